"""IoThreads: runs one batch's reads or writes on a few threads, so that checksums overlap with copies.

Owned by FileConnector and FileReader. The system calls and xxhash release the interpreter's lock; for records below
MIN_RECORD_BYTES handing over costs more than it wins (measured: at 64 KiB two threads were slower than one, at 1 MiB
1.5 times faster to read).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_RECORD_BYTES = 256 * 1024


class IoThreads:
    """Up to num_threads threads, the caller's among them. Started when they are first needed."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[Item], Result], items: Sequence[Item], item_bytes: int) -> list[Result]:
        """work(item) for each item, in order of the items. work must not raise."""
        share = -(-len(items) // self._num_threads)
        if len(items) < 2 or share == len(items) or item_bytes < MIN_RECORD_BYTES:
            return [work(item) for item in items]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads - 1, thread_name_prefix="fastkv-file-io")
        parts = [items[start : start + share] for start in range(0, len(items), share)]
        others = [self._pool.submit(_each, work, part) for part in parts[1:]]
        results = _each(work, parts[0])
        for other in others:
            results += other.result()
        return results

    def close(self) -> None:
        """Stop the threads. No run may be in progress."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [work(item) for item in items]
