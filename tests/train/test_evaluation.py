import itertools
import math

import numpy as np
import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import model_config, train_config
from torch.nn import functional as F

from attention_residuals.data import Batch, Batches
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder
from attention_residuals.train import evaluate
from attention_residuals.train.evaluation import document_mask, total_nats
from attention_residuals.train.execution import backward

RULES = pytest.mark.parametrize("residual", [StandardResidual(), AttnRes(sublayers_per_block=2)])


@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=3))
def test_tokens_attend_inside_their_own_document_only(rows):
    documents = torch.tensor(rows).cumsum(1)
    mask = document_mask(documents)
    if all(len(set(row)) == 1 for row in documents.tolist()):
        assert mask is None
        return
    for row, query, key in itertools.product(range(len(rows)), range(5), range(5)):
        assert mask[row, query, key] == (documents[row, query] == documents[row, key])


def batch_of(corpus, size=4):
    return Batches(corpus.train, sequence_length=24, batch_size=size, seed=1).at(0)


def nats(model, batch, **options):
    return total_nats(model, batch, **({"precision": "float32", "cross_documents": False} | options))


@RULES
def test_a_document_is_predicted_as_if_it_were_alone(corpus, residual):
    model = Decoder(model_config(residual))
    batch = batch_of(corpus)
    assert document_mask(batch.documents_BT) is not None
    alone = 0.0
    for tokens, targets, documents in zip(*batch, strict=True):
        for document in documents.unique():
            inside = documents == document
            logits = model(tokens[inside][None])[0]
            alone += F.cross_entropy(logits, targets[inside], reduction="sum").item()
    assert nats(model, batch).item() == pytest.approx(alone, rel=1e-5)
    across = F.cross_entropy(
        model(batch.tokens_BT).flatten(0, 1), batch.targets_BT.flatten(), reduction="sum"
    )
    assert nats(model, batch, cross_documents=True).item() == pytest.approx(across.item(), rel=1e-6)
    assert abs(across.item() - alone) > 1e-4 * alone


@RULES
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_accumulated_gradients_are_those_of_the_whole_batch(corpus, residual, micro_batch_size):
    gradients = []
    for size in (4, micro_batch_size):
        torch.manual_seed(0)
        model = Decoder(model_config(residual))
        found = backward(model, batch_of(corpus), train_config(micro_batch_size=size))
        assert found == pytest.approx(nats(model, batch_of(corpus)).item(), rel=1e-6)
        gradients.append(
            {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
        )
    whole, accumulated = gradients
    for name, gradient in whole.items():
        assert_close(accumulated[name], gradient)


def test_the_gradient_is_that_of_the_mean_loss_per_token(corpus):
    batch, model = batch_of(corpus), Decoder(model_config(StandardResidual()))
    backward(model, batch, train_config())
    mine = model.embedding.weight.grad.clone()
    model.zero_grad()
    (nats(model, batch) / batch.targets_BT.numel()).backward()
    assert_close(mine, model.embedding.weight.grad)


def test_bfloat16_logits_are_scored_in_float32(corpus):
    batch, model = batch_of(corpus), Decoder(model_config())
    low, high = nats(model, batch, precision="bfloat16"), nats(model, batch)
    assert low.dtype == torch.float32
    assert 0 < abs(low.item() - high.item()) < 1e-2 * high.item()


def test_evaluation_counts_every_target_once_in_nats_and_bytes(corpus):
    model, tokens = Decoder(model_config(StandardResidual())), np.asarray(corpus.valid[:110])
    bytes_per_token = corpus.tokenizer.bytes_per_token
    found = evaluate(model, tokens, bytes_per_token=bytes_per_token, sequence_length=24, batch_size=2)
    windows = [tokens[start : start + 25].astype(np.int64) for start in range(0, 109, 24)]
    total = 0.0
    for window in windows:
        row = torch.from_numpy(window)[None]
        batch = Batch(row[:, :-1], row[:, 1:], (row[:, :-1] == 0).cumsum(1))
        total += nats(model, batch).item()
    assert found.num_tokens == 109
    assert found.num_bytes == bytes_per_token[tokens[1:]].sum()
    assert found.loss == pytest.approx(total / 109, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / found.num_bytes / math.log(2), rel=1e-5)


def test_evaluation_stops_after_the_batches_that_were_asked_for(corpus):
    model = Decoder(model_config())
    options = {"bytes_per_token": corpus.tokenizer.bytes_per_token, "sequence_length": 8, "batch_size": 3}
    limited = evaluate(model, corpus.valid, max_batches=2, **options)
    assert limited == evaluate(model, np.asarray(corpus.valid[: 2 * 3 * 8 + 1]), **options)
    assert limited.num_tokens == 48


def test_evaluation_heeds_precision_and_document_borders(corpus):
    model = Decoder(model_config())
    options = {"bytes_per_token": corpus.tokenizer.bytes_per_token, "sequence_length": 24, "batch_size": 4}
    tokens = np.asarray(corpus.valid[:200])
    losses = [
        evaluate(model, tokens, **options, **changes).loss
        for changes in ({}, {"cross_documents": True}, {"precision": "bfloat16"})
    ]
    assert len(set(losses)) == 3


def test_evaluation_leaves_no_gradients(corpus):
    model = Decoder(model_config())
    options = {"bytes_per_token": corpus.tokenizer.bytes_per_token, "sequence_length": 24, "batch_size": 4}
    evaluate(model, np.asarray(corpus.valid[:99]), **options)
    assert all(parameter.grad is None for parameter in model.parameters())
