"""One attempt of one request: a prefill leg and a decode leg (or one local leg), and what each answer of a node leads
to.

The state machine behind `dispatch`, without waiting: `handle` takes one event and returns what the client may see now.
It sends, but never blocks. Not here: when to give up altogether, and what the next attempt looks like (`dispatch`).

What may happen, and what follows (P is the prefill leg, D the decode leg):
  1. P refuses, fails or is lost before D has spoken → RetryAttempt; D's slot is cancelled at once.
  2. D refuses → another D, or the same again after its retry_after; P computes on. No clock of the transfer runs
     meanwhile.
  3. D fails or is lost while P still holds the KV → another D under a new attempt number; P sends again without
     computing.
  4. D fails or is lost later → RetryAttempt, which replays prompt + emitted tokens.
  5. P's first token is held back until D has reserved (or it ends the request), so that what was streamed can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdcluster.core import errors
from pdcluster.core.messages import (
    Cancel,
    Deliver,
    Delivered,
    Endpoint,
    Failed,
    Finished,
    LegTimings,
    Prefill,
    Pull,
    Refused,
    Release,
    Reserve,
    Reserved,
    Scheduled,
    Ticket,
    TokenRow,
    Work,
)
from pdcluster_router.cluster.legs import (
    Body,
    ClusterLinks,
    FastTokenPath,
    LegLost,
    NodeReconnected,
    RequestLeg,
    error_of,
    refusal,
)
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import RequestRoute, TokenChunk
from pdcluster_router.core.job import Job, RetryAttempt
from pdcluster_router.core.stages import Stage, StageDeadlines
from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.policy.selector import PolicySelector
from pdcluster_router.request.begun import Begun, backend_of

QUEUE, ROOM, HANDSHAKE, TRANSFER, LIVENESS = Stage
NO_TIMINGS = LegTimings()

# Decode legs that may fail (refusals are none) before the prompt is tried anew.
MAX_DECODE_FAILURES = 3


class Attempt:
    def __init__(
        self,
        job: Job,
        choice: RoutingDecision,
        cluster: ClusterLinks,
        selector: PolicySelector,
        stages: StageDeadlines,
        clock: Callable[[], float],
    ) -> None:
        self._job, self._cluster, self._selector, self._stages, self._clock = job, cluster, selector, stages, clock
        self._mode = choice.mode
        self._prefill_node = choice.prefill
        self._decode_node: NodeView | None = choice.decode
        self._pull = (
            Pull(choice.pull.endpoint, choice.pull_tokens) if choice.pull is not None and choice.pull_tokens else None
        )
        self._prefill: RequestLeg | None = None
        self._decode: RequestLeg | None = None
        self._ticket: Ticket | None = None
        self._ticket_backend = ""
        self._avoid: set[str] = set()
        self._held: TokenRow | None = None
        self._early: list[TokenRow] = []
        # Tokens of earlier attempts: what the prefill node computes, and so what every decode node of this attempt
        # gets.
        self._base = len(job.emitted)
        self._has_token = self._is_reserved = self._is_delivered = self._decode_spoke = False
        self._decode_failures = 0
        self._clocks: dict[Stage, float] = {}
        # Not later than the first clock that runs out; earlier when a clock was stopped or moved since.
        self.due = job.deadline
        self._route: RequestRoute | None = None
        self.prefill_timings = NO_TIMINGS
        self.finished: Finished | None = None
        self._finished_by: RequestLeg | None = None
        self.first_token_at: float | None = None
        self.second_token_at: float | None = None

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        """Send the first frames. Raises RetryAttempt when a node is already gone."""
        job, node = self._job, self._decode_node
        self._start_clock(QUEUE, self._stages.queue_s)
        if self._mode == "local":
            assert node is not None
            self._decode = leg = self._enter(node.endpoint)
            self._is_reserved = self._decode_spoke = True
            fork_of = job.fork_of if job.fork_on is not None and node.endpoint.incarnation == job.fork_on else None
            self._send(leg, Prefill(self._work(leg), False, self._pull, fork_of))
            return
        assert self._prefill_node is not None
        self._prefill = self._enter(self._prefill_node.endpoint)
        self._send(self._prefill, Prefill(self._work(self._prefill), True, self._pull))
        if node is not None and node.has_slack and not job.busy_s(node.endpoint.incarnation, self._clock()):
            self._reserve(node)

    def go_on(self, begun: Begun) -> None:
        """From where it is, the first of its request."""
        is_local, ticket = self._mode == "local", begun.ticket
        self._prefill, self._decode, self._ticket, self._held, self._base = (
            begun.prefill,
            begun.decode,
            ticket,
            begun.held,
            0,
        )
        self._has_token, self._is_delivered = begun.has_token, begun.delivered is not None
        self._is_reserved, self._decode_spoke = is_local or ticket is not None, is_local or begun.decode_spoke
        self._ticket_backend = "" if ticket is None else backend_of(ticket)
        self.prefill_timings = begun.delivered or NO_TIMINGS
        self.first_token_at, self.second_token_at = begun.first_token_at, begun.second_token_at
        self._clocks = dict(begun.clocks)
        self.next_deadline()

    def stop(self, reason: str) -> None:
        """Cancel what still runs. Idempotent; called however the attempt ended."""
        prefill, decode, leave = self._prefill, self._decode, self._cluster.ledger.leave
        if decode is not None:
            # it leads to a line that may be another answer's next, and knows the request, all of which it would keep
            decode.way = None
            if self._finished_by is not decode:
                self._cancel(decode, reason)
        if prefill is not None:
            if not self._is_delivered and self._finished_by is not prefill:
                self._cancel(prefill, reason)
            leave(prefill)
        if decode is not None:
            leave(decode)

    def _note_timings(self, timings: LegTimings) -> None:
        self.prefill_timings = timings
        self._route = None

    def route(self) -> RequestRoute:
        """Asked for with every token, so made anew only when some part of it is another."""
        if self._route is None:
            self._route = self._route_now()
        return self._route

    def _route_now(self) -> RequestRoute:
        job, decode = self._job, self._decode_node.name if self._decode_node else None
        if self._mode == "local":
            return RequestRoute("local", None, decode, "", job.cached_tokens, job.tries)
        prefill = self._prefill_node.name if self._prefill_node else None
        return RequestRoute(
            "remote",
            prefill,
            decode,
            self.prefill_timings.backend or self._ticket_backend,
            job.cached_tokens,
            job.tries,
        )

    @property
    def awaits_report(self) -> bool:
        """Whether the prefill node still has to say what it did; only the timeline waits for it."""
        return self._prefill is not None and not self._is_delivered and self._finished_by is not self._prefill

    @property
    def decodes_on(self) -> str | None:
        """The boot that has reserved for its decoding, or runs it."""
        return (
            self._decode.endpoint.incarnation
            if self._decode is not None and self._is_reserved and self.finished is None
            else None
        )

    @property
    def is_done(self) -> bool:
        """Every token was emitted and the last word is here."""
        return self.finished is not None and len(self._job.emitted) >= self.finished.num_output

    # ------------------------------------------------------------ clocks

    def next_deadline(self) -> float:
        """The moment at which `expire` has something to do."""
        leg, clocks = self._decode, self._clocks
        if leg is not None and LIVENESS in clocks:
            clocks[LIVENESS] = max(
                clocks[LIVENESS], leg.heard_at + self._stages.liveness_s
            )  # rows that went the short way moved no clock
        self.due = min((self._job.deadline, *self._clocks.values()))
        return self.due

    def expire(self) -> None:
        """Act on the clocks that ran out; raises RetryAttempt or DeadlineExceeded."""
        now = self._clock()
        if now >= self._job.deadline:
            raise errors.DeadlineExceeded(
                f"request {self._job.request} was not done by its deadline, after {len(self._job.emitted)} tokens",
                "request",
            )
        for stage in [stage for stage, moment in self._clocks.items() if now >= moment]:
            if self._clocks.pop(stage, None) is not None:
                self._on_clock(stage)

    def _on_clock(self, stage: Stage) -> None:
        match stage:
            case Stage.QUEUE:
                first = self._prefill or self._decode
                assert first is not None
                late = f"node {first.endpoint.node} did not schedule the prompt within {self._stages.queue_s:g} s"
                raise RetryAttempt(errors.DeadlineExceeded(late, "queue"), first.endpoint.incarnation)
            case Stage.ROOM:
                self.reserve_anywhere()
            case Stage.HANDSHAKE:
                self._decode_leg_failed(errors.DeadlineExceeded("the decode node did not answer Reserve", "handshake"))
            case Stage.TRANSFER:
                self._decode_leg_failed(errors.DeadlineExceeded("the decode node got no commit", "transfer"))
            case Stage.LIVENESS:
                name = self._decode.endpoint.node if self._decode is not None else "none"
                self._decode_leg_failed(
                    errors.DeadlineExceeded(f"no token from node {name} for {self._stages.liveness_s:g} s", "liveness")
                )

    def _start_clock(self, stage: Stage, seconds: float) -> None:
        self._clocks[stage] = moment = self._clock() + seconds
        if moment < self.due:
            self.due = moment

    # ------------------------------------------------------------ events

    def goes_on(self, incarnation: str, row: TokenRow) -> bool:
        """Whether the row is just the next one of the decode leg, as nearly all that is said is. Then it is taken in,
        as `handle` would: the client may see its tokens. Else it is still to be handled."""
        leg, clocks, emitted = self._decode, self._clocks, self._job.emitted
        position, tokens = len(emitted), row.tokens
        if (
            leg is None
            or row.position != position
            or position < 2
            or leg.attempt != row.attempt
            or leg.endpoint.incarnation != incarnation
        ):
            return False
        if (
            not (tokens and self._decode_spoke and LIVENESS in clocks and len(clocks) == 1)
            or self._early
            or self.finished is not None
        ):
            return False
        clocks[LIVENESS] = self._clock() + self._stages.liveness_s  # which is later than it was, so that `due` stays
        emitted += tokens
        return True

    def open_way(self, way: FastTokenPath | None) -> None:
        """Rows that go on like one that did need not come here, until something else happens to the request. None: all
        of them."""
        if self._decode is not None:
            self._decode.way = way

    def handle(self, incarnation: str, body: Body) -> Sequence[TokenChunk]:
        """What the client may see because of what the node said. Answers of legs that are over are ignored, after the
        last token all but a report."""
        leg = self._decode
        if (
            leg is None
            or leg.attempt != body.attempt
            or leg.endpoint.incarnation != incarnation
            or type(body) is Refused
        ):
            leg = self._leg_of(incarnation, body)  # else it is of the leg that says nearly all
        if leg is None or (self.finished is not None and self.is_done and type(body) is not Delivered):
            return ()
        return _ON[type(body)](self, leg, body)

    def _leg_of(self, incarnation: str, body: Body) -> RequestLeg | None:
        if type(body) is Refused and body.leg == "deliver":
            from_writer = self._prefill is not None and self._prefill.endpoint.incarnation == incarnation
            return (
                self._decode
                if from_writer and self._decode is not None and self._decode.attempt == body.attempt
                else None
            )
        attempt, leg = body.attempt, self._decode
        if leg is None or leg.attempt != attempt:  # no two have the same number
            leg = self._prefill
        if leg is not None and leg.attempt == attempt:
            return leg if leg.endpoint.incarnation == incarnation else None
        if attempt is not None:
            return None
        return next(
            (
                leg
                for leg in (self._prefill, self._decode)
                if leg is not None and leg.endpoint.incarnation == incarnation
            ),
            None,
        )

    def _on_scheduled(self, leg: RequestLeg, message: Scheduled) -> Sequence[TokenChunk]:
        self._clocks.pop(QUEUE, None)
        if self._job.note_cached(message.cached_tokens):
            self._route = None
        if self._decode is None and ROOM not in self._clocks:
            self.reserve_anywhere()
        return ()

    def _on_finished(self, leg: RequestLeg, message: Finished) -> Sequence[TokenChunk]:
        self.finished, self._finished_by = message, leg
        if leg is self._prefill:
            self._note_timings(message.timings)
        if (leg is self._prefill or self._mode == "local") and self._job.note_cached(message.timings.cached_tokens):
            self._route = None
        return self._emit_held() if self._held is not None else ()

    def _on_delivered(self, leg: RequestLeg, message: Delivered) -> Sequence[TokenChunk]:
        self._note_timings(message.timings)
        self._is_delivered = True
        if self._job.awaits_prompt_logprobs:  # its row went before this
            raise RetryAttempt(errors.TransferError("the prompt's logprobs were lost on their way"), None)
        self._clocks.pop(TRANSFER, None)
        if not self.is_done and not self._decode_spoke:
            self._start_clock(LIVENESS, self._stages.liveness_s)
        self._cluster.ledger.leave(leg)  # the node is done with it: what decodes elsewhere is not its load
        return ()

    def _on_row(self, leg: RequestLeg, row: TokenRow) -> Sequence[TokenChunk]:
        if not row.tokens:
            return ()  # a node says again what was lost, and nothing was
        if leg is not self._decode:
            return self._on_first_row(row)
        self._clocks.pop(QUEUE, None)
        self._clocks.pop(TRANSFER, None)
        self._decode_spoke = True
        self._start_clock(LIVENESS, self._stages.liveness_s)
        return self._emit(row)

    def _on_first_row(self, row: TokenRow) -> Sequence[TokenChunk]:
        """Of the prefill leg."""
        self._clocks.pop(QUEUE, None)
        self._has_token = True
        if self._decode_spoke and not self._job.awaits_prompt_logprobs:
            return ()
        if not self._is_reserved:
            self._held = row
            if self._decode is None and ROOM not in self._clocks:
                self.reserve_anywhere()  # its Scheduled was lost
            return ()
        self._start_transfer_clock()
        return self._emit(row)

    def _start_transfer_clock(self) -> None:
        """Runs only while a decode node has reserved: who waits for room loses no time of the transfer."""
        if self._has_token and not self._is_delivered:
            self._start_clock(TRANSFER, self._stages.transfer_s)

    def _on_reserved(self, leg: RequestLeg, message: Reserved) -> Sequence[TokenChunk]:
        if leg is not self._decode or self._prefill is None:
            return ()
        self._clocks.pop(HANDSHAKE, None)
        self._is_reserved = True
        self._ticket_backend = backend_of(message.ticket)
        self._route = None
        self._ticket = message.ticket
        self._deliver(message.ticket)
        self._start_transfer_clock()
        return self._emit_held()

    def _deliver(self, ticket: Ticket) -> None:
        assert self._prefill is not None
        try:
            self._cluster.send(self._prefill.endpoint, Deliver(ticket))
        except errors.NodeLost as error:
            self._on_leg_lost(self._prefill, error)

    def _on_rewelcomed(self, leg: RequestLeg, _: NodeReconnected) -> Sequence[TokenChunk]:
        """The ticket may have been lost with the link; a node that has it does nothing."""
        if (
            leg is self._prefill
            and self._is_reserved
            and self._ticket is not None
            and not self._is_delivered
            and not self._decode_spoke
        ):
            self._deliver(self._ticket)
        return ()

    def _on_refused(self, leg: RequestLeg, message: Refused) -> Sequence[TokenChunk]:
        cause = refusal(message)
        if message.leg == "deliver":
            self._decode_leg_failed(errors.TransferError(f"KV could not be handed over: {message.reason}"))
            return ()
        if message.leg == "reserve":
            self._leave_decode()
        if not message.retryable:
            raise cause
        self._leave_alone(leg, message.retry_after_s)
        if message.leg != "reserve":
            raise RetryAttempt(cause, leg.endpoint.incarnation)
        self.reserve_anywhere()
        return ()

    def _on_failed(self, leg: RequestLeg, message: Failed) -> Sequence[TokenChunk]:
        self._on_leg_lost(leg, error_of(message))
        return ()

    def _on_lost(self, leg: RequestLeg, lost: LegLost) -> Sequence[TokenChunk]:
        self._on_leg_lost(leg, errors.NodeLost(f"node {leg.endpoint.node}: {lost.reason}"))
        return ()

    def _leave_alone(self, leg: RequestLeg, seconds: float) -> None:
        self._job.busy[leg.endpoint.incarnation] = self._clock() + max(seconds, self._stages.hold_s)

    def _on_leg_lost(self, leg: RequestLeg, cause: errors.PdclusterError) -> None:
        if leg is self._prefill and (self._decode_spoke or self._is_delivered) and not self._job.awaits_prompt_logprobs:
            self._is_delivered = True
            return
        if not cause.retryable:
            raise cause
        if leg is self._decode and self._mode == "remote":
            self._decode_leg_failed(cause)
            return
        if isinstance(cause, errors.Overloaded):
            self._leave_alone(leg, cause.retry_after_s)
        raise RetryAttempt(cause, leg.endpoint.incarnation)

    def _decode_leg_failed(self, cause: errors.PdclusterError) -> None:
        """Rules 3 and 4: while the prefill node holds the KV only the decode leg is made anew."""
        failed = self._decode
        if failed is None:
            return
        self._cancel(failed, str(cause))
        self._decode_failures += 1
        if (
            self._is_delivered
            or self._decode_spoke
            or self._prefill is None
            or self._decode_failures >= MAX_DECODE_FAILURES
        ):
            raise RetryAttempt(cause, failed.endpoint.incarnation)
        self._avoid.add(failed.endpoint.incarnation)
        self._leave_decode()
        self.reserve_anywhere()

    # ------------------------------------------------------------ reserving

    def reserve_anywhere(self) -> None:
        """Reserve on the best decode node that has not just refused or failed; when all have, ask again later."""
        job, now = self._job, self._clock()
        preferred = self._decode_node
        if (
            preferred is None
            or preferred.endpoint.incarnation in self._avoid
            or job.busy_s(preferred.endpoint.incarnation, now)
        ):
            preferred = self._pick_decode(now)
        if preferred is None:
            self._avoid.clear()
            preferred = self._pick_decode(now)
            if preferred is None:
                raise RetryAttempt(errors.NoNodeTakesWork("no decode node takes work now"), None)
            self._wait_for_room(self._stages.hold_s)
        elif job.busy_s(preferred.endpoint.incarnation, now):
            self._wait_for_room(min(until - now for until in job.busy.values() if until > now))
        else:
            self._reserve(preferred)

    def _pick_decode(self, now: float) -> NodeView | None:
        assert self._prefill_node is not None
        return self._selector.choose_decode(self._job, now, self._prefill_node, self._avoid)

    def _wait_for_room(self, seconds: float) -> None:
        self._decode_node = self._route = None
        self._start_clock(ROOM, seconds)

    def _reserve(self, node: NodeView) -> None:
        assert self._prefill is not None
        self._decode_node, self._route = node, None
        self._decode = self._enter(node.endpoint)
        self._start_clock(HANDSHAKE, self._stages.handshake_s)
        writer = self._prefill.endpoint
        try:
            self._send(self._decode, Reserve(self._work(self._decode), writer))
        except RetryAttempt as lost:
            self._decode_leg_failed(lost.cause)

    def _leave_decode(self) -> None:
        if self._decode is not None:
            self._cluster.ledger.leave(self._decode)
        self._decode = None
        self._is_reserved = False
        self._clocks.pop(HANDSHAKE, None)
        self._clocks.pop(TRANSFER, None)

    # ------------------------------------------------------------ sending and emitting

    def _enter(self, endpoint: Endpoint) -> RequestLeg:
        """A new leg, under the next number."""
        job = self._job
        leg = RequestLeg(job.request, job.attempts, endpoint, job.emitted)
        job.attempts += 1
        self._cluster.ledger.enter(leg)
        return leg

    def _work(self, leg: RequestLeg) -> Work:
        return self._job.work(leg.attempt, self._clock(), self._base)

    def _send(self, leg: RequestLeg, message: Prefill | Reserve) -> None:
        try:
            self._cluster.send(leg.endpoint, message)
        except errors.NodeLost as error:
            raise RetryAttempt(error, leg.endpoint.incarnation) from error

    def _cancel(self, leg: RequestLeg, reason: str) -> None:
        try:
            self._cluster.send(leg.endpoint, Cancel(self._job.request, leg.attempt, reason))
            if leg is self._prefill:
                self._cluster.send(leg.endpoint, Release(self._job.request))
        except errors.NodeLost:
            return  # a node that is gone holds nothing; if it comes back, its Hello shows that we no longer wait for it

    def _emit_held(self) -> Sequence[TokenChunk]:
        row, self._held = self._held, None
        return self._emit(row) if row is not None else ()

    def _emit(self, row: TokenRow) -> Sequence[TokenChunk]:
        """The part of `row` (and of rows that came early) that continues the stream; what was emitted before is
        dropped. The first has the prompt's logprobs, where they are asked for."""
        job = self._job
        if (
            not self._early
            and row.position <= len(job.emitted)
            and (job.has_prompt_logprobs or not job.awaits_prompt_logprobs)
        ):
            chunk = self._continue(row)
            return () if chunk is None else (chunk,)
        self._early.append(row)
        in_order = sorted(self._early, key=lambda r: (r.position, not r.prompt_logprobs))
        chunks = [chunk for early in in_order if (chunk := self._continue(early)) is not None]
        self._early = [r for r in self._early if r.position + len(r.tokens) > len(self._job.emitted)]
        return chunks

    def _continue(self, row: TokenRow) -> TokenChunk | None:
        job, tokens = self._job, row.tokens
        emitted = len(job.emitted)
        seen = emitted - row.position
        if (
            seen < 0
            or seen >= len(tokens)
            or (not job.has_prompt_logprobs and not row.prompt_logprobs and job.awaits_prompt_logprobs)
        ):
            return None
        tokens = tokens[seen:] if seen else tokens
        job.emitted += tokens
        if emitted <= 1:
            now = self._clock()
            if not emitted:
                self.first_token_at = now
            if len(job.emitted) > 1:
                self.second_token_at = now
        prompt_logprobs = () if job.has_prompt_logprobs else row.prompt_logprobs
        job.has_prompt_logprobs = True
        return TokenChunk(emitted, tokens, row.logprobs[seen:], prompt_logprobs, self._route or self.route())


_ON: Mapping[type[Body], Callable[[Attempt, RequestLeg, Any], Sequence[TokenChunk]]] = {
    TokenRow: Attempt._on_row,
    Scheduled: Attempt._on_scheduled,
    Reserved: Attempt._on_reserved,
    Delivered: Attempt._on_delivered,
    Finished: Attempt._on_finished,
    Refused: Attempt._on_refused,
    Failed: Attempt._on_failed,
    LegLost: Attempt._on_lost,
    NodeReconnected: Attempt._on_rewelcomed,
}
