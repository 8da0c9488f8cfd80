"""Which request goes to a node, waits, or is refused: hold queue, headroom and admission together.

It is pure, so replay drives the same object in simulated time. The policy's decisions come in as a function, times as
numbers. A request tries to be admitted: it goes at once when nobody waits for its nodes and some node is open.
Otherwise it is refused or held. Whenever room may have appeared, `release` scores the waiting requests again, in order.

A request that lacks room while others could go is set aside with what it lacks. One of those that lack the same is
scored with each release, and all have a turn again when it could go.

A request that no node takes now is *parked*: it is held until a node takes work again. A new one is parked only when
nothing about the request itself is to blame. One that was accepted before is parked whatever the reason.

A batch request goes only while no other waits for room, and where it is in nobody's way (`Headroom.has_batch_room`).
No service level refuses it.

A request is also held while it would slow down rows (`Headroom.keeps_rows_fast`). With a service level for first tokens
it is not: that level predicts waits for prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster.core import errors
from pdcluster_router.policy.base import Decision
from pdcluster_router.queueing.admission import DrainRate, Outlook, Slo, check_service, refusal
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.queueing.headroom import MODES, Headroom
from pdcluster_router.queueing.hold_queue import Expired, HoldLimits, HoldOutcome, HoldQueue, Lack

# What the policy would do with a request now, preferring other nodes than those of the second argument. Raises
# Unavailable when no node may take it.
Decide = Callable[[QueuedRequest, frozenset[str]], Decision]
NOTHING: frozenset[str] = frozenset()

# How long the gate trusts the last score of a request that lacks room. So one that may go elsewhere does not wait for
# the others that lack the same.
RESCORE_S = 0.15

# How often a request that no node takes is looked at again.
PARKED_LOOK_S = 0.05
# Set-aside requests that are looked at for one release, so that none takes long.
MOST_LOOKS = 64


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
        # What requests lacked when they were last scored, also of those that have a turn again.
        self._lacks: dict[str, Lack] = {}
        self._look_ahead = limits.look_ahead
        # When set-aside requests are looked at next.
        self._next_look = 0.0
        # Why no node took a parked request, when it was last scored.
        self._parked: dict[str, str] = {}

    def try_admit(self, held: QueuedRequest, decide: Decide, now: float) -> Decision | None:
        """Where the request goes at once; None: it is held, and `release` may place it right away.

        held.work is set here. Raises Overloaded when it may not come in, and whatever `decide` raises, unless the
        request may be parked. A request that came in before (is_charged) always may.
        """
        try:
            decision = decide(held, NOTHING)
        except errors.Unavailable as cause:
            self.park(held, cause, now)
            return None
        going = self.at_once(decision, now - held.arrived, is_charged=held.is_charged, is_batch=held.is_batch)
        if going is None:
            self.hold(held, decision, now)
        return going

    def at_once(
        self, decision: Decision, waited_s: float, *, is_charged: bool, is_batch: bool = False
    ) -> Decision | None:
        """Where a request goes that need not wait, as nearly all; None: it must be held. Raises Overloaded."""
        queue = self.queue
        if is_batch:
            return None if queue.num_able or not self._may_go_as_batch(decision) else decision
        if queue.num_all and (queue.num_others_able or queue.is_lacked(_taken(decision))):
            return None  # others are before it
        if not self._may_go(decision, waited_s, is_charged=is_charged):
            return None
        if self._slo.ttft_s is not None and not is_charged:
            backlog_s = float(decision.view.table["backlog_s"][decision.rows[0]])
            check_service(Outlook(0.0, backlog_s, decision.work_s), self._slo)
        return decision

    def hold(self, held: QueuedRequest, decision: Decision, now: float) -> None:
        """Hold a request that could not go. Raises Overloaded."""
        held = replace(held, work=decision.work_s)
        if not held.is_charged:
            self._admit(held, decision)
        self.queue.push(held)
        if not self._may_take(held, decision, now) and not self._is_full(decision):
            self._set_aside(held, decision, now)
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
        self.queue.push(held)
        self._park(held, cause, now)
        self._note_held(now)

    def pass_over(self, since: float, now: float) -> None:
        """A pause since then counts for no time of those that waited through it. They are in, so no bound is asked."""
        over = errors.NoNodeTakesWork("the pause is over")
        for held in self.queue.waiting():
            paused_s = now - max(held.arrived, since)
            self.queue.remove(held.request)
            later = replace(held, arrived=held.arrived + paused_s, deadline=held.deadline + paused_s)
            self.queue.push(later)
            self._park(later, over, now)
        self._note_held(now)

    def _park(self, held: QueuedRequest, cause: errors.Unavailable, now: float) -> None:
        self._parked[held.request] = str(cause)  # its traceback holds the view
        self._lacks.pop(held.request, None)
        self.queue.set_aside(held.request, now + PARKED_LOOK_S, None)

    def release(self, decide: Decide, now: float, most: int = 1) -> list[Released]:
        """Release up to `most` waiting requests. Use 1 when a decision counts in the view only once it was acted
        upon.
        """
        released = self._look_aside(decide, now)[:most]

        def offer(held: QueuedRequest) -> HoldOutcome:
            if len(released) >= most or (held.is_batch and self.queue.num_taken):
                return HoldOutcome.FULL
            try:
                decision = self._choose(held, decide)
                claimed = self.queue.claimed(held.priority, now)
                if not _taken(decision).isdisjoint(claimed):
                    decision = decide(held, claimed)  # its second choice
            except errors.PdclusterError as error:
                if isinstance(error, errors.Unavailable) and _may_park(held, error):
                    self._park(held, error, now)
                    return HoldOutcome.ASIDE
                released.append(Released(held, None, error))
                return HoldOutcome.PLACED
            if not self._may_take(held, decision, now):
                if self._is_full(decision):
                    return HoldOutcome.FULL
                self._set_aside(held, decision, now)
                return HoldOutcome.ASIDE
            if not _taken(decision).isdisjoint(claimed):
                return HoldOutcome.ELSEWHERE
            released.append(Released(held, decision))
            return HoldOutcome.PLACED

        for held in self.queue.release(offer, now):
            if not held.is_batch:
                self._drain.released(held.charge, now)
            self._forget(held.request)
        self._note_held(now)
        return released

    def _look_aside(self, decide: Decide, now: float) -> list[Released]:
        """Look at some set-aside requests again. Those that could go have a turn now; returns those that fail."""
        failed: list[Released] = []
        for lack, held in self.queue.lacking()[: self._look_ahead]:
            outcome = self._looked_at(held, decide, now, failed)
            if outcome is HoldOutcome.FULL:
                return failed
            if outcome is HoldOutcome.PLACED:
                for request in self.queue.who_lacks(lack):
                    self.queue.bring_back(request)
                self._forget(held.request)  # another one that cannot go does not speak for it
        if now < self._next_look:
            return failed
        self._next_look, num_vain = now + PARKED_LOOK_S, 0
        for held, lacking in self.queue.unseen(now)[:MOST_LOOKS]:
            if num_vain >= self._look_ahead:
                break
            outcome = self._looked_at(held, decide, now, failed)
            if outcome is HoldOutcome.ASIDE:
                num_vain += 1
                continue
            if outcome is HoldOutcome.FULL and lacking is not None:
                break
            self._next_look = now  # more may go
            self.queue.bring_back(held.request)
            self._forget(held.request)  # the others that lack the same may differ
        return failed

    def _looked_at(self, held: QueuedRequest, decide: Decide, now: float, failed: list[Released]) -> HoldOutcome:
        """What would become of a set-aside request."""
        try:
            decision = self._choose(held, decide)
        except errors.PdclusterError as error:
            if isinstance(error, errors.Unavailable) and _may_park(held, error):
                self._park(held, error, now)
            elif not failed:  # the others are looked at again with the next release
                self.queue.remove(held.request)
                self._forget(held.request)
                failed.append(Released(held, None, error))
            return HoldOutcome.ASIDE
        if self._may_take(held, decision, now):
            return HoldOutcome.PLACED
        if self._is_full(decision):
            return HoldOutcome.FULL
        self._set_aside(held, decision, now)
        return HoldOutcome.ASIDE

    def _set_aside(self, held: QueuedRequest, decision: Decision, now: float) -> None:
        """Set a request aside that lacks room, and all that lacked the same when they were last scored."""
        self._parked.pop(held.request, None)
        is_paced = self._headroom.has_open(decision)
        lack = Lack(self._headroom.lacking(decision, is_paced=is_paced), held.priority)
        self._lacks[held.request] = lack
        alike = [held.request]
        if self.queue.num_able:
            alike += [name for name, other in self._lacks.items() if other == lack and not self.queue.is_aside(name)]
        for request in dict.fromkeys(alike):
            self.queue.set_aside(request, now + RESCORE_S, lack)

    def _choose(self, held: QueuedRequest, decide: Decide) -> Decision:
        """What the policy would do. A batch request is kept from nodes where it would be in the way."""
        decision = decide(held, NOTHING)
        if not held.is_batch or self._headroom.has_batch_room(decision):
            return decision
        closed = self._headroom.closed_to_batch(decision)
        return decide(held, closed) if closed else decision

    def _may_take(self, held: QueuedRequest, decision: Decision, now: float) -> bool:
        if held.is_batch:
            return self._may_go_as_batch(decision)
        return self._may_go(decision, now - held.arrived, is_charged=held.is_charged)

    def _may_go_as_batch(self, decision: Decision) -> bool:
        is_free = not self.queue.num_taken and self._headroom.has_open(decision)
        return is_free and self._headroom.has_batch_room(decision)

    def _may_go(self, decision: Decision, waited_s: float, *, is_charged: bool) -> bool:
        may_slow = is_charged or self._slo.ttft_s is not None
        return self._headroom.has_open(decision) and (may_slow or self._headroom.keeps_rows_fast(decision, waited_s))

    def _is_full(self, decision: Decision) -> bool:
        """Whether no request has room."""
        return len(self._headroom.full_modes(decision.view)) == len(MODES)

    def leave(self, request: str, now: float) -> None:
        """Its client left, wherever the request is."""
        self.queue.remove(request)
        self._forget(request)
        self._note_held(now)

    def _forget(self, request: str) -> None:
        self._parked.pop(request, None)
        self._lacks.pop(request, None)

    def expire(self, now: float) -> list[Released]:
        """Requests whose time is over, with the error that answers them."""
        late = [Released(one.held, None, self._late(one, now)) for one in self.queue.expire(now)]
        for one in late:
            self._forget(one.held.request)
        self._note_held(now)
        return late

    def _note_held(self, now: float) -> None:
        """Time in which no node takes work says nothing about how fast nodes work."""
        self._drain.is_held(self.queue.num_taken > 0, now)

    def wait_s(self, held: QueuedRequest, nodes: Set[str]) -> float:
        """Predicted wait in the queue of a request outside it that may go to these nodes; at most the queue's age."""
        return min(self.queue.work_before(held, nodes) / self._drain.rate(max(len(nodes), 1)), self._age_s)

    # ------------------------------------------------------------ refusals

    def _admit(self, held: QueuedRequest, decision: Decision) -> None:
        usable, view = self._headroom.usable(decision), decision.view
        rows = [view.roster.row_of[incarnation] for incarnation in usable]
        least_s = min(view.table["backlog_s"][rows].tolist(), default=0.0)
        wait_s = self.wait_s(held, usable) + max(least_s - self._headroom.backlog_s, 0.0)
        bound = self.queue.lacks_room(held)
        if bound is not None:
            raise refusal(
                f"hold_{bound}",
                f"{len(self.queue)} requests of {self.queue.num_bytes} bytes wait for a node, no more may",
                wait_s,
            )
        if held.is_batch:
            return
        is_modest = self.queue.num_taken > 0 and not self.queue.has_any_of(held.tenant)
        check_service(Outlook(wait_s, min(least_s, self._headroom.backlog_s), held.work, is_modest), self._slo)

    def _late(self, expired: Expired, now: float) -> errors.PdclusterError:
        held, cause = expired.held, self._parked.get(expired.held.request)
        waited = f"request {held.request} waited {now - held.arrived:.2f} s for a node"
        why = "" if cause is None else f"; {cause}"
        if expired.reason == "deadline":
            return errors.DeadlineExceeded(f"{waited} and found no room by its deadline{why}", "request")
        if cause is not None:
            return errors.Unavailable(f"{waited}, as long as it may{why}")
        return refusal("hold_age", f"{waited}, as long as it may", self.wait_s(held, expired.nodes))


def _may_park(held: QueuedRequest, cause: errors.Unavailable) -> bool:
    return held.is_charged or isinstance(cause, errors.NoNodeTakesWork)


def _taken(decision: Decision) -> frozenset[str]:
    """The nodes that a request takes."""
    return frozenset((decision.first.endpoint.incarnation, decision.decode.endpoint.incarnation))
