"""CPU kernels of depth attention: one pass over the sources forward, one pass backward.

Each kernel is a C callback that takes one address: a table of int64 with sizes and addresses, so that one
compiled kernel serves every number of sources and no source is copied. Tokens are handled one after the
other, so that the rows of all sources for a token are still in the cache when they are read again. Work is
cut into a number of chunks that depends on the number of tokens alone; sums over tokens are kept per chunk
and added in order, so that any number of threads gives the same bits.

Functions are inlined by force: each kernel is one piece of machine code, the same whether it was just compiled
or comes from the cache. All compiled code is in this file: the cache of numba does not see changes in others.
"""

import functools
import math
import warnings

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic, overload

__all__ = [
    "BIAS",
    "COUNTER",
    "DIRECTION",
    "EPS",
    "GRAD_BIAS",
    "GRAD_DIRECTION",
    "GRAD_GAIN",
    "GRAD_LOGITS",
    "GRAD_MIX",
    "INVERSE_NORMS",
    "KEY_GAIN",
    "LOGITS",
    "MIX",
    "NOT_FINITE",
    "NUM_CHUNKS",
    "NUM_SOURCES",
    "NUM_TOKENS",
    "OUTPUT_GAIN",
    "OUTPUT_NORM",
    "SCRATCH",
    "SCRATCH_BYTES",
    "SOURCES",
    "TILE",
    "WIDTH",
    "compiled",
    "kernel",
]

# Places in the table. A zero address means that there is no such tensor.
COUNTER, NUM_CHUNKS, NUM_SOURCES, NUM_TOKENS, WIDTH, TILE, SCRATCH, SCRATCH_BYTES = range(8)
EPS, DIRECTION, BIAS, OUTPUT_GAIN, LOGITS, INVERSE_NORMS, OUTPUT_NORM, MIX = range(8, 16)
GRAD_MIX, GRAD_LOGITS, GRAD_BIAS, GRAD_DIRECTION, GRAD_GAIN = range(16, 21)
NOT_FINITE = 21
"""The kernels write 1 here when a logit is infinite or no number."""
KEY_GAIN = 22
"""Forward only: what the query, which is at DIRECTION there, is to be multiplied with."""
SOURCES = 23
"""From here on: S addresses of sources, S of their gradients, and S ones where those are added to."""

# How every function of the kernels is compiled. Sums may be reordered and contracted; infinities and NaN keep
# their meaning. A division by zero gives one of them, as numpy has it: Python's error would end a callback
# unseen, and leave its results unwritten.
_inlined = njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy", forceinline=True)


@intrinsic
def _pointer(typing_context, address, like):
    """Turns an address into a pointer to numbers of the type of ``like``."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


@intrinsic
def _take(typing_context, counter):
    """Returns a number and counts it up, in one step for all threads."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def _bits(typing_context, number):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _number(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _size(like):
    """Counts the bytes of a number of the type of ``like``."""


@overload(_size)
def _size_typed(like):
    size = like.bitwidth // 8
    return lambda like: size


def _load(row, index):
    """Reads a float32; bfloat16 numbers are the upper half of one."""


@overload(_load)
def _load_typed(row, index):
    if row.dtype == types.float32:
        return lambda row, index: row[index]
    return lambda row, index: _number(np.uint32(row[index]) << np.uint32(16))


def _store(row, index, number):
    """Writes a float32; to bfloat16 it is rounded to the nearest, ties to even, and NaN stays NaN."""


@overload(_store)
def _store_typed(row, index, number):
    if row.dtype == types.float32:

        def plain(row, index, number):
            row[index] = number

        return plain

    def rounded(row, index, number):
        bits = _bits(np.float32(number))
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        row[index] = np.uint16(np.uint32(0x7FC0) if number != number else nearest)

    return rounded


@_inlined
def _row(table, place, token, like):
    """Points to a token's row of a [N, D] tensor."""
    return _pointer(table[place] + table[WIDTH] * token * _size(like), like)


@_inlined
def _softmax(weights, num_sources):
    """Turns logits into weights, in place."""
    maximum = -np.float32(np.inf)
    for source in range(num_sources):
        maximum = max(maximum, weights[source])
    total = np.float32(0)
    for source in range(num_sources):
        weights[source] = math.exp(weights[source] - maximum)
        total += weights[source]
    for source in range(num_sources):
        weights[source] /= total


@_inlined
def _mix_row(table, token, weights, mixed, like):
    """Sums the weighted rows of a token, four sources at a time."""
    num_sources, width = table[NUM_SOURCES], table[WIDTH]
    for d in range(width):
        mixed[d] = np.float32(0)
    source = 0
    while source + 4 <= num_sources:
        a, b = _row(table, SOURCES + source, token, like), _row(table, SOURCES + source + 1, token, like)
        c, e = _row(table, SOURCES + source + 2, token, like), _row(table, SOURCES + source + 3, token, like)
        wa, wb, wc, we = weights[source], weights[source + 1], weights[source + 2], weights[source + 3]
        for d in range(width):
            mixed[d] += wa * _load(a, d) + wb * _load(b, d) + wc * _load(c, d) + we * _load(e, d)
        source += 4
    while source < num_sources:
        a, wa = _row(table, SOURCES + source, token, like), weights[source]
        for d in range(width):
            mixed[d] += wa * _load(a, d)
        source += 1


@_inlined
def _note(table, logit):
    """Notes a logit that is not finite; whichever thread does so writes the same."""
    if not abs(logit) < np.float32(np.inf):
        table[NOT_FINITE] = 1


@_inlined
def _scores(table, source, token, direction, like):
    """Writes logit and inverse norm of a source at a token, and returns the logit."""
    one, width = np.float32(1), table[WIDTH]
    numbers = _pointer(table[EPS], one)
    logits, inverse_norms = _pointer(table[LOGITS], one), _pointer(table[INVERSE_NORMS], one)
    row, square, dot = _row(table, SOURCES + source, token, like), np.float32(0), np.float32(0)
    for d in range(width):
        number = _load(row, d)
        square += number * number
        dot += number * direction[d]
    inverse = one / math.sqrt(square / np.float32(width) + numbers[0])
    logit, place = dot * inverse, source * table[NUM_TOKENS] + token
    if table[BIAS]:
        bias = _pointer(table[BIAS], one)
        logit += bias[place]
    if table[LOGITS]:
        inverse_norms[place] = inverse
        logits[place] = logit
    _note(table, logit)
    return logit


@_inlined
def _write_mix(table, token, mixed, like):
    """Writes the mix of a token, normalised where a gain is given."""
    one, width = np.float32(1), table[WIDTH]
    mix = _row(table, MIX, token, like)
    if not table[OUTPUT_GAIN]:
        for d in range(width):
            _store(mix, d, mixed[d])
        return
    gain, numbers = _pointer(table[OUTPUT_GAIN], one), _pointer(table[EPS], one)
    output_norms, square = _pointer(table[OUTPUT_NORM], one), np.float32(0)
    for d in range(width):
        square += mixed[d] * mixed[d]
    inverse = one / math.sqrt(square / np.float32(width) + numbers[1])
    if table[OUTPUT_NORM]:
        output_norms[token] = inverse
    for d in range(width):
        _store(mix, d, mixed[d] * inverse * gain[d])


@_inlined
def _forward(table, chunk, like):
    one = np.float32(1)
    num_sources, num_tokens, tile = table[NUM_SOURCES], table[NUM_TOKENS], table[TILE]
    start = table[SCRATCH] + chunk * table[SCRATCH_BYTES]
    weights, mixed = _pointer(start, one), _pointer(start + 4 * tile * num_sources, one)
    direction = _pointer(start + 4 * (tile * num_sources + table[WIDTH]), one)
    query, key_gain = _pointer(table[DIRECTION], one), _pointer(table[KEY_GAIN], one)
    for d in range(table[WIDTH]):
        direction[d] = query[d] * key_gain[d]
    last = (chunk + 1) * num_tokens // table[NUM_CHUNKS]
    for first in range(chunk * num_tokens // table[NUM_CHUNKS], last, tile):
        size = min(tile, last - first)
        for source in range(num_sources):
            for number in range(size):
                logit = _scores(table, source, first + number, direction, like)
                weights[number * num_sources + source] = logit
        for number in range(size):
            row = _pointer(start + 4 * number * num_sources, one)
            _softmax(row, num_sources)
            _mix_row(table, first + number, row, mixed, like)
            _write_mix(table, first + number, mixed, like)


@_inlined
def _grad_of_mix(table, chunk, token, weights, mixed, grad, like):
    """Writes the gradient with respect to the raw mix of a token into ``grad``."""
    one, width = np.float32(1), table[WIDTH]
    if not table[GRAD_MIX]:
        for d in range(width):
            grad[d] = np.float32(0)
        return
    given = _row(table, GRAD_MIX, token, like)
    if not table[OUTPUT_GAIN]:
        for d in range(width):
            grad[d] = _load(given, d)
        return
    gain, output_norms = _pointer(table[OUTPUT_GAIN], one), _pointer(table[OUTPUT_NORM], one)
    grad_gain, inverse = _pointer(table[GRAD_GAIN] + 4 * chunk * width, one), output_norms[token]
    _mix_row(table, token, weights, mixed, like)
    projection = np.float32(0)
    for d in range(width):
        normalised, number = mixed[d] * inverse, _load(given, d)
        grad_gain[d] += number * normalised
        grad[d] = number * gain[d]
        projection += grad[d] * normalised
    projection *= inverse / np.float32(width)
    for d in range(width):
        grad[d] = (grad[d] - mixed[d] * projection) * inverse


@_inlined
def _grad_of_logits(table, token, weights, dots):
    """Turns the products of gradient and values into gradients of logits, in place."""
    one, num_sources = np.float32(1), table[NUM_SOURCES]
    grad_logits, grad_bias = _pointer(table[GRAD_LOGITS], one), _pointer(table[GRAD_BIAS], one)
    mean = np.float32(0)
    for source in range(num_sources):
        mean += weights[source] * dots[source]
    for source in range(num_sources):
        place = source * table[NUM_TOKENS] + token
        dots[source] = weights[source] * (dots[source] - mean)
        if table[GRAD_LOGITS]:
            dots[source] += grad_logits[place]
        if table[GRAD_BIAS]:
            grad_bias[place] = dots[source]


@_inlined
def _grad_of_source(table, source, token, weight, grad_logit, grad, grad_direction, like):
    """Writes, or adds, the gradient of a source at a token, and adds to that of the direction."""
    one, num_sources, width = np.float32(1), table[NUM_SOURCES], table[WIDTH]
    direction, place = _pointer(table[DIRECTION], one), source * table[NUM_TOKENS] + token
    logits, inverse_norms = _pointer(table[LOGITS], one), _pointer(table[INVERSE_NORMS], one)
    raw = logits[place]
    if table[BIAS]:
        bias = _pointer(table[BIAS], one)
        # Behind a bias of -inf the weight is zero, and so are all gradients.
        raw = raw - bias[place] if bias[place] > -np.float32(np.inf) else np.float32(0)
    by_dot = grad_logit * inverse_norms[place]
    by_norm = by_dot * raw * inverse_norms[place] / np.float32(width)
    row = _row(table, SOURCES + source, token, like)
    out = _row(table, SOURCES + num_sources + source, token, like)
    if not table[SOURCES + num_sources + source]:
        for d in range(width):
            grad_direction[d] += by_dot * _load(row, d)
    elif table[SOURCES + 2 * num_sources + source]:
        for d in range(width):
            number = _load(row, d)
            change = weight * grad[d] + by_dot * direction[d] - by_norm * number
            grad_direction[d] += by_dot * number
            _store(out, d, _load(out, d) + change)
    else:
        for d in range(width):
            number = _load(row, d)
            grad_direction[d] += by_dot * number
            _store(out, d, weight * grad[d] + by_dot * direction[d] - by_norm * number)


@_inlined
def _backward(table, chunk, like):
    one = np.float32(1)
    num_sources, num_tokens, width, tile = table[NUM_SOURCES], table[NUM_TOKENS], table[WIDTH], table[TILE]
    start = table[SCRATCH] + chunk * table[SCRATCH_BYTES]
    row_bytes, rows = 4 * num_sources, 4 * tile * num_sources
    weights, dots = _pointer(start, one), _pointer(start + rows, one)
    mixed, grad_start = _pointer(start + 2 * rows, one), start + 2 * rows + 4 * width
    logits = _pointer(table[LOGITS], one)
    # Sums of many terms are kept per tile and then per chunk: short sums lose less to rounding.
    tile_direction = _pointer(grad_start + 4 * tile * width, one)
    grad_direction = _pointer(table[GRAD_DIRECTION] + 4 * chunk * width, one)
    last = (chunk + 1) * num_tokens // table[NUM_CHUNKS]
    for first in range(chunk * num_tokens // table[NUM_CHUNKS], last, tile):
        size = min(tile, last - first)
        for number in range(size):
            row = _pointer(start + number * row_bytes, one)
            for source in range(num_sources):
                row[source] = logits[source * num_tokens + first + number]
            _softmax(row, num_sources)
            grad = _pointer(grad_start + 4 * number * width, one)
            _grad_of_mix(table, chunk, first + number, row, mixed, grad, like)
        for source in range(num_sources):
            for number in range(size):
                value, dot = _row(table, SOURCES + source, first + number, like), np.float32(0)
                grad = _pointer(grad_start + 4 * number * width, one)
                for d in range(width):
                    dot += grad[d] * _load(value, d)
                dots[number * num_sources + source] = dot
        for number in range(size):
            row, products = (
                _pointer(start + number * row_bytes, one),
                _pointer(start + rows + number * row_bytes, one),
            )
            _grad_of_logits(table, first + number, row, products)
        for d in range(width):
            tile_direction[d] = np.float32(0)
        for source in range(num_sources):
            for number in range(size):
                place, grad = number * num_sources + source, _pointer(grad_start + 4 * number * width, one)
                _grad_of_source(
                    table, source, first + number, weights[place], dots[place], grad, tile_direction, like
                )
        for d in range(width):
            grad_direction[d] += tile_direction[d]


def _forward_float32(table):
    chunk = _take(table)
    while chunk < table[NUM_CHUNKS]:
        _forward(table, chunk, np.float32(1))
        chunk = _take(table)


def _forward_bfloat16(table):
    chunk = _take(table)
    while chunk < table[NUM_CHUNKS]:
        _forward(table, chunk, np.uint16(1))
        chunk = _take(table)


def _backward_float32(table):
    chunk = _take(table)
    while chunk < table[NUM_CHUNKS]:
        _backward(table, chunk, np.float32(1))
        chunk = _take(table)


def _backward_bfloat16(table):
    chunk = _take(table)
    while chunk < table[NUM_CHUNKS]:
        _backward(table, chunk, np.uint16(1))
        chunk = _take(table)


_BODIES = {
    ("forward", torch.float32): _forward_float32,
    ("forward", torch.bfloat16): _forward_bfloat16,
    ("backward", torch.float32): _backward_float32,
    ("backward", torch.bfloat16): _backward_bfloat16,
}


@functools.cache
def kernel(direction: str, dtype: torch.dtype) -> int:
    """Compiles a kernel, or reads it from numba's cache, and returns its address."""
    return int(compiled(_BODIES[direction, dtype]).address)


def compiled(body):
    """Compiles a callback that takes the table, or reads it from numba's cache."""
    signature = types.void(types.CPointer(types.int64))
    try:
        return cfunc(signature, cache=True)(body)
    except (RuntimeError, OSError) as error:  # numba found no folder that it may write to
        _say_uncached(str(error))
        return cfunc(signature)(body)


@functools.cache
def _say_uncached(why: str) -> None:
    warnings.warn(f"kernels are compiled anew by each process, a few seconds: {why}", stacklevel=2)
