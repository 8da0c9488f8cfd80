"""The first cluster after `make setup` finds every kernel compiled, whatever it is asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoints import KERNEL_CACHE
from processes import PATIENT, Up, running

from pdcluster.engine.ops.linear import MOST_ROWS
from pdcluster.launch.warm import warm

pytestmark = pytest.mark.timeout(300)

LOADED, COMPILED = "[cache] data loaded from", "[cache] data saved to"


def test_nodes_compile_nothing_that_setup_has_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba saves what it compiles, and says so when it is asked to."""
    assert warm(KERNEL_CACHE).startswith("CPU kernels are compiled")
    monkeypatch.setenv("NUMBA_DEBUG_CACHE", "1")
    with running(*PATIENT) as up:
        _ask_for_all(up)
    assert sum(LOADED in line for line in up.lines) >= 2 * 9, up.output()
    assert not [line for line in up.lines if COMPILED in line]


def _ask_for_all(up: Up) -> None:
    """Long and short prompts on one node and on two, and more rows together than the kernels of few rows take."""
    for mode in ("remote", "local"):
        for length in (1, 40, 600):
            up.complete(list(range(10, 10 + length)), 4, pdcluster_mode=mode)
    with ThreadPoolExecutor(MOST_ROWS + 8) as pool:
        list(
            pool.map(lambda first: up.complete([first, 11, 12], 24, pdcluster_mode="remote"), range(20, 28 + MOST_ROWS))
        )
