"""What the documents say is run, and what they list exists."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from facts.test_zero_query import largest_distance
from layers import test_residual_rules, test_source_rules
from stats import test_mixing

from attention_residuals.models import presets
from attention_residuals.models.costs import costs
from attention_residuals.trace import load_edits
from benchmarks.traffic import table

ROOT = Path(__file__).parent.parent
TOKENS = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))


def python_of(document: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL))


@pytest.fixture(scope="module")
def howto():
    names: dict[str, object] = {}
    exec(compile(python_of("docs/howto/add-a-rule.md"), "add-a-rule.md", "exec"), names)
    return names


SUITE = {
    name: test
    for name, test in {**vars(test_residual_rules), **vars(test_source_rules), **vars(test_mixing)}.items()
    if name.startswith("test_") and list(inspect.signature(test).parameters) == ["config"]
}


@pytest.mark.parametrize("name", SUITE)
def test_the_rule_of_the_howto_does_what_every_rule_must(howto, name):
    if "formula" not in name and "several_inputs" not in name:  # those know the formulas of our rules
        SUITE[name](howto["Fading"]())


def test_the_rule_of_the_howto_starts_as_the_standard_model(howto):
    assert largest_distance(howto["Fading"](), torch.float64, 0.0, scaled=False) <= 1e-9


def test_the_common_suite_is_more_than_a_few_tests():
    assert len(SUITE) >= 20


def test_the_table_of_traffic_is_what_is_counted():
    assert table() in (ROOT / "docs/inference.md").read_text()


DOCUMENTS = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_what_a_document_links_to_is_there(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    for link in links:
        assert (ROOT / document).parent.joinpath(link).exists(), link
    assert not re.search(r"\b[A-Z]{3,}_[A-Z_]+\b", re.sub(r"`[^`]*`", "", text))


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/tour.md",
        "docs/rules.md",
        "docs/inference.md",
        "docs/distributed.md",
        "docs/reading.md",
        "docs/howto/convert.md",
        "docs/howto/kimi-linear.md",
    ],
)
def test_the_code_of_a_document_runs(document):
    code = python_of(document)
    assert code
    exec(compile(code, document, "exec"), {})


def test_the_sizes_of_kimi_linear_are_those_of_the_presets():
    def size(number):
        if number < 1e9:
            return f"{number / 1e6:.{1 if number < 10e6 else 0}f} M"
        return f"{number / 1e9:.2f} B"

    text = (ROOT / "docs/howto/kimi-linear.md").read_text()
    for name, shape in presets.KIMI_LINEAR_SHAPES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        vocab_size = 4096 if name == "kimi-linear-tiny" else 163_840
        found = costs(presets.kimi_linear(name, vocab_size=vocab_size))
        numbers = (found.total, found.total - found.embeddings, found.active, found.active - found.embeddings)
        assert cells == [
            *map(str, (shape.num_layers, shape.width, shape.num_heads)),
            f"{shape.num_experts} ({shape.num_active} + 1)",
            *map(str, (shape.expert_width, shape.sublayers_per_block)),
            *map(size, numbers),
        ]


def test_the_edits_of_the_page_on_reading_are_edits(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/reading.md").read_text(), re.DOTALL)
    (tmp_path / "edits.yaml").write_text(text)
    assert [type(edit).__name__ for edit in load_edits(tmp_path / "edits.yaml")] == ["Drop", "Force", "Skip"]


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_runs(example, tmp_path):
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_encoder_changes_ten_lines():
    lines = (ROOT / "examples" / "encoder.py").read_text().splitlines()
    assert sum(line.endswith("# +") for line in lines) == 10


def test_every_path_that_a_document_names_exists():
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/tour.md", "docs/glossary.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(r"`((?:scripts|docs|examples|src|tests|benchmarks)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (document, path)
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for path in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
            assert ((ROOT / document).parent / path).exists(), (document, path)
