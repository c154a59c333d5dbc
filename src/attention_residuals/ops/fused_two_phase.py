"""Two-phase reads on the CPU kernels, for inference: checked tensors in, results out, no gradients."""

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from attention_residuals.ops import threads
from attention_residuals.ops.depth_read import DepthRead, require_finite
from attention_residuals.ops.fused import SMALL, address_of, as_float32, cpu_kernels, num_chunks_of
from attention_residuals.ops.phases import Phase1

__all__ = ["phase_1", "read"]


_FRESH = 2**25
"""Bytes from which on malloc takes memory straight from the system, page by page at first touch."""


@functools.cache
def _kernels() -> ModuleType:
    """Imports the kernels, and numba with them, when the first one is to run."""
    from attention_residuals.ops import cpu_two_phase

    return cpu_two_phase


def phase_1(
    blocks: Sequence[Tensor],
    pseudo_queries: Tensor,
    key_gains: Tensor,
    eps: float,
    known_norms: Tensor | None,
) -> Phase1:
    """Reads all blocks for all queries, in one pass; inverse norms that are known are kept."""
    cpu, kernels = cpu_kernels(), _kernels()
    sources = [block.contiguous() for block in blocks]
    num_blocks, num_queries, shape = len(sources), len(pseudo_queries), sources[0].shape
    num_known = 0 if known_norms is None else len(known_norms)
    outputs = _with_huge_pages(torch.empty((num_queries, *shape), dtype=torch.float32, device="cpu"))
    logits = torch.empty((num_blocks, num_queries, *shape[:-1]), dtype=torch.float32, device="cpu")
    maxima, denominators = torch.empty_like(logits[0]), torch.empty_like(logits[0])
    inverse_norms = torch.empty((num_blocks, *shape[:-1]), dtype=torch.float32, device="cpu")
    if known_norms is not None:
        inverse_norms[:num_known] = known_norms
    numbers = (ctypes.c_float * 2)(eps, 0.0)
    directions = (pseudo_queries.float() * key_gains.float()).contiguous()
    addresses = {
        cpu.EPS: ctypes.addressof(numbers),
        cpu.DIRECTION: directions.data_ptr(),
        cpu.LOGITS: logits.data_ptr(),
        cpu.INVERSE_NORMS: inverse_norms.data_ptr(),
    }
    extra = {
        kernels.NUM_QUERIES: num_queries,
        kernels.NUM_KNOWN: num_known,
        kernels.OUTPUTS: outputs.data_ptr(),
        kernels.MAXIMA: maxima.data_ptr(),
        kernels.DENOMINATORS: denominators.data_ptr(),
    }
    # Weights of all queries, and where the sources are bfloat16 the rows of a token as float32.
    floats = (num_queries + 3) * (num_blocks + 3)
    floats += num_blocks * shape[-1] if sources[0].dtype == torch.bfloat16 else 0
    _launch("phase_1", sources, sources[0], addresses, extra, floats, num_blocks * num_queries)
    return Phase1(outputs, maxima, denominators, logits, inverse_norms, sources[0].new_empty(0))


def read(
    found: Phase1,
    site: int,
    live: Sequence[Tensor],
    pseudo_query: Tensor,
    key_gain: Tensor,
    eps: float,
    output_gain: Tensor | None,
    output_eps: float | None,
) -> DepthRead:
    """Scores the live sources, merges them with the results of phase 1 and normalises, in one pass.

    Raises:
        NonFiniteError: A source holds NaN or infinity.
    """
    cpu, kernels = cpu_kernels(), _kernels()
    outputs, maxima, denominators, found_logits, found_norms = (tensor.contiguous() for tensor in found[:5])
    num_finished, num_queries, shape = len(found_norms), len(outputs), outputs.shape[1:]
    sources = [source.contiguous() for source in live]
    mix = torch.empty(shape, dtype=found.like.dtype, device="cpu")
    num_tokens = mix.numel() // max(1, shape[-1])
    logits = torch.empty((num_finished + len(live), *shape[:-1]), dtype=torch.float32, device="cpu")
    inverse_norms = torch.empty_like(logits)
    numbers = (ctypes.c_float * 2)(eps, output_eps or 0.0)
    direction, gain = pseudo_query.float() * key_gain.float(), as_float32(output_gain)
    addresses = {
        cpu.EPS: ctypes.addressof(numbers),
        cpu.DIRECTION: direction.data_ptr(),
        cpu.OUTPUT_GAIN: address_of(gain),
        cpu.LOGITS: logits.data_ptr() + 4 * num_finished * num_tokens,
        cpu.INVERSE_NORMS: inverse_norms.data_ptr() + 4 * num_finished * num_tokens,
        cpu.MIX: mix.data_ptr(),
    }
    extra = {
        kernels.NUM_QUERIES: num_queries,
        kernels.OUTPUTS: outputs.data_ptr() + 4 * site * num_tokens * shape[-1],
        kernels.MAXIMA: maxima.data_ptr() + 4 * site * num_tokens,
        kernels.DENOMINATORS: denominators.data_ptr() + 4 * site * num_tokens,
        kernels.NUM_FINISHED: num_finished,
        kernels.FINISHED_LOGITS: found_logits.data_ptr() + 4 * site * num_tokens,
        kernels.FINISHED_NORMS: found_norms.data_ptr(),
    }
    filled = _launch("read", sources, mix, addresses, extra, shape[-1] + len(live), len(live) + 1)
    result = DepthRead(mix, logits, inverse_norms)
    # A look at the logits from here would cost as much as the kernel, so it has looked.
    return require_finite(result) if filled[cpu.NOT_FINITE] else result


def _launch(
    name: str,
    sources: list[Tensor],
    like: Tensor,
    addresses: dict[int, int],
    extra: dict[int, int],
    floats: int,
    passes: int,
) -> ctypes.Array[ctypes.c_int64]:
    """Fills the address table, runs a kernel over tokens of the shape of ``like`` and returns the table.

    ``floats`` is the scratch space of a chunk of tokens, ``passes`` how many times the work is that of one
    source.
    """
    cpu, kernels = cpu_kernels(), _kernels()
    num_chunks, width = num_chunks_of(like), like.shape[-1]
    num_tokens = like.numel() // max(1, width)
    # Behind the chunks' own space: one number per token, the norms of the outputs, which nobody reads.
    scratch = torch.empty(num_chunks * floats + num_tokens, dtype=torch.float32, device="cpu")
    behind = [0] * kernels.NUM_EXTRA
    table = [0] * cpu.SOURCES + [source.data_ptr() for source in sources] + behind
    table[cpu.NUM_CHUNKS], table[cpu.NUM_SOURCES] = num_chunks, len(sources)
    table[cpu.NUM_TOKENS], table[cpu.WIDTH] = num_tokens, width
    table[cpu.SCRATCH], table[cpu.SCRATCH_BYTES] = scratch.data_ptr(), 4 * floats
    table[cpu.OUTPUT_NORM] = scratch.data_ptr() + 4 * num_chunks * floats
    for place, address in addresses.items():
        table[place] = address
    for place, address in extra.items():
        table[cpu.SOURCES + len(sources) + place] = address
    filled = (ctypes.c_int64 * len(table))(*table)
    num_threads = 1 if passes * like.numel() < SMALL else min(torch.get_num_threads(), num_chunks)
    threads.run(kernels.kernel(name, like.dtype), ctypes.addressof(filled), num_threads)
    return filled


def _with_huge_pages(tensor: Tensor) -> Tensor:
    """Asks for huge pages for large fresh memory: touching it page by page takes longer than the kernel."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is not None and tensor.nbytes >= _FRESH:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.data_ptr() + tensor.nbytes - start
        # A refusal changes nothing but the time that it takes.
        _madvise()(start, size // mmap.PAGESIZE * mmap.PAGESIZE, advice)
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise
