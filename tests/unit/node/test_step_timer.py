"""The node times its own steps: from launch until the next may be launched, and reports nothing before it ran one."""

from __future__ import annotations

import numpy as np
import pytest

from pdcluster.core.step import Row, StepPlan
from pdcluster.cost.cost import NodeCost
from pdcluster.node.native.step_timer import StepTimer


def plan(*rows: tuple[int, int]) -> StepPlan:
    return StepPlan(
        tuple(
            Row(f"r{i}", np.zeros(new, np.int32), start, np.zeros(1, np.int32)) for i, (new, start) in enumerate(rows)
        )
    )


def test_steps_are_timed_with_what_the_loop_does_after_them() -> None:
    now = [0.0]
    watch = StepTimer(512, lambda: now[0])
    assert watch.report() is None
    for _ in range(300):
        for rows, took in ((((1, 99),), 0.010), (((1, 99), (256, 0)), 0.100), (((1, 999),), 0.019)):
            watch.ready()
            watch.launched()
            now[0] += took / 2
            watch.done(plan(*rows))
            now[0] += took / 2
            watch.ready()
            now[0] += 5.0
    report = watch.report()
    assert report is not None
    cost = NodeCost.of(report)
    assert cost.decode.seconds(1, 100) == pytest.approx(0.010, rel=0.05)
    assert cost.decode.seconds(1, 1000) == pytest.approx(0.019, rel=0.05)
    assert cost.prefill.seconds(256) + cost.decode.added_s(1, 100) == pytest.approx(0.100, rel=0.05)
    assert (report.prefill_samples, report.decode_samples, report.chunk_tokens) == (300, 600, 512)


def test_batch_rows_lengthen_a_step_with_others_by_a_twentieth_at_most() -> None:
    now = [0.0]
    watch = StepTimer(512, lambda: now[0])
    assert watch.most_batch_rows(3, 300) == 3, "nothing is known"
    for _ in range(300):
        for rows in (1, 20):  # 20 ms and 1 ms a row
            watch.ready()
            watch.launched()
            now[0] += 0.020 + 0.001 * rows
            watch.done(plan(*[(1, 99)] * rows))
            watch.ready()
    assert watch.most_batch_rows(50, 5000) == 3  # of 70 ms
    assert watch.most_batch_rows(10, 1000) == 1  # of 30 ms
