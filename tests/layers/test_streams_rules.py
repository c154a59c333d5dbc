"""Rules with several residual streams against the formulas of their papers, written out on plain numbers."""

import math

import pytest
import torch
from closeness import assert_close
from layers.test_carried_rules import (
    STREAMS,
    TOKENS,
    combined,
    decoder,
    dot,
    logits_and_gradients,
    looked_at,
    mix_of,
    normed,
    of_tokens,
    sigmoid,
)
from layers.test_residual_rules import NUM_LAYERS, WIDTH, Looker, embedding, rule_of
from torch import nn
from torch.nn import functional as F

from attention_residuals.errors import BackendError, ShapeError
from attention_residuals.layers import RMSNorm, Site
from attention_residuals.layers.residual import HyperConnections, ManifoldHyperConnections
from attention_residuals.layers.residual.hyper import sinkhorn
from attention_residuals.layers.residual.streams import gate_scores

every_streams_rule = pytest.mark.parametrize("config", STREAMS, ids=repr)


def hyper_gates(learned, streams):
    """Read gates alpha_k, write gates beta_k and A[k][j], of stream k into stream j."""
    static, projection = learned.static.tolist(), learned.projection.tolist()
    read_scale, write_scale = learned.read_scale.item(), learned.write_scale.item()
    gates = []
    for k, stream in enumerate(streams):
        scores = [math.tanh(dot(normed(stream), row)) for row in projection]
        scales = [read_scale, write_scale, *[read_scale] * len(streams)]
        gates.append(
            [own[k] + scale * score for own, scale, score in zip(static, scales, scores, strict=True)]
        )
    return [gate[0] for gate in gates], [gate[1] for gate in gates], [gate[2:] for gate in gates]


def plain_sinkhorn(logits, steps):
    matrix, axis = [[math.exp(logit) for logit in row] for row in logits], range(len(logits))
    for _ in range(steps):
        sums = [sum(matrix[i][j] for i in axis) for j in axis]
        matrix = [[matrix[i][j] / sums[j] for j in axis] for i in axis]
        matrix = [[number / sum(row) for number in row] for row in matrix]
    return matrix


def manifold_gates(learned, streams):
    """The same for mHC, whose matrix maps into rows: A is its transpose."""
    m, row = len(streams), normed([number for stream in streams for number in stream])
    scale_of = [0] * m + [1] * m + [2] * m * m
    scales, projection, bias = learned.scales.tolist(), learned.projection.tolist(), learned.bias.tolist()
    logits = [
        scales[n] * dot(row, vector) + b for n, vector, b in zip(scale_of, projection, bias, strict=True)
    ]
    mixing = [logits[2 * m + m * i : 2 * m + m * (i + 1)] for i in range(m)]
    result = plain_sinkhorn(mixing, learned.sinkhorn_steps)
    transposed = [list(column) for column in zip(*result, strict=True)]
    return [sigmoid(x) for x in logits[:m]], [2 * sigmoid(x) for x in logits[m : 2 * m]], transposed


def gates_of(rule, number, streams):
    function = hyper_gates if isinstance(rule.config, HyperConnections) else manifold_gates
    return function(list(rule.gates.values())[number], streams)


@every_streams_rule
def test_streams_follow_the_papers_recurrence(config):
    rule = rule_of(config)
    reads, outputs = looked_at(rule)

    def states(first, *written):
        streams, result = [first] * config.streams, []
        for number, output in enumerate(written):
            alpha, beta, mixing = gates_of(rule, number, streams)
            result.append(combined(alpha, streams))
            into = [[*(row[j] for row in mixing), beta[j]] for j in range(config.streams)]
            streams = [combined(weights, [*streams, output]) for weights in into]
        return [*result, combined([1.0] * config.streams, streams)]

    expected = of_tokens(states, *outputs)
    for number, read in enumerate(reads):
        assert_close(mix_of(read), expected[:, :, number])


@every_streams_rule
def test_writers_weights_are_the_product_of_gates_between(config):
    """M of writer i at read l is beta_i^T A_(i+1) ... A_(l-1) alpha_l, with beta of the embedding all ones."""
    rule = rule_of(config)
    reads, _ = looked_at(rule)

    def row_of(*streams_of_reads):
        gates = [gates_of(rule, number, streams) for number, streams in enumerate(streams_of_reads[:-1])]
        tensors = [[torch.tensor(gate, dtype=torch.float64) for gate in site] for site in gates]
        ones = torch.ones(config.streams, dtype=torch.float64)
        alphas = [*(alpha for alpha, _, _ in tensors), ones]
        row = []
        for number in range(len(reads)):
            for writer in range(number + 1):
                held = ones if writer == 0 else tensors[writer - 1][1]
                for _, _, mixing in tensors[writer:number]:
                    held = held @ mixing
                row.append((held @ alphas[number]).item())
        return row

    expected = of_tokens(row_of, *(torch.stack(read.values, dim=-2) for read in reads))
    actual = [
        torch.einsum("sbt,swbt->btw", read.weights, read.membership.to(read.weights.dtype)) for read in reads
    ]
    assert_close(torch.cat(actual, dim=-1), expected)


def test_a_write_without_its_read_is_refused():
    rule = rule_of(HyperConnections())
    with pytest.raises(ShapeError, match=r"L0\.attention without gates"):
        rule.write(rule.open(embedding()), Site(0, "attention"), embedding())


@pytest.mark.parametrize("config", [HyperConnections(), ManifoldHyperConnections()], ids=repr)
def test_streams_differ_after_one_step_unless_all_are_read_alike(config):
    for alike in (False, True):
        model = decoder(config)
        for gates in model.residual.gates.values():
            if alike:
                parameter = gates.static if isinstance(config, HyperConnections) else gates.bias
                (parameter.data[0] if parameter.ndim == 2 else parameter.data[:4]).fill_(0.25)
        logits_and_gradients(model)
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
        looker = Looker()
        model(TOKENS, tap=looker)
        streams = torch.stack(looker.reads[-1].values)
        assert ((streams - streams[0]).norm() / streams.norm() > 1e-4) == (not alike)


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_sinkhorn_is_the_plain_algorithm_and_so_are_its_gradients(size, steps):
    logits = torch.randn(3, 2, size, size, dtype=torch.float64).mul_(2).requires_grad_()
    plain = logits.exp()
    for _ in range(steps):
        plain = plain / plain.sum(-2, keepdim=True)
        plain = plain / plain.sum(-1, keepdim=True)
    grad = torch.randn_like(plain)
    assert_close(sinkhorn(logits, steps), plain)
    (expected,) = torch.autograd.grad(plain, logits, grad)
    (actual,) = torch.autograd.grad(sinkhorn(logits, steps), logits, grad)
    assert (actual - expected).abs().max() < 1e-10
    single = logits.detach().float().requires_grad_()
    (rounded,) = torch.autograd.grad(sinkhorn(single, steps), single, grad.float())
    assert (rounded - expected).abs().max() < 1e-5


def test_the_mixing_of_mhc_is_doubly_stochastic():
    rule = ManifoldHyperConnections().build(num_layers=NUM_LAYERS, width=WIDTH)
    for parameter in rule.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    streams = torch.randn(2, 50, 4, WIDTH)
    for gates in rule.gates.values():
        read, write, carry = gates(streams)
        assert carry.min() >= 0
        assert (carry.sum(-1) - 1).abs().max() < 1e-5
        assert (carry.sum(-2) - 1).abs().max() < 1e-3
        assert 0 < read.min() < read.max() < 1
        assert 0 < write.min() < write.max() < 2


def test_hyper_connections_start_as_published():
    rule = HyperConnections().build(num_layers=NUM_LAYERS, width=WIDTH)
    for number, gates in enumerate(rule.gates.values()):
        read, write, carry = gates(torch.randn(1, 3, 4, WIDTH))
        assert torch.equal(read, torch.eye(4)[number % 4].expand(1, 3, 4))
        assert torch.equal(write, torch.ones(1, 3, 4))
        assert torch.equal(carry, torch.eye(4).expand(1, 3, 4, 4))
        assert gates.projection.eq(0).all()
        assert gates.read_scale.item() == gates.write_scale.item() == pytest.approx(0.01)


def test_mhc_starts_near_the_identity_with_read_gates_that_sum_to_one():
    rule = ManifoldHyperConnections().build(num_layers=NUM_LAYERS, width=WIDTH)
    for number, gates in enumerate(rule.gates.values()):
        read, write, carry = gates(torch.randn(1, 3, 4, WIDTH))
        assert_close(read.sum(-1), torch.ones(1, 3))
        assert read[0, 0].argmax() == number % 4
        assert torch.equal(write, torch.ones(1, 3, 4))
        assert (carry.diagonal(dim1=-2, dim2=-1) > 0.85).all()


def test_scores_and_their_gradients_are_those_of_a_norm_and_a_projection():
    rows = (torch.randn(2, 3, 4, WIDTH, dtype=torch.float64) / 100).requires_grad_()
    projection = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = F.linear(F.rms_norm(rows, (WIDTH,), eps=1e-6), projection)
    grad = torch.randn_like(expected)
    assert_close(gate_scores(rows, projection), expected)
    for own, other in zip(
        torch.autograd.grad(gate_scores(rows, projection), (rows, projection), grad),
        torch.autograd.grad(expected, (rows, projection), grad),
        strict=True,
    ):
        assert_close(own, other)


def test_second_derivatives_are_refused():
    inputs = torch.randn(2, 3, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    for result in (sinkhorn(inputs[0], 3), gate_scores(*inputs)):
        with pytest.raises(BackendError):
            torch.autograd.grad(result.sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize("config", [HyperConnections(), ManifoldHyperConnections()], ids=repr)
@pytest.mark.parametrize("norm", [RMSNorm(100), nn.LayerNorm(100)], ids=["folded", "foreign"])
def test_for_backward_a_site_keeps_the_streams_and_its_output_and_no_mix(config, norm):
    rule, start, output = config.build(num_layers=1, width=100), *torch.randn(2, 2, 4, 100).requires_grad_()
    _, state = rule.read(rule.open(start), Site(0, "attention"), norm)
    state = rule.write(state, Site(0, "attention"), start)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        _, after = rule.read(state, Site(0, "mlp"), norm)
        after = rule.write(after, Site(0, "mlp"), output)

    def storage(tensor):
        return tensor.untyped_storage().data_ptr()

    wide = {storage(tensor) for tensor in kept if tensor.numel() >= start.numel()}
    assert wide - set(map(storage, rule.parameters())) == {storage(state.streams), storage(output)}
    after.streams.sum().backward()
