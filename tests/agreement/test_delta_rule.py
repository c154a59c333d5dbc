"""The delta rule in chunks gives what the recurrence gives, and what Transformers' does, however strong the decay."""

import pytest
import torch
from closeness import assert_close, distance
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as transformers_kimi

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.ops.delta import chunked_delta_rule, delta_rule

NAMES = ("query", "key", "value", "log_decay", "rate", "memory")


def drawn(length, *, decay=1.0, dtype=torch.float64, batch=2, heads=3, width=8, value_width=5, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=dtype)

    key = normal(batch, length, heads, width)
    inputs = (
        normal(batch, length, heads, width) * width**-0.5,
        key / key.norm(dim=-1, keepdim=True),
        normal(batch, length, heads, value_width),
        -decay * torch.rand(batch, length, heads, width, generator=random, dtype=dtype),
        torch.rand(batch, length, heads, generator=random, dtype=dtype),
        normal(batch, heads, width, value_width),
    )
    return [tensor.requires_grad_() for tensor in inputs]


def everything(rule, inputs, **options):
    """Output, memory, and the gradients of all inputs under a loss that tells all places apart."""
    output, memory = rule(*inputs[:5], memory=inputs[5], **options)
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    loss = (output.sin() * weights).sum() + memory.square().sum()
    return [output, memory, *torch.autograd.grad(loss, inputs)]


def assert_same(found, expected, tolerance=None):
    for name, one, other in zip(("output", "memory after", *NAMES), found, expected, strict=True):
        assert distance(one, other) <= (tolerance or 1e-10), name


def test_slow_decay_is_not_lost_in_bfloat16():
    inputs = [tensor.detach().bfloat16() for tensor in drawn(64, decay=0.002)]
    exact = delta_rule(*[tensor.float() for tensor in inputs[:5]], memory=inputs[5].float())
    for rule in (delta_rule, chunked_delta_rule):
        assert distance(rule(*inputs[:5], memory=inputs[5].float()).memory, exact.memory) < 1e-5


@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 130])
def test_chunks_give_what_the_recurrence_gives(length, decay):
    inputs = drawn(length, decay=decay)
    assert_same(everything(chunked_delta_rule, inputs), everything(delta_rule, inputs))
    short = drawn(length, decay=decay, dtype=torch.float32)
    assert_same(everything(chunked_delta_rule, short), everything(delta_rule, short), 1e-5)


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 40),
    chunk=st.sampled_from([1, 2, 4, 16, 64]),
    decay=st.floats(0, 200),
    seed=st.integers(0, 9),
)
def test_the_size_of_chunks_changes_nothing(length, chunk, decay, seed):
    inputs = drawn(length, decay=decay, batch=1, heads=1, width=3, seed=seed)
    assert_same(everything(chunked_delta_rule, inputs, chunk=chunk), everything(delta_rule, inputs))


@pytest.mark.parametrize("length", [5, 64, 100])
@pytest.mark.parametrize("decay", [0.1, 3.0, 60.0])
def test_values_and_gradients_are_those_of_transformers(length, decay, monkeypatch):
    def theirs(rule):
        def run(query, key, value, log_decay, rate, *, memory):
            width = query.shape[-1]
            return rule(
                query * width**0.5, key, value, log_decay, rate, initial_state=memory, output_final_state=True
            )

        return run

    short = drawn(length, decay=decay, dtype=torch.float32)
    found = everything(chunked_delta_rule, short)
    for rule in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        assert_same(found, everything(theirs(getattr(transformers_kimi, rule)), short), 1e-4)

    class InFloat64:  # Transformers' rule always computes in float32; here its torch says that this is float64
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(transformers_kimi, "torch", InFloat64())
    inputs = drawn(length, decay=decay)
    expected = everything(theirs(transformers_kimi.recurrent_kimi_delta_attention), inputs)
    assert expected[0].dtype == torch.float64
    assert_same(everything(chunked_delta_rule, inputs), expected, 1e-9)


@pytest.mark.parametrize("cut", [1, 32, 40])
def test_a_text_in_two_pieces_is_one_text(cut):
    inputs = drawn(70)
    whole = chunked_delta_rule(*inputs[:5], memory=inputs[5])
    first = chunked_delta_rule(*(tensor[:, :cut] for tensor in inputs[:5]), memory=inputs[5])
    second = chunked_delta_rule(*(tensor[:, cut:] for tensor in inputs[:5]), memory=first.memory)
    assert_close(torch.cat([first.output, second.output], 1), whole.output)
    assert_close(second.memory, whole.memory)


@pytest.mark.parametrize("start", [1, 16, 31, 33])
@pytest.mark.parametrize("forgotten", [float("-inf"), -1e30])
def test_a_decay_to_nothing_begins_a_new_text(start, forgotten):
    inputs = drawn(50)
    with torch.no_grad():
        inputs[3][:, start] = forgotten
    found = everything(chunked_delta_rule, inputs)
    assert all(tensor.isfinite().all() for tensor in found)
    alone = chunked_delta_rule(*(tensor[:, start:] for tensor in inputs[:5]))
    assert_close(found[0][:, start:], alone.output)
    assert_close(found[1], alone.memory)
    assert not found[2 + NAMES.index("log_decay")][:, start].any()


def test_neighbours_behind_a_strong_decay_still_see_each_other_exactly():
    """A quotient of decays from the start of a chunk would be 0 / 0 here."""
    inputs = drawn(32, decay=0.01, dtype=torch.float32)
    with torch.no_grad():
        inputs[3][:, 2] = -300.0
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = everything(chunked_delta_rule, inputs), everything(delta_rule, exact)
    assert_same([tensor.double() for tensor in found], expected, 2e-6)


def test_bfloat16_is_computed_in_float32_and_the_memory_stays_so():
    inputs = [tensor.detach() for tensor in drawn(20, dtype=torch.float32)]
    short = [tensor.bfloat16() for tensor in inputs]
    output, memory = chunked_delta_rule(*short[:5])
    expected = chunked_delta_rule(*(tensor.float() for tensor in short[:5]))
    assert (output.dtype, memory.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(output, expected.output.bfloat16())
    assert torch.equal(memory, expected.memory)


def test_autocast_leaves_the_rule_in_float32():
    inputs = [tensor.detach() for tensor in drawn(20, dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        output, memory = chunked_delta_rule(*inputs[:5])
        slow = delta_rule(*inputs[:5])
    expected = chunked_delta_rule(*inputs[:5])
    assert torch.equal(output, expected.output)
    assert torch.equal(memory, expected.memory)
    assert_close(slow.output, output)


def test_gradients_are_those_of_finite_differences():
    inputs = drawn(9, batch=1, heads=1, width=2, value_width=2)
    assert torch.autograd.gradcheck(
        lambda *tensors: tuple(chunked_delta_rule(*tensors[:5], memory=tensors[5], chunk=4)), inputs
    )


def test_wrong_tensors_are_refused():
    query, key, value, log_decay, rate, memory = drawn(4)
    with pytest.raises(ConfigError, match="a power of 2"):
        chunked_delta_rule(query, key, value, log_decay, rate, chunk=24)
    for typed in (delta_rule, chunked_delta_rule):
        rule = getattr(typed, "__wrapped__", typed)  # without the type checker of tests, which is faster
        with pytest.raises(ShapeError, match="one decay for each channel"):
            rule(query, key, value, log_decay[..., :1], rate)
        with pytest.raises(ShapeError, match="T >= 1"):
            rule(*(tensor[:, :0] for tensor in (query, key, value, log_decay, rate)))
        with pytest.raises(ShapeError, match="T >= 1"):
            rule(*(tensor[0] for tensor in (query, key, value, log_decay, rate)))
        with pytest.raises(ShapeError, match="memory"):
            rule(query, key, value, log_decay, rate, memory=memory[:1])
