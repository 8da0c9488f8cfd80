"""Requests at one router while nodes refuse, fail, lose, repeat, die, change their model and come back: no double,
missing or wrong answer, no entry left in a book, and nobody waits beside an idle node that could serve it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from unittest import mock

import pytest
from fuzz_plan import Ask, Mishap, NodeSpec, Plan, Rates, draw_plan
from fuzz_shrink import shrunk, told
from fuzz_world import run_plan

from pdcluster.core.messages import TokenRow
from pdcluster_router.cluster.legs import Ledger, RequestLeg
from pdcluster_router.core.generation import TokenChunk
from pdcluster_router.queueing.hold_queue import HoldQueue
from pdcluster_router.request import node_events
from pdcluster_router.request.attempt import Attempt
from pdcluster_router.request.request import Request

# Of those that take a fraction of a second.
SEEDS = (0, *range(100, 124), 5003, 5051, 90058)
PARTS, PART_S = 5, 120.0


def check(seed: int) -> None:
    outcome = run_plan(draw_plan(seed))
    if outcome.problems:
        pytest.fail(told(outcome))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sample_of_the_request_fuzz(seed: int) -> None:
    check(seed)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_of_ten_minutes_of_the_request_fuzz(part: int) -> None:
    """New seeds each time; one that fails is named."""
    until = time.monotonic() + PART_S
    while time.monotonic() < until:
        check(random.SystemRandom().randrange(1 << 40))


def test_a_run_with_the_same_plan_is_the_same_run() -> None:
    first, again = (run_plan(draw_plan(7)) for _ in range(2))
    assert first.log == again.log and first.num_right > 0


# ---------------------------------------------------------------- the fuzz sees what it should see


def emits_all_again(attempt: Attempt, row: TokenRow) -> TokenChunk | None:
    """Tokens that the client has are emitted again."""
    attempt.job.emitted += row.tokens
    return TokenChunk(row.position, row.tokens, row.logprobs, row.prompt_logprobs, attempt.route())


def keeps_legs(ledger: Ledger, leg: RequestLeg) -> None:
    """A leg that is over stays in the ledger."""


def hears_on(request: Request, reason: str) -> None:
    """A client that left hears more."""


def releases_nobody(queue: HoldQueue, *_: object) -> list[object]:
    """Room is never offered to those that wait."""
    return []


@pytest.mark.parametrize(
    ("owner", "name", "broken", "seen"),
    [
        (node_events, "_continued", emits_all_again, "wrong answer"),
        (Ledger, "leave", keeps_legs, "left in the books"),
        (Request, "cancel", hears_on, "two answers"),
        (HoldQueue, "release", releases_nobody, "waits beside an idle node"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_rule_broken_on_purpose_is_seen(owner: object, name: str, broken: Callable[..., object], seen: str) -> None:
    with mock.patch.object(owner, name, broken):
        kinds = (problem.kind for seed in range(20) for problem in run_plan(draw_plan(seed)).problems)
        assert seen in kinds, f"no run saw that {broken.__doc__}"


def test_of_a_plan_that_fails_little_is_left() -> None:
    node = NodeSpec("n0", "mixed", max_len=96, slots=2, num_pages=40)
    asks = tuple(Ask(f"r{number}", at=0.1 * number, num_prompt=9, max_tokens=5, seed=number) for number in range(6))
    mishaps = (Mishap(0.2, "cordon", "n0", 0.2), Mishap(0.3, "evict", "n0"))
    rates = Rates(repeat=0.5)
    plan = Plan(1, "product", "auto", "conditional", None, 2.0, 20.0, 1024, (node,), asks, mishaps, rates)
    with mock.patch.object(node_events, "_continued", emits_all_again):
        failed = run_plan(plan)
        assert any(problem.kind == "wrong answer" for problem in failed.problems), failed.log
        least = shrunk(failed).plan
    assert (len(least.asks), len(least.mishaps)) == (1, 0)
    assert not run_plan(plan).problems
