"""An engine is stuck after max(2 s, 5 × the expected time) without a sign, and not while anything explains that."""

from __future__ import annotations

import numpy as np
import pytest

from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.compiling import compilations
from pdcluster.node.native.step_timer import COLD_S, LEAST_S, StepTimer, StuckWatch


def plan(*rows: tuple[int, int]) -> StepPlan:
    return StepPlan(
        tuple(
            Row(f"r{i}", np.zeros(new, np.int32), start, np.zeros(1, np.int32)) for i, (new, start) in enumerate(rows)
        )
    )


class Watched:
    def __init__(self, expected_s: float | None) -> None:
        self.now = 0.0
        self.watch = StuckWatch(lambda _: expected_s, lambda: self.now)

    def after(self, seconds: float, signs: object, *, in_flight: bool = True, is_compiling: bool = False) -> bool:
        self.now += seconds
        self.watch.look(plan((1, 9)) if in_flight else None, signs, is_compiling=is_compiling)
        return self.watch.is_stuck


@pytest.mark.parametrize(
    ("expected_s", "bound_s"), [(0.001, LEAST_S), (0.4, LEAST_S), (0.7, 3.5), (6.0, 30.0), (None, COLD_S)]
)
def test_it_is_stuck_after_its_bound_and_no_sooner(expected_s: float | None, bound_s: float) -> None:
    engine = Watched(expected_s)
    assert not engine.after(0.0, 7)
    assert not engine.after(bound_s - 0.01, 7)
    assert engine.after(0.02, 7) and engine.after(100.0, 7), "and it stays so"
    assert not engine.after(0.0, 8), "a sign ends it"
    assert not engine.after(bound_s - 0.01, 8)


def test_signs_idleness_and_the_compiler_explain_a_long_time() -> None:
    engine = Watched(0.001)
    for sign in range(40):
        assert not engine.after(1.9, sign)
    assert not engine.after(50.0, 39, in_flight=False), "nothing runs"
    assert not engine.after(0.0, 39) and not engine.after(1.9, 39), "the time without a step does not count"
    assert not engine.after(50.0, 39, is_compiling=True), "the compiler works"
    assert engine.after(20.0, 39, is_compiling=True), "but not for ever"


def timed(rows: tuple[tuple[int, int], ...], took_s: float, times: int, timer: StepTimer, now: list[float]) -> None:
    for _ in range(times):
        timer.ready()
        timer.launched()
        now[0] += took_s
        timer.done(plan(*rows))
        timer.ready()


def test_what_a_step_may_take_is_known_once_such_steps_ran() -> None:
    now = [0.0]
    timer = StepTimer(8192, lambda: now[0])
    assert timer.progress_s(plan((1, 99)), 4) is None
    timed(((1, 99),), 0.010, 20, timer, now)
    decode_s = timer.progress_s(plan((1, 99)), 4)
    assert decode_s is not None and 0.010 <= decode_s < 0.02, "a step of decode rows may be one piece"
    assert timer.progress_s(plan((64, 0), (1, 99)), 4) is None, "no prompt was computed so far"
    timed(((64, 0),), 0.4, 20, timer, now)
    chunk_s, long_s = timer.progress_s(plan((64, 0)), 4), timer.progress_s(plan((8192, 0)), 4)
    assert chunk_s is not None and 0.1 <= chunk_s < 0.2, "a quarter: one of four layers"
    assert long_s is not None and long_s > 128 * chunk_s / 2, "a long prompt may take in proportion"


def test_a_compilation_is_counted() -> None:
    numba = pytest.importorskip("numba")
    count = compilations()
    before = count.num_begun

    @numba.njit
    def function(x):  # type: ignore[no-untyped-def]
        return x + 1

    assert function(1) == 2
    assert count.num_begun > before and count.num_running == 0
