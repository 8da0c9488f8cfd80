"""Work on its way: what this router sent to each node and the node's last load report does not count yet.

Every report echoes the number of the last frame that the node had taken in from this router. Frames go in order, so
work of later frames is exactly what the report misses. Each piece is added once and taken away once: by the report that
counts it, or when its leg ends; so no sum can sink below zero. Owned by the router's event loop.
"""

from __future__ import annotations

from operator import add, sub

import msgspec

from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import HASH_BYTES, Prefill, Reserve
from pdcluster.cost.cost import num_pairs
from pdcluster_router.cluster.view import NOTHING_PENDING, InFlightWork

TOKEN_BYTES = 4


class SentWork(msgspec.Struct, frozen=True):
    """One leg's work. sequence: of the frame that carried it; hashes: blocks that the node will hold when it is
    done."""

    attempt: int
    sequence: int
    work: InFlightWork
    hashes: bytes


class NodeAccount(msgspec.Struct, eq=False):
    """Of one node, by request. sent: every leg that is open; uncounted: those that no report counts, in the order of
    their frames; total: their sum."""

    sent: dict[str, SentWork] = {}
    uncounted: dict[str, SentWork] = {}
    total: InFlightWork = NOTHING_PENDING


class WorkInFlight:
    def __init__(self) -> None:
        # Of nodes that were sent something since they came.
        self._accounts: dict[str, NodeAccount] = {}
        # Nodes whose sum is another since somebody took this set.
        self.changed: set[str] = set()

    def enter(self, incarnation: str, request: str, sent: SentWork) -> None:
        """A newer attempt on the same node takes the place of the older one."""
        account = self._accounts.get(incarnation)
        if account is None:
            account = self._accounts[incarnation] = NodeAccount()
        elif request in account.sent:
            self.leave(incarnation, request)
        account.sent[request] = account.uncounted[request] = sent
        account.total = _plus(account.total, sent.work)
        self.changed.add(incarnation)

    def reported(self, incarnation: str, seen: int) -> None:
        """A report came that counts everything up to frame `seen`."""
        account = self._accounts.get(incarnation)
        while account is not None and account.uncounted:
            request, sent = next(iter(account.uncounted.items()))
            if sent.sequence > seen:
                return
            del account.uncounted[request]
            account.total = _minus(account.total, sent.work)
            self.changed.add(incarnation)

    def find(self, incarnation: str, request: str, attempt: int) -> SentWork | None:
        account = self._accounts.get(incarnation)
        sent = None if account is None else account.sent.get(request)
        return sent if sent is not None and sent.attempt == attempt else None

    def has_alike(self, incarnation: str, sent: SentWork) -> bool:
        """Whether the node will hold these blocks for another leg, too."""
        account, block = self._accounts.get(incarnation), sent.hashes[-HASH_BYTES:]
        return account is not None and any(
            other is not sent and other.hashes[-HASH_BYTES:] == block for other in account.sent.values()
        )

    def leave(self, incarnation: str, request: str) -> None:
        """The leg is over. Idempotent."""
        account = self._accounts.get(incarnation)
        if account is None:
            return
        account.sent.pop(request, None)
        sent = account.uncounted.pop(request, None)
        if sent is not None:
            account.total = _minus(account.total, sent.work)
            self.changed.add(incarnation)

    def lose(self, incarnation: str) -> None:
        self._accounts.pop(incarnation, None)
        self.changed.add(incarnation)

    def of(self, incarnation: str) -> InFlightWork:
        """What to add to the node's last report."""
        account = self._accounts.get(incarnation)
        return NOTHING_PENDING if account is None else account.total

    def check_integrity(self) -> None:
        """Raises IntegrityError when sums differ from their parts."""
        for incarnation, account in self._accounts.items():
            total = NOTHING_PENDING
            for request, sent in account.uncounted.items():
                total = _plus(total, sent.work)
                if account.sent.get(request) is not sent:
                    raise IntegrityError(f"request {request} is pending on {incarnation}, but has no leg there")
            if min(total) < 0 or total != account.total:
                raise IntegrityError(f"{account.total} is pending on {incarnation}, its parts make {total}")


def work_of(message: Prefill | Reserve, cached_tokens: int) -> InFlightWork:
    """What the message will make of its node's load, when it holds so much of the prompt already. Only what decodes
    there takes a row for long."""
    num_tokens = len(message.work.token_ids) // TOKEN_BYTES
    if isinstance(message, Reserve):
        return InFlightWork(1, 0, 0, 1, num_tokens)
    cached = cached_tokens if cached_tokens < num_tokens and message.fork_of is None else num_tokens - 1
    uncached = num_tokens - cached
    pairs = round(num_pairs(uncached, cached))
    return (
        InFlightWork(1, uncached, pairs, 0, 0, 1)
        if message.remote
        else InFlightWork(1, uncached, pairs, 1, num_tokens, 1)
    )


def _plus(total: InFlightWork, work: InFlightWork) -> InFlightWork:
    return _new(InFlightWork, map(add, total, work))


def _minus(total: InFlightWork, work: InFlightWork) -> InFlightWork:
    return _new(InFlightWork, map(sub, total, work))


# Of a tuple's kind, without a frame of its own.
_new = tuple.__new__
