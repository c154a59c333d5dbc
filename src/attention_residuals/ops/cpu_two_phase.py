"""CPU kernels of two-phase reads: finished blocks for all queries at once, then one site's live sources.

The address table, the chunks of tokens and the helpers are those of ``cpu``. The cache of numba does not see
changes in that file, so its text is part of the key under which these kernels are kept.
"""

import functools
import inspect
import math
import zlib

import numpy as np
import torch
from numba import types
from numba.extending import overload

from attention_residuals.ops import cpu
from attention_residuals.ops.cpu import (
    DIRECTION,
    EPS,
    INVERSE_NORMS,
    LOGITS,
    NUM_CHUNKS,
    NUM_SOURCES,
    NUM_TOKENS,
    SCRATCH,
    SCRATCH_BYTES,
    SOURCES,
    WIDTH,
    _inlined,
    _load,
    _note,
    _pointer,
    _row,
    _scores,
    _take,
    _write_mix,
)

__all__ = [
    "DENOMINATORS",
    "FINISHED_LOGITS",
    "FINISHED_NORMS",
    "MAXIMA",
    "NUM_EXTRA",
    "NUM_FINISHED",
    "NUM_KNOWN",
    "NUM_QUERIES",
    "OUTPUTS",
    "kernel",
]

# Places in the table behind the addresses of the sources.
NUM_QUERIES, NUM_KNOWN, OUTPUTS, MAXIMA, DENOMINATORS = range(5)
NUM_FINISHED, FINISHED_LOGITS, FINISHED_NORMS, NUM_EXTRA = range(5, 9)

_STEP = 512  # channels handled together: those of some queries and all rows of a token stay in the L1 cache


@_inlined
def _extra(table, place):
    return table[SOURCES + table[NUM_SOURCES] + place]


def _unpack(table, token, unpacked, like):
    """Makes float32 rows of a token's bfloat16 ones, once for all queries; float32 rows are read in place."""


@overload(_unpack)
def _unpack_typed(table, token, unpacked, like):
    if like == types.float32:
        return lambda table, token, unpacked, like: None

    def unpack(table, token, unpacked, like):
        width = table[WIDTH]
        for source in range(table[NUM_SOURCES]):
            row = _row(table, SOURCES + source, token, like)
            plain = _pointer(unpacked + 4 * width * source, np.float32(1))
            for d in range(width):
                plain[d] = _load(row, d)

    return unpack


def _plain_row(table, source, token, unpacked, like):
    """Points to a token's row of a source as float32; sources past the last are the last."""


@overload(_plain_row)
def _plain_row_typed(table, source, token, unpacked, like):
    if like == types.float32:
        return lambda table, source, token, unpacked, like: _row(
            table, SOURCES + min(source, table[NUM_SOURCES] - 1), token, like
        )
    return lambda table, source, token, unpacked, like: _pointer(
        unpacked + 4 * table[WIDTH] * min(source, table[NUM_SOURCES] - 1), np.float32(1)
    )


@_inlined
def _norms(table, token, unpacked, like):
    """Writes the inverse norms that are not known yet."""
    one, width, num_tokens = np.float32(1), table[WIDTH], table[NUM_TOKENS]
    numbers, inverse_norms = _pointer(table[EPS], one), _pointer(table[INVERSE_NORMS], one)
    for source in range(_extra(table, NUM_KNOWN), table[NUM_SOURCES]):
        row, square = _plain_row(table, source, token, unpacked, like), np.float32(0)
        for d in range(width):
            square += row[d] * row[d]
        inverse_norms[source * num_tokens + token] = one / math.sqrt(square / np.float32(width) + numbers[0])


@_inlined
def _direction(table, query):
    """Points to a direction; those past the last are the last."""
    last = _extra(table, NUM_QUERIES) - 1
    return _pointer(table[DIRECTION] + 4 * table[WIDTH] * min(query, last), np.float32(1))


@_inlined
def _dots(table, token, dots, unpacked, like):
    """Multiplies all rows of a token with all directions, two rows and four directions at a time."""
    num_sources, num_queries, width = table[NUM_SOURCES], _extra(table, NUM_QUERIES), table[WIDTH]
    stride = num_sources + 3  # room for what four queries and four sources at a time have too much
    for place in range((num_queries + 3) * stride):
        dots[place] = np.float32(0)
    for first in range(0, width, _STEP):
        last = min(first + _STEP, width)
        for query in range(0, num_queries, 4):
            a, b = _direction(table, query), _direction(table, query + 1)
            c, e = _direction(table, query + 2), _direction(table, query + 3)
            for source in range(0, num_sources, 2):
                x = _plain_row(table, source, token, unpacked, like)
                y = _plain_row(table, source + 1, token, unpacked, like)
                xa = xb = xc = xe = ya = yb = yc = ye = np.float32(0)
                for d in range(first, last):
                    xa += x[d] * a[d]
                    xb += x[d] * b[d]
                    xc += x[d] * c[d]
                    xe += x[d] * e[d]
                    ya += y[d] * a[d]
                    yb += y[d] * b[d]
                    yc += y[d] * c[d]
                    ye += y[d] * e[d]
                place = query * stride + source
                dots[place] += xa
                dots[place + 1] += ya
                dots[place + stride] += xb
                dots[place + stride + 1] += yb
                dots[place + 2 * stride] += xc
                dots[place + 2 * stride + 1] += yc
                dots[place + 3 * stride] += xe
                dots[place + 3 * stride + 1] += ye


@_inlined
def _weigh(table, token, dots):
    """Turns products into exponentials of the distance to the largest logit, in place, and writes statistics."""
    one, num_tokens = np.float32(1), table[NUM_TOKENS]
    num_sources, num_queries = table[NUM_SOURCES], _extra(table, NUM_QUERIES)
    logits, inverse_norms = _pointer(table[LOGITS], one), _pointer(table[INVERSE_NORMS], one)
    maxima = _pointer(_extra(table, MAXIMA), one)
    denominators, stride = _pointer(_extra(table, DENOMINATORS), one), num_sources + 3
    for query in range(num_queries):
        maximum, total = -np.float32(np.inf), np.float32(0)
        for source in range(num_sources):
            logit = dots[query * stride + source] * inverse_norms[source * num_tokens + token]
            dots[query * stride + source] = logit
            logits[(source * num_queries + query) * num_tokens + token] = logit
            maximum = max(maximum, logit)
        for source in range(num_sources):
            weight = math.exp(dots[query * stride + source] - maximum)
            dots[query * stride + source] = weight
            total += weight
        for source in range(num_sources, stride):
            dots[query * stride + source] = np.float32(0)
        maxima[query * num_tokens + token] = maximum
        denominators[query * num_tokens + token] = total


@_inlined
def _mixes(table, token, weights, unpacked, like):
    """Writes the weighted sums of a token's rows, four rows at a time; rows past the last weigh nothing."""
    one, width, num_tokens = np.float32(1), table[WIDTH], table[NUM_TOKENS]
    num_sources, stride = table[NUM_SOURCES], table[NUM_SOURCES] + 3
    for first in range(0, width, _STEP):
        last = min(first + _STEP, width)
        for query in range(_extra(table, NUM_QUERIES)):
            mix = _pointer(_extra(table, OUTPUTS) + 4 * width * (query * num_tokens + token), one)
            for source in range(0, num_sources, 4):
                a = _plain_row(table, source, token, unpacked, like)
                b = _plain_row(table, source + 1, token, unpacked, like)
                c = _plain_row(table, source + 2, token, unpacked, like)
                e = _plain_row(table, source + 3, token, unpacked, like)
                place = query * stride + source
                wa, wb, wc, we = weights[place], weights[place + 1], weights[place + 2], weights[place + 3]
                if source == 0:
                    for d in range(first, last):
                        mix[d] = wa * a[d] + wb * b[d] + wc * c[d] + we * e[d]
                else:
                    for d in range(first, last):
                        mix[d] += wa * a[d] + wb * b[d] + wc * c[d] + we * e[d]


@_inlined
def _phase_1(table, chunk, like):
    start = table[SCRATCH] + chunk * table[SCRATCH_BYTES]
    weights = _pointer(start, np.float32(1))
    unpacked = start + 4 * (_extra(table, NUM_QUERIES) + 3) * (table[NUM_SOURCES] + 3)
    num_chunks, num_tokens = table[NUM_CHUNKS], table[NUM_TOKENS]
    for token in range(chunk * num_tokens // num_chunks, (chunk + 1) * num_tokens // num_chunks):
        _unpack(table, token, unpacked, like)
        _norms(table, token, unpacked, like)
        _dots(table, token, weights, unpacked, like)
        _weigh(table, token, weights)
        _mixes(table, token, weights, unpacked, like)


@_inlined
def _copy_finished(table, first, last):
    """Puts what phase 1 found before the logits and inverse norms of the live sources."""
    one, num_tokens, num_finished = np.float32(1), table[NUM_TOKENS], _extra(table, NUM_FINISHED)
    found_logits = _pointer(_extra(table, FINISHED_LOGITS), one)
    found_norms = _pointer(_extra(table, FINISHED_NORMS), one)
    logits = _pointer(table[LOGITS] - 4 * num_finished * num_tokens, one)
    inverse_norms = _pointer(table[INVERSE_NORMS] - 4 * num_finished * num_tokens, one)
    for source in range(num_finished):
        there = source * _extra(table, NUM_QUERIES) * num_tokens
        for token in range(first, last):
            logits[source * num_tokens + token] = found_logits[there + token]
            _note(table, found_logits[there + token])
            inverse_norms[source * num_tokens + token] = found_norms[source * num_tokens + token]


@_inlined
def _merge_row(table, token, weights, mixed, like):
    """Scores the live sources of a token and mixes them with what phase 1 found."""
    one, num_live, width = np.float32(1), table[NUM_SOURCES], table[WIDTH]
    maxima = _pointer(_extra(table, MAXIMA), one)
    denominators = _pointer(_extra(table, DENOMINATORS), one)
    output = _pointer(_extra(table, OUTPUTS) + 4 * width * token, one)
    top = maxima[token]
    for source in range(num_live):
        weights[source] = _scores(table, source, token, _pointer(table[DIRECTION], one), like)
        top = max(top, weights[source])
    old = np.float32(math.exp(maxima[token] - top))
    total = old * denominators[token]
    for source in range(num_live):
        weights[source] = math.exp(weights[source] - top)
        total += weights[source]
    old /= total
    for d in range(width):
        mixed[d] = old * output[d]
    for source in range(num_live):
        row, weight = _row(table, SOURCES + source, token, like), weights[source] / total
        for d in range(width):
            mixed[d] += weight * _load(row, d)


@_inlined
def _read(table, chunk, like):
    one, width = np.float32(1), table[WIDTH]
    start = table[SCRATCH] + chunk * table[SCRATCH_BYTES]
    mixed, weights = _pointer(start, one), _pointer(start + 4 * width, one)
    num_chunks, num_tokens = table[NUM_CHUNKS], table[NUM_TOKENS]
    first, last = chunk * num_tokens // num_chunks, (chunk + 1) * num_tokens // num_chunks
    _copy_finished(table, first, last)
    for token in range(first, last):
        _merge_row(table, token, weights, mixed, like)
        _write_mix(table, token, mixed, like)


def _bodies(like, stamp):
    """Makes the callbacks. What they close over, numbers only, is part of the key in numba's cache."""

    def phase_1(table):
        chunk = _take(table)
        while stamp and chunk < table[NUM_CHUNKS]:
            _phase_1(table, chunk, like)
            chunk = _take(table)

    def read(table):
        chunk = _take(table)
        while stamp and chunk < table[NUM_CHUNKS]:
            _read(table, chunk, like)
            chunk = _take(table)

    return {"phase_1": phase_1, "read": read}


@functools.cache
def kernel(name: str, dtype: torch.dtype) -> int:
    """Compiles a kernel, or reads it from numba's cache, and returns its address."""
    like = np.float32(1) if dtype == torch.float32 else np.uint16(1)
    stamp = zlib.crc32(inspect.getsource(cpu).encode()) + 1
    return int(cpu.compiled(_bodies(like, stamp)[name]).address)
