"""The hold queue: requests that wait in the router because every node they may use is past a small backlog.

Pure; the time is passed in. Requests wait here and not on a node, so each is scored again against current caches when
room appears. The queue is bounded by count, bytes and age, and fair (`fairness`). It knows no nodes: `release` offers
requests in order to its caller. No request is starved:

1. Tenants and tiers take fair turns.
2. Inside a tenant, requests go by due time: `urgency` times what their prompts take, at most `patience_s`, and by their
   deadlines. A later request cannot pass one that is due.
3. A request that cannot use the free room is set aside with what it lacks. Once it is due, those of its tier and of
   less urgent ones must leave that alone. All that lack the same have a turn again once one of them has room.
4. A request that no node takes now is set aside, too. It has no work before others.

Batch requests are below all others and may starve: they have no turn while another waits for room. They wait until
their deadline, and take at most BATCH_PLACES of the places and bytes.

Those set aside are in nobody's way: they have no turn, and count for the bounds only. A few are looked at again, the
longest unseen first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from pdcluster.core.errors import IntegrityError
from pdcluster_router.core.generation import BATCH_PRIORITY
from pdcluster_router.core.room import PATIENCE
from pdcluster_router.core.shares import GREED, Shares
from pdcluster_router.queueing.fairness import FairQueue, QueuedRequest

Bound = Literal["count", "bytes"]
BATCH_PLACES = 0.5
Reason = Literal["deadline", "age"]


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Limits of the hold queue. For quantum, floor and burst see `fairness`."""

    count: int = 1024
    size_bytes: int = 256 * 2**20
    # The longest wait.
    age_s: float = 60.0
    # A request is due after this at the latest.
    patience_s: float = 30.0
    # A request is due after `urgency` times its own work; None: first come, first served.
    urgency: float | None = PATIENCE
    # Requests that are scored for one release and may be passed over for a later one; and set-aside ones looked at in
    # vain.
    look_ahead: int = 16
    quantum: float = 0.05
    floor: float = 0.05
    burst: float = 1.0
    # Several tenants may come, so none may fill the queue.
    is_shared: bool = False


class HoldOutcome(Enum):
    """What became of an offered request."""

    # It went.
    PLACED = auto()
    # What it would take is another's.
    ELSEWHERE = auto()
    # It was set aside.
    ASIDE = auto()
    # Nothing is free for any request.
    FULL = auto()


@dataclass(frozen=True, slots=True)
class Lack:
    """What a request waits for."""

    # Incarnations, one of which must have room.
    nodes: frozenset[str]
    # The tier of the request.
    priority: int

    @property
    def is_batch(self) -> bool:
        return self.priority >= BATCH_PRIORITY


# Tries to place a request.
Offer = Callable[[QueuedRequest], HoldOutcome]


@dataclass(frozen=True, slots=True)
class SetAside:
    held: QueuedRequest
    # When it may be looked at again.
    look_at: float
    # None: no node takes it.
    lack: Lack | None


@dataclass(frozen=True, slots=True)
class Expired:
    held: QueuedRequest
    reason: Reason
    # What it waited for.
    nodes: frozenset[str]


class HoldQueue:
    """Waiting requests. Owned by one thread, or by one simulation."""

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._queue = FairQueue(limits.quantum, limits.floor, limits.burst)
        greed = GREED if limits.is_shared else None
        self._places = Shares(limits.count, greed)
        self._bytes = Shares(limits.size_bytes, greed)
        # The longest unseen first.
        self._aside: dict[str, SetAside] = {}
        # When those that lack the same are due.
        self._lacking: dict[Lack, dict[str, float]] = {}
        self._expiries: list[tuple[float, str]] = []
        # All requests that wait, and the batch requests among them.
        self.num_all = self.num_batch = 0
        # Places and bytes of batch requests.
        self._batch: dict[Bound, int] = {"count": 0, "bytes": 0}

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def __contains__(self, request: str) -> bool:
        return request in self._queue or request in self._aside

    @property
    def num_able(self) -> int:
        """Requests that have a turn."""
        return len(self._queue)

    @property
    def num_others_able(self) -> int:
        """Requests that have a turn and are not batch."""
        return len(self._queue) - self._queue.num_batch

    @property
    def num_taken(self) -> int:
        """Requests, not batch, that some node takes: they wait for room."""
        aside = sum(len(due) for lack, due in self._lacking.items() if not lack.is_batch)
        return self.num_others_able + aside

    @property
    def num_bytes(self) -> int:
        return self._bytes.used

    def waiting(self) -> list[QueuedRequest]:
        """All requests in the order they came."""
        return sorted((*self._queue.all(), *(one.held for one in self._aside.values())), key=lambda one: one.arrived)

    def has_any_of(self, tenant: str) -> bool:
        """Whether a request of the tenant waits for room."""
        return self._queue.has_any_of(tenant) or any(
            one.held.tenant == tenant for one in self._aside.values() if one.lack is not None
        )

    # ------------------------------------------------------------ in and out

    def lacks_room(self, held: QueuedRequest) -> Bound | None:
        """The bound that keeps the request out; None when it may come in."""
        for bound, shares, amount in self._amounts(held):
            is_full = held.is_batch and self._batch[bound] + amount > BATCH_PLACES * shares.limit
            if is_full or not shares.has_room(held.tenant, amount):
                return bound
        return None

    def push(self, held: QueuedRequest) -> None:
        """Add a request for which `lacks_room` is None. One that comes back is due at once."""
        if held.request in self:
            raise IntegrityError(f"request {held.request} waits already")
        self._queue.add(held, self._due(held))
        for bound, shares, amount in self._amounts(held):
            shares.take(held.tenant, amount)
            self._batch[bound] += amount * held.is_batch
        heapq.heappush(self._expiries, (self._expiry(held), held.request))
        self.num_all += 1
        self.num_batch += held.is_batch

    def remove(self, request: str) -> QueuedRequest | None:
        """Remove a request whose client left. None when it does not wait here."""
        if request in self._aside:
            held = self._take_back(request)
        elif request in self._queue:
            held = self._queue.remove(request)
        else:
            return None
        self._gone(held)
        return held

    # ------------------------------------------------------------ set aside

    def set_aside(self, request: str, look_at: float, lack: Lack | None) -> None:
        """Nobody need look at the request until then, or until a node of `lack` has room. None: no node takes it."""
        held = self._take_back(request) if request in self._aside else self._queue.remove(request)
        self._aside[request] = SetAside(held, look_at, lack)
        if lack is not None:
            self._lacking.setdefault(lack, {})[request] = self._due(held)

    def bring_back(self, request: str) -> None:
        """The request has a turn from now on."""
        held = self._take_back(request)
        self._queue.add(held, self._due(held))

    def is_aside(self, request: str) -> bool:
        return request in self._aside

    def unseen(self, now: float) -> list[tuple[QueuedRequest, Lack | None]]:
        """Set-aside requests that may be looked at now, with what they lack; None: no node takes them."""
        is_quiet = not self.num_taken
        return [
            (one.held, one.lack)
            for one in self._aside.values()
            if one.look_at <= now and (is_quiet or one.lack is None or not one.lack.is_batch)
        ]

    def lacking(self) -> list[tuple[Lack, QueuedRequest]]:
        """What set-aside requests lack, with the one that is due first. Batch requests only while no other waits."""
        is_quiet = not self.num_taken
        return [
            (lack, self._aside[min(due, key=due.__getitem__)].held)
            for lack, due in self._lacking.items()
            if is_quiet or not lack.is_batch
        ]

    def who_lacks(self, lack: Lack) -> list[str]:
        return list(self._lacking.get(lack, ()))

    def is_lacked(self, nodes: Set[str]) -> bool:
        """Whether a set-aside request, not batch, waits for one of these nodes."""
        return any(not lack.is_batch and not lack.nodes.isdisjoint(nodes) for lack in self._lacking)

    def claimed(self, priority: int, now: float) -> frozenset[str]:
        """Nodes that requests of this tier must leave to those that are due."""
        due = (
            lack.nodes for lack, due in self._lacking.items() if lack.priority <= priority and min(due.values()) <= now
        )
        return frozenset().union(*due)

    def _take_back(self, request: str) -> QueuedRequest:
        one = self._aside.pop(request)
        if one.lack is not None:
            due = self._lacking[one.lack]
            del due[request]
            if not due:
                del self._lacking[one.lack]
        return one.held

    def expire(self, now: float) -> list[Expired]:
        """Take out requests that are past their deadline or waited too long."""
        expired = []
        while (moment := self.next_expiry()) is not None and moment <= now:
            request = self._expiries[0][1]
            one = self._aside.get(request)
            held = self.remove(request)
            assert held is not None  # next_expiry drops those that left
            nodes = frozenset[str]() if one is None or one.lack is None else one.lack.nodes
            expired.append(Expired(held, "deadline" if now >= held.deadline else "age", nodes))
        return expired

    def next_expiry(self) -> float | None:
        """When `expire` has something to do."""
        while self._expiries and not self._is_current(*self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def release(self, offer: Offer, now: float) -> list[QueuedRequest]:
        """Offer requests in order until nothing is free. Returns those that were placed."""
        placed: list[QueuedRequest] = []
        passed: set[str] = set()
        num_scored = 0
        while num_scored <= self._limits.look_ahead and (turn := self._queue.peek(passed)) is not None:
            answer = offer(turn.held)
            if answer is HoldOutcome.FULL:
                break
            if answer is HoldOutcome.PLACED:
                placed.append(self._queue.take(turn))
                self._gone(turn.held)
                continue
            num_scored += 1
            if answer is HoldOutcome.ELSEWHERE:
                passed.add(turn.held.request)
        return placed

    # ------------------------------------------------------------ what will be

    def work_before(self, held: QueuedRequest, nodes: Set[str]) -> float:
        """Work that is released before a request that is not here yet, and may go to these nodes."""
        due = self._due(held)
        aside = sum(
            self._aside[request].held.charge
            for lack, dues in self._lacking.items()
            if not lack.nodes.isdisjoint(nodes) and lack.priority <= held.priority
            for request, other in dues.items()
            if other <= due or lack.priority < held.priority
        )
        return aside + self._queue.work_before(held, due)

    # ------------------------------------------------------------ books

    def _amounts(self, held: QueuedRequest) -> tuple[tuple[Bound, Shares, int], ...]:
        """The amounts that a request takes of each bound. One that came back takes nothing: it was admitted, and
        running requests are bounded elsewhere.
        """
        if held.is_charged:
            return ()
        return ("count", self._places, 1), ("bytes", self._bytes, held.size_bytes)

    def _due(self, held: QueuedRequest) -> float:
        if held.is_charged:
            return min(held.deadline, held.arrived)
        urgency, patience_s = self._limits.urgency, self._limits.patience_s
        return min(
            held.deadline, held.arrived + (patience_s if urgency is None else min(urgency * held.work, patience_s))
        )

    def _expiry(self, held: QueuedRequest) -> float:
        if held.is_batch:
            return held.deadline
        return min(held.deadline, held.arrived + self._limits.age_s)

    def _is_current(self, moment: float, request: str) -> bool:
        held = self._aside[request].held if request in self._aside else self._queue.get(request)
        return held is not None and self._expiry(held) == moment

    def _gone(self, held: QueuedRequest) -> None:
        self.num_all -= 1
        self.num_batch -= held.is_batch
        for bound, shares, amount in self._amounts(held):
            shares.give_back(held.tenant, amount)
            self._batch[bound] -= amount * held.is_batch
        if len(self._expiries) > 2 * len(self) + 16:
            self._expiries = [entry for entry in self._expiries if self._is_current(*entry)]
            heapq.heapify(self._expiries)

    def check_integrity(self) -> None:
        if self.num_all != len(self):
            raise IntegrityError(f"{len(self)} requests wait, {self.num_all} are counted")
        if self.num_batch != sum(one.is_batch for one in self.waiting()):
            raise IntegrityError(f"{self.num_batch} batch requests are counted")
        self._queue.check_integrity()
        self._places.check_integrity()
        self._bytes.check_integrity()
        if both := [request for request in self._aside if request in self._queue]:
            raise IntegrityError(f"set aside and waiting for a turn: {both}")
        lacking = {(lack, request) for lack, due in self._lacking.items() for request in due}
        if lacking != {(one.lack, request) for request, one in self._aside.items() if one.lack is not None}:
            raise IntegrityError("what set-aside requests lack differs from what is known of it")
        held = self.waiting()
        taken = [one for one in held if not one.is_charged]
        if self._places.used != len(taken) or self._bytes.used != sum(one.size_bytes for one in taken):
            raise IntegrityError(
                f"{len(taken)} new requests wait, {self._places.used} places and {self._bytes.used} bytes are taken "
                "for them"
            )
        if not {(self._expiry(one), one.request) for one in held} <= set(self._expiries):
            raise IntegrityError("a waiting request has no expiry")
