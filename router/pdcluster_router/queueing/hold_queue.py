"""The hold queue: requests that wait in the router because every node they may use is past a small backlog.

Pure; the time is passed in. Requests wait here and not on a node, so each is scored again against current caches when
room appears. The queue is bounded by count, bytes and age, and fair (`fairness`). It knows no nodes: `release` offers
requests in order to its caller. No request is starved:

1. Tenants and tiers take fair turns.
2. Inside a tenant, requests go by due time: `urgency` times what their prompts take, at most `patience_s`, and by their
   deadlines. A later request cannot pass one that is due.
3. A request that cannot use the free room is passed over. Once it is due, those behind it must leave alone what it
   lacks.
4. A request that no node takes now is set aside. It is in nobody's way: it has no turn, and no work before others. It
   counts for the bounds. A few are looked at again with each release, the longest unseen first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Literal

from pdcluster.core.errors import IntegrityError
from pdcluster_router.policy.predicted.cost_model import PATIENCE
from pdcluster_router.queueing.fairness import FairQueue, QueuedRequest
from pdcluster_router.queueing.shares import GREED, Shares

Bound = Literal["count", "bytes"]
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
    # Requests that are scored for one release and may be passed over for a later one; and set-aside ones looked at.
    look_ahead: int = 16
    # Requests that are passed over for one release without a score, because what they lack is lacking still.
    most_passed: int = 64
    quantum: float = 0.05
    floor: float = 0.05
    burst: float = 1.0
    # Several tenants may come, so none may fill the queue.
    is_shared: bool = False


class HoldOutcome(Enum):
    """What became of an offered request."""

    # It went.
    PLACED = auto()
    # The free room is not for this one.
    ELSEWHERE = auto()
    # As when it was last scored: nothing was computed.
    STILL = auto()
    # No node takes it now.
    ASIDE = auto()
    # Nothing is free for any request.
    FULL = auto()


# Tries to place a request. The second argument: requests whose nodes this one must leave alone.
Offer = Callable[[QueuedRequest, Sequence[QueuedRequest]], HoldOutcome]


@dataclass(frozen=True, slots=True)
class Expired:
    held: QueuedRequest
    reason: Reason


class HoldQueue:
    """Waiting requests. Owned by one thread, or by one simulation."""

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._queue = FairQueue(limits.quantum, limits.floor, limits.burst)
        greed = GREED if limits.is_shared else None
        self._places = Shares(limits.count, greed)
        self._bytes = Shares(limits.size_bytes, greed)
        # Requests that no node takes, the longest unseen first, with when they may be looked at again.
        self._aside: dict[str, tuple[QueuedRequest, float]] = {}
        self._expiries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def __contains__(self, request: str) -> bool:
        return request in self._queue or request in self._aside

    @property
    def num_able(self) -> int:
        """Requests that some node takes, and so have a turn."""
        return len(self._queue)

    @property
    def num_bytes(self) -> int:
        return self._bytes.used

    def waiting(self) -> list[QueuedRequest]:
        """All requests in the order they came."""
        return sorted((*self._queue.all(), *(held for held, _ in self._aside.values())), key=lambda one: one.arrived)

    def has_any_of(self, tenant: str) -> bool:
        return self._queue.has_any_of(tenant)

    # ------------------------------------------------------------ in and out

    def lacks_room(self, held: QueuedRequest) -> Bound | None:
        """The bound that keeps the request out; None when it may come in."""
        return next(
            (bound for bound, shares, amount in self._amounts(held) if not shares.has_room(held.tenant, amount)), None
        )

    def push(self, held: QueuedRequest, *, look_at: float | None = None) -> None:
        """Add a request for which `lacks_room` is None. One that comes back is due at once.

        look_at: no node takes it now, so it is set aside until then; None: some node does.
        """
        if look_at is None:
            self._queue.add(held, self._due(held))
        elif held.request in self:
            raise IntegrityError(f"request {held.request} waits already")
        else:
            self._aside[held.request] = held, look_at
        for _, shares, amount in self._amounts(held):
            shares.take(held.tenant, amount)
        heapq.heappush(self._expiries, (self._expiry(held), held.request))

    def remove(self, request: str) -> QueuedRequest | None:
        """Remove a request whose client left. None when it does not wait here."""
        if request in self._aside:
            held, _ = self._aside.pop(request)
        elif request in self._queue:
            held = self._queue.remove(request)
        else:
            return None
        self._gone(held)
        return held

    # ------------------------------------------------------------ set aside

    def unseen(self, now: float) -> list[QueuedRequest]:
        """Set-aside requests to look at now, at most `look_ahead`."""
        found = (held for held, look_at in self._aside.values() if look_at <= now)
        return list(islice(found, self._limits.look_ahead))

    def seen(self, request: str, look_at: float) -> None:
        """No node takes the set-aside request yet."""
        held, _ = self._aside.pop(request)
        self._aside[request] = held, look_at

    def bring_back(self, request: str) -> None:
        """Some node takes the set-aside request again: it has a turn from now on."""
        held, _ = self._aside.pop(request)
        self._queue.add(held, self._due(held))

    def expire(self, now: float) -> list[Expired]:
        """Take out requests that are past their deadline or waited too long."""
        expired = []
        while (moment := self.next_expiry()) is not None and moment <= now:
            held = self.remove(self._expiries[0][1])
            assert held is not None  # next_expiry drops those that left
            expired.append(Expired(held, "deadline" if now >= held.deadline else "age"))
        return expired

    def next_expiry(self) -> float | None:
        """When `expire` has something to do."""
        while self._expiries and not self._is_current(*self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def release(self, offer: Offer, now: float, look_at: float = 0.0) -> list[QueuedRequest]:
        """Offer requests in order until nothing is free. Returns those that were placed.

        look_at: when those that it sets aside may be looked at again.
        """
        placed: list[QueuedRequest] = []
        passed: set[str] = set()
        claims: list[QueuedRequest] = []
        num_scored, limits = 0, self._limits
        while (
            num_scored <= limits.look_ahead
            and len(passed) <= limits.most_passed
            and (turn := self._queue.peek(passed)) is not None
        ):
            answer = offer(turn.held, claims)
            if answer is HoldOutcome.FULL:
                break
            if answer is HoldOutcome.PLACED:
                placed.append(self._queue.take(turn))
                self._gone(turn.held)
                continue
            num_scored += answer is not HoldOutcome.STILL
            if answer is HoldOutcome.ASIDE:
                held = self._queue.remove(turn.held.request)
                self._aside[held.request] = held, look_at
                continue
            passed.add(turn.held.request)
            if now >= self._due(turn.held):
                claims.append(turn.held)
        return placed

    # ------------------------------------------------------------ what will be

    def work_before(self, held: QueuedRequest) -> float:
        """Work that is released before a request that is not here yet."""
        return self._queue.work_before(held, self._due(held))

    # ------------------------------------------------------------ books

    def _amounts(self, held: QueuedRequest) -> tuple[tuple[Bound, Shares, int], ...]:
        """The amounts that a request takes of each bound. One that came back takes nothing: it was admitted, and
        running requests are bounded elsewhere.
        """
        if held.is_paid:
            return ()
        return ("count", self._places, 1), ("bytes", self._bytes, held.size_bytes)

    def _due(self, held: QueuedRequest) -> float:
        if held.is_paid:
            return min(held.deadline, held.arrived)
        urgency, patience_s = self._limits.urgency, self._limits.patience_s
        return min(
            held.deadline, held.arrived + (patience_s if urgency is None else min(urgency * held.work, patience_s))
        )

    def _expiry(self, held: QueuedRequest) -> float:
        return min(held.deadline, held.arrived + self._limits.age_s)

    def _is_current(self, moment: float, request: str) -> bool:
        held = self._aside[request][0] if request in self._aside else self._queue.get(request)
        return held is not None and self._expiry(held) == moment

    def _gone(self, held: QueuedRequest) -> None:
        for _, shares, amount in self._amounts(held):
            shares.give_back(held.tenant, amount)
        if len(self._expiries) > 2 * len(self) + 16:
            self._expiries = [entry for entry in self._expiries if self._is_current(*entry)]
            heapq.heapify(self._expiries)

    def check_integrity(self) -> None:
        self._queue.check_integrity()
        self._places.check_integrity()
        self._bytes.check_integrity()
        if both := [request for request in self._aside if request in self._queue]:
            raise IntegrityError(f"set aside and waiting for a turn: {both}")
        held = self.waiting()
        taken = [one for one in held if not one.is_paid]
        if self._places.used != len(taken) or self._bytes.used != sum(one.size_bytes for one in taken):
            raise IntegrityError(
                f"{len(taken)} new requests wait, {self._places.used} places and {self._bytes.used} bytes are taken "
                "for them"
            )
        if not {(self._expiry(one), one.request) for one in held} <= set(self._expiries):
            raise IntegrityError("a waiting request has no expiry")
