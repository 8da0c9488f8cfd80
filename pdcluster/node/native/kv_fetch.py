"""Pulls of KV between nodes. The reading end fetches KV of a prompt that another node has cached, before it is
computed.

A pull's life: a Prefill names a holder. The sequence is held in the queue. Pages are taken for the tokens that the
cache lacks. The holder may write to them under a ticket, and Fetch asks it to. The KV is verified and published. The
sequence is resumed and finds a longer cached prefix. A pull fails no request and costs it at most `pull_s`: whatever
goes wrong, the prompt is computed.

A pull is all or nothing. Its digests come with its Commit, so its pages are right only then. Missing chunks are asked
for again. A pull that ends without all of them publishes no page. What was cached before stays.

While it is open, the pages belong to the pull alone. At its end, published pages stay cached, and pages that a writer
may still write to are quarantined until the reader reports Reclaimed. Owned by the node loop's thread; no sockets here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster.core.errors import IntegrityError, TransferError
from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import HASH_BYTES, Declined, Fetch, Pull, Ticket
from pdcluster.kv.pages import PagePool
from pdcluster.node.outbox import Outbox
from pdcluster.scheduler.scheduler import Scheduler
from pdcluster.scheduler.sequence import Sequence
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.breaker import Breaker, BreakerSettings
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import Acked, Drained, Landed, Reclaimed, TicketFailed, TicketGaveUp, peer_of
from pdcluster.transfer.protocol.writer import Writer

logger = logging.getLogger(__name__)

# When a holder is avoided for a while: each failure costs a request its time.
BREAKER = BreakerSettings(failures=2, window_s=30.0, pause_s=5.0)

# Holders judged at a time. A gone boot is forgotten when its link ends, but a router may name one that never had a
# link.
MAX_HOLDERS = 1024

# Ends that speak for the holder.
WELL = ("ok", "declined")


@dataclass(slots=True)
class PullInProgress:
    """One pull.

    pages: in token order from the prompt's first on, all held while it is open. The first num_cached were cached here.
    is_cut: the request's own deadline leaves it less than `pull_s`.
    """

    sequence: Sequence
    holder: Peer
    nonce: int
    pages: list[int]
    num_cached: int
    began: float
    deadline: float
    is_cut: bool
    is_open: bool = True


class FetchSide:
    """The reading end.

    counters: pulls by how they ended (ok, declined, failed, expired, cancelled), and why others did not begin
    (needless, no_room, avoided).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pages: PagePool,
        reader: Reader,
        outbox: Outbox,
        *,
        pull_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._reader = reader
        self._outbox = outbox
        self._pull_s = pull_s
        self._clock = clock
        # By nonce, until the ticket's writer can write no more.
        self._pulls: dict[int, PullInProgress] = {}
        self._breakers: dict[Peer, Breaker] = {}
        self.counters: Counter[str] = Counter()

    # ------------------------------------------------------------ what the loop asks for

    def start(self, sequence: Sequence, pull: Pull, deadline_s: float) -> None:
        """Fetch what the holder has beyond this node's cache, if there is room. The sequence is queued already, unless
        it was refused.
        """
        if self._scheduler.find(sequence.key) is not sequence:
            return
        num_pages = self._wanted(sequence, pull.num_tokens)
        cached = self._pages.match(sequence.hashes, num_pages)
        if len(cached) == num_pages:
            self.counters["needless"] += 1
        elif self._is_avoided(holder := peer_of(pull.holder)) or self._reader.is_suspected(holder):
            self.counters["avoided"] += 1
        elif (fresh := self._take(cached, num_pages - len(cached))) is None:
            self.counters["no_room"] += 1
        else:
            self._open(sequence, pull, cached, fresh, min(self._pull_s, deadline_s))

    def owns(self, nonce: int) -> bool:
        return nonce in self._pulls

    def on_declined(self, sender: Peer, message: Declined) -> None:
        pulling = self._pulls.get(message.nonce)
        if pulling is None or not pulling.is_open:
            return  # it ended before
        if pulling.holder != sender:
            self.counters["foreign_message"] += 1
            return
        self._abort(pulling, message.reason, "failed" if message.gave_up else "declined")

    def on_event(self, event: Landed | TicketFailed | Reclaimed) -> None:
        """A ticket of ours changed."""
        pulling = self._pulls[event.nonce]
        if isinstance(event, TicketFailed):
            if pulling.is_open:
                self._end(pulling, "expired" if self._clock() >= pulling.deadline else "failed", event.reason)
            return
        self._pages.detach_writer(event.nonce)
        del self._pulls[event.nonce]
        if isinstance(event, Landed) and pulling.is_open:
            pulling.sequence.num_pulled = self._publish(pulling) * self._pages.page_tokens
            self._end(pulling, "ok")

    def expire(self) -> None:
        """End pulls whose sequences ended. The reader keeps the deadlines of tickets."""
        for pulling in [
            each for each in self._pulls.values() if each.is_open and each.sequence.state is not Residence.HELD
        ]:
            self._abort(pulling, "the request ended", "cancelled")

    def forget(self, peer: Peer) -> None:
        """That boot is gone."""
        self._breakers.pop(peer, None)

    @property
    def num_holders(self) -> int:
        """Holders whose past pulls are remembered."""
        return len(self._breakers)

    @property
    def num_open(self) -> int:
        return sum(pulling.is_open for pulling in self._pulls.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError when the books contradict each other."""
        for nonce, pulling in self._pulls.items():
            if not pulling.is_open and pulling.pages:
                raise IntegrityError(f"pull {nonce:x} is over, but holds {len(pulling.pages)} pages")
            for page in pulling.pages[pulling.num_cached :]:
                owners, writer = self._pages.num_owners(page), self._pages.writer_of(page)
                if owners != 1 or writer != nonce:
                    raise IntegrityError(f"page {page} of pull {nonce:x} has {owners} owners and writer {writer}")

    # ------------------------------------------------------------ beginning

    def _wanted(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages of the prefix that the sequence could use. Its last token is always computed here, and with prompt
        logprobs all are.
        """
        if sequence.wants_prompt_logprobs:
            return 0
        usable = min(num_tokens, sequence.num_tokens - 1)
        sequence.extend_hashes(min(num_tokens, sequence.num_tokens))
        return min(usable, len(sequence.hashes) // HASH_BYTES * self._pages.block_tokens) // self._pages.page_tokens

    def _take(self, cached: list[int], num_fresh: int) -> list[int] | None:
        """Take fresh pages and hold the cached ones before them; None when others need them more."""
        pages = self._pages
        if (
            self._scheduler.has_waiting_preempted
            or num_fresh + pages.num_idle(cached) > self._scheduler.num_spare_pages
        ):
            return None
        pages.acquire(cached)
        fresh = pages.allocate(num_fresh)
        assert fresh is not None
        return fresh

    def _open(self, sequence: Sequence, pull: Pull, cached: list[int], fresh: list[int], seconds: float) -> None:
        now, page_tokens, holder, pages = self._clock(), self._pages.page_tokens, peer_of(pull.holder), cached + fresh
        ticket = self._reader.open(
            sequence.request, sequence.attempt, pull.holder, pages, len(pages) * page_tokens,
            len(cached) * page_tokens, seconds
        )  # fmt: skip
        self._pages.attach_writer(fresh, ticket.nonce)
        self._scheduler.hold(sequence)
        self._breaker(holder).begin(now)
        self._pulls[ticket.nonce] = PullInProgress(
            sequence, holder, ticket.nonce, pages, len(cached), now, now + seconds, seconds < self._pull_s
        )
        # All that the holder has: its pages may be larger, and are named by their last hash.
        num_hashes = pull.num_tokens // self._pages.block_tokens
        fetch = Fetch(ticket, bytes(sequence.hashes[: num_hashes * HASH_BYTES]))
        self._outbox.message(pull.holder, fetch, once=lambda: self._reader.is_permitted(ticket.nonce))

    def _is_avoided(self, holder: Peer) -> bool:
        breaker = self._breakers.get(holder)
        return breaker is not None and not breaker.has_room(self._clock())

    def _breaker(self, holder: Peer) -> Breaker:
        if holder not in self._breakers and len(self._breakers) >= MAX_HOLDERS:
            del self._breakers[next(iter(self._breakers))]  # the oldest one
        return self._breakers.setdefault(holder, Breaker(BREAKER))

    # ------------------------------------------------------------ ends

    def _publish(self, pulling: PullInProgress) -> int:
        """Publish the pages, and return how many. An earlier page with the same contents stays. None behind a forgotten
        page.
        """
        hashes, width = pulling.sequence.hashes, self._pages.page_tokens // self._pages.block_tokens * HASH_BYTES
        for index in range(pulling.num_cached, len(pulling.pages)):
            if index and not self._pages.is_published(pulling.pages[index - 1]):
                return index - pulling.num_cached
            start = index * width
            parent = bytes(hashes[start - HASH_BYTES : start]) if index else None
            pulling.pages[index] = self._pages.publish(
                pulling.pages[index], bytes(hashes[start : start + width]), parent
            )
        return len(pulling.pages) - pulling.num_cached

    def _abort(self, pulling: PullInProgress, reason: str, result: str) -> None:
        self._reader.abort(pulling.nonce, reason)
        self._end(pulling, result, reason)

    def _end(self, pulling: PullInProgress, result: str, reason: str = "") -> None:
        """Give up the pages, and let the sequence go on with what is cached now."""
        now, breaker, key, node = (
            self._clock(),
            self._breakers.get(pulling.holder),
            pulling.sequence.key,
            pulling.holder.node,
        )
        pulling.is_open = False
        self._pages.release(pulling.pages)
        pulling.pages = []
        if pulling.sequence.state is Residence.HELD:
            self._scheduler.resume(pulling.sequence)
        if breaker is not None and result in WELL:  # None: that boot is gone
            breaker.succeeded(pulling.began, now)
        elif breaker is not None and result != "cancelled" and not (result == "expired" and pulling.is_cut):
            breaker.failed(pulling.began, now)
        self.counters[result] += 1
        if result != "ok":
            logger.info("pull for %s from node %s: %s after %.3f s: %s", key, node, result, now - pulling.began, reason)


# The writing end of pulls pins cached KV that another node asks for by its block hashes, and writes it under that
# node's ticket.
#
# An export's life: Fetch; pages are found and pinned; everything is pushed, and Commit goes out; Acked, or GaveUp,
# which the reader is told; Drained, and the pages are unpinned. A node without the KV, or without room to
# pin it, answers Declined. Then the other node computes. A draining node gives what it has: it is about to be lost.
# Nothing is computed here and no request is known.

# Exports at a time. Others are declined.
MAX_OPEN = 64


@dataclass(frozen=True, slots=True)
class Export:
    """One export.

    pages: the source, one reference each.
    """

    reader: Peer
    pages: list[int]


class ExportSide:
    """The writing end.

    counters: exports by how they ended (acked, gave_up), and what was declined (gone, no_room, busy,
    impossible).
    """

    def __init__(
        self, scheduler: Scheduler, pages: PagePool, writer: Writer, outbox: Outbox, *, max_open: int = MAX_OPEN
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._writer = writer
        self._outbox = outbox
        self._max_open = max_open
        # By nonce, until no write can read their pages.
        self._exports: dict[int, Export] = {}
        self.counters: Counter[str] = Counter()

    def open(self, sender: Peer, message: Fetch) -> None:
        """Begin to write what is asked for, or decline."""
        ticket = message.ticket
        if peer_of(ticket.reader) != sender:
            self.counters["foreign_message"] += 1
            return
        if ticket.nonce in self._exports:
            return  # a repeated message
        num_pages = self._pages.pages_for(ticket.num_tokens)
        pages = self._pages.match(message.hashes, num_pages)
        if len(self._exports) >= self._max_open:
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

    def on_event(self, event: Acked | TicketGaveUp | Drained) -> None:
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
