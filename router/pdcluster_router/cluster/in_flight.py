"""Work in flight: what this router sent to nodes and no load report counts yet.

Every report echoes the number of the last frame that the node took from this router. Frames go in order. So the report
misses exactly the work of later frames. Each piece of work is added once and subtracted once: by the report that counts
it, or when its leg ends. So no sum falls below zero. Owned by the router's event loop.
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
    """The work of one leg."""

    attempt: int
    # Of the frame that carried it.
    sequence: int
    work: InFlightWork
    # Blocks that the node will hold when the leg is done.
    hashes: bytes


class NodeAccount(msgspec.Struct, eq=False):
    """The work sent to one node, by request."""

    # Every open leg.
    sent: dict[str, SentWork] = {}
    # Legs that no report counts, in the order of their frames.
    uncounted: dict[str, SentWork] = {}
    # The sum of the uncounted work.
    total: InFlightWork = NOTHING_PENDING


class WorkInFlight:
    def __init__(self) -> None:
        # Accounts of nodes that this router sent work to.
        self._accounts: dict[str, NodeAccount] = {}
        # Nodes whose sum changed since this set was last taken.
        self.changed: set[str] = set()

    def enter(self, incarnation: str, request: str, sent: SentWork) -> None:
        """Add a leg. A newer attempt replaces an older one on the same node."""
        account = self._accounts.get(incarnation)
        if account is None:
            account = self._accounts[incarnation] = NodeAccount()
        elif request in account.sent:
            self.leave(incarnation, request)
        account.sent[request] = account.uncounted[request] = sent
        account.total = _new(InFlightWork, map(add, account.total, sent.work))
        self.changed.add(incarnation)

    def reported(self, incarnation: str, seen: int) -> None:
        """A report arrived that counts every frame up to `seen`."""
        account = self._accounts.get(incarnation)
        while account is not None and account.uncounted:
            request, sent = next(iter(account.uncounted.items()))
            if sent.sequence > seen:
                return
            del account.uncounted[request]
            account.total = _new(InFlightWork, map(sub, account.total, sent.work))
            self.changed.add(incarnation)

    def find(self, incarnation: str, request: str, attempt: int) -> SentWork | None:
        account = self._accounts.get(incarnation)
        sent = None if account is None else account.sent.get(request)
        return sent if sent is not None and sent.attempt == attempt else None

    def has_alike(self, incarnation: str, sent: SentWork) -> bool:
        """Whether the node will hold the same blocks for another leg."""
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
            account.total = _new(InFlightWork, map(sub, account.total, sent.work))
            self.changed.add(incarnation)

    def lose(self, incarnation: str) -> None:
        self._accounts.pop(incarnation, None)
        self.changed.add(incarnation)

    def of(self, incarnation: str) -> InFlightWork:
        """The work that the node's last report does not count."""
        account = self._accounts.get(incarnation)
        return NOTHING_PENDING if account is None else account.total

    def check_integrity(self) -> None:
        """Raises IntegrityError when sums differ from their parts."""
        for incarnation, account in self._accounts.items():
            total = NOTHING_PENDING
            for request, sent in account.uncounted.items():
                total = _new(InFlightWork, map(add, total, sent.work))
                if account.sent.get(request) is not sent:
                    raise IntegrityError(f"request {request} is pending on {incarnation}, but has no leg there")
            if min(total) < 0 or total != account.total:
                raise IntegrityError(f"{account.total} is pending on {incarnation}, its parts make {total}")


def work_of(message: Prefill | Reserve, cached_tokens: int) -> InFlightWork:
    """The load that a message adds to a node with `cached_tokens` of the prompt in its cache.

    Only a leg that decodes there takes a row for long. Prompts of batch requests are in nobody's way.
    """
    work = message.work
    num_tokens = len(work.token_ids) // TOKEN_BYTES
    if isinstance(message, Reserve):
        return InFlightWork(1, 0, 0, 1, num_tokens, batch_rows=int(work.is_batch))
    cached = cached_tokens if cached_tokens < num_tokens and message.fork_of is None else num_tokens - 1
    uncached = num_tokens - cached
    if work.is_batch:
        rows = int(not message.remote)
        return InFlightWork(1, rows=rows, context_tokens=rows * num_tokens, batch_tokens=uncached, batch_rows=rows)
    pairs = round(num_pairs(uncached, cached))
    return (
        InFlightWork(1, uncached, pairs, 0, 0, 1)
        if message.remote
        else InFlightWork(1, uncached, pairs, 1, num_tokens, 1)
    )


# Makes a tuple subclass without a Python frame.
_new = tuple.__new__
