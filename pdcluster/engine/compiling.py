"""Whether this process compiles kernels now. A step that waits for the compiler stands still without being stuck."""

from __future__ import annotations

import threading
from functools import cache


class CompileCount:
    """Compilations by numba, in any thread. num_begun: so far. num_running: not done, or failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_begun = 0
        self.num_running = 0

    def on_start(self, event: object) -> None:
        with self._lock:
            self.num_begun += 1
            self.num_running += 1

    def on_end(self, event: object) -> None:
        with self._lock:
            self.num_running -= 1


@cache
def compilations() -> CompileCount:
    """The count of this process. It stays 0 where numba cannot be imported."""
    try:
        from numba.core import event
    except ImportError:
        return CompileCount()

    class CountingListener(CompileCount, event.Listener):
        pass

    count = CountingListener()
    event.register("numba:compile", count)  # type: ignore[no-untyped-call]
    return count
