"""Work on its way: what this router sent to each node and the node's last load report does not count yet.

Every report echoes the number of the last frame that the node had taken in from this router. Frames go in order, so work of later frames is exactly
what the report misses. Each piece is added once and taken away once: by the report that counts it, or when its leg ends; so no sum can sink below
zero. Owned by the router's event loop.
"""

from __future__ import annotations

from collections import defaultdict
from operator import add, sub

import msgspec

from pdcluster.cost import num_pairs
from pdcluster.errors import IntegrityError
from pdcluster.messages import Prefill, Reserve
from pdcluster_router.view import NOTHING_PENDING, Pending

TOKEN_BYTES = 4


class Sent(msgspec.Struct, frozen=True):
    """One leg's work. sequence: of the frame that carried it; hashes: blocks that the node will hold when it is done."""

    attempt: int
    sequence: int
    work: Pending
    hashes: bytes


class PendingWork:
    def __init__(self) -> None:
        self._sent: defaultdict[str, dict[str, Sent]] = defaultdict(dict)
        """By node and request: every leg that is open."""
        self._uncounted: defaultdict[str, dict[str, Sent]] = defaultdict(dict)
        """The same without those that a report counts, in the order of their frames."""
        self._totals: dict[str, Pending] = {}
        self.changed: set[str] = set()
        """Nodes whose sum is another since somebody took this set."""

    def enter(self, incarnation: str, request: str, sent: Sent) -> None:
        """A newer attempt on the same node takes the place of the older one."""
        there = self._sent[incarnation]
        if request in there:
            self.leave(incarnation, request)
            there = self._sent[incarnation]
        there[request] = sent
        self._uncounted[incarnation][request] = sent
        self._totals[incarnation] = _plus(self.of(incarnation), sent.work)
        self.changed.add(incarnation)

    def reported(self, incarnation: str, seen: int) -> None:
        """A report came that counts everything up to frame `seen`."""
        uncounted = self._uncounted.get(incarnation)
        while uncounted:
            request, sent = next(iter(uncounted.items()))
            if sent.sequence > seen:
                return
            self._count(incarnation, request)

    def find(self, incarnation: str, request: str, attempt: int) -> Sent | None:
        sent = self._sent[incarnation].get(request) if incarnation in self._sent else None
        return sent if sent is not None and sent.attempt == attempt else None

    def leave(self, incarnation: str, request: str) -> None:
        """The leg is over. Idempotent."""
        sent = self._sent.get(incarnation)
        if sent is None or sent.pop(request, None) is None:
            return
        if not sent:
            del self._sent[incarnation]
        self._count(incarnation, request)

    def lose(self, incarnation: str) -> None:
        for by_node in (self._sent, self._uncounted, self._totals):
            by_node.pop(incarnation, None)
        self.changed.add(incarnation)

    def of(self, incarnation: str) -> Pending:
        """What to add to the node's last report."""
        return self._totals.get(incarnation, NOTHING_PENDING)

    def _count(self, incarnation: str, request: str) -> None:
        uncounted = self._uncounted.get(incarnation)
        sent = uncounted.pop(request, None) if uncounted is not None else None
        if sent is None:
            return
        self.changed.add(incarnation)
        if uncounted:
            self._totals[incarnation] = _minus(self._totals[incarnation], sent.work)
        else:
            del self._uncounted[incarnation], self._totals[incarnation]

    def check_integrity(self) -> None:
        """Raises IntegrityError when sums differ from their parts."""
        for incarnation, uncounted in self._uncounted.items():
            total = NOTHING_PENDING
            for request, sent in uncounted.items():
                total = _plus(total, sent.work)
                if self.find(incarnation, request, sent.attempt) is not sent:
                    raise IntegrityError(f"request {request} is pending on {incarnation}, but has no leg there")
            if min(total) < 0 or total != self.of(incarnation):
                raise IntegrityError(f"{self.of(incarnation)} is pending on {incarnation}, its parts make {total}")
        if set(self._totals) != set(self._uncounted):
            raise IntegrityError("a node has a sum of pending work without parts, or parts without a sum")


def work_of(message: Prefill | Reserve, cached_tokens: int) -> Pending:
    """What the message will make of its node's load, when it holds so much of the prompt already. Only what decodes there takes a row for long."""
    num_tokens = len(message.work.token_ids) // TOKEN_BYTES
    if isinstance(message, Reserve):
        return Pending(1, 0, 0, 1, num_tokens)
    cached = cached_tokens if cached_tokens < num_tokens and message.fork_of is None else num_tokens - 1
    uncached = num_tokens - cached
    pairs = round(num_pairs(uncached, cached))
    return Pending(1, uncached, pairs, 0, 0, 1) if message.remote else Pending(1, uncached, pairs, 1, num_tokens, 1)


def _plus(total: Pending, work: Pending) -> Pending:
    return _new(Pending, map(add, total, work))


def _minus(total: Pending, work: Pending) -> Pending:
    return _new(Pending, map(sub, total, work))


_new = tuple.__new__
"""Of a tuple's kind, without a frame of its own."""
