"""Writer: the prefill node's half of the transfer protocol (rules R1…R11 in `session`). It decides what to write when;
backends move the bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import IntegrityError, PeerUnreachable, TransferError
from pdcluster.core.lifecycle import WRITING, Writing
from pdcluster.core.messages import Abort, AbortAck, Commit, CommitAck, Ticket, TokenLogprobs
from pdcluster.transfer.backends.base import Backend, Handle, Peer, Stamp, WriteStatus
from pdcluster.transfer.copying.copy import native
from pdcluster.transfer.copying.page_pairs import are_below
from pdcluster.transfer.layout.geometry import part_bytes
from pdcluster.transfer.layout.spans import digest
from pdcluster.transfer.paths.measure import Paths
from pdcluster.transfer.protocol.ladder import Ladder
from pdcluster.transfer.protocol.session import (
    Acked,
    Clock,
    Drained,
    LocalPages,
    Send,
    Settings,
    TicketGaveUp,
    TransferStats,
    WriterEvent,
    peer_of,
    reply_to,
)
from pdcluster.transfer.protocol.writer_state import (
    Chunk,
    ChunkInFlight,
    Outgoing,
    PageFit,
    Push,
    checked_pages,
    cut,
    fit_of,
)

__all__ = ["Acked", "Drained", "Send", "TicketGaveUp", "TransferStats", "Writer", "WriterEvent"]

# Number of page kinds remembered.
MAX_FITS = 64
# Writes in flight are polled this often even without a doorbell.
NO_WAKEUP_S = 0.05


class Writer:
    """All tickets this node writes under. One thread owns it, and only that thread polls the backends' handles."""

    def __init__(
        self,
        me: Peer,
        backends: Mapping[str, Backend],
        order: Sequence[str],
        *,
        local: LocalPages,
        clock: Clock,
        settings: Settings,
        block_tokens: int = 1,
        paths: Paths | None = None,
    ) -> None:
        """local: its memories are digested.
        order: backend names, best first.
        block_tokens: readers' pages must be multiples of it.
        paths: chooses the backend; by default as measured, with the usual settings.
        """
        native()  # load now, not during the first transfer
        self._me = me
        self._backends = backends
        self._order = tuple(order)
        self._region, self._weights = local.region, local.weights
        self._shape = shape = local.shape
        self._block_tokens = block_tokens
        self._memories = [memory.cast("B") for memory in local.memories]
        self._num_pages = min(map(len, self._memories)) // shape.page_bytes
        self._clock = clock
        self._settings = settings
        self.paths = paths if paths is not None else Paths(order, clock)
        self.ladder = Ladder(self.paths, settings.trials)
        self._open: dict[int, Outgoing] = {}
        self._flights: dict[tuple[str, Handle], ChunkInFlight] = {}
        self._tombstones: dict[int, float] = {}
        # Ended tickets: reader, media whose writes were lost (R5), and how long we remember them; for ever where any
        # write was lost.
        self._answers: dict[int, tuple[Peer, tuple[str, ...], float]] = {}
        # Media of lost writes of tickets that had to be forgotten.
        self._lost_before: set[str] = set()
        # By the tickets' page_tokens, page_bytes and ranks.
        self._fits: dict[tuple[int, int, int], PageFit] = {}
        self._turns: dict[Peer, deque[int]] = {}
        self._events: list[WriterEvent] = []
        self._poll_now = False
        self._forget_at = 0.0
        self._proof_at: float | None = None
        self.counters: Counter[str] = Counter()

    # ------------------------------------------------------------ what the node asks for

    def open(self, ticket: Ticket) -> str:
        """Accept a ticket. Returns the name of the backend that would carry most of it now. Raises TransferError and
        then holds nothing.
        """
        self._forget_old()
        if self._tombstones.get(ticket.nonce, 0.0) > self._clock():
            raise TransferError(
                f"ticket {ticket.nonce:x} was aborted by its reader before it came; a new attempt needs a new ticket"
            )
        if ticket.nonce in self._open or ticket.nonce in self._answers:
            raise TransferError(f"ticket {ticket.nonce:x} was opened before; a ticket is used once")
        if ticket.weights != self._weights:
            self.counters["other_weights"] += 1
            raise TransferError(
                f"ticket {ticket.nonce:x} is for KV of the weights {ticket.weights!r}, and this node has "
                f"{self._weights!r}; a new attempt needs nodes of one version"
            )
        fit, pages = self._fit(ticket), checked_pages(ticket, self._me)
        peer, adverts = peer_of(ticket.reader), dict(ticket.reader.adverts)
        backends = self._connect(peer, adverts)
        deadline = self._clock() + ticket.deadline_s
        self._open[ticket.nonce] = Outgoing(ticket, peer, pages, adverts, backends, deadline, fit, ticket.cached_tokens)
        self._turns.setdefault(peer, deque()).append(ticket.nonce)
        self.paths.meet(peer, backends)
        return self.paths.best(peer, backends)

    def push(
        self,
        nonce: int,
        source_pages: Sequence[int],
        first_token: int,
        num_tokens: int,
        layers: tuple[int, int] | None = None,
    ) -> None:
        """Write the KV of tokens [first_token, first_token + num_tokens), which is ready in these local pages.

        The first page holds first_token. Pushes come in token order and in whole blocks; only the prompt's last may be
        partial. What the reader has cached is skipped. Nothing happens for a ticket that was given up.

        layers: (first, end) when only these are ready. The caller pushes the same tokens again with the next layers
        until all are pushed.
        """
        outgoing = self._open.get(nonce)
        if outgoing is None or outgoing.state is not Writing.OPEN:
            return
        end, pages = first_token + num_tokens, np.fromiter(source_pages, np.int64, len(source_pages))
        self._check_push(outgoing, pages, first_token, end)
        start = max(first_token, outgoing.next_token)
        if end <= start:
            return
        first_layer, end_layer = self._check_layers(outgoing, end, layers)
        push = Push(pages, first_token // self._shape.page_tokens, start, end, first_layer, end_layer)
        for leg in range(len(outgoing.fit.courses)):
            self._cut(outgoing, leg, push)
        outgoing.layered_end, outgoing.next_layer = end, end_layer
        if end_layer == self._shape.num_layers:
            outgoing.next_token, outgoing.next_layer = end, 0
        self._poll_now = True

    def finish(self, nonce: int, first_token: int | None, first_logprobs: TokenLogprobs | None) -> None:
        """Record that everything was pushed. Commit goes out when every write is done. Nothing happens for a ticket
        that was given up. first_token: None when the push answers a Fetch.
        """
        outgoing = self._open.get(nonce)
        if outgoing is None or outgoing.state is not Writing.OPEN or outgoing.finished is not None:
            return
        if outgoing.next_token != outgoing.ticket.num_tokens:
            raise IntegrityError(
                f"ticket {nonce:x} finished after {outgoing.next_token} of {outgoing.ticket.num_tokens} tokens were "
                "pushed"
            )
        outgoing.finished = (first_token, first_logprobs)
        outgoing.finish_time = self._clock()
        self._poll_now = True

    def abort(self, nonce: int, reason: str) -> None:
        """Give up a ticket. The events are GaveUp now and Drained when the source is free. Idempotent."""
        outgoing = self._open.get(nonce)
        if outgoing is not None:
            self._give_up(outgoing, reason)

    def handle(self, sender: Peer, message: CommitAck | Abort) -> None:
        """Handle a reader's message. Repeated and late messages change nothing."""
        self._poll_now = True
        outgoing = self._open.get(message.nonce)
        if outgoing is not None and outgoing.peer != sender:
            self.counters["foreign_message"] += 1  # R9
        elif isinstance(message, Abort):
            self._on_abort(sender, message, outgoing)
        elif outgoing is None or outgoing.state is not Writing.COMMITTED or message.round != outgoing.round:
            self.counters["stale_commit_ack"] += 1  # R7
        else:
            self._on_commit_ack(outgoing, message)

    def peer_gone(self, peer: Peer) -> None:
        """Handle a reader's boot that is dead or unreachable for good: give up its tickets and end its connections."""
        for backend in self._backends.values():
            backend.close(peer)
        for outgoing in [each for each in self._open.values() if each.peer == peer]:
            self._give_up(outgoing, f"node {peer.node} is gone")
        self.paths.forget(peer)

    def poll(self) -> list[WriterEvent]:
        """Take results, start writes, send and repeat Commits. Never blocks."""
        self._poll_now = False
        self._collect()
        self._expire()
        self._submit()
        self._commit()
        self._drain()
        self._seek_proof()
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        """Clock time by which `poll` must run even without a doorbell; None when nothing waits."""
        if self._events or self._poll_now:
            return self._clock()
        times = [self._clock() + NO_WAKEUP_S] if self._flights else []
        for each in self._open.values():
            if each.state is not Writing.DRAINING:
                times += [time for time in (each.deadline, each.commit_at, each.give_up_at) if time is not None]
        return min(times, default=None)

    def is_idle(self) -> bool:
        """Whether no ticket is open and none pins a source page."""
        return not self._open and not self._flights

    def check_integrity(self) -> None:
        """Raise IntegrityError when the books contradict each other."""
        for nonce, outgoing in self._open.items():
            flying = sum(flight.nonce == nonce for flight in self._flights.values())
            if flying != outgoing.in_flight:
                raise IntegrityError(
                    f"ticket {nonce:x} counts {outgoing.in_flight} writes in flight, the books hold {flying}"
                )
            if outgoing.state is Writing.COMMITTED and (flying or not all(chunk.done for chunk in outgoing.chunks)):
                raise IntegrityError(f"ticket {nonce:x} is committed with unfinished writes")
        if any(flight.nonce not in self._open for flight in self._flights.values()):
            raise IntegrityError("a write is in flight for a ticket that ended")

    # ------------------------------------------------------------ opening

    def _fit(self, ticket: Ticket) -> PageFit:
        """The fit of a ticket's pages, computed once for each kind of pages. A ticket that does not fit raises and is
        not remembered.
        """
        kind = (ticket.page_tokens, ticket.page_bytes, ticket.ranks)
        fit = self._fits.get(kind)
        if fit is None:
            fit = fit_of(ticket, self._shape, self._block_tokens)
            if len(self._fits) >= MAX_FITS:
                self._fits.clear()
            self._fits[kind] = fit
        return fit

    def _connect(self, peer: Peer, adverts: Mapping[str, bytes]) -> list[str]:
        """The backends that both ends have, in our order, from the first one that can be connected."""
        common = [name for name in self._order if name in adverts and name in self._backends]
        problems = (
            [] if common else [f"{peer.node} offers {sorted(adverts) or 'none'}, this node has {list(self._order)}"]
        )
        usable = []
        for name in common:
            try:
                self._backends[name].connect(peer, adverts[name])
                usable.append(name)
            except PeerUnreachable as error:
                problems.append(f"{name}: {error}")
        if not usable:
            raise PeerUnreachable(f"no transfer backend reaches {peer.node}: " + "; ".join(problems))
        return usable

    # ------------------------------------------------------------ pushing

    def _check_push(self, outgoing: Outgoing, pages: NDArray[np.int64], first: int, end: int) -> None:
        ticket, tokens, block = outgoing.ticket, self._shape.page_tokens, outgoing.fit.block_tokens
        ragged = end % block and end != ticket.num_tokens
        if (
            first % block
            or ragged
            or first > outgoing.next_token
            or end > ticket.num_tokens
            or outgoing.finished is not None
        ):
            raise IntegrityError(
                f"push of tokens {first}…{end} of {ticket.num_tokens} to ticket {ticket.nonce:x}, "
                f"{outgoing.next_token} is next"
            )
        needed, num_pages = -(-end // tokens) - first // tokens, self._num_pages
        if not are_below(pages, needed, num_pages):
            raise IntegrityError(
                f"push to ticket {ticket.nonce:x}: {needed} pages below {num_pages} are needed, got "
                f"{pages[:8].tolist()}…"
            )

    def _check_layers(self, outgoing: Outgoing, end: int, layers: tuple[int, int] | None) -> tuple[int, int]:
        """Check the layers of this push: they must follow those already pushed of the same tokens."""
        first, last = layers if layers is not None else (outgoing.next_layer, self._shape.num_layers)
        same_tokens = outgoing.next_layer == 0 or end == outgoing.layered_end
        if not same_tokens or first != outgoing.next_layer or not first < last <= self._shape.num_layers:
            raise IntegrityError(
                f"push of layers {first}…{last} up to token {end} to ticket {outgoing.ticket.nonce:x}: layer "
                f"{outgoing.next_layer} of "
                f"{self._shape.num_layers} up to token {outgoing.layered_end} is next"
            )
        return first, last

    def _cut(self, outgoing: Outgoing, leg: int, push: Push) -> None:
        """Cut one leg of a push into chunks that wait to be written."""
        course = outgoing.fit.courses[leg]
        for part, runs in cut(self._shape, outgoing, leg, push, self._settings):
            first = part.first_block * part.block_tokens
            num_tokens = min(part.end_block * part.block_tokens, push.end) - first
            nbytes = part_bytes(self._shape, part)
            chunk = Chunk(
                len(outgoing.chunks),
                course,
                first,
                num_tokens,
                part.first_layer,
                part.end_layer - part.first_layer,
                runs,
                nbytes,
            )
            outgoing.chunks.append(chunk)
            outgoing.waiting.append(chunk.index)

    # ------------------------------------------------------------ messages

    def _on_abort(self, sender: Peer, message: Abort, outgoing: Outgoing | None) -> None:
        if outgoing is not None:
            self._give_up(outgoing, message.reason)  # AbortAck follows when the ticket is drained
        elif message.nonce in self._answers:
            reader, lost, _ = self._answers[message.nonce]
            if reader != sender:
                self.counters["foreign_message"] += 1
            else:
                self._events.append(Send(reply_to(sender), AbortAck(message.nonce, "ended before", lost)))
        else:
            self._bury(sender, message)

    def _bury(self, sender: Peer, message: Abort) -> None:
        """R6."""
        self._forget_old()
        if len(self._tombstones) >= self._settings.max_tombstones or not 0 <= message.remaining_s < float("inf"):
            self.counters["tombstone_refused"] += 1
            return
        self._tombstones[message.nonce] = max(
            self._clock() + message.remaining_s, self._tombstones.get(message.nonce, 0.0)
        )
        self._events.append(
            Send(reply_to(sender), AbortAck(message.nonce, "never started", tuple(sorted(self._lost_before))))
        )

    def _on_commit_ack(self, outgoing: Outgoing, message: CommitAck) -> None:
        if message.refused:
            self._give_up(outgoing, f"refused by the reader: {message.refused}")
        elif not message.resend:
            self._acked(outgoing)
        elif outgoing.round >= self._settings.rounds or not all(
            0 <= index < len(outgoing.chunks) for index in message.resend
        ):
            self._give_up(outgoing, f"the reader asks for chunks {message.resend[:8]} again in round {outgoing.round}")
        else:
            self._resend(outgoing, message.resend)

    def _resend(self, outgoing: Outgoing, indexes: tuple[int, ...]) -> None:
        outgoing.state = WRITING[outgoing.state, "resend"]
        outgoing.round += 1
        outgoing.commit_at = outgoing.give_up_at = None
        for index in sorted(set(indexes)):
            self.ladder.not_verified(outgoing, outgoing.chunks[index])
            outgoing.resent += 1
            outgoing.waiting.append(index)
        self.counters["resent_chunks"] += len(set(indexes))

    def _acked(self, outgoing: Outgoing) -> None:
        nonce, now = outgoing.ticket.nonce, self._clock()
        outgoing.state = WRITING[outgoing.state, "ack"]
        started = outgoing.last_write if outgoing.first_write is None else outgoing.first_write
        stats = TransferStats(
            backend=outgoing.main_path(),
            nbytes=sum(chunk.nbytes for chunk in outgoing.chunks),
            chunks=len(outgoing.chunks),
            resent=outgoing.resent,
            transfer_s=outgoing.last_write - started,
            exposed_s=now - outgoing.finish_time,
            busy_s=outgoing.busy_s,
        )
        self._events += [Acked(nonce, stats), Drained(nonce)]
        self.counters["acked"] += 1
        self._end(outgoing)

    def _give_up(self, outgoing: Outgoing, reason: str) -> None:
        if outgoing.state is Writing.DRAINING:
            return
        outgoing.state = WRITING[outgoing.state, "abort"]
        outgoing.reason = reason
        outgoing.waiting.clear()
        self._poll_now = True
        self.counters["given_up"] += 1
        self._events.append(TicketGaveUp(outgoing.ticket.nonce, reason))

    def _end(self, outgoing: Outgoing) -> None:
        nonce = outgoing.ticket.nonce
        del self._open[nonce]
        turns = self._turns[outgoing.peer]
        turns.remove(nonce)
        if not turns:
            del self._turns[outgoing.peer]
        self._answers[nonce] = (
            outgoing.peer,
            tuple(sorted(outgoing.lost)),
            max(outgoing.deadline, self._clock()) + self._settings.commit_s,
        )

    def _forget_old(self) -> None:
        now = self._clock()
        if now < self._forget_at:
            return
        self._forget_at = now + 1.0
        self._tombstones = {nonce: until for nonce, until in self._tombstones.items() if until > now}
        self._answers = {nonce: answer for nonce, answer in self._answers.items() if answer[1] or answer[2] > now}
        lost = [nonce for nonce, answer in self._answers.items() if answer[1]]
        for nonce in lost[: -self._settings.max_lost_tickets]:
            self._lost_before.update(
                self._answers.pop(nonce)[1]
            )  # from now on an Abort of any unknown ticket may mean this one

    # ------------------------------------------------------------ what poll does

    def _collect(self) -> None:
        """Take the results of writes."""
        for key, flight in list(self._flights.items()):
            status = self._backends[flight.backend].poll(key[1])
            if status is WriteStatus.PENDING:
                continue
            outgoing = self._open[flight.nonce]
            chunk = outgoing.chunks[flight.chunk]
            if status is WriteStatus.UNKNOWN:
                self._keep_unknown(outgoing, chunk, flight)
                continue
            del self._flights[key]
            outgoing.in_flight -= 1
            outgoing.last_write = self._clock()
            if not outgoing.in_flight:
                outgoing.busy_s += outgoing.last_write - outgoing.busy_from
            if status is WriteStatus.DONE:
                self._done(outgoing, chunk, flight, key[1])
            else:
                self._ended_badly(outgoing, chunk, status, flight)

    def _keep_unknown(self, outgoing: Outgoing, chunk: Chunk, flight: ChunkInFlight) -> None:
        """R1; the chunk stays in flight, R4."""
        if not flight.is_unknown:
            flight.is_unknown = True
            self.ladder.ended_badly(outgoing.peer, chunk, WriteStatus.UNKNOWN)
        self._give_up(outgoing, f"a write by {flight.backend} has no known outcome")

    def _done(self, outgoing: Outgoing, chunk: Chunk, flight: ChunkInFlight, handle: Handle) -> None:
        backend = self._backends[flight.backend]
        digest, seconds = backend.take_digest(handle), backend.take_duration(handle)
        if flight.is_unknown:
            return  # proved too late: the ticket is given up
        if self._settings.digests:
            chunk.digest = self._digest(chunk, digest)
        self.ladder.done(outgoing.peer, chunk, seconds)

    def _digest(self, chunk: Chunk, taken: int | None) -> int:
        """taken: the digest that the mover took. The source is pinned and does not change, so it can still be digested
        now.
        """
        return taken if taken is not None else digest(self._memories[chunk.course.writer_rank], chunk.runs.sources)

    def _ended_badly(self, outgoing: Outgoing, chunk: Chunk, status: WriteStatus, flight: ChunkInFlight) -> None:
        if not flight.is_unknown:
            self.ladder.ended_badly(outgoing.peer, chunk, status)
        if status is WriteStatus.LOST:
            outgoing.lost.add(flight.backend)
            self.counters["lost_writes"] += 1
            self._give_up(outgoing, f"the connection by {flight.backend} was lost during a write")
        elif status is WriteStatus.REFUSED:
            self._give_up(outgoing, f"the reader permits no more writes (chunk {chunk.index} by {flight.backend})")
        elif outgoing.state is Writing.OPEN:
            self._write_again(outgoing, chunk)

    def _write_again(self, outgoing: Outgoing, chunk: Chunk) -> None:
        if self.ladder.next_path(outgoing, chunk) is None:
            self._give_up(outgoing, f"chunk {chunk.index} failed {chunk.trial} times, the last time by {chunk.path}")
        else:
            outgoing.waiting.appendleft(chunk.index)

    def _expire(self) -> None:
        now = self._clock()
        for outgoing in list(self._open.values()):
            if now >= outgoing.deadline:
                self._give_up(outgoing, "the ticket's deadline passed")
            elif outgoing.give_up_at is not None and now >= outgoing.give_up_at:
                self._give_up(outgoing, f"no answer to Commit for {self._settings.commit_s} s")

    def _submit(self) -> None:
        """Start writes, one chunk per ticket in turn, while the peer's window has room."""
        for peer, turns in self._turns.items():
            nbytes = runs = 0
            for flight in self._flights.values():
                if self._open[flight.nonce].peer == peer:
                    nbytes, runs = nbytes + flight.nbytes, runs + flight.runs
            idle = 0
            while idle < len(turns):
                outgoing = self._open[turns[0]]
                turns.rotate(-1)
                if not outgoing.waiting:
                    idle += 1
                    continue
                chunk = outgoing.chunks[outgoing.waiting[0]]
                full = (
                    nbytes + chunk.nbytes > self._settings.window_bytes
                    or runs + len(chunk.runs) > self._settings.window_runs
                )
                if nbytes and (full or self.paths.is_measuring(peer, outgoing.backends, chunk.nbytes)):
                    turns.rotate(1)
                    break
                idle = 0
                outgoing.waiting.popleft()
                self._write(outgoing, chunk)
                nbytes, runs = nbytes + chunk.nbytes, runs + len(chunk.runs)

    def _write(self, outgoing: Outgoing, chunk: Chunk) -> None:
        name, ticket, course = self.ladder.next_path(outgoing, chunk), outgoing.ticket, chunk.course
        assert name is not None  # a chunk whose ladder ended does not wait
        source, target = self._region + course.writer_rank, ticket.region + course.reader_rank
        if outgoing.first_write is None:
            outgoing.first_write = self._clock()
        self.ladder.begin(outgoing, chunk, name)
        stamp, backend = Stamp(ticket.nonce, chunk.index, chunk.trial, chunk.nbytes), self._backends[name]
        try:
            backend.connect(outgoing.peer, outgoing.adverts[name])  # R10
            handle = backend.write(outgoing.peer, source, target, stamp, chunk.runs, self._settings.digests)
        except PeerUnreachable:
            self.ladder.unreachable(outgoing.peer, chunk)
            self._write_again(outgoing, chunk)
            return
        self._flights[name, handle] = ChunkInFlight(ticket.nonce, chunk.index, name, chunk.nbytes, len(chunk.runs))
        if not outgoing.in_flight:
            outgoing.busy_from = self._clock()
        outgoing.in_flight += 1

    def _commit(self) -> None:
        now = self._clock()
        for outgoing in self._open.values():
            if (
                outgoing.state is Writing.OPEN
                and outgoing.finished
                and not outgoing.in_flight
                and all(chunk.done for chunk in outgoing.chunks)
            ):
                outgoing.state = WRITING[outgoing.state, "commit"]  # R1
                outgoing.commit_at, outgoing.give_up_at = now, now + self._settings.commit_s
            if outgoing.state is Writing.COMMITTED and outgoing.commit_at is not None and now >= outgoing.commit_at:
                outgoing.commit_at = now + self._settings.repeat_s  # R8
                self._events.append(Send(outgoing.ticket.reader, self._commit_message(outgoing)))

    def _commit_message(self, outgoing: Outgoing) -> Commit:
        assert outgoing.finished is not None
        return Commit(
            outgoing.ticket.nonce, outgoing.fit.block_tokens, outgoing.legs(), *outgoing.finished, round=outgoing.round
        )

    def _drain(self) -> None:
        """End given-up tickets whose writes all have an answer (R4), and tell the reader (R5)."""
        for nonce, outgoing in list(self._open.items()):
            if outgoing.state is not Writing.DRAINING or outgoing.in_flight:
                continue
            outgoing.state = WRITING[outgoing.state, "drained"]
            self._events.append(Drained(nonce))
            self._events.append(
                Send(outgoing.ticket.reader, AbortAck(nonce, outgoing.reason, tuple(sorted(outgoing.lost))))
            )
            self._end(outgoing)

    def _seek_proof(self) -> None:
        """End the connections of a write of unknown outcome past its ticket's deadline, which may yield an answer. Not
        earlier: it hurts other writes.
        """
        now, late = self._clock(), set()
        for flight in self._flights.values():
            if flight.is_unknown and now >= self._open[flight.nonce].deadline:
                late.add((self._open[flight.nonce].peer, flight.backend))
        if not late or (self._proof_at is not None and now < self._proof_at):
            return
        self._proof_at = now + self._settings.proof_s
        for peer, name in late:
            self._backends[name].close(peer)
