"""Runs a compiled callback on the threads that PyTorch uses already.

On Linux these are libgomp's, which PyTorch has loaded: a second pool would fight it for the cores. Where
that library is missing, plain Python threads call the callback, which gives the lock back meanwhile. In a
forked child only the calling thread works, since a pool does not survive a fork.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["run", "scratch"]

_forked = False


class _Kept(threading.local):
    """What a thread keeps: to make a small read's working memory anew would cost as much as its kernel."""

    floats = torch.empty(0)


_kept = _Kept()


def run(callback: int, table: int, num_threads: int) -> None:
    """Calls a callback, on several threads at once where that pays.

    Args:
        callback: Address of a C function that takes one address, and shares the work out by itself.
        table: The address that it takes.
        num_threads: At most so many threads; 1 stays in the calling one.
    """
    if num_threads <= 1 or _forked:
        _function(callback)(table)
    elif (team := _openmp()) is not None:
        team(callback, table, num_threads, 0)
    else:
        function = _function(callback)
        others = [_pool().submit(function, table) for _ in range(num_threads - 1)]
        function(table)
        wait(others)


def scratch(num_floats: int) -> Tensor:
    """Returns working memory of the calling thread, for one call of a kernel in it.

    Args:
        num_floats: At least so many float32 numbers, with whatever an earlier call has left in them.
    """
    floats = _kept.floats
    if floats.numel() < num_floats:
        floats = _kept.floats = torch.empty(num_floats, dtype=torch.float32, device="cpu")
    return floats


@functools.cache
def _function(callback: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(callback)


@functools.cache
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """Finds the libgomp that is loaded; another copy of it would bring a pool of its own."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text(encoding="utf-8").split() if maps.exists() else []
    for path in loaded:
        if "libgomp" in Path(path).name:
            launch = ctypes.CDLL(path).GOMP_parallel
            launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            launch.restype = None
            return launch
    return None


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=torch.get_num_threads(), thread_name_prefix="depth-attention")


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
