"""Reads in two phases: threads, the choice of backend, refusals and the kernels' cache."""

import subprocess
import sys

import numba
import pytest
import torch
from agreement.phase_cases import (
    PLAIN,
    case,
    every_backend,
    flat,
    in_one_phase,
    in_two_phases,
)
from closeness import assert_close

from attention_residuals.errors import BackendError, NonFiniteError, ShapeError
from attention_residuals.ops import (
    backends,
    cpu,
    cpu_two_phase,
    depth_attention,
    fused_two_phase,
    threads,
)
from attention_residuals.ops.phases import Phase1
from attention_residuals.ops.two_phase import merge, phase_1, phase_2, read_open_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    given, before, results = case(9, 1, 5, (500,), 60, dtype), torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
            results.append([*found, *flat(in_two_phases(given, "cpu"))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_one_token_wakes_no_thread_and_many_do(monkeypatch):
    before, used, run = torch.get_num_threads(), [], threads.run
    monkeypatch.setattr(threads, "run", lambda *arguments: (used.append(arguments[2]), run(*arguments)))
    try:
        torch.set_num_threads(2)
        in_two_phases(case(8, 1, 16, (1,), 1024), "cpu", [3])
        in_two_phases(case(8, 1, 2, (500,), 60), "cpu", [1])
    finally:
        torch.set_num_threads(before)
    assert used == [1, 1, 2, 2]


@every_backend
def test_strided_sources_and_a_cut_phase_1_agree(backend):
    base = torch.randn(6, 4, 20)
    blocks = [base.transpose(0, 1), base.flip(0).transpose(0, 1), torch.randn(20).expand(4, 6, 20)]
    queries, gains = torch.randn(20, 3).T, torch.rand(20, 3).T
    live = torch.randn(4, 12, 20)[:, ::2]
    found = phase_1(blocks, queries, gains, eps=1e-6, backend=backend)
    cut = found._replace(
        outputs=found.outputs[:, 1:3],
        maxima=found.maxima[:, 1:3],
        denominators=found.denominators[:, 1:3],
        logits=found.logits[:, :, 1:3],
        inverse_norms=found.inverse_norms[:, 1:3],
    )
    expected = depth_attention([*blocks, live], queries[1], gains[1], eps=1e-6, backend="reference")
    read = read_open_block(found, 1, live, queries[1], gains[1], eps=1e-6, backend=backend)
    part = read_open_block(cut, 1, live[1:3], queries[1], gains[1], eps=1e-6, backend=backend)
    for number, (whole, piece, other) in enumerate(zip(read, part, expected, strict=True)):
        assert_close(whole, other)
        assert_close(piece, other[1:3] if number == 0 else other[:, 1:3])


@pytest.mark.parametrize("backend", PLAIN)
def test_autocast_does_not_lower_the_precision(backend):
    given = case(5, 1, 2, (8,), 60)
    plain = flat(in_two_phases(given, backend))
    with torch.autocast("cpu", torch.bfloat16):
        cast = flat(in_two_phases(given, backend))
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))


def kernels_used(monkeypatch):
    used = []
    for name in ("phase_1", "read"):
        run = getattr(fused_two_phase, name)
        monkeypatch.setattr(
            fused_two_phase, name, lambda *given, name=name, run=run: (used.append(name), run(*given))[1]
        )
    return used


def test_auto_takes_the_kernels_but_where_a_gradient_is_asked_for(monkeypatch):
    used, given = kernels_used(monkeypatch), case(3, 1, 1, (4,), 8, grad=True)
    assert in_two_phases(given, "auto")[0].mix.requires_grad
    assert not used
    with torch.no_grad():
        in_two_phases(given, "auto")
    assert used == ["phase_1", "read"]
    found = phase_1([block.detach() for block in given.blocks], given.queries.detach(), given.gains.detach(),
                    eps=1e-6)  # fmt: skip
    assert used == ["phase_1", "read", "phase_1"]
    # One of the reader's own tensors is enough.
    read = read_open_block(found, 0, given.live[0].detach(), given.queries[0].detach(), given.gains[0].detach(),
                           eps=1e-6, output_gain=given.output_gain, output_eps=1e-3)  # fmt: skip
    assert read.mix.requires_grad
    assert used == ["phase_1", "read", "phase_1"]


def test_the_kernels_refuse_what_they_cannot_do_and_say_why(monkeypatch):
    given = case(3, 1, 1, (4,), 8, grad=True)
    with pytest.raises(BackendError, match="no backward pass"):
        in_two_phases(given, "cpu")
    with pytest.raises(BackendError, match=r"not torch\.float64"):
        in_two_phases(given.to(torch.float64), "cpu")
    with pytest.raises(BackendError, match="did you mean 'eager'"):
        in_two_phases(given, "egaer")
    with pytest.raises(BackendError, match="reads in two phases: cpu, eager, reference"):
        in_two_phases(given, "fla")
    monkeypatch.setitem(backends._INSTALLED, "numba", False)
    with torch.no_grad():
        with pytest.raises(BackendError, match="the package numba is not installed"):
            in_two_phases(given, "cpu")
        for one, other in zip(flat(in_two_phases(given, "auto")), flat(in_one_phase(given)), strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("backend", ["auto", "cpu", "eager"])
def test_vmap_is_refused_with_what_to_do_and_the_reference_does_it(backend):
    given, lives = case(3, 1, 1, (4,), 8), torch.randn(5, 4, 8)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6)

    def mix(live, name):
        again = phase_1([*given.blocks, live], given.queries, given.gains, eps=1e-6, backend=name)
        query, gain = given.queries[0], given.gains[0]
        return again.outputs, read_open_block(found, 0, live, query, gain, eps=1e-6, backend=name).mix

    with pytest.raises(BackendError, match="backend='reference'"):
        torch.vmap(mix, in_dims=(0, None))(lives, backend)
    with pytest.raises(BackendError, match="backend='reference'"):
        torch.vmap(lambda live: read_open_block(found, 0, live, given.queries[0], given.gains[0], eps=1e-6,
                                                backend=backend).mix)(lives)  # fmt: skip
    batched = torch.vmap(mix, in_dims=(0, None))(lives, "reference")
    for one, other in zip(batched, zip(*(mix(live, backend) for live in lives), strict=True), strict=True):
        assert_close(one, torch.stack(other))


@every_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_source_that_is_not_finite_is_named(backend, bad):
    given = case(3, 2, 2, (2,), 4)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend=backend)
    given.blocks[1][1, 2] = given.live[1][0, 3] = bad
    with pytest.raises(NonFiniteError, match=r"sources number \[1\] of 3"):
        phase_1(given.blocks, 0 * given.queries, given.gains, eps=1e-6, backend=backend)
    with pytest.raises(NonFiniteError, match=r"sources number \[[14]\] of [25]"):
        read_open_block(found, 0, given.live, given.queries[0], given.gains[0], eps=1e-6, backend=backend)


@every_backend
@pytest.mark.parametrize(("size", "eps"), [(0.0, 0.0), (0.0, 1e-50), (1e-23, 0.0)])
def test_a_source_without_a_norm_is_named_and_never_read_from_old_memory(backend, size, eps):
    given = case(3, 2, 2, (2,), 4)
    query = given.queries[0].abs()
    found = phase_1(given.blocks, query[None], given.gains[:1], eps=eps, backend=backend)
    given.blocks[1][1] = given.live[1][0] = size
    with pytest.raises(NonFiniteError, match=r"sources number \[1\] of 3"):
        phase_1(given.blocks, query[None], given.gains[:1], eps=eps, backend=backend)
    with pytest.raises(NonFiniteError, match=r"sources number \[[14]\] of [25]"):
        read_open_block(found, 0, given.live, query, given.gains[0], eps=eps, backend=backend)


@every_backend
def test_a_mix_of_zero_without_an_eps_is_not_a_number_at_its_token_alone(backend):
    found = phase_1([VECTOR.expand(2, 4)], torch.zeros(1, 4), VECTOR[None], eps=0.0, backend=backend)
    live, options = torch.tensor([[-1.0] * 4, [3.0] * 4]), {"output_gain": VECTOR, "output_eps": 0.0}
    read = read_open_block(found, 0, live, 0 * VECTOR, VECTOR, eps=0.0, backend=backend, **options)
    assert read.mix[0].isnan().all()
    assert_close(read.mix[1], VECTOR)


def unchecked(function):
    """The checks are the function's own: the shape checker of the tests must not come first."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": []}, "zero sources"),
        ({"blocks": [torch.ones(2, 4), torch.ones(3, 4)]}, r"source 1 is torch.float32\[3, 4\]"),
        ({"blocks": [torch.ones(2, 4), torch.ones(2, 4).double()]}, "source 1 is torch.float64"),
        ({"queries": torch.ones(4)}, r"pseudo_queries of shape \[4\]"),
        ({"queries": torch.ones(0, 4), "gains": torch.ones(0, 4)}, r"pseudo_queries of shape \[0, 4\]"),
        ({"gains": torch.ones(2, 4)}, r"key_gains of \[2, 4\]"),
        ({"queries": torch.ones(3, 5), "gains": torch.ones(3, 5)}, r"pseudo_query of shape \(5,\)"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"inverse_norms": torch.ones(3, 2)}, r"inverse_norms of shape \[3, 2\].*at most 2 rows"),
        ({"inverse_norms": torch.ones(1, 3)}, r"inverse_norms of shape \[1, 3\].*shape \[2\]"),
    ],
)
@every_backend
def test_a_phase_1_that_does_not_fit_is_refused(backend, changes, message):
    given = {
        "blocks": [torch.ones(2, 4)] * 2,
        "queries": torch.ones(3, 4),
        "gains": torch.ones(3, 4),
        "eps": 1e-6,
        **changes,
    }
    with pytest.raises(ShapeError, match=f"(?s){message}"):
        unchecked(phase_1)(
            given.pop("blocks"), given.pop("queries"), given.pop("gains"), backend=backend, **given
        )


VECTOR = torch.ones(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": 3}, "site number 3.*0 to 2"),
        ({"site": -1}, "site number -1"),
        ({"live": torch.ones(3, 4)}, r"float32\[3, 4\].*float32\[2, 4\], as the finished"),
        ({"live": torch.ones(2, 4).bfloat16()}, "a live source that is torch.bfloat16"),
        ({"live": [torch.ones(2, 4), torch.ones(2, 5)]}, "source 1 is"),
        ({"query": torch.ones(5)}, "pseudo_query of shape"),
        ({"gain": torch.ones(5)}, "key_gain of shape"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"output_gain": torch.ones(5), "output_eps": 0.1}, "output_gain of shape"),
        ({"live": None, "output_gain": torch.ones(5), "output_eps": 0.1}, "output_gain of shape"),
        ({"output_gain": VECTOR}, "output_eps=None"),
        ({"live": None, "output_eps": 0.1}, "output_gain absent"),
        ({"output_gain": VECTOR, "output_eps": -1.0}, "output_eps=-1.0"),
    ],
)
@every_backend
def test_a_read_that_does_not_fit_is_refused(backend, changes, message):
    found = phase_1([torch.ones(2, 4)] * 2, torch.ones(3, 4), torch.ones(3, 4), eps=1e-6)
    given = {"site": 0, "live": torch.ones(2, 4), "query": VECTOR, "gain": VECTOR, "eps": 1e-6, **changes}
    with pytest.raises(ShapeError, match=f"(?s){message}"):
        unchecked(read_open_block)(
            found,
            given.pop("site"),
            given.pop("live"),
            given.pop("query"),
            given.pop("gain"),
            backend=backend,
            **given,
        )


@pytest.mark.parametrize("name", Phase1._fields[:5])
@pytest.mark.parametrize(
    "change",
    [torch.Tensor.bfloat16, torch.Tensor.double, lambda tensor: tensor[:-1], lambda tensor: tensor[..., :-1],
     lambda tensor: tensor[None], lambda tensor: tensor.flatten()[0], lambda tensor: tensor.to("meta")],
    ids=["bfloat16", "float64", "first axis", "last axis", "one axis more", "a number", "another device"],
)  # fmt: skip
@every_backend
def test_a_phase_1_of_which_one_tensor_was_changed_is_refused(backend, name, change):
    found = phase_1([torch.ones(2, 3, 4)] * 2, torch.ones(3, 4), torch.ones(3, 4), eps=1e-6)
    broken, live = found._replace(**{name: change(getattr(found, name))}), torch.ones(2, 3, 4)
    # Outputs of another width are a whole, for other sources.
    with pytest.raises(
        ShapeError, match=r"(?s)a Phase1 of .*pass what phase_1 returned|a live source that is"
    ):
        read_open_block(broken, 0, live, VECTOR, VECTOR, eps=1e-6, backend=backend)
    with pytest.raises(ShapeError, match=r"a Phase1 of outputs torch\.|a live source that is"):
        merge(broken, 0, live, phase_2(live, VECTOR, VECTOR, eps=1e-6))


def test_phase_2_and_merge_refuse_what_does_not_fit():
    found = phase_1([torch.ones(2, 4)] * 2, torch.ones(1, 4), torch.ones(1, 4), eps=1e-6)
    scores = phase_2(torch.ones(2, 4), VECTOR, VECTOR, eps=1e-6)
    with pytest.raises(ShapeError, match=r"2 live source\(s\), and the scores of 1"):
        merge(found, 0, [torch.ones(2, 4)] * 2, scores)
    with pytest.raises(ShapeError, match=r"0 live source\(s\), and the scores of 1"):
        merge(found, 0, None, scores)
    with pytest.raises(ShapeError, match="output_eps=None"):
        merge(found, 0, torch.ones(2, 4), scores, output_gain=VECTOR)
    with pytest.raises(ShapeError, match="zero sources"):
        phase_2([], VECTOR, VECTOR, eps=1e-6)
    with pytest.raises(ShapeError, match="eps=-1"):
        phase_2(torch.ones(2, 4), VECTOR, VECTOR, eps=-1.0)


def test_a_change_in_the_shared_kernels_compiles_these_anew_and_the_cache_gives_the_same_bits(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_two_phase, "kernel", cpu_two_phase.kernel.__wrapped__)
    given = case(3, 1, 2, (4,), 20)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
    loaded = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, loaded, strict=True))
    monkeypatch.setattr(cpu_two_phase.inspect, "getsource", lambda module: "changed")
    phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
    assert len(list(tmp_path.rglob("*.nbc"))) == 2


def test_without_a_folder_for_its_cache_numba_compiles_anew_and_that_is_said(monkeypatch):
    def cfunc(signature, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return whole(signature)

    whole, said = cpu.cfunc, []
    monkeypatch.setattr(cpu, "cfunc", cfunc)
    monkeypatch.setattr(cpu, "_say_uncached", said.append)
    monkeypatch.setattr(cpu_two_phase, "kernel", cpu_two_phase.kernel.__wrapped__)
    given = case(3, 0, 2, (4,), 20)
    assert_close(in_two_phases(given, "cpu")[0].mix, in_one_phase(given)[0].mix)
    assert set(said) == {"cannot cache function: no locator available"}


def test_large_outputs_are_advised_huge_pages_within_their_memory(monkeypatch):
    advised = []
    monkeypatch.setattr(fused_two_phase, "_madvise", lambda: lambda *given: advised.append(given))
    monkeypatch.setattr(fused_two_phase, "_FRESH", 2**16)
    monkeypatch.setattr(fused_two_phase.mmap, "MADV_HUGEPAGE", 14, raising=False)
    small, large = torch.empty(100), torch.empty(2**15 + 5)
    assert fused_two_phase._with_huge_pages(small) is small
    assert fused_two_phase._with_huge_pages(large) is large
    ((start, size, _),) = advised
    page = fused_two_phase.mmap.PAGESIZE
    assert start % page == size % page == 0
    assert large.data_ptr() <= start < start + size <= large.data_ptr() + large.nbytes
    monkeypatch.delattr(fused_two_phase.mmap, "MADV_HUGEPAGE")
    assert fused_two_phase._with_huge_pages(large) is large
    assert len(advised) == 1


@pytest.mark.skipif(not hasattr(fused_two_phase.mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_the_system_takes_the_advice():
    tensor = torch.empty(fused_two_phase._FRESH // 4)
    page = fused_two_phase.mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    assert fused_two_phase._madvise()(start, page, fused_two_phase.mmap.MADV_HUGEPAGE) in (0, -1)
    given = case(2, 0, 8, (1100,), 1000)
    assert_close(in_two_phases(given, "cpu", [7])[0].mix, in_one_phase(given, [7])[0].mix)


def test_tensors_that_are_watched_go_the_eager_way(monkeypatch):
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    used, given = kernels_used(monkeypatch), case(3, 1, 1, (4,), 8)
    with Watch():
        read = in_two_phases(given, "auto")[0]
        with pytest.raises(BackendError, match="plain tensors, outside of compiled graphs"):
            in_two_phases(given, "cpu")
    assert not used
    assert_close(read.mix, in_one_phase(given)[0].mix)


@pytest.mark.slow
def test_a_compiled_graph_holds_both_phases_and_agrees():
    code = """
import torch
from attention_residuals.ops.two_phase import phase_1, read_open_block
blocks, queries, gains = torch.randn(3, 4, 16).unbind(0), torch.randn(2, 16), torch.ones(2, 16)
def mix(live):
    found = phase_1(blocks, queries, gains, eps=1e-6)
    return read_open_block(found, 1, live, queries[1], gains[1], eps=1e-6).mix
live = torch.randn(4, 16)
print((torch.compile(mix, fullgraph=True)(live) - mix(live)).abs().max().item())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1e-5
