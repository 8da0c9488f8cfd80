"""The writing end of pulls: cached KV that another node asks for by its block hashes is pinned here and written under that node's ticket.

An export's life: Fetch → the pages are found and pinned → everything is pushed at once, and Commit goes out → Acked, or GaveUp, which the reader is
told → Drained, and the pages are unpinned. A node that no longer has the KV, has no room to pin it or is draining answers Declined: the other one
then computes.

Nothing is computed here and no request is known. Owned by the node loop's thread; no sockets here. The other end is `fetch`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdcluster.core.errors import IntegrityError, TransferError
from pdcluster.core.messages import Declined, Fetch, Ticket
from pdcluster.kv.pages import PagePool
from pdcluster.node.outbox import Outbox
from pdcluster.scheduler.scheduler import Scheduler
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.session import Acked, Drained, GaveUp, peer_of
from pdcluster.transfer.protocol.writer import Writer

MAX_OPEN = 64
"""Exports at a time; whoever asks for more computes."""


@dataclass(frozen=True, slots=True)
class Export:
    """pages: the source, one reference each."""

    reader: Peer
    pages: list[int]


class ExportSide:
    """counters: exports by how they ended (acked, gave_up), and what was declined (gone, no_room, busy, draining, impossible)."""

    def __init__(self, scheduler: Scheduler, pages: PagePool, writer: Writer, outbox: Outbox, *, max_open: int = MAX_OPEN) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._writer = writer
        self._outbox = outbox
        self._max_open = max_open
        self._exports: dict[int, Export] = {}
        """By nonce, until no write can read their pages any more."""
        self.counters: Counter[str] = Counter()

    def open(self, sender: Peer, message: Fetch, *, is_draining: bool) -> None:
        """Begin to write what is asked for, or say that it will not be."""
        ticket = message.ticket
        if peer_of(ticket.reader) != sender:
            self.counters["foreign_message"] += 1
            return
        if ticket.nonce in self._exports:
            return  # said twice
        num_pages = self._pages.pages_for(ticket.num_tokens)
        pages = self._pages.match(message.hashes, num_pages)
        if is_draining:
            self._decline(sender, ticket, "draining", "the node is draining")
        elif len(self._exports) >= self._max_open:
            self._decline(sender, ticket, "busy", f"{len(self._exports)} exports are open, {self._max_open} may be")
        elif len(pages) < num_pages:
            held = len(pages) * self._pages.page_tokens
            self._decline(sender, ticket, "gone", f"{held} of {ticket.num_tokens} tokens are cached here")
        elif self._scheduler.has_waiting_preempted or self._pages.num_idle(pages) > self._scheduler.num_spare_pages:
            self._decline(sender, ticket, "no_room", "rows that run here may need the pages")
        else:
            self._begin(sender, ticket, pages[ticket.cached_tokens // self._pages.page_tokens :])

    def owns(self, nonce: int) -> bool:
        return nonce in self._exports

    def on_event(self, event: Acked | GaveUp | Drained) -> None:
        if isinstance(event, Drained):
            self._pages.release(self._exports.pop(event.nonce).pages)
        elif isinstance(event, Acked):
            self.counters["acked"] += 1
        else:  # the writer's AbortAck may come much later, or never
            self.counters["gave_up"] += 1
            self._outbox.message(self._exports[event.nonce].reader, Declined(event.nonce, event.reason, gave_up=True))

    @property
    def num_pinned(self) -> int:
        return sum(len(export.pages) for export in self._exports.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError when a page that a write may read is not held."""
        for nonce, export in self._exports.items():
            if not all(self._pages.num_owners(page) for page in export.pages):
                raise IntegrityError(f"export {nonce:x} reads a page that nobody holds")

    # ------------------------------------------------------------ inside

    def _begin(self, sender: Peer, ticket: Ticket, pages: list[int]) -> None:
        try:
            self._writer.open(ticket)
        except TransferError as error:
            self._decline(sender, ticket, "impossible", str(error))
            return
        self._pages.acquire(pages)
        self._exports[ticket.nonce] = Export(sender, pages)
        self._writer.push(ticket.nonce, pages, ticket.cached_tokens, ticket.num_tokens - ticket.cached_tokens)
        self._writer.finish(ticket.nonce, None, None)

    def _decline(self, sender: Peer, ticket: Ticket, why: str, reason: str) -> None:
        self.counters[why] += 1
        self._outbox.message(sender, Declined(ticket.nonce, reason))
