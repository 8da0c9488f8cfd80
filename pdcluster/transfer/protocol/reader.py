"""Reader: the decode node's half of the transfer protocol (rules R1…R11 in `session`). It owns the pages of open and
dead tickets.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import structs

from pdcluster.core.errors import IntegrityError
from pdcluster.core.lifecycle import READING, Checking, Reading
from pdcluster.core.messages import AbortAck, ChunkEntry, Commit, CommitAck, Endpoint, Ticket, pack_tokens
from pdcluster.transfer.backends.base import Arrival, Backend, Fence, Peer, Permit
from pdcluster.transfer.layout.geometry import join_spans
from pdcluster.transfer.layout.runs import SpanTable, merged
from pdcluster.transfer.layout.spans import Spans
from pdcluster.transfer.protocol.abort_notices import AbortNotices
from pdcluster.transfer.protocol.commit_coverage import covers_all
from pdcluster.transfer.protocol.rank_memory import OwnMemories, PendingAnswer, RankMemories, are_here
from pdcluster.transfer.protocol.reader_state import (
    CommitCheck,
    Incoming,
    Landing,
    are_in_place,
    in_token_order,
    is_as_seen,
    legs_seen,
    spans_of,
    stats_of,
    writable_pages,
)
from pdcluster.transfer.protocol.session import (
    Clock,
    Landed,
    LocalPages,
    ReaderEvent,
    Reclaimed,
    Send,
    Settings,
    TicketFailed,
    TransferStats,
    earliest,
    peer_of,
    reply_to,
)

__all__ = ["Landed", "Reader", "ReaderEvent", "Reclaimed", "Send", "TicketFailed", "TransferStats"]


class Reader:
    """All tickets this node issued. One thread owns it, and only that thread calls the backends' `arrivals`."""

    def __init__(
        self,
        me: Endpoint,
        backends: Mapping[str, Backend],
        order: Sequence[str],
        *,
        local: LocalPages,
        clock: Clock,
        settings: Settings,
        ranks: RankMemories | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """me: this boot's endpoint; its adverts are ignored.
        order: backends, best first.
        ranks: who computes digests; by default `local` holds the memory of all ranks.
        """
        self._me = me
        self._backends = backends
        self._order = tuple(order)
        self._region, self._weights = local.region, local.weights
        self._shape = shape = local.shape
        self._ranks: RankMemories = ranks if ranks is not None else OwnMemories(local.memories)
        self._clock = clock
        self._settings = settings
        self._random = rng if rng is not None else random.SystemRandom()
        self._tickets: dict[int, Incoming] = {}
        # Pages that are writable under an open or a quarantined ticket.
        self._is_owned = np.zeros(min(memory.nbytes for memory in local.memories) // shape.page_bytes, dtype=np.bool_)
        self._aborts = AbortNotices(settings)
        # Verified tickets: writer, the answer to a repeated Commit, and how long we remember it.
        self._answers: dict[int, tuple[Peer, CommitAck, float]] = {}
        # Answers that allow writes. They wait until every rank allows them.
        self._held: dict[int, CommitAck] = {}
        self._proof_at: float | None = None
        self._forget_at = 0.0
        self._events: list[ReaderEvent] = []
        self._poll_now = False
        self.counters: Counter[str] = Counter()

    # ------------------------------------------------------------ what the node asks for

    def open(
        self,
        request: str,
        attempt: int,
        writer: Endpoint,
        pages: Sequence[int],
        num_tokens: int,
        cached_tokens: int,
        deadline_s: float,
    ) -> Ticket:
        """Issue a ticket: `writer` may write the KV of tokens [cached_tokens, num_tokens) into `pages`, which are in
        token order from token 0.
        """
        self._forget_old()
        writable = writable_pages(self._shape, self._is_owned, pages, num_tokens, cached_tokens)
        nonce = self._random.getrandbits(64)
        ticket = Ticket(
            nonce=nonce,
            request=request,
            attempt=attempt,
            reader=structs.replace(self._me, adverts=self._adverts()),
            writer=writer,
            region=self._region,
            pages=pack_tokens(pages),
            page_tokens=self._shape.page_tokens,
            page_bytes=self._shape.page_bytes,
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            deadline_s=deadline_s,
            ranks=self._shape.ranks,
            weights=self._weights,
        )
        now = self._clock()
        incoming = Incoming(
            ticket, peer_of(writer), writable, in_token_order(self._shape, writable), now, now + deadline_s
        )
        self._aborts.readmit(incoming.writer)
        self._tickets[nonce] = incoming
        self._is_owned[writable] = True
        whole = join_spans(np.sort(writable) * self._shape.page_bytes, self._shape.page_bytes)
        self._permit(incoming, dict.fromkeys(range(self._shape.ranks), whole))
        return ticket

    def is_permitted(self, nonce: int) -> bool:
        """Whether every rank now accepts writes under the ticket. The writer must not get the ticket before. True when
        the ticket ended.
        """
        incoming = self._tickets.get(nonce)
        return incoming is None or are_here(incoming.permitted)

    def abort(self, nonce: int, reason: str) -> None:
        """Give up a ticket. The events are Failed, and Reclaimed when its pages are safe. Nothing happens when it
        already ended.
        """
        incoming = self._tickets.get(nonce)
        if incoming is not None:
            self._fail(incoming, reason)

    def handle(self, sender: Peer, message: Commit | AbortAck) -> None:
        """Handle a writer's message. Repeated and late messages get the same answer as before and change nothing."""
        self._poll_now = True
        incoming = self._tickets.get(message.nonce)
        if isinstance(message, AbortAck):
            self._on_abort_ack(sender, message, incoming)
        elif incoming is None:
            self._answer_late(sender, message)
        elif incoming.writer != sender:
            self.counters["foreign_message"] += 1  # R9
        else:
            self._on_commit(incoming, message)

    def peer_gone(self, peer: Peer) -> None:
        """Handle a writer's boot that was declared dead (lease ended, link lost for good). Its tickets fail. Later
        polls ask the media for their fences until there is proof.
        """
        self._aborts.declare_gone(peer, self._clock())
        for incoming in [each for each in self._tickets.values() if each.writer == peer]:
            self._fail(incoming, f"node {peer.node} is gone")
        self._proof_at = self._clock()
        self._poll_now = True

    def poll(self) -> list[ReaderEvent]:
        """Take arrivals, verify Commits, repeat Aborts and look for fences. Never blocks."""
        self._poll_now = False
        self._collect()
        self._expire()
        self._verify()
        self._tell_permitted()
        self._seek_proof()
        self._events += self._aborts.take_due(self._tickets, self._clock())
        if self._aborts.gone:  # `peer_gone` failed all their tickets; a later ticket makes a boot reachable again
            self._aborts.forget_gone({each.writer for each in self._tickets.values()})
        events, self._events = self._events, []
        return events

    def is_suspected(self, writer: Peer) -> bool:
        """Whether pages wait for that writer's end: it was declared dead, or left an Abort unanswered for suspect_s.
        New pages might share their fate.
        """
        return self._aborts.is_suspected(writer, self._tickets, self._clock())

    def next_deadline(self) -> float | None:
        """Clock time by which `poll` must run even without a doorbell; None when nothing waits."""
        if self._events or self._poll_now:
            return self._clock()
        return earliest(
            self._proof_at,
            self._aborts.next_deadline(),
            *(self._due(incoming) for incoming in self._tickets.values()),
        )

    @property
    def quarantined_pages(self) -> int:
        return sum(len(each.writable) for each in self._tickets.values() if each.state is Reading.ABORTING)

    @property
    def open_tickets(self) -> int:
        return sum(each.state is Reading.OPEN for each in self._tickets.values())

    def is_idle(self) -> bool:
        """Whether no page is reserved or in quarantine. A repeated Abort may remain, as it holds nothing."""
        return not self._tickets and not self._is_owned.any()

    def check_integrity(self) -> None:
        """Raise IntegrityError when the books contradict each other."""
        pages = [page for each in self._tickets.values() for page in each.writable.tolist()]
        if len(set(pages)) != len(pages):
            raise IntegrityError("a page is writable under two tickets")
        if self._is_owned.nonzero()[0].tolist() != sorted(pages):
            raise IntegrityError("the page owners and the tickets disagree")
        if any(incoming.state not in (Reading.OPEN, Reading.ABORTING) for incoming in self._tickets.values()):
            raise IntegrityError("a ticket that ended is still in the books")

    # ------------------------------------------------------------ opening

    def _adverts(self) -> tuple[tuple[str, bytes], ...]:
        return tuple((name, self._backends[name].advert()) for name in self._order)

    def _permit(self, incoming: Incoming, ranges: Mapping[int, Spans]) -> None:
        """ranges: by rank."""
        for rank, spans in ranges.items():
            permit = Permit(incoming.ticket.nonce, incoming.writer, self._region + rank, spans, self._settings.digests)
            for name in self._order:
                self._backends[name].permit(permit)
        incoming.permitted = self._ranks.mark()

    # ------------------------------------------------------------ messages

    def _on_commit(self, incoming: Incoming, message: Commit) -> None:
        if incoming.state is not Reading.OPEN:
            self._send(incoming, CommitAck(message.nonce, refused="the ticket was aborted", round=message.round))
        elif message.round in incoming.answers:
            if message.nonce not in self._held:
                self._send(incoming, incoming.answers[message.round])  # R7
        elif message.round != incoming.round:
            self.counters["wrong_round"] += 1
        elif incoming.check is None:
            incoming.check = CommitCheck(message, self._clock())

    def _answer_late(self, sender: Peer, message: Commit) -> None:
        remembered = self._answers.get(message.nonce)
        if remembered is not None and remembered[0] == sender:
            self._events.append(Send(reply_to(sender), remembered[1]))
            return
        self.counters["late_commit"] += 1
        self._events.append(
            Send(reply_to(sender), CommitAck(message.nonce, refused="unknown ticket", round=message.round))
        )

    def _on_abort_ack(self, sender: Peer, message: AbortAck, incoming: Incoming | None) -> None:
        if not set(message.lost).issubset(self._order):
            self.counters["bad_abort_ack"] += (
                1  # by a medium that none of our adverts offers: this writer's word is no proof
            )
            return
        self._aborts.answered(message.nonce, sender)
        if incoming is None:
            return  # reclaimed by a fence, or verified before the writer gave up
        if incoming.writer != sender:
            self.counters["foreign_message"] += 1  # R9
            return
        if incoming.state is Reading.OPEN:
            self._fail(incoming, f"the writer gave up: {message.reason}", tell=False)
        if incoming.state is Reading.ABORTING:
            incoming.unfenced.intersection_update(message.lost)  # R5
            if not incoming.unfenced:
                self._reclaim(incoming)

    def _send(self, incoming: Incoming, message: CommitAck) -> None:
        self._events.append(Send(incoming.ticket.writer, message))

    # ------------------------------------------------------------ endings

    def _fail(self, incoming: Incoming, reason: str, *, tell: bool = True) -> None:
        """R3: the ticket is dead from now on. It is reclaimed at once where every backend can fence a nonce. tell: send
        Aborts.
        """
        if incoming.state is not Reading.OPEN:
            return
        ticket, now = incoming.ticket, self._clock()
        incoming.state = READING[incoming.state, "abort"]
        incoming.check = None
        self._held.pop(ticket.nonce, None)
        self._events.append(TicketFailed(ticket.nonce, reason))
        self.counters["failed"] += 1
        self._poll_now = True
        if tell:
            self._aborts.add(ticket.nonce, ticket.writer, reason, incoming.deadline, now)
        incoming.unfenced = {
            name for name in self._order if self._backends[name].revoke(ticket.nonce) is not Fence.FENCED
        }
        if not incoming.unfenced:
            self._reclaim(incoming)
        elif self._proof_at is None:
            self._proof_at = now + self._settings.proof_s

    def _reclaim(self, incoming: Incoming) -> None:
        incoming.state = READING[incoming.state, "reclaim"]
        self._drop(incoming)
        self._events.append(Reclaimed(incoming.ticket.nonce))

    def _drop(self, incoming: Incoming) -> None:
        del self._tickets[incoming.ticket.nonce]
        self._is_owned[incoming.writable] = False

    def _land(self, incoming: Incoming, commit: Commit) -> None:
        nonce, now = commit.nonce, self._clock()
        incoming.state = READING[incoming.state, "verify"]
        self._drop(incoming)
        ack = CommitAck(nonce, round=commit.round)
        self._answers[nonce] = (incoming.writer, ack, max(incoming.deadline, now) + self._settings.commit_s)
        self.counters["landed"] += 1
        self._events.append(Landed(nonce, commit.first_token, commit.first_logprobs, stats_of(incoming, commit)))
        self._send(incoming, ack)

    def _forget_old(self) -> None:
        now = self._clock()
        if now >= self._forget_at:
            self._forget_at = now + 1.0
            self._answers = {nonce: answer for nonce, answer in self._answers.items() if answer[2] > now}

    # ------------------------------------------------------------ what poll does

    def _collect(self) -> None:
        for name in self._order:
            for arrival in self._backends[name].arrivals():
                self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        stamp = arrival.stamp
        incoming = self._tickets.get(stamp.nonce)
        if incoming is None or incoming.state is not Reading.OPEN:
            self.counters["late_arrival"] += 1
            return
        known, incoming.seen = incoming.arrived.get(stamp.chunk), ()
        if known is not None:
            incoming.repeated.add(stamp.chunk)
        if known is not None and known.stamp.trial >= stamp.trial:
            self.counters["duplicate_arrival"] += 1
            return
        incoming.arrived[stamp.chunk] = arrival
        incoming.last_arrival = self._clock()
        if incoming.first_arrival is None:
            incoming.first_arrival = incoming.last_arrival
        incoming.arrived_bytes += stamp.nbytes
        incoming.seen = legs_seen(self._shape, incoming, self._region, digests=self._settings.digests)

    def _expire(self) -> None:
        now = self._clock()
        for incoming in list(self._tickets.values()):
            if incoming.state is Reading.OPEN and now >= incoming.deadline:
                self._fail(incoming, "the ticket's deadline passed")

    def _due(self, incoming: Incoming) -> float | None:
        if incoming.state is not Reading.OPEN:
            return None
        check = incoming.check
        if check is None:
            return incoming.deadline
        if check.unchecked and self._num_digesting_bytes < self._settings.verify_bytes:
            return self._clock()
        if check.state in (Checking.REVOKED, Checking.DIGESTING):
            return incoming.deadline  # our ranks ring the doorbell
        return earliest(incoming.deadline, check.since + self._settings.arrival_s)

    def _verify(self) -> None:
        """Check Commits whose stamps all arrived or are overdue. One poll checks a bounded number of bytes, and no more
        are pending at ranks that answer later. Ranks work in order, so other tickets would wait behind them.
        """
        budget = self._settings.verify_bytes - self._num_digesting_bytes
        for incoming, check in [(each, each.check) for each in self._tickets.values() if each.check is not None]:
            if check.state is not Checking.DIGESTING:
                self._prepare(incoming, check)
            while check.unchecked and budget > 0:
                budget -= self._check_digest(incoming, check, check.unchecked.popleft())
            if check.is_answered:
                self._end_check(incoming, check)

    @property
    def _num_digesting_bytes(self) -> int:
        return sum(each.check.num_digesting_bytes for each in self._tickets.values() if each.check is not None)

    def _prepare(self, incoming: Incoming, check: CommitCheck) -> None:
        """Take a Commit as far as it comes: to its digests, or to the end of the ticket."""
        if check.state is Checking.RECEIVED:
            self._accept(incoming, check)
        if check.state is Checking.ARRIVING:
            self._revoke(incoming, check)
        if check.state is Checking.REVOKED and are_here(check.revoked):
            self._collect()  # what arrived before the permit was revoked
            if self._is_as_seen(incoming, check.commit):
                self._land(incoming, check.commit)
            else:
                self._begin_digests(incoming, check)

    def _is_as_seen(self, incoming: Incoming, commit: Commit) -> bool:
        """Whether the Commit equals what was seen. With a revoked permit it needs no further check."""
        return is_as_seen(self._shape, incoming, commit)

    def _accept(self, incoming: Incoming, check: CommitCheck) -> None:
        """Compare a Commit with its ticket once, while its last chunks may still land."""
        commit = check.commit
        if self._is_as_seen(incoming, commit) or covers_all(self._shape, incoming.ticket, commit):
            check.accept()
        else:
            self.counters["bad_commit"] += 1
            self._refuse(incoming, commit, "the Commit's chunks do not cover the ticket's tokens")

    def _revoke(self, incoming: Incoming, check: CommitCheck) -> None:
        """R2: revoke the permit once all stamps arrived or are overdue. The Commit promised that no write is in
        flight.
        """
        check.missing = [each for each in check.missing if not incoming.has_arrived(each)]
        if check.missing and self._clock() < check.since + self._settings.arrival_s:
            return
        for name in self._order:
            self._backends[name].revoke(incoming.ticket.nonce)
        check.revoked = self._ranks.mark()
        check.advance("revoke")

    def _begin_digests(self, incoming: Incoming, check: CommitCheck) -> None:
        check.missing = [each for each in check.landings if not incoming.has_arrived(each)]
        check.unchecked = deque(each for each in check.landings if incoming.has_arrived(each))
        check.is_in_place = self._settings.digests and are_in_place(
            self._shape, incoming, check.unchecked, self._region
        )
        check.advance("digest")

    def _check_digest(self, incoming: Incoming, check: CommitCheck, landing: Landing) -> int:
        """Request the digest of a chunk, unless it is known or digests are off. Returns the bytes that are digested for
        it.
        """
        if not self._settings.digests:
            return 0
        on_arrival = incoming.digest_on_arrival(check, landing)
        if on_arrival is not None:
            check.asked.append((landing.entry, PendingAnswer(on_arrival)))
            return 0
        spans = spans_of(self._shape, incoming, landing)
        check.asked.append((landing.entry, self._ranks.begin_digest(landing.rank, spans)))
        return landing.entry.nbytes

    def _is_intact(self, entry: ChunkEntry, answer: PendingAnswer) -> bool:
        if answer.value == entry.digest:
            return True
        self.counters["digest_mismatch"] += 1
        return False

    def _end_check(self, incoming: Incoming, check: CommitCheck) -> None:
        mismatched = (entry.index for entry, answer in check.asked if not self._is_intact(entry, answer))
        bad = (*(each.entry.index for each in check.missing), *mismatched)
        if not bad:
            self._land(incoming, check.commit)
        elif incoming.round >= self._settings.rounds:
            self._refuse(incoming, check.commit, f"{len(bad)} chunks did not verify in round {incoming.round}")
        else:
            self._ask_again(incoming, check, bad)

    def _ask_again(self, incoming: Incoming, check: CommitCheck, bad: tuple[int, ...]) -> None:
        commit = check.commit
        ack = CommitAck(commit.nonce, resend=bad, round=commit.round)
        incoming.answers[commit.round] = self._held[commit.nonce] = ack
        incoming.round += 1
        incoming.check, incoming.seen = None, ()
        incoming.resent += len(bad)
        self.counters["chunks_asked_again"] += len(bad)
        asked: dict[int, list[SpanTable]] = {}
        for landing in (each for each in check.landings if each.entry.index in bad):
            incoming.arrived.pop(landing.entry.index, None)
            asked.setdefault(landing.rank, []).append(spans_of(self._shape, incoming, landing))
        self._permit(incoming, {rank: merged(tables) for rank, tables in asked.items()})

    def _tell_permitted(self) -> None:
        for nonce in [nonce for nonce in self._held if self.is_permitted(nonce)]:
            self._send(self._tickets[nonce], self._held.pop(nonce))

    def _refuse(self, incoming: Incoming, commit: Commit, reason: str) -> None:
        self._send(incoming, CommitAck(commit.nonce, refused=reason, round=commit.round))
        self._fail(incoming, reason)

    def _seek_proof(self) -> None:
        """R3: ask the media again whether the dead tickets' writers can still write."""
        now = self._clock()
        if self._proof_at is None or now < self._proof_at:
            return
        closed: dict[tuple[Peer, str], bool] = {}
        for incoming in [each for each in self._tickets.values() if each.state is Reading.ABORTING]:
            incoming.unfenced = {name for name in incoming.unfenced if not self._has_fence(incoming, name, closed)}
            if not incoming.unfenced:
                self._reclaim(incoming)
        waiting = any(each.state is Reading.ABORTING for each in self._tickets.values())
        self._proof_at = now + self._settings.proof_s if waiting else None

    def _has_fence(self, incoming: Incoming, name: str, closed: dict[tuple[Peer, str], bool]) -> bool:
        backend, writer = self._backends[name], incoming.writer
        if backend.revoke(incoming.ticket.nonce) is Fence.FENCED:
            return True
        if writer not in self._aborts.gone:
            return False
        if (writer, name) not in closed:
            closed[writer, name] = backend.close(writer) is Fence.FENCED
        return closed[writer, name]
