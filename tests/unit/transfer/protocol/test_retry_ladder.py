"""Each rung of the ladder, over two media whose failures are scripted: the same medium, the other one, a new attempt;
and breakers above them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from fake_backend import Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_harness import PAGE_BYTES, QUICK, READER, Pair

from pdcluster.core.errors import PeerUnreachable
from pdcluster.core.messages import Ticket
from pdcluster.transfer.backends.base import Stamp, WriteStatus
from pdcluster.transfer.paths.breaker import BreakerState
from pdcluster.transfer.paths.measure import MeasureSettings, Paths
from pdcluster.transfer.protocol.ladder import Ladder

FAILS = Fault(status=WriteStatus.FAILED)
MEDIA = ("fast", "slow")
SOURCE, TARGET = [10, 11, 12, 13, 14, 15], [3, 9, 4, 1, 20, 33]
TOKENS = 24


class Rungs(Pair):
    """Two media. `faults`: what happens to a write, by medium; `tried`: (medium, chunk, trial) of every write that
    began."""

    def __init__(
        self, *, measure: MeasureSettings | None = None, checks: tuple[bool, bool] = (True, True), **faults: Fault
    ) -> None:
        self.faults = faults
        self.tried: list[tuple[str, int, int]] = []
        super().__init__(media=MEDIA, plans={name: self._plan_of(name) for name in MEDIA})
        for name, does in zip(MEDIA, checks, strict=True):
            self.networks[name].checks_permits = does
        if measure is not None:
            self.writer.paths = Paths(MEDIA, self.clock, measure=measure)
            self.writer.ladder = Ladder(self.writer.paths, QUICK.trials)

    def _plan_of(self, name: str) -> Callable[[Stamp], Fault]:
        def plan(stamp: Stamp) -> Fault:
            self.tried.append((name, stamp.chunk, stamp.trial))
            return self.faults.get(name, Fault())

        return plan

    def transfer(self, seconds: float = 1.0, deadline_s: float = 30.0) -> Ticket:
        ticket = self.open(TARGET, TOKENS, deadline_s=deadline_s)
        self.send_all(ticket, SOURCE)
        self.run(seconds)
        return ticket

    def state(self, name: str) -> BreakerState:
        return {report.backend: report.state for report in self.writer.paths.report()}[name]

    def by_chunk(self, chunk: int) -> list[str]:
        return [name for name, number, _ in self.tried if number == chunk]

    def is_intact(self) -> bool:
        return all(
            self.source.page(source) == self.target.page(target) for source, target in zip(SOURCE, TARGET, strict=True)
        )

    def is_idle(self) -> bool:
        return self.reader.is_idle() and self.writer.is_idle()


def test_without_failures_the_first_medium_carries_everything() -> None:
    rungs = Rungs()
    rungs.transfer()
    assert {name for name, _, _ in rungs.tried} == {"fast"} and len(rungs.acked) == 1 and rungs.is_intact()


def test_when_a_medium_fails_for_all_chunks_its_breaker_sends_them_to_the_other_one() -> None:
    rungs = Rungs(fast=FAILS)
    rungs.transfer()
    assert all(rungs.by_chunk(chunk)[0] == "fast" and rungs.by_chunk(chunk)[-1] == "slow" for chunk in range(3))
    assert len(rungs.acked) == 1 and rungs.is_intact() and rungs.is_idle()


def test_a_chunk_fails_on_its_medium_a_bounded_number_of_times_before_it_goes_by_the_other() -> None:
    """One chunk on its own, so that the failures of others do not open the breaker."""
    rungs = Rungs(fast=FAILS)
    ticket = rungs.open(TARGET[:1], 4)
    rungs.writer.open(ticket)
    rungs.writer.push(ticket.nonce, SOURCE[:1], 0, 4)
    rungs.writer.finish(ticket.nonce, 1, None)
    rungs.run(1.0)
    assert rungs.tried == [("fast", 0, 1), ("fast", 0, 2), ("fast", 0, 3), ("slow", 0, 4)]
    assert rungs.writer.ladder.failures == {"failed": 3} and rungs.writer.ladder.resends == {
        "same_path": 2,
        "other_path": 1,
    }
    assert len(rungs.acked) == 1


def test_a_medium_by_which_the_peer_is_out_of_reach_is_left_at_once() -> None:
    rungs = Rungs()
    ticket = rungs.open(TARGET, TOKENS)
    rungs.send_all(ticket, SOURCE)
    rungs.source.backends["fast"].close(READER)
    rungs.target.backends["fast"].shutdown()
    rungs.run(1.0)
    assert {name for name, _, _ in rungs.tried} == {"slow"} and len(rungs.acked) == 1 and rungs.is_intact()
    assert rungs.writer.ladder.failures["unreachable"] >= 3 and rungs.state("fast") is BreakerState.OPEN
    assert set(rungs.writer.ladder.resends) == {"other_path"}


def test_a_chunk_that_fails_everywhere_ends_the_ticket_and_the_reader_gets_its_pages_back() -> None:
    rungs = Rungs(fast=FAILS, slow=FAILS)
    rungs.transfer()
    assert (
        len(rungs.gave_up) == len(rungs.failed) == len(rungs.reclaimed) == len(rungs.drained) == 1 and not rungs.landed
    )
    tried = [[rungs.by_chunk(chunk).count(name) for name in MEDIA] for chunk in range(3)]
    assert [QUICK.trials, QUICK.trials] in tried and max(map(max, tried)) == QUICK.trials, tried
    assert rungs.is_idle()


@pytest.mark.parametrize(
    ("fault", "reason"), [(Fault(delay_s=2.0, unknown_s=0.01), "unknown"), (Fault(delay_s=2.0, lost_s=0.01), "lost")]
)
def test_a_write_without_a_definite_outcome_is_never_written_again_under_its_ticket(fault: Fault, reason: str) -> None:
    rungs = Rungs(fast=fault, checks=(False, False))
    ticket = rungs.transfer()
    assert (
        len(rungs.gave_up) == 1
        and {trial for _, _, trial in rungs.tried} == {1}
        and {name for name, _, _ in rungs.tried} == {"fast"}
    )
    assert rungs.writer.ladder.failures[reason] >= 1 and not rungs.writer.ladder.resends
    rungs.reader.abort(ticket.nonce, "the router makes a new attempt")
    assert rungs.reader.quarantined_pages == len(TARGET) and not rungs.reclaimed, "no proof yet"
    rungs.faults = {}
    before = len(rungs.tried)
    rungs.send_all(rungs.open([40, 41], 8), SOURCE[:2])
    rungs.run(0.5)
    assert len(rungs.acked) == 1 and len(rungs.tried) > before, "a new ticket on other pages goes on"
    rungs.run(3.0)
    proved = reason == "unknown"  # it turned out to be done; what is lost needs the fence of the medium
    assert bool(rungs.reclaimed) is proved and rungs.reader.quarantined_pages == (0 if proved else len(TARGET))
    assert ticket.nonce not in {event.nonce for event in rungs.acked}  # type: ignore[attr-defined]


def test_a_reader_that_refuses_says_nothing_about_the_path() -> None:
    """Cancelled tickets, however many, shut no path."""
    rungs = Rungs()
    for _ in range(10):
        ticket = rungs.open(TARGET, TOKENS)
        rungs.send_all(ticket, SOURCE)
        rungs.reader.abort(ticket.nonce, "the client left")
        rungs.run(0.5)
    assert rungs.writer.ladder.failures["refused"] >= 10 and not rungs.writer.ladder.resends
    assert rungs.state("fast") is BreakerState.CLOSED and rungs.is_idle()


def test_what_does_not_verify_goes_by_the_other_medium() -> None:
    rungs = Rungs(fast=Fault(flip_byte=1))
    rungs.transfer(0.9)
    assert len(rungs.acked) == 1 and rungs.is_intact()
    assert {rungs.by_chunk(chunk)[-1] for chunk in range(3)} == {"slow"} and rungs.writer.ladder.resends == {
        "not_verified": 3
    }
    assert rungs.state("fast") is BreakerState.OPEN, "wrong bytes are failures of the path"


# ---------------------------------------------------------------- breakers


def test_the_breaker_opens_half_opens_after_a_growing_time_and_closes_when_the_medium_works() -> None:
    rungs = Rungs(fast=FAILS)
    rungs.transfer()
    assert rungs.state("fast") is BreakerState.OPEN
    rungs.tried.clear()
    rungs.clock.now += 0.05
    rungs.writer.paths.counters.clear()
    opened = []
    for _ in range(160):
        rungs.tried.clear()
        rungs.transfer(0.5)
        if any(name == "fast" for name, _, _ in rungs.tried):
            opened.append(rungs.clock.now)
            assert [name for name, _, _ in rungs.tried].count("fast") == 1, "one probe, not all chunks"
    gaps = [later - earlier for earlier, later in itertools.pairwise(opened)]
    assert len(gaps) >= 4 and all(later > 1.6 * earlier for earlier, later in itertools.pairwise(gaps)), gaps
    assert len(rungs.acked) == 161, "every ticket went by the other medium meanwhile"
    rungs.faults = {}
    rungs.clock.now += 61.0
    assert rungs.state("fast") is BreakerState.HALF_OPEN
    rungs.transfer()
    assert rungs.state("fast") is BreakerState.CLOSED
    rungs.tried.clear()
    rungs.transfer()
    assert {name for name, _, _ in rungs.tried} == {"fast"}


def test_all_paths_of_a_peer_are_never_shut_at_once() -> None:
    rungs = Rungs(fast=FAILS, slow=FAILS)
    for _ in range(8):
        rungs.transfer(0.4)
    assert {rungs.state(name) for name in MEDIA} == {BreakerState.OPEN} and not rungs.acked
    rungs.faults = {}
    rungs.transfer(0.4)
    assert len(rungs.acked) == 1, "the next ticket is tried without waiting for a pause to end"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["fast", "slow", "both", "none"]), st.sampled_from([0.4, 1.5, 8.0])),
        min_size=1,
        max_size=12,
    )
)
def test_as_long_as_one_medium_works_every_ticket_arrives(story: list[tuple[str, float]]) -> None:
    rungs = Rungs()
    for number, (dead, seconds) in enumerate(story):
        rungs.faults = dict.fromkeys(MEDIA if dead == "both" else [dead], FAILS)
        acked = len(rungs.acked)
        rungs.transfer(seconds)
        assert (len(rungs.acked) == acked + 1) is (dead != "both"), (number, rungs.writer_events[-3:])
        assert rungs.is_idle()


# ---------------------------------------------------------------- one ticket over several media


def test_while_a_pair_is_measured_one_ticket_is_written_over_both_media_one_write_at_a_time() -> None:
    measure = MeasureSettings(smallest_bytes=2 * PAGE_BYTES, warm_writes=0, sample_writes=1)
    rungs = Rungs(measure=measure, fast=Fault(delay_s=0.06), slow=Fault(delay_s=0.02))
    ticket = rungs.open(TARGET, TOKENS)
    rungs.send_all(ticket, SOURCE)
    while not rungs.acked:
        rungs.step(0.01)
        measuring = rungs.writer.paths.is_measuring(READER, MEDIA, 2 * PAGE_BYTES)
        assert not measuring or sum(len(network.writes) for network in rungs.networks.values()) <= 1
    assert {name for name, _, _ in rungs.tried} == set(MEDIA) and rungs.is_intact()
    assert [name for name, _, _ in rungs.tried] == ["fast", "slow", "slow"], "measured once, then the faster one"


def test_a_ticket_written_over_two_media_stays_in_quarantine_until_both_are_fenced() -> None:
    """One medium checks permits and fences at once; the other proves nothing while the writer's process lives."""
    rungs = Rungs(
        checks=(True, False),
        measure=MeasureSettings(smallest_bytes=1, warm_writes=0, sample_writes=1),
        slow=Fault(delay_s=9.0, lost_s=0.01),
    )
    ticket = rungs.transfer()
    rungs.reader.abort(ticket.nonce, "the router makes a new attempt")
    rungs.run(0.5)
    assert {name for name, _, _ in rungs.tried} == set(MEDIA) and len(rungs.failed) == 1
    assert rungs.reader.quarantined_pages == len(TARGET)
    rungs.reader.peer_gone(rungs.source.peer)
    rungs.run(1.0)
    assert rungs.reader.quarantined_pages == len(TARGET) and not rungs.reclaimed, "said to be gone, but alive"
    rungs.networks["fast"].kill(rungs.source.peer)
    rungs.run(1.0)
    assert rungs.reader.quarantined_pages == len(TARGET), "only the first medium knows of its end"
    rungs.networks["slow"].kill(rungs.source.peer)
    rungs.run(1.0)
    assert rungs.reader.quarantined_pages == 0 and len(rungs.reclaimed) == 1


def test_a_peer_that_no_medium_reaches_is_refused_when_the_ticket_comes() -> None:
    rungs = Rungs()
    ticket = rungs.open(TARGET, TOKENS)
    for network in rungs.networks.values():
        network.kill(READER)
    with pytest.raises(PeerUnreachable, match="no transfer backend reaches d0"):
        rungs.writer.open(ticket)
