"""Kernels over rows, shared out over threads.

Not by numba's own parallel loops: those compile what they call two or three times over, which took a third of a first run's wait.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from numba import get_num_threads, njit

PARTS = 4
"""work chunks per thread, for load balancing: a thread that is done takes another"""


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of so many threads, kept: starting them anew would take longer than scoring a few clients."""
    return ThreadPoolExecutor(threads)


# threads do not survive a fork
os.register_at_fork(after_in_child=_pool.cache_clear)


def share_out(kernel: Any, rows: int, *arguments: Any) -> None:
    """kernel(low, high, *arguments) for parts of so many rows, on as many threads as numba is told to use."""
    threads = min(get_num_threads(), rows)
    if threads < 2:
        if rows:
            kernel(0, rows, *arguments)
        return
    parts = min(PARTS * threads, rows)
    done = [_pool(threads).submit(kernel, i * rows // parts, (i + 1) * rows // parts, *arguments) for i in range(parts)]
    wait(done)  # for all of them, also if one fails: what they are given is used again
    for one in done:
        one.result()


def shared(rows: Callable[..., int] | None = None, **options: Any) -> Any:
    """numba's njit for a kernel of rows low up to high, its first two arguments, which callers leave out.

    rows: how many there are, from the other arguments; the length of the first of them if left out.
    """

    def decorate(function: Any) -> Any:
        kernel = njit(nogil=True, cache=True, **options)(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> None:
            share_out(kernel, len(arguments[0]) if rows is None else rows(*arguments), *arguments)

        return call

    return decorate
