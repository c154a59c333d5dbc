"""A corpus of another model's tokens keeps its tokenizer, and everything that reads it knows where texts end."""

import numpy as np
import pytest
import torch
from foreign import KINDS, SMOL, edited, loaded

from attention_residuals.data import Batches, Corpus, TextFiles, Tokenizer, prepare, sequential
from attention_residuals.errors import ConfigError
from attention_residuals.inference import Engine, Sampling
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import Decoder, DecoderConfig
from attention_residuals.trace import record
from attention_residuals.train import AdamW, Cosine, TrainConfig, load_checkpoint_model, train

LINES = [f"{n} cats sat.<|endoftext|> \U0001f642" for n in range(60)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """One corpus with ids that two bytes hold, one with ids that need four."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "lines.txt").write_text("\n".join(LINES), encoding="utf-8")
    source = TextFiles(path=str(folder / "lines.txt"), separator="\n")
    tokenizers_ = {
        "narrow": loaded(KINDS["special in the middle, gaps"], folder),
        "wide": loaded(edited(SMOL, ids=lambda index: 70_000 - index), folder),
    }
    return {
        name: prepare(source, folder / name, tokenizer=tokenizer, valid_fraction=0.3)
        for name, tokenizer in tokenizers_.items()
    }


@pytest.mark.parametrize(
    ("name", "dtype", "end"), [("narrow", "<u2", 303), ("wide", "<u4", 69_999)], ids=["narrow", "wide"]
)
def test_a_corpus_keeps_the_tokenizer_and_starts_documents_with_its_end_of_text(corpora, name, dtype, end):
    corpus = Corpus.load(corpora[name].folder)
    assert corpus.manifest["dtype"] == dtype
    assert corpus.tokenizer.to_json() == corpora[name].tokenizer.to_json()
    assert corpus.tokenizer.end_of_text == end
    assert corpus.vocab_size == corpus.manifest["vocab_size"] == corpus.tokenizer.vocab_size
    found = []
    for split, tokens in (("train", corpus.train), ("valid", corpus.valid)):
        starts = np.flatnonzero(tokens == end)
        found += [corpus.tokenizer.decode(part) for part in np.split(tokens, starts)[1:]]
        about = corpus.manifest["splits"][split]
        assert about["documents"] == len(starts)
        assert about["bytes"] == corpus.tokenizer.bytes_per_token[tokens].sum()
    assert sorted(found) == sorted(LINES)


def test_a_corpus_of_another_choice_of_the_end_of_text_is_another(corpora, tmp_path):
    corpus = corpora["narrow"]
    source = TextFiles(**corpus.manifest["source"]["config"])
    again = prepare(source, corpus.folder, tokenizer=corpus.tokenizer, valid_fraction=0.3)
    assert again.manifest == corpus.manifest
    other = loaded(KINDS["special in the middle, gaps"], tmp_path, end_of_text="<|pad|>")
    with pytest.raises(ConfigError, match="tokenizer="):
        prepare(source, corpus.folder, tokenizer=other, valid_fraction=0.3)


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_batches_number_documents_by_the_end_of_text_that_they_are_told(corpora, name):
    corpus = corpora[name]
    how = {"sequence_length": 40, "batch_size": 2, "end_of_text": corpus.tokenizer.end_of_text}
    for batch in (Batches(corpus.train, seed=0, **how).at(0), next(sequential(corpus.train, **how))):
        for row, documents in zip(batch.tokens_BT.tolist(), batch.documents_BT.tolist(), strict=True):
            assert documents == np.cumsum([token == corpus.tokenizer.end_of_text for token in row]).tolist()
            assert documents[-1] > documents[0]


def tiny(vocab_size):
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=1,
        width=16,
        num_heads=1,
        num_kv_heads=1,
        head_width=16,
        mlp_width=16,
        max_tokens=64,
        tied=False,
        residual=AttnRes(sublayers_per_block=1),
    )


def test_a_model_trains_generates_and_is_traced(corpora, tmp_path):
    corpus = corpora["narrow"]
    config = TrainConfig(
        model=tiny(corpus.vocab_size),
        optimizer=AdamW(learning_rate=1e-3),
        schedule=Cosine(warmup_steps=1),
        num_steps=2,
        batch_size=2,
        sequence_length=16,
        seed=0,
    )
    assert 0 < train(config, corpus, tmp_path / "run", progress=False).bits_per_byte < 20
    tokenizer = Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    assert tokenizer.to_json() == corpus.tokenizer.to_json()
    model = load_checkpoint_model(tmp_path / "run")
    found = Engine(model, tokenizer).generate(["7 cats", "sat"], max_new_tokens=5)
    assert [completion.prompt[0] for completion in found] == [303, 303]
    assert tokenizer.decode(found[0].prompt) == "7 cats"
    trace = record(model, torch.tensor([found[0].prompt]), tokenizer=tokenizer)
    assert trace.token_texts[0][:2] == ("<|endoftext|>", "7")
    assert "".join(trace.token_texts[0][1:]) == "7␣cats"


def test_an_engine_ends_at_their_end_of_text(corpora):
    tokenizer = corpora["narrow"].tokenizer
    model = Decoder(tiny(tokenizer.vocab_size))
    prompt = [303, *tokenizer.encode("cat").tolist()]
    with torch.no_grad():
        model.head.weight[:303] = model.head.weight[304:] = 0.0
        model.head.weight[303] *= model(torch.tensor([prompt]))[0, -1, 303].sign()
    (found,) = Engine(model, tokenizer).generate(
        ["cat"], max_new_tokens=5, sampling=Sampling(temperature=0.0)
    )
    assert (found.ended, found.tokens, found.text) == ("end of text", [303], "")
