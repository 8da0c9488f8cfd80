"""The router's heap keeps what large requests took: asked of the real allocator, in a process of its own."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

import pytest

from pdcluster_router.core import kept_heap
from pdcluster_router.core.kept_heap import keep_heap

ROUNDS = 40


def num_faults_of_large_requests() -> int:
    """Each takes a few buffers of a request with 100,000 ids, and lets go of them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        held = [bytes(size) for size in (700_000, 400_000, 400_000, 90_000)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_large_requests_fault_no_pages_in_once_the_heap_is_kept() -> None:
    """One page fault per 4 KiB without it."""
    found = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60, check=True)
    assert int(found.stdout) < 100 * ROUNDS


def test_an_allocator_that_knows_no_such_thing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_heap.ctypes, "CDLL", lambda name: object())
    assert keep_heap() is False


if __name__ == "__main__":
    assert keep_heap()
    num_faults_of_large_requests()
    print(num_faults_of_large_requests())
