"""No interleaving of whole nodes breaks ownership; and the same search finds each rule that is broken on purpose."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
from fault_matrix import quiet_logs
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from ownership_machine import Ownership

from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import Ticket
from pdcluster.node.native.decode import DecodeLeg, DecodeSide
from pdcluster.node.native.kv_fetch import ExportSide, FetchSide, PullInProgress
from pdcluster.node.native.prefill import Pins, PrefillSide
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.reader_state import Incoming
from pdcluster.transfer.protocol.session import Acked, Drained, Landed, Reclaimed, TicketFailed, TicketGaveUp
from pdcluster.transfer.protocol.writer import Writer

LIMITS = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(600)
def test_no_history_of_nodes_breaks_ownership() -> None:
    with quiet_logs():
        run_state_machine_as_test(Ownership, settings=LIMITS)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_no_history_of_nodes_breaks_ownership_in_thousands_of_runs(part: int) -> None:
    """4000 in all, drawn anew for each part, which go to whichever worker is free."""
    with quiet_logs():
        run_state_machine_as_test(Ownership, settings=settings(LIMITS, max_examples=500, derandomize=False))


# ---------------------------------------------------------------- broken on purpose


class FreesAtAbort(DecodeSide):
    """Gives the pages of a broken slot back at once, although nobody proved that their writer stopped."""

    def _end(self, leg: DecodeLeg, reason: str) -> None:
        nonce = leg.nonce
        super()._end(leg, reason)
        if nonce is not None:
            self._pages.detach_writer(nonce)

    def on_event(self, event: Landed | TicketFailed | Reclaimed) -> None:
        if not (isinstance(event, Reclaimed) and event.nonce not in self._pages._pages_of_writer):
            super().on_event(event)


class ReclaimsByTime(Reader):
    """Gives a dead ticket's pages back after a while."""

    def _seek_proof(self) -> None:
        now = self._clock()
        for incoming in [
            each for each in self._tickets.values() if each.state.name == "ABORTING" and now > each.opened + 1.0
        ]:
            self._reclaim(incoming)


class TakesAnyBytes(Reader):
    """Accepts a Commit without digests."""

    def _is_intact(self, *_: object) -> bool:
        return True


class UnpinsAtGaveUp(PrefillSide):
    """Frees the source pages when a ticket is given up, not when its writes ended."""

    def on_event(self, event: Acked | TicketGaveUp | Drained) -> None:
        super().on_event(event)
        if isinstance(event, TicketGaveUp):
            self._pages.release(self._pins.pop(event.nonce, Pins()).pages)


class NeverPins(PrefillSide):
    """Trusts that the row's own pages outlive the writes that read them."""

    def on_event(self, event: Acked | TicketGaveUp | Drained) -> None:
        if not isinstance(event, Drained):
            super().on_event(event)

    def _push(self, leg: object, end: int, layers: tuple[int, int]) -> None:
        super()._push(leg, end, layers)  # type: ignore[arg-type]
        for pins in self._pins.values():
            self._pages.release(pins.pages)
            pins.pages.clear()


class AcknowledgesTooEarly(Writer):
    """Says that no write can land any more while some are under way."""

    def _drain(self) -> None:
        for nonce in [nonce for nonce, each in self._open.items() if each.state.name == "DRAINING" and each.in_flight]:
            self._flights = {key: flight for key, flight in self._flights.items() if flight.nonce != nonce}
            self._open[nonce].in_flight = 0
        super()._drain()


class BelievesAnyFence(Reader):
    """Takes a medium's 'cannot fence' for a fence."""

    def _has_fence(self, *_: object) -> bool:
        return True


class AsksTheFirstMediumOnly(Reader):
    """Takes the fence of the best medium for that of all by which the ticket may have been written."""

    def _has_fence(self, incoming: Incoming, name: str, closed: dict[tuple[Peer, str], bool]) -> bool:
        return name != self._order[0] or super()._has_fence(incoming, name, closed)


class FreesPullsAtOnce(FetchSide):
    """Gives the pages of a broken pull back at once, although its holder may still write to them."""

    def _end(self, pulling: PullInProgress, result: str, reason: str = "") -> None:
        super()._end(pulling, result, reason)
        if result != "ok":
            self._pages.detach_writer(pulling.nonce)

    def on_event(self, event: Landed | TicketFailed | Reclaimed) -> None:
        if isinstance(event, Reclaimed) and event.nonce not in self._pages._pages_of_writer:
            del self._pulls[event.nonce]
        else:
            super().on_event(event)


class NeverPinsExports(ExportSide):
    """Trusts that what is cached stays cached."""

    def _begin(self, sender: Peer, ticket: Ticket, pages: list[int]) -> None:
        super()._begin(sender, ticket, pages)
        if ticket.nonce in self._exports:
            self._pages.release(pages)
            self._exports[ticket.nonce].pages.clear()


BROKEN: dict[str, dict[str, type]] = {
    "pages freed at abort": {"DecodeSide": FreesAtAbort},
    "pages freed by a timer": {"Reader": ReclaimsByTime},
    "commit without digests": {"Reader": TakesAnyBytes},
    "source unpinned when given up": {"PrefillSide": UnpinsAtGaveUp},
    "source never pinned": {"PrefillSide": NeverPins},
    "abort acknowledged too early": {"Writer": AcknowledgesTooEarly},
    "fence without proof": {"Reader": BelievesAnyFence},
    "fence of one medium only": {"Reader": AsksTheFirstMediumOnly},
    "pulled pages freed at once": {"FetchSide": FreesPullsAtOnce},
    "exported pages not pinned": {"ExportSide": NeverPinsExports},
}


# Where the search begins, so that rare histories come early. With other code they may come later, and are found as
# well.
SHORT_CUTS = {
    "exported pages not pinned": 12,
    "fence of one medium only": 5,
    "commit without digests": 1,
    "pages freed by a timer": 2,
    "pulled pages freed at once": 1,
    "fence without proof": 2,
}


@pytest.mark.parametrize("rule_broken", BROKEN)
@pytest.mark.timeout(600)
def test_a_broken_rule_is_caught(rule_broken: str) -> None:
    search = settings(LIMITS, max_examples=40, derandomize=False, phases=(Phase.generate,), report_multiple_bugs=False)
    begin = SHORT_CUTS.get(rule_broken, 0)
    with ExitStack() as patches, quiet_logs():
        for name, broken in BROKEN[rule_broken].items():
            patches.enter_context(mock.patch(f"pdcluster.node.native.assembly.{name}", broken))
        for number in range(begin, begin + 60):
            try:
                run_state_machine_as_test(seed(number)(type("Seeded", (Ownership,), {})), settings=search)
            except (AssertionError, IntegrityError):
                return
    raise AssertionError("no history shows that the rule is broken")
