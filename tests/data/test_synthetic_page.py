"""The items that docs/contradiction-items.md shows are those that the generators make."""

import re
from pathlib import Path

import pytest

from attention_residuals.data import Lesson, StepDocuments, StepItems, prepare, step_tokenizer
from attention_residuals.data.synthetic import CLAIM_PLACES, FAMILIES, KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "contradiction-items.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_shows_the_first_item_of_each_family(family):
    items = StepItems(family=family)
    ids = items.item(0).ids
    shown = [f"{'ab'[u]}{'ab'[p]}: {items.text(ids[u, p])}" for u in range(2) for p in range(2)]
    assert f"### {family.capitalize()}" in PAGE
    assert "```text\n" + "\n".join(shown) + "\n```" in PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_shows_each_kind(kind):
    items = StepItems(family="variables", kind=kind, num_steps=3)
    assert f"\n{kind}: {items.text(items.item(0).ids[0, 1])}\n" in PAGE


def test_the_page_shows_a_training_text_and_every_place():
    assert next(iter(StepDocuments(num_documents=1).documents())).text in PAGE
    assert re.findall(r"^\| `([a-z ]+)` \|", PAGE, re.MULTILINE) == list(CLAIM_PLACES)


@pytest.mark.parametrize("kind", Lesson().shares)
def test_the_page_shows_a_text_of_each_kind_without_a_story(kind):
    source = StepDocuments(num_documents=60, course=(Lesson(**{kind: 1.0}),))
    assert any(f"\n{kind}: {document.text}\n" in PAGE for document in source.documents())


def test_the_pages_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"StepDocuments": StepDocuments, "prepare": prepare, "step_tokenizer": step_tokenizer}
    exec(code.replace("30_000", "90"), names)
    assert names["corpus"].vocab_size == step_tokenizer().vocab_size
