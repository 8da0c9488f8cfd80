"""What is on its way to nodes and not in their reports yet: counted once, taken away once, whatever the order of
reports and endings."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace
from policy_cases import make_node

from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import Endpoint, Prefill, Reserve, Sampling, Work, pack_tokens
from pdcluster_router.cluster.in_flight import SentWork, WorkInFlight, work_of
from pdcluster_router.cluster.view import NOTHING_PENDING, InFlightWork

NODES = st.sampled_from(["a", "b"])
REQUESTS = st.sampled_from(["r1", "r2", "r3", "r4"])


def work(num_tokens: int) -> Work:
    return Work("r", 0, pack_tokens(range(num_tokens)), num_tokens, b"", Sampling(4, 1), 9.0)


def test_a_remote_prompt_is_prefill_work_and_its_reservation_a_row() -> None:
    assert work_of(Prefill(work(100), True), 60) == InFlightWork(1, 40, 40 * 60 + 800, 0, 0, 1)
    assert work_of(Reserve(work(100), Endpoint("p", "p-1", "h:1")), 60) == InFlightWork(1, 0, 0, 1, 100)
    assert work_of(Prefill(work(100), False), 0) == InFlightWork(1, 100, 5000, 1, 100, 1)


def test_a_prompt_that_is_cached_whole_still_computes_a_token() -> None:
    assert work_of(Prefill(work(64), True), 64).prefill_tokens == 1


class PendingMachine(RuleBasedStateMachine):
    """Frames are numbered by link; a report echoes any number up to the last one that was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = WorkInFlight()
        self.model: dict[tuple[str, str], tuple[int, int, bool]] = {}
        self.sent = {"a": 0, "b": 0}

    @rule(node=NODES, request=REQUESTS, tokens=st.integers(1, 50))
    def send(self, node: str, request: str, tokens: int) -> None:
        self.sent[node] += 1
        self.pending.enter(
            node, request, SentWork(0, self.sent[node], InFlightWork(1, tokens, tokens * 2, 1, tokens), b"")
        )
        self.model[node, request] = (self.sent[node], tokens, False)

    @rule(node=NODES, back=st.integers(0, 5))
    def report(self, node: str, back: int) -> None:
        seen = self.sent[node] - back
        self.pending.reported(node, seen)
        for key, (sequence, tokens, _) in list(self.model.items()):
            if key[0] == node and sequence <= seen:
                self.model[key] = (sequence, tokens, True)

    @rule(node=NODES, request=REQUESTS)
    def leave(self, node: str, request: str) -> None:
        self.pending.leave(node, request)
        self.model.pop((node, request), None)

    @rule(node=NODES)
    def lose(self, node: str) -> None:
        self.pending.lose(node)
        self.model = {key: value for key, value in self.model.items() if key[0] != node}

    @invariant()
    def what_is_uncounted_is_pending(self) -> None:
        self.pending.check_integrity()
        for node in ("a", "b"):
            open_ones = [
                tokens for (where, _), (_, tokens, counted) in self.model.items() if where == node and not counted
            ]
            total, count = sum(open_ones), len(open_ones)
            assert self.pending.of(node) == (
                InFlightWork(count, total, 2 * total, count, total) if count else NOTHING_PENDING
            )
            for request in ("r1", "r2", "r3", "r4"):
                assert (self.pending.find(node, request, 0) is not None) == ((node, request) in self.model)


TestPending = PendingMachine.TestCase
TestPending.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("wrong", [InFlightWork(1), InFlightWork(1, -5), InFlightWork(2, 7)])
def test_sums_that_are_not_those_of_their_parts_are_found(wrong: InFlightWork) -> None:
    pending = WorkInFlight()
    pending.enter("a", "r1", SentWork(0, 1, InFlightWork(1, 7), b""))
    pending.check_integrity()
    pending._accounts["a"].total = wrong
    with pytest.raises(IntegrityError, match="its parts make"):
        pending.check_integrity()


def test_a_part_below_zero_is_found_though_the_sum_is_right() -> None:
    pending = WorkInFlight()
    pending.enter("a", "r1", SentWork(0, 1, InFlightWork(1, -7), b""))
    with pytest.raises(IntegrityError):
        pending.check_integrity()


def test_a_reservation_is_a_row_to_come_and_no_prompt() -> None:
    reserve = work_of(Reserve(work(100), Endpoint("p", "p-1", "h:1")), 0)
    prefill = work_of(Prefill(work(100), False), 0)
    node = make_node("d", "decode")
    assert replace(node, pending=reserve).num_prompts == 0 < replace(node, pending=prefill).num_prompts
