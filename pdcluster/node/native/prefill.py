"""The prefill side of a node: prompts for remote decode nodes. Their KV is pushed under a ticket, or parked until one
comes.

A leg's life: Prefill → the scheduler computes chunks → token 1 goes to the router → parked. Deliver may come at any
time. From then on every computed page is pushed. The leg ends with Acked (Delivered to the router), Cancel, Release, or
its parking deadline, which runs while no ticket is open.

Pages under a write are pinned (one reference each per ticket) until the writer reports Drained, whatever becomes of the
leg. So a source page that a write may read is never reused. Owned by the node loop's thread; no sockets here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from pdcluster.core import errors
from pdcluster.core.grammar import Grammar
from pdcluster.core.messages import (
    Deliver,
    Delivered,
    Failed,
    Finished,
    LegTimings,
    Prefill,
    Refused,
    RefusedLeg,
    Scheduled,
    Ticket,
    TokenLogprobs,
)
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
from pdcluster.node.parking import ParkedKV
from pdcluster.node.reports.leg_records import EndedStages, LegStage
from pdcluster.scheduler.scheduler import Update
from pdcluster.scheduler.sequence import Sequence
from pdcluster.telemetry.tracing import Attribute
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.session import Acked, Drained, TicketGaveUp, TransferStats

# In how many groups of layers the last tokens of a prompt leave. Pure arithmetic over measured bandwidth.
#
# A transfer adds the part that cannot start before the last layer is computed: with g equal groups about bytes / (g ×
# bandwidth). Each group has a fixed cost. The sum is least at g = √(bytes / (bandwidth × cost of a group)).

FIRST_GUESS_BYTES_S = 2e9
SMALLEST_SAMPLE_BYTES = 1 << 18
WEIGHT = 0.3


class LayerGroups:
    """Owned by the node loop's thread.

    group_s: fixed seconds of one more group (submit, wake-up, stamp).
    """

    def __init__(self, num_layers: int, page_bytes: int, *, group_s: float = 0.0004) -> None:
        self.num_layers = num_layers
        self._page_bytes = page_bytes
        self._group_s = group_s
        self._bandwidth: dict[str, float] = {}

    def observe(self, stats: TransferStats) -> None:
        """Learn a backend's bandwidth from a good transfer. Small ones say more about fixed costs."""
        if stats.nbytes < SMALLEST_SAMPLE_BYTES or stats.busy_s <= 0:
            return
        sample = stats.nbytes / stats.busy_s
        known = self._bandwidth.get(stats.backend, sample)
        self._bandwidth[stats.backend] = known + WEIGHT * (sample - known)

    def bandwidth(self, backend: str) -> float:
        """Bytes per second."""
        return self._bandwidth.get(backend, FIRST_GUESS_BYTES_S)

    def milestones(self, num_pages: int, backend: str) -> tuple[int, ...]:
        """Layer counts after which to send these pages' layers. The rest leaves with the end of the step. Empty for a
        small prompt.
        """
        groups = round(math.sqrt(num_pages * self._page_bytes / (self.bandwidth(backend) * self._group_s)))
        groups = min(max(groups, 1), self.num_layers)
        return tuple(self.num_layers * index // groups for index in range(1, groups))


# Described in a leg's record.
MAX_FAILED_TRANSFERS = 8

# Retry hint of a refused delivery: the KV is parked, and another ticket may come at once.
STOPPED_BY_PEER_S = 0.05


@dataclass(slots=True)
class PrefillLeg:
    router: Peer
    request: str
    attempt: int
    key: str
    sequence: Sequence
    num_tokens: int
    deadline: float
    arrived: float
    output: EmittedTokens
    # Since finished KV last had a ticket.
    parking_deadline: float | None = None
    ticket: Ticket | None = None
    backend: str = ""
    # Tokens before it were pushed. Of those from it on, `layers_pushed` layers were.
    pushed: int = 0
    layers_pushed: int = 0
    source: list[int] = field(default_factory=list)
    # The writer was told that all of the ticket's tokens were pushed.
    is_finished: bool = False
    first_token: int | None = None
    first_logprobs: TokenLogprobs | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    # Since when the current ticket is here, and what its transfer took once it is done.
    ticket_at: float | None = None
    stats: TransferStats | None = None
    # Transfers that came to nothing.
    failed_transfers: list[LegStage] = field(default_factory=list)
    # Of its work; see Work.
    trace: bytes = b""


@dataclass(slots=True)
class Pins:
    """Source pages of one ticket that a write may still read."""

    pages: list[int] = field(default_factory=list)


class PrefillSide:
    def __init__(
        self,
        shared: NodeContext,
        *,
        groups: LayerGroups,
        parking: ParkedKV,
    ) -> None:
        self._scheduler, self._pages, self._writer = shared.scheduler, shared.pages, shared.writer
        self._outbox, self._ended = shared.outbox, shared.ended
        self._clock, self._records = shared.clock, shared.records
        self._groups = groups
        self._parking = parking
        self._legs: dict[str, PrefillLeg] = {}
        self._by_key: dict[str, PrefillLeg] = {}
        self._by_nonce: dict[int, PrefillLeg] = {}
        # Legs that the scheduler did not take from its queue yet.
        self._queued: dict[str, PrefillLeg] = {}
        self._pins: dict[int, Pins] = {}
        # Legs whose last chunk the running step computes, and which send its layers in groups.
        self._layered: list[PrefillLeg] = []

    # ------------------------------------------------------------ what a router asks

    def start(self, router: Peer, message: Prefill, sequence: Sequence) -> None:
        """Queue a prompt for computing. Answers Refused when the node cannot take it."""
        work = message.work
        self.cancel(work.request, work.attempt, "a newer attempt came")
        try:
            check_newest(work, self._legs.get(work.request))
            self._parking.check_room()
            self._scheduler.add(sequence)
        except REFUSALS as error:
            self._outbox.message(router, refusal(work, "prefill", error))
            return
        now = self._clock()
        leg = PrefillLeg(
            router,
            work.request,
            work.attempt,
            key_of(work),
            sequence,
            len(work.token_ids) // 4,
            now + work.deadline_s,
            now,
            EmittedTokens.of(work),
            trace=work.trace,
        )
        self._legs[leg.request] = self._by_key[leg.key] = self._queued[leg.key] = leg

    def deliver(self, router: Peer, message: Deliver) -> None:
        """Start pushing under a ticket. An earlier ticket of the request is given up: its decode node is gone or
        full.
        """
        ticket = message.ticket
        leg = self._legs.get(ticket.request)
        if leg is None or leg.router != router:
            self._refuse(router, ticket.request, ticket.attempt, "deliver", "this node has no KV for the request", 0.0)
            return
        if leg.ticket is not None and leg.ticket.nonce == ticket.nonce:
            return  # repeated, because the router could not know that the first one came
        self._drop_ticket(leg, "a newer ticket came")
        if ticket.num_tokens != leg.num_tokens:
            self._refuse(
                router,
                ticket.request,
                ticket.attempt,
                "deliver",
                f"the ticket is for {ticket.num_tokens} tokens, not {leg.num_tokens}",
                0.0,
            )
            return
        try:
            leg.backend = self._writer.open(ticket)
        except errors.TransferError as error:
            self._refuse(router, ticket.request, ticket.attempt, "deliver", str(error), STOPPED_BY_PEER_S)
            return
        leg.ticket, leg.ticket_at = ticket, self._clock()
        leg.pushed, leg.layers_pushed, leg.is_finished = ticket.cached_tokens, 0, False
        self._by_nonce[ticket.nonce] = leg
        self._pins[ticket.nonce] = Pins()
        self._advance(leg)

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        """End the leg if it is of this attempt or an earlier one. Pages under a write stay pinned."""
        leg = self._legs.get(request)
        if leg is None or leg.attempt > attempt:
            return
        self._end(leg, reason)

    def release(self, request: str) -> None:
        leg = self._legs.get(request)
        if leg is not None and leg.first_token is not None:
            self._end(leg, "released")

    def cancel_router(self, router: Peer) -> None:
        """The router's lease ended: nobody waits for its requests."""
        for leg in of_router(self._legs.values(), router):
            self._end(leg, "router lost")

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        """The router (re)connected. End legs that it does not name: a Cancel was lost or could not be sent."""
        for leg in unawaited(self._legs.values(), router, awaited):
            self._end(leg, "the router no longer waits for it")

    # ------------------------------------------------------------ what the scheduler and the writer report

    def owns(self, key: str) -> bool:
        return key in self._by_key

    def on_launch(self, plan: StepPlan) -> None:
        """A step was planned. Legs that left the queue report it, and push what was cached."""
        now = self._clock()
        for leg in [self._queued.pop(row.request) for row in plan.rows if row.request in self._queued]:
            leg.scheduled_at = now
            self._outbox.message(leg.router, Scheduled(leg.request, leg.attempt, leg.sequence.num_cached))
            self._advance(leg)

    def milestones(self, plan: StepPlan) -> tuple[int, ...]:
        """Layer counts of the step after which something can leave. A ticket may still come while it runs."""
        self._layered.clear()
        milestones: set[int] = set()
        for row in plan.rows:
            leg = self._by_key.get(row.request)
            if leg is None or row.sampling is None:
                continue
            own = self._groups.milestones(
                self._pages.pages_for(leg.num_tokens) - row.start // self._pages.page_tokens, leg.backend
            )
            if own:
                self._layered.append(leg)
                milestones.update(own)
        return tuple(sorted(milestones))

    def on_layers(self, layers_done: int) -> None:
        """A step runs: push the layers of last tokens that it computed."""
        for leg in self._layered:
            if leg.ticket is not None and layers_done > leg.layers_pushed and leg.pushed < leg.num_tokens:
                self._push(leg, leg.num_tokens, (leg.layers_pushed, layers_done))

    def on_step(self, plan: StepPlan) -> None:
        """A step was taken in: push what it computed. Legs without a row in it have nothing new."""
        for leg in [self._by_key[row.request] for row in plan.rows if row.request in self._by_key]:
            self._advance(leg)

    def on_update(self, update: Update) -> None:
        """The scheduler's report on one of our rows: a chunk done, or token 1."""
        leg = self._by_key[update.key]
        if update.token is None:
            return
        leg.output.prompt_logprobs.extend(update.prompt_logprobs)
        leg.first_token, leg.first_logprobs = update.token, update.logprobs
        leg.first_token_at = self._clock()
        self._outbox.row(leg.router, leg.output.append(update.token, update.logprobs))
        if update.finished is not None:
            word = Finished(
                leg.request, leg.attempt, update.finished, leg.output.num_output, self._timings(leg), update.stop_token
            )
            self._ended.add(EndedLeg(leg.router, leg.output, word))
            self._outbox.message(leg.router, word)
            self._end(leg, "finished with its first token")
            return
        self._park(leg, update.sequence)
        self._advance(leg)

    def fail(self, key: str, reason: str, *, retryable: bool = True, param: str = "", code: str = "") -> None:
        """One of our rows cannot be computed here. Another node may, or the request must change."""
        leg = self._by_key.get(key)
        if leg is not None:
            code = code or (errors.PdclusterError.code if retryable else errors.BadRequest.code)
            self._outbox.message(leg.router, Failed(leg.request, leg.attempt, code, reason, retryable, param))
            self._end(leg, reason, has_failed=True)

    def on_event(self, event: Acked | TicketGaveUp | Drained) -> None:
        if isinstance(event, Drained):
            self._pages.release(self._pins.pop(event.nonce, Pins()).pages)
            return
        leg = self._by_nonce.pop(event.nonce, None)
        if leg is None:
            return
        ticket, leg.ticket = leg.ticket, None
        assert ticket is not None
        if isinstance(event, TicketGaveUp):
            self._note_failed_transfer(leg, event.reason)
            self._start_parking_clock(leg)
            self._refuse(leg.router, leg.request, ticket.attempt, "deliver", event.reason, STOPPED_BY_PEER_S)
            return
        self._groups.observe(event.stats)
        leg.stats = event.stats
        word = Delivered(leg.request, leg.attempt, self._timings(leg, event.stats))
        self._ended.add(EndedLeg(leg.router, leg.output, word))
        self._outbox.message(leg.router, word)
        self._end(leg, "delivered")

    # ------------------------------------------------------------ clocks and questions

    def expire(self) -> None:
        """End legs past their request's or parking deadline."""
        now = self._clock()
        for leg in [leg for leg in self._legs.values() if now >= self._limit(leg)]:
            is_late = now >= leg.deadline
            reason = (
                "the request's deadline passed"
                if is_late
                else f"no decode node took the KV within {self._parking.deadline_s:g} s"
            )
            code = errors.DeadlineExceeded.code if is_late else errors.Overloaded.code
            word = Failed(leg.request, leg.attempt, code, f"prefill node gave up: {reason}", retryable=not is_late)
            self._outbox.message(leg.router, word)
            self._end(leg, reason, has_failed=True)

    def next_deadline(self) -> float | None:
        return min((self._limit(leg) for leg in self._legs.values()), default=None)

    def find(self, request: str, attempt: int) -> PrefillLeg | None:
        leg = self._legs.get(request)
        return leg if leg is not None and leg.attempt == attempt else None

    def keys(self) -> Iterator[str]:
        return iter(self._by_key)

    @property
    def grammars(self) -> set[Grammar]:
        """Grammars in use."""
        return {
            leg.sequence.sampling.grammar for leg in self._legs.values() if leg.sequence.sampling.grammar is not None
        }

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    @property
    def num_pinned(self) -> int:
        return sum(len(pins.pages) for pins in self._pins.values())

    @property
    def num_parked_pages(self) -> int:
        return self._parking.num_pages

    # ------------------------------------------------------------ inside

    def _advance(self, leg: PrefillLeg) -> None:
        """Push full computed pages. With token 1 also the last page, and the commit."""
        if leg.ticket is None:
            return
        page_tokens = self._pages.page_tokens
        end = leg.num_tokens if leg.first_token is not None else leg.sequence.num_computed // page_tokens * page_tokens
        if end > leg.pushed:
            self._push(leg, end, (leg.layers_pushed, self._groups.num_layers))
        if leg.first_token is not None and not leg.is_finished:
            leg.is_finished = True
            self._writer.finish(leg.ticket.nonce, leg.first_token, leg.first_logprobs)

    def _push(self, leg: PrefillLeg, end: int, layers: tuple[int, int]) -> None:
        """Pass layers [first, end) of the unpushed tokens to the writer, and pin their pages."""
        assert leg.ticket is not None
        page_tokens, nonce = self._pages.page_tokens, leg.ticket.nonce
        if not leg.layers_pushed:  # otherwise the groups go on with the pages of the first one, which are pinned
            leg.source = leg.sequence.pages[leg.pushed // page_tokens : -(-end // page_tokens)].tolist()
            self._pages.acquire(leg.source)
            self._pins[nonce].pages.extend(leg.source)
        self._writer.push(nonce, leg.source, leg.pushed, end - leg.pushed, layers)
        leg.layers_pushed = layers[1]
        if leg.layers_pushed == self._groups.num_layers:
            leg.pushed, leg.layers_pushed = end, 0

    def _drop_ticket(self, leg: PrefillLeg, reason: str) -> None:
        if leg.ticket is not None:
            self._by_nonce.pop(leg.ticket.nonce, None)
            self._writer.abort(leg.ticket.nonce, reason)
            leg.ticket = None
            self._note_failed_transfer(leg, reason)
            self._start_parking_clock(leg)

    # ------------------------------------------------------------ parking

    def _park(self, leg: PrefillLeg, sequence: Sequence) -> None:
        self._parking.enter(leg.key, sequence.pages.tolist())
        self._scheduler.admit_remote = not self._parking.is_full
        self._start_parking_clock(leg)

    def _start_parking_clock(self, leg: PrefillLeg) -> None:
        if leg.first_token is not None:
            leg.parking_deadline = self._clock() + self._parking.deadline_s

    # ------------------------------------------------------------ ends

    def _end(self, leg: PrefillLeg, reason: str, *, has_failed: bool = False) -> None:
        self._drop_ticket(leg, reason)
        if self._records.wants(leg.trace):
            stages = self._stages(leg)
            self._records.ended(EndedStages("prefill", leg.request, leg.attempt, leg.trace, stages, reason, has_failed))
        self._scheduler.cancel(leg.key)
        self._parking.leave(leg.key)
        self._scheduler.admit_remote = not self._parking.is_full
        self._queued.pop(leg.key, None)
        del self._legs[leg.request], self._by_key[leg.key]

    def _limit(self, leg: PrefillLeg) -> float:
        if leg.ticket is not None or leg.parking_deadline is None:
            return leg.deadline
        return min(leg.deadline, leg.parking_deadline)

    def _refuse(
        self, router: Peer, request: str, attempt: int, leg: RefusedLeg, reason: str, retry_after_s: float
    ) -> None:
        self._outbox.message(router, Refused(request, attempt, leg, reason, retry_after_s))

    def _note_failed_transfer(self, leg: PrefillLeg, reason: str) -> None:
        since, leg.ticket_at = leg.ticket_at, None
        if since is not None and len(leg.failed_transfers) < MAX_FAILED_TRANSFERS:
            medium = {"pdcluster.transfer.medium": leg.backend}
            leg.failed_transfers.append(LegStage("transfer", since, self._clock(), medium, error=reason))

    def _stages(self, leg: PrefillLeg) -> list[LegStage]:
        """The leg's life until now."""
        now, scheduled, first = self._clock(), leg.scheduled_at, leg.first_token_at
        stages = [LegStage("queue", leg.arrived, now if scheduled is None else scheduled)]
        if scheduled is not None:
            cached, pulled = leg.sequence.num_cached, min(leg.sequence.num_pulled, leg.sequence.num_cached)
            tokens: dict[str, Attribute] = {
                "pdcluster.tokens": leg.num_tokens,
                "pdcluster.cached_tokens": cached,
                "pdcluster.pulled_tokens": pulled,
            }
            stages.append(LegStage("prefill", scheduled, now if first is None else first, tokens))
        if first is not None and leg.ticket_at is not None and leg.ticket_at > first:
            stages.append(LegStage("parked", first, leg.ticket_at))
        stages += leg.failed_transfers
        if leg.stats is not None:
            moved: dict[str, Attribute] = {
                "pdcluster.transfer.bytes": leg.stats.nbytes,
                "pdcluster.transfer.medium": leg.stats.backend,
            }
            stages.append(LegStage("transfer", now - leg.stats.transfer_s, now, moved))
        return stages

    def _timings(self, leg: PrefillLeg, stats: TransferStats | None = None) -> LegTimings:
        scheduled = leg.scheduled_at if leg.scheduled_at is not None else leg.arrived
        first = leg.first_token_at if leg.first_token_at is not None else scheduled
        return LegTimings(
            queue_s=scheduled - leg.arrived,
            prefill_s=first - scheduled,
            transfer_s=stats.transfer_s if stats is not None else 0.0,
            exposed_s=self._clock() - first if stats is not None else 0.0,
            transfer_bytes=stats.nbytes if stats is not None else 0,
            cached_tokens=leg.sequence.num_cached,
            backend=leg.backend,
            pulled_tokens=min(leg.sequence.num_pulled, leg.sequence.num_cached),
        )
