"""What a failed run of the request fuzz says: the least of its plan that still fails alike, and the log of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from fuzz_plan import Plan, Rates
from fuzz_world import Outcome, run_plan

T = TypeVar("T")

SHRINK_S = 20.0
SHOWN = 60


def shrunk(outcome: Outcome, seconds: float = SHRINK_S) -> Outcome:
    """A smaller plan with a problem of the same kind, as small as is found within these seconds."""
    kind, until, best = outcome.problems[0].kind, time.monotonic() + seconds, outcome

    def fails(plan: Plan) -> bool:
        nonlocal best
        if time.monotonic() >= until:
            return False
        found = run_plan(plan)
        has_failed = any(problem.kind == kind for problem in found.problems)
        best = found if has_failed else best
        return has_failed

    if outcome.plan.rates != Rates():
        fails(replace(outcome.plan, rates=Rates()))
    _without(best.plan.mishaps, lambda mishaps: fails(replace(best.plan, mishaps=tuple(mishaps))))
    _without(best.plan.asks, lambda asks: fails(replace(best.plan, asks=tuple(asks))))
    return best


def _without(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> None:
    """Leaves out ever smaller parts, as long as it still fails."""
    size = len(items)
    while size:
        at = 0
        while at < len(items):
            fewer = [*items[:at], *items[at + size :]]
            if fails(fewer):
                items = fewer
            else:
                at += size
        size //= 2


def told(outcome: Outcome) -> str:
    """For whoever reads that a test failed."""
    least, plan = shrunk(outcome), outcome.plan
    small = least.plan
    settings = {
        name: getattr(small, name)
        for name in ("policy", "mode", "fallback", "ttft_s", "patience_s", "age_s", "first_token", "parks_s")
    }
    return "\n".join(
        [
            f"seed {plan.seed}: {len(outcome.problems)} problems, first: {outcome.problems[0]}",
            f"{len(plan.asks)} requests and {len(plan.mishaps)} mishaps, of which these fail alike: {settings}",
            *map(str, (*small.nodes, small.rates, *small.mishaps, *small.asks)),
            *map(str, least.problems[:3]),
            *least.log[-SHOWN:],
        ]
    )
