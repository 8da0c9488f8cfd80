"""The decode side of a node: slots for KV of prefill nodes, and every row that runs to its end here, also in mode
local.

A slot's life: Reserve → Reserved(ticket) → Landed (its KV verified) → the row runs → Finished. When the ticket breaks,
the row is dropped at once. Its pages keep the ticket's nonce as writer until the reader reports Reclaimed. Owned by the
node loop's thread; no sockets here.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from pdcluster.core import errors
from pdcluster.core.grammar import Grammar
from pdcluster.core.messages import Failed, Finished, LegTimings, Prefill, Reserve, Reserved, Scheduled, Work
from pdcluster.core.step import StepPlan
from pdcluster.node.legs import (
    REFUSALS,
    EmittedTokens,
    EndedLeg,
    check_newest,
    key_of,
    of_router,
    refusal,
    unawaited,
)
from pdcluster.node.native.context import NodeContext
from pdcluster.node.reports.leg_records import EndedStages, LegStage
from pdcluster.node.wait_queue import WaitQueue
from pdcluster.scheduler.scheduler import Update
from pdcluster.scheduler.sequence import Sequence
from pdcluster.telemetry.tracing import Attribute
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.session import Landed, Reclaimed, peer_of
from pdcluster.transfer.protocol.session import TicketFailed as TicketFailed

# When to ask again behind a request that waits for room.
PLACE_RETRY_S = 0.1

NEWER = "a newer attempt came"


@dataclass(slots=True)
class DecodeLeg:
    """A leg of the decode side.

    nonce: the ticket under which KV still comes; None for a local leg and once it landed.
    """

    router: Peer
    request: str
    attempt: int
    key: str
    sequence: Sequence
    deadline: float
    arrived: float
    output: EmittedTokens
    nonce: int | None = None
    decode_from: float | None = None
    # Of its work; see Work.
    trace: bytes = b""
    # Its KV comes from another node.
    is_remote: bool = False


class DecodeSide:
    def __init__(self, shared: NodeContext, *, vocab_size: int) -> None:
        self._scheduler, self._pages, self._reader = shared.scheduler, shared.pages, shared.reader
        self._outbox, self._ended = shared.outbox, shared.ended
        self._clock, self._records = shared.clock, shared.records
        self._vocab_size = vocab_size
        self._line = WaitQueue()
        self._legs: dict[str, DecodeLeg] = {}
        self._by_key: dict[str, DecodeLeg] = {}
        self._by_nonce: dict[int, DecodeLeg] = {}
        # Local legs of which no step has computed anything, by key.
        self._queued: dict[str, DecodeLeg] = {}
        # Forks in the queue that wait for the KV of another request's prompt, by that request.
        self._forks: dict[str, list[DecodeLeg]] = {}

    # ------------------------------------------------------------ what a router asks

    def start_local(self, router: Peer, message: Prefill, sequence: Sequence) -> None:
        """Run a request from prompt to end on this node."""
        work = message.work
        self.cancel(work.request, work.attempt, NEWER)
        try:
            check_newest(work, self._legs.get(work.request))
            parent = self._legs.get(message.fork_of) if message.fork_of is not None else None
            sequence.parent = parent.sequence if parent is not None and parent.router == router else None
            self._scheduler.add(sequence)
        except REFUSALS as error:
            self._outbox.message(router, refusal(work, "prefill", error))
            return
        leg = self._enter(router, work, sequence)
        self._queued[leg.key] = leg
        if parent is not None and sequence.parent is not None and not parent.output.tokens:
            self._scheduler.hold(sequence)
            self._forks.setdefault(parent.request, []).append(leg)

    def reserve(self, router: Peer, message: Reserve, sequence: Sequence) -> None:
        """Reserve a slot and answer with its ticket, or refuse."""
        work = message.work
        self.cancel(work.request, work.attempt, NEWER)
        try:
            check_newest(work, self._legs.get(work.request))
            if self._reader.is_suspected(peer_of(message.writer)):
                raise errors.Overloaded(f"pages here still wait for {message.writer.node} to end", PLACE_RETRY_S)
            pages = self._take_room(router, work.request, sequence)
        except REFUSALS as error:
            self._outbox.message(router, refusal(work, "reserve", error))
            return
        leg = self._enter(router, work, sequence)
        cached, num_tokens = sequence.num_cached, len(work.token_ids) // 4
        ticket = self._reader.open(
            work.request, work.attempt, message.writer, pages, num_tokens, cached, work.deadline_s
        )
        self._pages.attach_writer(pages[cached // self._pages.page_tokens :], ticket.nonce)
        leg.nonce, leg.is_remote = ticket.nonce, True
        self._by_nonce[ticket.nonce] = leg
        self._outbox.message(router, Reserved(ticket), once=lambda: self._reader.is_permitted(ticket.nonce))

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        """End the leg if it is of this attempt or an earlier one. The request asks for no slot here any more."""
        if reason != NEWER:
            self._line.leave(request)
        leg = self._legs.get(request)
        if leg is not None and leg.attempt <= attempt:
            self._end(leg, reason)

    def cancel_router(self, router: Peer) -> None:
        self._line.leave_router(router)
        for leg in of_router(self._legs.values(), router):
            self._end(leg, "router lost")

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        """The router (re)connected. End legs that it does not name: a Cancel was lost or could not be sent."""
        self._line.leave_router(router, {request for request, _ in awaited})
        for leg in unawaited(self._legs.values(), router, awaited):
            self._end(leg, "the router no longer waits for it")

    # ------------------------------------------------------------ what the scheduler and the reader report

    def owns(self, key: str) -> bool:
        return key in self._by_key

    def on_launch(self, plan: StepPlan) -> None:
        """A step was planned. Local legs that leave the queue say so, and what they found cached.

        Their router stops the clock of the queue: a long prompt may compute for minutes. One that a stop string ends
        gets no last message.
        """
        for leg in [self._queued.pop(row.request) for row in plan.rows if row.request in self._queued]:
            self._outbox.message(leg.router, Scheduled(leg.request, leg.attempt, leg.sequence.num_cached))

    def on_update(self, update: Update) -> None:
        """The scheduler's report on one of our rows: tokens for the router, and perhaps the row's end."""
        leg = self._by_key[update.key]
        if not leg.output.tokens:
            leg.output.prompt_logprobs.extend(update.prompt_logprobs)
        if update.token is not None:
            for fork in self._forks.pop(leg.request, ()):
                self._scheduler.resume(fork.sequence)
            if leg.decode_from is None:
                leg.decode_from = self._clock()
            self._outbox.row(leg.router, leg.output.append(update.token, update.logprobs))
        if update.finished is not None:
            word = Finished(
                leg.request, leg.attempt, update.finished, leg.output.num_output, self._timings(leg), update.stop_token
            )
            self._ended.add(EndedLeg(leg.router, leg.output, word))
            self._outbox.message(leg.router, word)
            self._record(leg, update.finished)
            self._forget(leg)

    def fail(self, key: str, reason: str, *, retryable: bool = True, param: str = "", code: str = "") -> None:
        """One of our rows cannot be computed here; another node may, or else it is the request that must change."""
        leg = self._by_key.get(key)
        if leg is not None:
            code = code or (errors.PdclusterError.code if retryable else errors.BadRequest.code)
            self._outbox.message(leg.router, Failed(leg.request, leg.attempt, code, reason, retryable, param))
            self._end(leg, reason, has_failed=True)

    def on_event(self, event: Landed | TicketFailed | Reclaimed) -> None:
        if isinstance(event, Reclaimed):
            self._pages.detach_writer(event.nonce)
            return
        leg = self._by_nonce.pop(event.nonce, None)
        if isinstance(event, Landed):
            self._pages.detach_writer(event.nonce)
        if leg is None:
            return
        leg.nonce = None
        if isinstance(event, TicketFailed):
            self._break(leg, event.reason)
        elif event.first_token is None:
            self._break(leg, "the prefill node sent no first token")
        elif not 0 <= event.first_token < self._vocab_size:  # it would fail the whole step, other requests' rows too
            self._break(
                leg,
                f"the prefill node sent token {event.first_token}; this node's model has ids 0 to "
                f"{self._vocab_size - 1}",
            )
        else:
            self.on_update(self._scheduler.commit(leg.key, event.first_token, event.first_logprobs))

    # ------------------------------------------------------------ clocks and questions

    def expire(self) -> None:
        now = self._clock()
        for leg in [leg for leg in self._legs.values() if now >= leg.deadline]:
            reason = "the request's deadline passed"
            self._outbox.message(
                leg.router,
                Failed(
                    leg.request,
                    leg.attempt,
                    errors.DeadlineExceeded.code,
                    f"decode node gave up: {reason}",
                    retryable=False,
                ),
            )
            self._end(leg, reason, has_failed=True)

    def next_deadline(self) -> float | None:
        return min((leg.deadline for leg in self._legs.values()), default=None)

    def find(self, request: str, attempt: int) -> DecodeLeg | None:
        leg = self._legs.get(request)
        return leg if leg is not None and leg.attempt == attempt else None

    def keys(self) -> Iterator[str]:
        return iter(self._by_key)

    @property
    def grammars(self) -> set[Grammar]:
        """In use."""
        return {
            leg.sequence.sampling.grammar for leg in self._legs.values() if leg.sequence.sampling.grammar is not None
        }

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    @property
    def num_places(self) -> int:
        """Requests in line for a slot."""
        return len(self._line)

    # ------------------------------------------------------------ inside

    def _take_room(self, router: Peer, request: str, sequence: Sequence) -> list[int]:
        """The slot's pages; raises Overloaded, and keeps the request's place, when there is no room or somebody waits
        for it long enough."""
        now = self._clock()
        try:
            if not self._line.may_try(request, now):
                raise errors.Overloaded("requests that asked earlier wait for a slot; retry later", PLACE_RETRY_S)
            pages = self._scheduler.reserve(sequence)
        except errors.Overloaded as error:
            self._line.refused(request, router, now, error.retry_after_s)
            raise
        self._line.served(request)
        return pages

    def _enter(self, router: Peer, work: Work, sequence: Sequence) -> DecodeLeg:
        now = self._clock()
        leg = DecodeLeg(
            router,
            work.request,
            work.attempt,
            key_of(work),
            sequence,
            now + work.deadline_s,
            now,
            EmittedTokens.of(work),
            trace=work.trace,
        )
        self._legs[leg.request] = self._by_key[leg.key] = leg
        return leg

    def _break(self, leg: DecodeLeg, reason: str) -> None:
        self._outbox.message(
            leg.router, Failed(leg.request, leg.attempt, errors.TransferError.code, reason, retryable=True)
        )
        self._end(leg, reason, has_failed=True)

    def _end(self, leg: DecodeLeg, reason: str, *, has_failed: bool = False) -> None:
        """Drop the row. Pages of an open ticket stay quarantined until the reader reports Reclaimed. Idempotent. Forks
        that wait for its KV end with it.
        """
        if self._by_key.get(leg.key) is not leg:
            return
        if leg.nonce is not None:
            self._by_nonce.pop(leg.nonce, None)
            self._reader.abort(leg.nonce, reason)
        self._scheduler.cancel(leg.key)
        self._record(leg, reason, has_failed=has_failed)
        self._forget(leg)

    def _forget(self, leg: DecodeLeg) -> None:
        del self._legs[leg.request], self._by_key[leg.key]
        self._queued.pop(leg.key, None)
        for forks in self._forks.values():
            if leg in forks:
                forks.remove(leg)
        for fork in self._forks.pop(leg.request, ()):
            reason = "the choice whose KV it was to share has ended here"
            self._outbox.message(
                fork.router, Failed(fork.request, fork.attempt, errors.Overloaded.code, reason, retryable=True)
            )
            self._end(fork, reason)

    def _record(self, leg: DecodeLeg, reason: str, *, has_failed: bool = False) -> None:
        if self._records.wants(leg.trace):
            name = "decode" if leg.is_remote else "local"
            self._records.ended(
                EndedStages(name, leg.request, leg.attempt, leg.trace, self._stages(leg), reason, has_failed)
            )

    def _stages(self, leg: DecodeLeg) -> list[LegStage]:
        """The leg's life until now."""
        now, first, sequence = self._clock(), leg.decode_from, leg.sequence
        start = now if first is None else first
        cached: dict[str, Attribute] = {"pdcluster.cached_tokens": sequence.num_cached}
        if leg.is_remote:
            stages = [LegStage("reserve", leg.arrived, start, cached)]
        else:
            scheduled = start if sequence.first_scheduled is None else sequence.first_scheduled
            stages = [LegStage("queue", leg.arrived, scheduled), LegStage("prefill", scheduled, start, cached)]
        if first is not None:
            stages.append(LegStage("decode", first, now, {"pdcluster.tokens": max(len(leg.output.tokens) - 1, 0)}))
        return stages

    def _timings(self, leg: DecodeLeg) -> LegTimings:
        now = self._clock()
        scheduled = leg.sequence.first_scheduled
        first = leg.decode_from if leg.decode_from is not None else now
        return LegTimings(
            queue_s=max(scheduled - leg.arrived, 0.0) if scheduled is not None else 0.0,
            prefill_s=max(first - scheduled, 0.0) if scheduled is not None else 0.0,
            decode_s=now - first,
            decode_tokens=max(len(leg.output.tokens) - 1, 0),
            cached_tokens=leg.sequence.num_cached,
            pulled_tokens=min(leg.sequence.num_pulled, leg.sequence.num_cached),
        )
