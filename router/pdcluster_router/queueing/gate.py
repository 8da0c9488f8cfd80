"""Which request goes to a node, waits, or is refused: hold queue, headroom and admission together.

It is pure, so replay drives the same object in simulated time. The policy's decisions come in as a function, times as
numbers. A request tries to be admitted: it goes at once when nobody waits and some node is open. Otherwise it is
refused or held. Whenever room may have appeared, `release` scores the waiting requests again, in order.

A request that no node takes now is *parked*: it is held until a node takes work again. A new one is parked only when
nothing about the request itself is to blame. One that was accepted before is parked whatever the reason.

A request is also held while it would slow down rows (`Headroom.keeps_pace`). With a service level for first tokens it
is not: that level predicts waits for prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from pdcluster.core import errors
from pdcluster_router.core.generation import Mode
from pdcluster_router.policy.base import suits_all
from pdcluster_router.policy.decisions import Decision
from pdcluster_router.queueing.admission import DrainRate, Outlook, Slo, check_service, refusal
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.queueing.headroom import MODES, Headroom
from pdcluster_router.queueing.hold_queue import Expired, HoldLimits, HoldOutcome, HoldQueue

# What the policy would do with a request now. Raises Unavailable when no node may take it.
Decide = Callable[[QueuedRequest], Decision]

# Why a request waits: its mode has no room, or it would slow down rows.
Reason = Mode | Literal["pace"]
PACE: Literal["pace"] = "pace"

# How long the gate trusts the last score of a waiting request, while what kept it waiting is still full. So a request
# that may go elsewhere does not wait for those before it. And a report of a full pool costs one decision, not one for
# each waiting request.
RESCORE_S = 0.25

# How often a request that no node takes is looked at again.
PARKED_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Wish:
    """Why a request did not go when it was last scored."""

    reason: Reason
    # Incarnations whose room it lacked.
    nodes: frozenset[str]
    # When it was scored.
    moment: float


@dataclass(frozen=True, slots=True)
class Released:
    """A request that waits no more: where it goes, or why it cannot go."""

    held: QueuedRequest
    decision: Decision | None
    error: errors.PdclusterError | None = None


class Gate:
    """The gate. Owned by one thread, or by one simulation.

    With a service level, requests of a tenant go first come, first served: others must not pass a request that was
    admitted by its predicted wait.
    """

    def __init__(self, limits: HoldLimits, headroom: Headroom, slo: Slo) -> None:
        self.queue = HoldQueue(limits if slo.ttft_s is None else dataclasses.replace(limits, urgency=None))
        self._age_s = limits.age_s
        self._headroom = headroom
        self._slo = slo
        self._drain = DrainRate()
        # Wishes of requests that were passed over lately.
        self._wishes: dict[str, Wish] = {}
        # Why no node took a parked request, when it was last scored.
        self._parked: dict[str, errors.Unavailable] = {}

    def try_admit(self, held: QueuedRequest, decide: Decide, now: float) -> Decision | None:
        """Where the request goes at once; None: it is held, and `release` may place it right away.

        held.work is set here. Raises Overloaded when it may not come in, and whatever `decide` raises, unless the
        request may be parked. A request that came in before (is_paid) always may.
        """
        try:
            decision = decide(held)
        except errors.Unavailable as cause:
            self.park(held, cause, now)
            return None
        going = self.at_once(decision, now - held.arrived, is_paid=held.is_paid)
        if going is None:
            self.hold(held, decision, now)
        return going

    def at_once(self, decision: Decision, waited_s: float, *, is_paid: bool) -> Decision | None:
        """Where a request goes that need not wait, as nearly all; None: it must be held. Raises Overloaded."""
        if self.queue.num_able or self._why_held(decision, waited_s, is_paid=is_paid) is not None:
            return None
        if self._slo.ttft_s is not None and not is_paid:
            query, first = decision.query, decision.choice.first
            check_service(Outlook(0.0, self._headroom.waiting_s(first), self._headroom.own_s(first, query)), self._slo)
        return _going(decision)

    @property
    def room_s(self) -> float:
        """Backlog below which a node takes a new request. -1: it must call `try_admit`, since others wait or a service
        level holds.
        """
        return -1.0 if self.queue.num_able or self._slo.ttft_s is not None else self._headroom.backlog_s

    def hold(self, held: QueuedRequest, decision: Decision, now: float) -> None:
        """Hold a request that could not go. Raises Overloaded."""
        held = replace(held, work=self._headroom.own_s(decision.choice.first, decision.query))
        if not held.is_paid:
            self._admit(held, decision)
        self.queue.push(held)
        self._note_held(now)

    def park(self, held: QueuedRequest, cause: errors.Unavailable, now: float) -> None:
        """Hold a request that no node takes. Raises the cause when it may not be parked."""
        if not _may_park(held, cause):
            raise cause
        bound = self.queue.lacks_room(held)
        if bound is not None:
            raise errors.Unavailable(
                f"{len(self.queue)} requests of {self.queue.num_bytes} bytes wait for a node, no more may; {cause}"
            )
        self.queue.push(held, look_at=now + PARKED_LOOK_S)
        self._parked[held.request] = cause
        self._note_held(now)

    def release(self, decide: Decide, now: float, most: int = 1) -> list[Released]:
        """Release up to `most` waiting requests. Use 1 when a decision counts in the view only once it was acted
        upon.
        """
        released = self._look_aside(decide, now)[:most]
        wanted: dict[str, frozenset[str]] = {}
        full: frozenset[Reason] = frozenset()

        def offer(held: QueuedRequest, claims: Sequence[QueuedRequest]) -> HoldOutcome:
            nonlocal full
            if len(released) >= most:
                return HoldOutcome.FULL
            if (wish := self._still_wished(held, full, now)) is not None:
                wanted[held.request] = wish.nodes
                return HoldOutcome.STILL
            try:
                decision = decide(held)
            except errors.PdclusterError as error:
                if isinstance(error, errors.Unavailable) and _may_park(held, error):
                    self._parked[held.request] = error
                    return HoldOutcome.ASIDE
                released.append(Released(held, None, error))
                return HoldOutcome.PLACED
            choice, query, view = decision.choice, decision.query, decision.view
            if (reason := self._why_held(decision, now - held.arrived, is_paid=held.is_paid)) is not None:
                wanted[held.request] = nodes = self._headroom.lacking(choice, query, view, is_paced=reason == PACE)
                modes = self._headroom.full_modes(view)
                full = modes | {PACE} if PACE in (reason, *full) else modes
                self._wishes[held.request] = Wish(reason, nodes, now)
                return HoldOutcome.FULL if len(modes) == len(MODES) else HoldOutcome.ELSEWHERE
            takes = {choice.first.endpoint.incarnation, choice.decode.endpoint.incarnation}
            if any(takes & wanted.get(claim.request, frozenset()) for claim in claims):
                return HoldOutcome.ELSEWHERE
            released.append(Released(held, _going(decision)))
            return HoldOutcome.PLACED

        for held in self.queue.release(offer, now, now + PARKED_LOOK_S):
            self._drain.released(held.charge, now)
        self._note_held(now)
        self._wishes = {
            request: wish
            for request, wish in self._wishes.items()
            if now < wish.moment + RESCORE_S and request in self.queue
        }
        return released

    def _look_aside(self, decide: Decide, now: float) -> list[Released]:
        """Look at some parked requests again. Those that a node takes have a turn now; returns those that fail."""
        failed: list[Released] = []
        for held in self.queue.unseen(now):
            try:
                decide(held)
            except errors.PdclusterError as error:
                if isinstance(error, errors.Unavailable) and _may_park(held, error):
                    self._parked[held.request] = error
                    self.queue.seen(held.request, now + PARKED_LOOK_S)
                    continue
                if not failed:  # the others are looked at again with the next release
                    self.queue.remove(held.request)
                    self._parked.pop(held.request, None)
                    failed.append(Released(held, None, error))
                continue
            self._parked.pop(held.request, None)
            self.queue.bring_back(held.request)
        return failed

    def _why_held(self, decision: Decision, waited_s: float, *, is_paid: bool) -> Reason | None:
        """Why a request cannot go now; None: it can."""
        choice, query, may_slow = decision.choice, decision.query, is_paid or self._slo.ttft_s is not None
        if self._headroom.goes(choice, query, decision.view, waited_s, may_slow=may_slow):
            return None
        if not self._headroom.has_open(choice, query, decision.view):
            return choice.mode
        return None if may_slow or self._headroom.keeps_pace(choice, query, waited_s) else PACE

    def _still_wished(self, held: QueuedRequest, full: Set[Reason], now: float) -> Wish | None:
        wish = self._wishes.get(held.request)
        return wish if wish is not None and wish.reason in full and now < wish.moment + RESCORE_S else None

    def leave(self, request: str, now: float) -> None:
        """Its client left, wherever the request is."""
        self.queue.remove(request)
        self._forget(request)
        self._note_held(now)

    def _forget(self, request: str) -> None:
        self._parked.pop(request, None)
        self._wishes.pop(request, None)

    def expire(self, now: float) -> list[Released]:
        """Requests whose time is over, with the error that answers them."""
        late = [Released(one.held, None, self._late(one, now)) for one in self.queue.expire(now)]
        for one in late:
            self._forget(one.held.request)
        self._note_held(now)
        return late

    def _note_held(self, now: float) -> None:
        """Time in which no node takes work says nothing about how fast nodes work."""
        self._drain.is_held(self.queue.num_able > 0, now)

    def wait_s(self, held: QueuedRequest, num_nodes: int) -> float:
        """Predicted wait in the queue of a request outside it; at most the queue's age."""
        return min(self.queue.work_before(held) / self._drain.rate(max(num_nodes, 1)), self._age_s)

    # ------------------------------------------------------------ refusals

    def _admit(self, held: QueuedRequest, decision: Decision) -> None:
        pool = [
            node
            for node in decision.view.nodes
            if node.accepts_work and (decision.choice.mode == "local" or node.role != "decode")
        ]
        least_s = min((self._headroom.waiting_s(node) for node in pool), default=0.0)
        wait_s = self.wait_s(held, len(pool)) + max(least_s - self._headroom.backlog_s, 0.0)
        bound = self.queue.lacks_room(held)
        if bound is not None:
            raise refusal(
                f"hold_{bound}",
                f"{len(self.queue)} requests of {self.queue.num_bytes} bytes wait for a node, no more may",
                wait_s,
            )
        is_modest = self.queue.num_able > 0 and not self.queue.has_any_of(held.tenant)
        check_service(Outlook(wait_s, min(least_s, self._headroom.backlog_s), held.work, is_modest), self._slo)

    def _late(self, expired: Expired, now: float) -> errors.PdclusterError:
        held, cause = expired.held, self._parked.get(expired.held.request)
        waited = f"request {held.request} waited {now - held.arrived:.2f} s for a node"
        why = "" if cause is None else f"; {cause}"
        if expired.reason == "deadline":
            return errors.DeadlineExceeded(f"{waited} and found no room by its deadline{why}", "request")
        if cause is not None:
            return errors.Unavailable(f"{waited}, as long as it may{why}")
        return refusal("hold_age", f"{waited}, as long as it may", self.wait_s(held, 1))


def _may_park(held: QueuedRequest, cause: errors.Unavailable) -> bool:
    return held.is_paid or isinstance(cause, errors.NoNodeTakesWork)


def _going(decision: Decision) -> Decision:
    """What is kept of a decision while its request runs: not the whole view."""
    choice = decision.choice
    return decision if choice.suits is suits_all else replace(decision, choice=replace(choice, suits=suits_all))
