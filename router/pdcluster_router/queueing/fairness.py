"""Whose turn it is among waiting requests. Pure: the same calls in the same order give the same turns.

1. Tiers. The most urgent tier goes first. The other tiers share `floor` of the work that goes before them. A tier goes
   as soon as its share pays for its next request. So urgent work delays the rest but cannot starve it. The tier of
   batch requests has no share.
2. Tenants. Deficit round robin (Shreedhar and Varghese 1995): each visit credits a tenant quantum × weight, and its
   releases are charged. While two tenants wait, their work ÷ weight differs by at most one quantum, the largest request
   of each ÷ its weight, and `burst`. The burst is credit of a tenant that took less than its share before. Without it,
   a tenant that asks now and then would wait behind a flood.
3. Requests of one tenant go by due time, then by arrival.

`peek` changes nothing. Only `take` credits and charges. Requests that `peek` skips count as absent. Their tenants
keep their deficit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from pdcluster.core.errors import IntegrityError
from pdcluster_router.core.generation import BATCH_PRIORITY


class QueuedRequest(msgspec.Struct, frozen=True, gc=False):
    """One request in the hold queue."""

    request: str
    tenant: str
    # Its expected cost for a node, in one unit for all requests, such as seconds.
    work: float
    size_bytes: int
    # Moments of one clock.
    arrived: float
    deadline: float
    weight: float = 1.0
    # Lower goes first.
    priority: int = 0
    # It was released before and came back, so its tenant is not charged again.
    is_charged: bool = False

    @property
    def charge(self) -> float:
        return 0.0 if self.is_charged else self.work

    @property
    def is_batch(self) -> bool:
        return self.priority >= BATCH_PRIORITY


@dataclass(frozen=True, slots=True, order=True)
class QueuePosition:
    """A request's position among those of its tenant and tier."""

    due: float
    sequence: int
    held: QueuedRequest = field(compare=False)


@dataclass(slots=True)
class Flow:
    """Waiting requests of one tenant in one tier, most urgent first. The weight is that of its latest request."""

    tenant: str
    weight: float
    places: list[QueuePosition] = field(default_factory=list)
    deficit: float = 0.0
    # Savings (work ÷ weight) that are not in the deficit, because no other tenant waited when it began. What it took
    # since is subtracted.
    unused: float = 0.0

    def head(self, skip: Container[str]) -> QueuedRequest | None:
        return next((place.held for place in self.places if place.held.request not in skip), None)

    @property
    def work(self) -> float:
        return sum(place.held.charge for place in self.places)

    def work_until(self, due: float) -> float:
        return sum(place.held.charge for place in takewhile(lambda place: place.due <= due, self.places))


class Savings:
    """Credit (work ÷ weight) of tenants that begin to wait behind others, at most `burst` less what they used before.

    A tenant with nothing waiting earns it back while others are served, as if it had waited.
    """

    def __init__(self, burst: float) -> None:
        self._burst = burst
        # Used credit, of tenants that have less than all.
        self._spent: dict[str, float] = {}

    def of(self, tenant: str) -> float:
        return self._burst - self._spent.get(tenant, 0.0)

    def withdraw(self, tenant: str) -> float:
        in_hand = self.of(tenant)
        self._spent[tenant] = self._burst
        return in_hand

    def deposit(self, tenant: str, left: float) -> None:
        self._spent[tenant] = max(self._burst - left, 0.0)

    def earn(self, each: float) -> None:
        self._spent = {tenant: spent - each for tenant, spent in self._spent.items() if spent > each}


@dataclass(frozen=True, slots=True)
class Turn:
    """The request that goes next."""

    held: QueuedRequest
    tier: int
    # Visits of the round until it goes.
    visits: int
    # The tenants in the round, in order.
    ring: tuple[str, ...]
    by_floor: bool = False


class Tier:
    """Deficit round robin over the tenants of one priority.

    owed: work that more urgent tiers released past it and did not pay for.
    """

    def __init__(self, priority: int, quantum: float, savings: Savings) -> None:
        self.priority = priority
        self._savings = savings
        self.owed = 0.0
        self._quantum = quantum
        self._flows: dict[str, Flow] = {}
        # Tenants in the order of their next visits. The one being served is last.
        self._ring: list[str] = []
        self._serving: str | None = None

    @property
    def flows(self) -> dict[str, Flow]:
        return self._flows

    def add(self, held: QueuedRequest, due: float, sequence: int) -> None:
        flow = self._flows.get(held.tenant)
        if flow is None:
            in_hand = self._savings.withdraw(held.tenant)
            flow = (
                Flow(held.tenant, held.weight, deficit=in_hand * held.weight)
                if self._flows
                else Flow(held.tenant, held.weight, unused=in_hand)
            )
            self._flows[held.tenant] = flow
            self._ring.insert(len(self._ring) - (self._serving is not None), held.tenant)
        flow.weight = held.weight
        insort(flow.places, QueuePosition(due, sequence, held))

    def remove(self, held: QueuedRequest, due: float, sequence: int) -> None:
        flow = self._flows[held.tenant]
        index = bisect_left(flow.places, QueuePosition(due, sequence, held))
        if index == len(flow.places) or flow.places[index].sequence != sequence:
            raise IntegrityError(f"request {held.request} is not where its tenant's queue should have it")
        del flow.places[index]
        if not flow.places:
            self._savings.deposit(held.tenant, max(flow.deficit / flow.weight, flow.unused))
            del self._flows[held.tenant]
            self._ring.remove(held.tenant)
            if self._serving == held.tenant:
                self._serving = None

    def peek(self, skip: Container[str]) -> Turn | None:
        heads = {tenant: head for tenant in self._ring if (head := self._flows[tenant].head(skip)) is not None}
        if not heads:
            return None
        ring = tuple(heads)
        if self._serving in heads and self._fits(heads[self._serving]):
            return Turn(heads[self._serving], self.priority, 0, ring)
        visits, tenant = min(
            (self._visits_until(head, index, len(ring)), tenant) for index, (tenant, head) in enumerate(heads.items())
        )
        return Turn(heads[tenant], self.priority, visits, ring)

    def _fits(self, head: QueuedRequest) -> bool:
        return head.charge <= self._flows[head.tenant].deficit

    def _visits_until(self, head: QueuedRequest, index: int, num_tenants: int) -> int:
        flow = self._flows[head.tenant]
        rounds = max(math.ceil((head.charge - flow.deficit) / (self._quantum * flow.weight)), 1)
        return (rounds - 1) * num_tenants + index + 1

    def settle(self, turn: Turn) -> None:
        """Credit the visits up to the turn, and charge it. Its request still waits here."""
        for index, tenant in enumerate(turn.ring):
            flow = self._flows[tenant]
            num_visits = (turn.visits - index - 1) // len(turn.ring) + 1 if turn.visits > index else 0
            flow.deficit += num_visits * self._quantum * flow.weight
        flow = self._flows[turn.held.tenant]
        flow.deficit = max(flow.deficit - turn.held.charge, 0.0)
        flow.unused = max(flow.unused - turn.held.charge / flow.weight, 0.0)
        self._savings.earn(turn.held.charge / sum(each.weight for each in self._flows.values()))
        if turn.visits:
            at = self._ring.index(turn.held.tenant) + 1
            self._ring = self._ring[at:] + self._ring[:at]
            self._serving = turn.held.tenant

    def is_paid_for(self) -> bool:
        """Whether what the tier is owed pays for its next request. It is owed no more until that went."""
        turn = self.peek(())
        return turn is not None and turn.held.charge <= self.owed

    def check_integrity(self) -> None:
        if sorted(self._ring) != sorted(self._flows) or (self._serving is not None and self._ring[-1] != self._serving):
            raise IntegrityError(
                f"tier {self.priority}: the round {self._ring} (serving {self._serving}) is not over "
                f"{sorted(self._flows)}"
            )
        for flow in self._flows.values():
            if not flow.places or flow.places != sorted(flow.places) or flow.deficit < 0:
                raise IntegrityError(
                    f"tier {self.priority}: the queue of {flow.tenant} is empty, out of order or in debt: {flow}"
                )


class FairQueue:
    """All waiting requests.

    quantum: work that a visit credits a tenant of weight 1.
    floor: share of released work that is owed to the less urgent tiers it passed.
    burst: see Savings.
    """

    def __init__(self, quantum: float, floor: float, burst: float = 0.0) -> None:
        self._quantum = quantum
        self._floor = floor
        self._savings = Savings(burst)
        self._tiers: dict[int, Tier] = {}
        self._where: dict[str, tuple[QueuedRequest, float, int]] = {}
        self._num_added = 0
        self.num_batch = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request: str) -> bool:
        return request in self._where

    def get(self, request: str) -> QueuedRequest | None:
        found = self._where.get(request)
        return None if found is None else found[0]

    def all(self) -> Iterator[QueuedRequest]:
        return (held for held, _, _ in self._where.values())

    def has_any_of(self, tenant: str) -> bool:
        return any(tenant in tier.flows for tier in self._tiers.values())

    def add(self, held: QueuedRequest, due: float) -> None:
        if held.request in self._where:
            raise IntegrityError(f"request {held.request} waits already")
        tier = self._tiers.get(held.priority)
        if tier is None:
            tier = self._tiers[held.priority] = Tier(held.priority, self._quantum, self._savings)
        self._num_added += 1
        self.num_batch += held.is_batch
        self._where[held.request] = held, due, self._num_added
        tier.add(held, due, self._num_added)

    def remove(self, request: str) -> QueuedRequest:
        held, due, sequence = self._where.pop(request)
        self.num_batch -= held.is_batch
        tier = self._tiers[held.priority]
        tier.remove(held, due, sequence)
        if not tier.flows:
            del self._tiers[held.priority]
        return held

    def peek(self, skip: Container[str] = ()) -> Turn | None:
        """The request whose turn it is, outside `skip`; None for none."""
        first: Turn | None = None
        for priority in sorted(self._tiers):
            turn = self._tiers[priority].peek(skip)
            if turn is None:
                continue
            if first is None:
                first = turn
            elif priority < BATCH_PRIORITY and turn.held.charge <= self._tiers[priority].owed:
                return Turn(turn.held, turn.tier, turn.visits, turn.ring, by_floor=True)
        return first

    def take(self, turn: Turn) -> QueuedRequest:
        """Release what `peek` gave. Nothing may have changed in between."""
        tier, charge = self._tiers[turn.tier], turn.held.charge
        if turn.by_floor:
            tier.owed -= charge
        tier.settle(turn)
        passed = [
            other
            for other in self._tiers.values()
            if turn.tier < other.priority < BATCH_PRIORITY and not other.is_paid_for()
        ]
        for other in passed:
            other.owed += self._floor * charge / len(passed)
        return self.remove(turn.held.request)

    def work_before(self, new: QueuedRequest, due: float) -> float:
        """Work that goes before the last of a new request's.

        It counts more urgent tiers, its tenant's earlier work, and what weights allow the others of its tier meanwhile.
        It ignores floors of less urgent tiers and requests still to come.
        """
        total = sum(
            flow.work for tier in self._tiers.values() if tier.priority < new.priority for flow in tier.flows.values()
        )
        tier = self._tiers.get(new.priority)
        if tier is None:
            return total
        flows = tier.flows
        own = flows[new.tenant].work_until(due) if new.tenant in flows else 0.0
        in_hand = flows[new.tenant].deficit / new.weight if new.tenant in flows else self._savings.of(new.tenant)
        per_weight = max((own + new.work) / new.weight - in_hand, 0.0)
        return (
            total
            + own
            + sum(min(flow.work, per_weight * flow.weight) for name, flow in flows.items() if name != new.tenant)
        )

    def check_integrity(self) -> None:
        found = [
            place.held.request for tier in self._tiers.values() for flow in tier.flows.values() for place in flow.places
        ]
        if self.num_batch != sum(held.is_batch for held in self.all()):
            raise IntegrityError(f"{self.num_batch} batch requests are counted")
        if sorted(found) != sorted(self._where):
            raise IntegrityError(
                f"waiting requests are lost or doubled: {sorted(found)} in tiers, {sorted(self._where)} known"
            )
        for tier in self._tiers.values():
            tier.check_integrity()
