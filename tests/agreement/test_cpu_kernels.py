"""What is special about the CPU kernels: threads, shared gradients, compiled graphs, and their absence."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from closeness import assert_close, distance
from torch.nn import functional as F

from attention_residuals.errors import BackendError, NonFiniteError
from attention_residuals.layers.residual import AttnRes, TwoPhaseRule
from attention_residuals.models import Decoder, presets
from attention_residuals.ops import (
    BACKENDS,
    backends,
    depth_attention,
    fused,
    reference,
    share_gradients,
    threads,
)


def leaves(num_sources=9, tokens=500, width=60, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(num_sources)]
    vectors = [torch.randn(width, generator=generator) / width**0.5 for _ in range(3)]
    return [tensor.requires_grad_() for tensor in (*sources, *vectors)]


def read_and_gradients(inputs):
    *sources, query, gain, output_gain = inputs
    read = fused.depth_attention(sources, query, gain, eps=1e-6, output_gain=output_gain, output_eps=1e-6)
    # Given gradients: torch's own sums and softmax depend on its number of threads.
    given = read.mix.detach(), read.logits.detach()
    return [*read, *torch.autograd.grad([read.mix, read.logits], inputs, given)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    inputs, before = leaves(dtype=dtype), torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            results.append(read_and_gradients(inputs))
    finally:
        torch.set_num_threads(before)
    assert all(same(results[0], other) for other in results[1:])


def test_plain_python_threads_give_the_same_bits_where_there_is_no_openmp(monkeypatch):
    inputs, before = leaves(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = read_and_gradients(inputs)
        monkeypatch.setattr(threads, "_openmp", lambda: None)
        assert same(read_and_gradients(inputs), expected)
    finally:
        torch.set_num_threads(before)


def test_several_python_threads_may_call_at_once():
    inputs = leaves()
    expected, wrong = read_and_gradients(inputs), []

    def work():
        own = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        for _ in range(20):
            if not same(read_and_gradients(own), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_process_that_compiles_and_one_that_loads_from_the_cache_give_the_same_bits(tmp_path):
    code = """
import hashlib, torch
from attention_residuals.ops import fused
torch.manual_seed(0)
inputs = [torch.randn(64, 32).requires_grad_() for _ in range(5)] + [torch.rand(32).requires_grad_() for _ in range(3)]
*sources, query, gain, output_gain = inputs
read = fused.depth_attention(sources, query, gain, eps=1e-6, output_gain=output_gain, output_eps=1e-6)
results = [*read, *torch.autograd.grad(read.mix, inputs, torch.ones_like(read.mix))]
print(hashlib.sha256(b"".join(result.detach().numpy().tobytes() for result in results)).hexdigest())
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    digests = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert digests[0] == digests[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes_the_same():
    code = """
import os, torch, warnings
from attention_residuals.ops import fused
torch.set_num_threads(2)
sources = [torch.randn(4000, 64) for _ in range(3)]
def mix(): return fused.depth_attention(sources, torch.ones(64) / 8, torch.ones(64), eps=1e-6).mix
expected = mix().numpy().tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if mix().numpy().tobytes() == expected else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


def test_reads_that_share_a_gradient_give_the_gradients_of_reads_that_do_not():
    *sources, query, gain, _ = leaves(4, 50)
    gradients = []
    for prepare in (lambda source: source, share_gradients):
        used = [prepare(source) for source in sources]
        total = sum(
            fused.depth_attention(used[: number + 1], query * number, gain, eps=1e-6).mix.square().sum()
            for number in range(4)
        )
        # A use that is no depth read, and the same source twice in one read.
        total = (
            total
            + used[0].sin().sum()
            + fused.depth_attention([used[1], used[1]], query, gain, eps=1e-6).mix.sum()
        )
        gradients.append(torch.autograd.grad(total, [*sources, query, gain]))
    for shared, plain in zip(*reversed(gradients), strict=True):
        assert_close(shared, plain)


def test_a_gradient_that_an_earlier_pass_left_behind_is_not_counted():
    *sources, query, gain, _ = leaves(3, 20)
    used = [share_gradients(source) for source in sources]
    loss = fused.depth_attention(used, query, gain, eps=1e-6).mix.square().sum()
    expected = torch.autograd.grad(loss, sources, retain_graph=True)
    torch.autograd.grad(loss, [query], retain_graph=True)  # the sources' nodes do not run in this pass
    assert same(torch.autograd.grad(loss, sources), expected)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_on_the_kernels_has_the_gradients_of_one_on_the_reference(size, checkpointed):
    torch.manual_seed(0)
    model = Decoder(presets.scaled(4, vocab_size=50, residual=AttnRes(sublayers_per_block=size)))
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    tokens, results = torch.randint(50, (2, 33)), []
    for name, checkpoint in (("reference", False), ("cpu", checkpointed)):
        model.residual.backend, model.checkpoint_activations = name, checkpoint
        model.zero_grad()
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        results.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss}
        )
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        assert distance(results[1][name], expected) <= 1e-5, name


@pytest.mark.parametrize("backend", ["cpu", "eager", "reference"])
@pytest.mark.parametrize("two_phase", [False, True])
def test_a_sublayer_that_writes_zeros_is_told_by_a_model_whose_keys_have_no_eps(two_phase, backend):
    config = AttnRes(sublayers_per_block=1, key_eps=0.0)
    model = Decoder(presets.scaled(2, vocab_size=50, residual=config)).requires_grad_(False)
    for layer in model.layers:
        layer.attention.output.weight.zero_()
    model.residual.backend = backend
    residual = TwoPhaseRule(model.residual) if two_phase else None
    with pytest.raises(NonFiniteError, match=r"sources number \[[01]\] of [12]"):
        model(torch.tensor([[1, 2, 3]]), residual=residual)


@pytest.mark.parametrize("magnitude", [1e-20, 1e17])
def test_magnitudes_near_the_ends_of_float32_are_as_good_as_the_reference(magnitude):
    sources = [magnitude * torch.randn(5, 64, dtype=torch.float64) for _ in range(4)]
    query, gain = torch.randn(64, dtype=torch.float64), torch.ones(64, dtype=torch.float64)
    truth = reference.depth_attention(sources, query, gain, eps=1e-6)
    single = [source.float() for source in sources], query.float(), gain.float()
    usual = reference.depth_attention(*single, eps=1e-6)
    actual = fused.depth_attention(*single, eps=1e-6)
    assert distance(actual.mix, truth.mix) <= max(1e-6, 2 * distance(usual.mix, truth.mix))
    assert distance(actual.logits, truth.logits) <= max(1e-6, 2 * distance(usual.logits, truth.logits))


def test_bfloat16_numbers_are_rounded_to_the_nearest_and_ties_to_even():
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).mul(2**16).add(2**15).view(torch.float32)
    numbers = numbers[numbers.isfinite() & (numbers.abs() > 1e-30) & (numbers.abs() < 1e15)]
    # The mix of a source with itself is the source; with a gain of g the output is that times g.
    source = torch.ones(len(numbers), 2, dtype=torch.bfloat16)
    # (times an inverse norm that is 1, or on some processors one bit less).
    for number in numbers[:: len(numbers) // 50]:
        gain = torch.full((2,), float(number))
        mix, exact = (
            fused.depth_attention(
                [one], torch.zeros(2), torch.ones(2), eps=0.0, output_gain=gain, output_eps=0.0
            ).mix
            for one in (source[:1], source[:1].float())
        )
        assert torch.equal(mix, exact.bfloat16())
        assert torch.allclose(exact[0], gain, rtol=1e-6)


def test_the_registered_operation_passes_opcheck():
    *sources, query, gain, output_gain = leaves(3, 10)
    bias = torch.randn(3, 10, requires_grad=True)
    operation = torch.ops.attention_residuals.depth_attention.default
    for extra in ((None, None, 0.0), (bias, output_gain, 1e-6)):
        torch.library.opcheck(operation, (sources, query, gain, 1e-6, *extra))


def test_the_dispatched_operation_gives_the_bits_of_the_direct_call():
    inputs = leaves(4, 30)
    expected = read_and_gradients(inputs)
    *sources, query, gain, output_gain = inputs
    mix, logits, inverse_norms, _ = torch.ops.attention_residuals.depth_attention(
        sources, query, gain, 1e-6, None, output_gain, 1e-6
    )
    gradients = torch.autograd.grad([mix, logits], inputs, [mix.detach(), logits.detach()])
    assert same([mix, logits, inverse_norms, *gradients], expected)


def test_a_mode_that_wants_to_see_operations_sees_this_one():
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names = []
    *sources, query, gain, _ = leaves(2, 3)
    with Names():
        depth_attention(sources, query, gain, eps=1e-6).mix.sum().backward()
    assert "attention_residuals.depth_attention.default" in names
    assert "attention_residuals.depth_attention_backward.default" in names


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_a_compiled_model_is_one_graph_and_agrees(size):
    code = f"""
import torch
from torch.nn import functional as F
from attention_residuals import AttnRes, Decoder, presets
torch.manual_seed(0)
model = Decoder(presets.scaled(2, vocab_size=50, residual=AttnRes(sublayers_per_block={size})))
for parameter in model.residual.parameters():
    parameter.data += torch.randn_like(parameter) / 3
tokens = torch.randint(50, (2, 17))
def gradients(run):
    model.zero_grad()
    F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
expected, actual = gradients(model), gradients(torch.compile(model, fullgraph=True))
print(max(((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(actual, expected, strict=True)))
exported = torch.export.export(model, (tokens,))
print((exported.module()(tokens) - model(tokens)).abs().max().item())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    compiled, exported = map(float, done.stdout.split())
    assert compiled <= 1e-5
    assert exported <= 1e-5


def test_without_numba_auto_takes_eager_and_the_kernels_say_why(monkeypatch):
    monkeypatch.setitem(backends._INSTALLED, "numba", False)
    monkeypatch.setattr(
        backends, "_first", backends._first.__wrapped__
    )  # its answers are kept for the process
    *sources, query, gain, _ = leaves(2, 3)
    assert backends.chosen_backend("auto", sources[0], False).name == "eager"
    with pytest.raises(BackendError, match="the package numba is not installed"):
        depth_attention(sources, query, gain, eps=1e-6, backend="cpu")


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float64, "eager"),
                                             (torch.float16, "eager")])  # fmt: skip
def test_auto_takes_the_first_that_can_do_the_call(dtype, name):
    assert backends.chosen_backend("auto", torch.zeros(2, dtype=dtype), True).name == name


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("cpu", torch.float64, "takes torch.float32 and torch.bfloat16"),
        ("fla", torch.float32, "runs on cuda, not on cpu"),
    ],
)
def test_a_named_backend_that_cannot_do_the_call_says_why(name, dtype, message):
    with pytest.raises(BackendError, match=message):
        depth_attention([torch.ones(2, 4, dtype=dtype)], torch.ones(4), torch.ones(4), eps=1e-6, backend=name)


def test_without_a_folder_for_its_cache_numba_compiles_anew_and_that_is_said_once():
    code = """
import numba, torch, warnings
whole = numba.cfunc
def cfunc(signature, cache=False):
    if cache:
        raise RuntimeError("cannot cache function: no locator available")
    return whole(signature)
numba.cfunc = cfunc
from attention_residuals.ops import fused
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    source = torch.ones(2, 4, requires_grad=True)
    mix = fused.depth_attention([source], torch.ones(4), torch.ones(4), eps=1e-6).mix
    mix.sum().backward()
print(mix.sum().item(), source.grad.sum().item(), len([w for w in said if "compiled anew" in str(w.message)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["8.0", "8.0", "1"], done.stderr


def test_every_backend_says_what_it_is():
    assert all(backend.about and backend.name == name for name, backend in BACKENDS.items())
    assert replace(BACKENDS["eager"]).missing is None
