"""Which of vLLM's steps a node learns of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcluster.node.vllm.engine.engine import IDLE_STEP_S, StepFilter
from pdcluster.node.vllm.engine.interface import EngineStep

IDLE = EngineStep(
    at_s=10.0, prompt_tokens=0, reused_tokens=0, output_tokens=0, running=0, kv_usage=0.5, preemptions=0,
    failed_transfers=0, expired_leases=0,
)  # fmt: skip


def test_steps_without_work_are_told_now_and_then() -> None:
    steps = StepFilter()
    told = [replace(IDLE, at_s=10.0 + number / 1000) for number in range(100)]
    told = [step for step in told if steps.is_news(step)]
    assert len(told) == pytest.approx(0.1 / IDLE_STEP_S, abs=1)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_usage": 0.0}, {"running": 1}, {"prompt_tokens": 5}, {"reused_tokens": 5},
        {"output_tokens": 1}, {"preemptions": 1}, {"failed_transfers": 1}, {"expired_leases": 1},
    ],
)  # fmt: skip
def test_each_change_is_told(change: dict[str, float]) -> None:
    steps = StepFilter()
    assert steps.is_news(IDLE)
    assert not steps.is_news(replace(IDLE, at_s=10.001))
    assert steps.is_news(replace(IDLE, at_s=10.002, **change))


@pytest.mark.parametrize("field", ["running", "output_tokens", "failed_transfers", "expired_leases"])
def test_all_steps_with_work_are_told(field: str) -> None:
    steps = StepFilter()
    assert all(steps.is_news(replace(IDLE, at_s=10.0 + number / 1000, **{field: 2})) for number in range(50))
