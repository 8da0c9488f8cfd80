"""One plain request's life in one machine: asks for nodes, sends it to them, takes in what they say in its usual order,
and answers.

What mostly happens is all that it knows. With anything else the request *becomes general* (`general`): `run`, `attempt`
and `answer` are put together as they would be by then, hear what happened, and take it to its end. So this module has
no rule of its own about nodes that refuse, fail or are lost, clocks that run out, clients that leave or do not read,
and operators; and nothing here may leave out what the general way notes in the books.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import msgspec

from pdcluster.api.openai.replies import PromptTokensDetails, RouteReport, Timeline, TokenUsage
from pdcluster.core import errors
from pdcluster.core.messages import (
    Cancel,
    Deliver,
    Delivered,
    Finished,
    LegTimings,
    Prefill,
    Pull,
    Reserve,
    Reserved,
    Scheduled,
    Ticket,
    TokenRow,
    Work,
)
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.cluster.legs import Body, FastTokenPath, RequestLeg
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import Done, RequestRoute, TenantPriority, TokenChunk
from pdcluster_router.core.job import Job
from pdcluster_router.explain.recorder import Record
from pdcluster_router.frontend.choices import FINISH_REASONS
from pdcluster_router.frontend.response import named_headers
from pdcluster_router.http.errors import fail
from pdcluster_router.http.exchange import JSON, Exchange
from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.policy.placed import Placed
from pdcluster_router.policy.selector import Decision
from pdcluster_router.request.begun import backend_of
from pdcluster_router.request.open_requests import OpenRequest
from pdcluster_router.request.plain import general
from pdcluster_router.request.plain.plain_kind import Asked
from pdcluster_router.request.plain.plain_stream import PlainStream
from pdcluster_router.request.run import Run, Shared
from pdcluster_router.request.timers import Round, TimerBuckets

logger = logging.getLogger(__name__)


def nothing() -> None: ...


class PlainRun(msgspec.Struct, eq=False):
    """Owned by the router's event loop. started, placed_at, first_at, second_at, heard_at, reserved_at, carried_since:
    moments on the dispatcher's clock, 0 before; heard_at: of the decode node's last word that was read here,
    carried_since: from which on the transfer may take its time. first_seen, second_seen, last_seen: of tokens, on the
    client's. delivered: what the prefill node said of its part; held: its token, while no decode node has reserved;
    has_token: from the prefill node. asked: of a whole answer that is put together here, stream: of any other."""

    shared: Shared
    metrics: RouterMetrics
    exchange: Exchange
    model: str
    vocab_size: int
    job: Job
    standing: TenantPriority
    started: float
    record: Record
    local_rounds: TimerBuckets
    remote_rounds: TimerBuckets
    asked: Asked | None = None
    stream: PlainStream | None = None
    choice: RoutingDecision | None = None
    prefill: RequestLeg | None = None
    decode: RequestLeg | None = None
    ticket: Ticket | None = None
    held: TokenRow | None = None
    delivered: LegTimings | None = None
    backend: str = ""
    is_scheduled: bool = False
    has_token: bool = False
    decode_spoke: bool = False
    placed_at: float = 0.0
    reserved_at: float = 0.0
    carried_since: float = 0.0
    heard_at: float = 0.0
    first_at: float | None = None
    second_at: float | None = None
    first_seen: float = 0.0
    second_seen: float | None = None
    last_seen: float = 0.0
    round: Round | None = None
    timer: int | None = None
    is_at_work: bool = False
    is_over: bool = False
    pending_messages: list[tuple[str, Body]] = []
    run: Run | None = None  # that it has become

    # ------------------------------------------------------------ start

    def start(self) -> None:
        shared, job = self.shared, self.job
        self.exchange.on_gone = self._gone
        shared.open.enter(job.request, self._told)
        shared.cluster.ledger.open(job.request, self.read)
        self.is_at_work = True
        try:
            self._place(self.started)
            if self.run is None:
                self._watch(self.placed_at, job.deadline)
            if self.pending_messages:
                self._read_messages()
        except Exception as error:  # the top of what happens to a request
            self._fail(error)
        finally:
            self.is_at_work = False

    def _place(self, now: float) -> None:
        shared, job = self.shared, self.job
        if now >= job.deadline:
            self._become().place()  # which says so
            return
        shared.shut.apply(job, now)
        try:
            going = shared.selector.place(job, shared.waiting.room_s, now)
            decision = shared.selector.choose(job, now) if going is None else None
        except Exception as error:  # what is told of it is the general way's
            general.place_after(job.request, self._become(), error)
            return
        if going is not None:
            self._go(going, now)
        elif decision is not None:
            self._try_admit(decision, now)

    def _try_admit(self, decision: Decision, asked: float) -> None:
        shared, record = self.shared, self.record
        try:
            admitted = shared.waiting.at_once(decision, self.standing.tenant, is_paid=False)
        except errors.Overloaded as error:
            record.consider(decision, asked)
            self._become().fail(error)
            return
        if admitted is None:
            record.consider(decision, asked)
            self._become().hold(decision, asked)
            return
        choice, query = admitted.choice, admitted.query
        self.placed_at = now = shared.clock()
        record.decided(admitted, asked, now)
        shared.selector.note_sent(choice, query.num_tokens, query.cached_on(choice.first), now)
        shared.selector.note_prefix(*record.prefix)
        self._send(choice, now)()

    def _go(self, placed: Placed, asked: float) -> None:
        """Where nearly all go. It is sent before that is noted, so that nodes begin meanwhile."""
        shared, record = self.shared, self.record
        self.placed_at = now = shared.clock()
        try:
            go_on = self._send(placed.choice(), now)
        finally:
            record.placed(placed, self.job.hashes, asked, now)
            shared.selector.note_going(placed, now)
            shared.selector.note_prefix(*record.prefix)
        go_on()

    def _send(self, choice: RoutingDecision, now: float) -> Callable[[], object]:
        """What is to be done once that is noted."""
        shared, job, first, is_remote = self.shared, self.job, choice.first, choice.mode == "remote"
        self.choice = choice
        pull = (
            Pull(choice.pull.endpoint, choice.pull_tokens) if choice.pull is not None and choice.pull_tokens else None
        )
        leg, decode = self._enter(first), choice.decode
        self.prefill, self.decode = (leg, None) if is_remote else (None, leg)
        try:
            shared.cluster.send(first.endpoint, Prefill(self._work(leg, now), is_remote, pull))
        except errors.NodeLost:
            self.prefill = self.decode = None
            self._withdraw(leg)
            return lambda: self._become().go_on(choice, now, None)
        if (
            is_remote
            and decode.has_slack
            and not (job.busy and job.busy_s(decode.endpoint.incarnation, now))
            and not self._reserve(now)
        ):
            return lambda: self._become().reserve()
        return nothing

    def _reserve(self, now: float) -> bool:
        """False: the decode node is gone, and nothing was sent."""
        choice, prefill = self.choice, self.prefill
        assert choice is not None and prefill is not None  # it has nodes
        leg = self._enter(choice.decode)
        self.decode, self.reserved_at = leg, now
        try:
            self.shared.cluster.send(leg.endpoint, Reserve(self._work(leg, now), prefill.endpoint))
        except errors.NodeLost:
            self.decode = None
            self._withdraw(leg)
            return False
        return True

    def _enter(self, node: NodeView) -> RequestLeg:
        leg = RequestLeg(self.job.request, self.job.attempts, node.endpoint, self.job.emitted)
        self.job.attempts += 1
        self.shared.cluster.ledger.enter(leg)
        return leg

    def _withdraw(self, leg: RequestLeg) -> None:
        """Of which no node knows."""
        self.shared.cluster.ledger.leave(leg)
        self.job.attempts -= 1

    def _work(self, leg: RequestLeg, now: float) -> Work:
        """The prompt: nothing else was there when its first leg began."""
        job = self.job
        left_s = job.deadline - now
        return Work(
            job.request, leg.attempt, job.packed, len(job.prompt), job.hashes, job.sampling,
            left_s if left_s > 0.001 else 0.001, job.chain.root
        )  # fmt: skip

    # ------------------------------------------------------------ what nodes say

    def read(self, incarnation: str, body: Body) -> None:
        """A node said something."""
        if self.is_at_work:
            self.pending_messages.append((incarnation, body))
            return
        try:
            if self.prefill is None:
                if not self._takes_local(incarnation, body):
                    self._become().read(incarnation, body)
                return
            self.is_at_work = True  # a node is told something in turn, which it may answer at once
            try:
                if not self._takes_remote(incarnation, body):
                    self._become().read(incarnation, body)
                if self.pending_messages:
                    self._read_messages()
            finally:
                self.is_at_work = False
        except Exception as error:  # the top of what happens to a request
            self._fail(error)

    def _read_messages(self) -> None:
        """What came while it was at work."""
        while self.pending_messages and not self.is_over:
            incarnation, body = self.pending_messages.pop(0)
            if self.run is not None:
                self.run.read(incarnation, body)
            elif not (self._takes_local if self.prefill is None else self._takes_remote)(incarnation, body):
                self._become().read(incarnation, body)

    def _takes_local(self, incarnation: str, body: Body) -> bool:
        """False, with nothing changed: it is not what mostly happens."""
        leg = self.decode
        if (
            leg is None or body.attempt != 0 or incarnation != leg.endpoint.incarnation
        ):  # the first leg, and here the only one
            return False
        if type(body) is TokenRow:
            return self._takes_row(leg, body)
        if type(body) is Scheduled:
            return self._takes_scheduled(body)
        if (
            type(body) is not Finished
            or not body.num_output == len(self.job.emitted) > 0
            or self.exchange.line.is_paused
        ):
            return False
        if self.job.cached_tokens is None:
            self.job.note_cached(body.timings.cached_tokens)
        self._finish(body, body.timings)
        return True

    def _takes_remote(self, incarnation: str, body: Body) -> bool:
        prefill, decode, attempt = self.prefill, self.decode, body.attempt
        assert prefill is not None  # else it is local
        if attempt == prefill.attempt and incarnation == prefill.endpoint.incarnation:
            if type(body) is TokenRow:
                return self._takes_first_row(body)
            if type(body) is Scheduled:
                return (
                    decode is not None or (not self.job.busy and self._reserve(self.shared.clock()))
                ) and self._takes_scheduled(body)
            if type(body) is Finished:
                return self._takes_early_end(body)
            return type(body) is Delivered and self._takes_delivered(prefill, body)
        if decode is None or attempt != decode.attempt or incarnation != decode.endpoint.incarnation:
            return False
        if type(body) is TokenRow:
            return self.ticket is not None and self._takes_row(decode, body)
        if type(body) is Reserved:
            return self.ticket is None and self._takes_ticket(prefill, body.ticket)
        if (
            type(body) is not Finished
            or self.delivered is None
            or not body.num_output == len(self.job.emitted) > 0
            or self.exchange.line.is_paused
        ):
            return False
        self._finish(body, self.delivered)
        return True

    def _takes_scheduled(self, message: Scheduled) -> bool:
        self.is_scheduled = True
        self.job.note_cached(message.cached_tokens)
        return True

    def _takes_row(self, leg: RequestLeg, row: TokenRow) -> bool:
        """Of the leg that decodes."""
        emitted, tokens = self.job.emitted, row.tokens
        seen = len(emitted) - row.position
        if self.stream is not None and self.exchange.line.is_paused:
            return False
        if seen < 0 or not tokens or row.logprobs or row.prompt_logprobs or max(tokens) >= self.vocab_size:
            return False
        self.heard_at = now = self.shared.clock()
        self.decode_spoke, self.carried_since = True, 0.0
        if seen < len(tokens):
            self._emit(tokens[seen:] if seen else tokens, now)
            if leg.way is None and len(emitted) > 1:
                take = self._take if self.stream is None else self.stream.way()
                leg.way = None if take is None else FastTokenPath(take, self._fail)
        return True

    def _take(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """Implements generation.Take."""
        if len(token_ids) != 1 or not 0 <= token_ids[0] < self.vocab_size:
            return False
        self.last_seen = monotonic()
        return True

    def _takes_first_row(self, row: TokenRow) -> bool:
        """Of the prefill node."""
        tokens = row.tokens
        if row.position or not tokens or self.has_token or self.decode is None or row.logprobs or row.prompt_logprobs:
            return False
        if max(tokens) >= self.vocab_size or self.exchange.line.is_paused:
            return False
        self.has_token = True
        if self.ticket is None:
            self.held = row
        elif not self.decode_spoke:
            now = self.shared.clock()
            if self.delivered is None:
                self.carried_since = now
            self._emit(tokens, now)
        return True

    def _takes_ticket(self, prefill: RequestLeg, ticket: Ticket) -> bool:
        if self.exchange.line.is_paused:
            return False
        try:
            self.shared.cluster.send(prefill.endpoint, Deliver(ticket))
        except errors.NodeLost:
            return False
        self.ticket, self.backend = ticket, backend_of(ticket)
        if self.held is not None:
            now = self.carried_since = self.shared.clock()
            row, self.held = self.held, None
            self._emit(row.tokens, now)
        return True

    def _takes_delivered(self, prefill: RequestLeg, message: Delivered) -> bool:
        if self.ticket is None or self.delivered is not None:
            return False
        self.delivered, self.carried_since = message.timings, 0.0
        self.backend = message.timings.backend or self.backend
        if not self.decode_spoke:
            self.heard_at = self.shared.clock()
        self.shared.cluster.ledger.leave(prefill)  # the node is done with it: what decodes elsewhere is not its load
        return True

    def _takes_early_end(self, finished: Finished) -> bool:
        """The prefill node's token was the last one."""
        held = self.held
        num_output = len(self.job.emitted) + (len(held.tokens) if held is not None else 0)
        if (
            not num_output
            or finished.num_output != num_output
            or self.delivered is not None
            or self.exchange.line.is_paused
        ):
            return False
        self.job.note_cached(finished.timings.cached_tokens)
        self.backend = finished.timings.backend or self.backend
        if held is not None:
            self._emit(held.tokens, self.shared.clock())
        if self.decode is not None:
            with suppress(errors.NodeLost):  # a node that is gone holds nothing
                self.shared.cluster.send(self.decode.endpoint, Cancel(self.job.request, self.decode.attempt, "done"))
        self._finish(finished, finished.timings)
        return True

    def _emit(self, tokens: tuple[int, ...], now: float) -> None:
        emitted, position = self.job.emitted, len(self.job.emitted)
        if not position:
            self.first_at = now
            self.record.first_token(now)
        emitted += tokens
        if self.second_at is None and len(emitted) > 1:
            self.second_at = now
        if self.stream is not None:
            self.stream.say(TokenChunk(position, tokens, (), (), self.route()))
            return
        self.last_seen = seen = monotonic()
        if not position:
            self.first_seen = seen
        if self.second_seen is None and len(emitted) > 1:
            self.second_seen = seen

    # ------------------------------------------------------------ the end

    def _finish(self, finished: Finished, prefill: LegTimings) -> None:
        """The one answer. prefill: what the node says that computed the prompt."""
        job, choice, exchange, backend, started = self.job, self.choice, self.exchange, self.backend, self.started
        first_at, second_at, decoded = self.first_at, self.second_at, finished.timings
        assert choice is not None and first_at is not None  # there is a token
        num_prompt, num_output, cached = len(job.prompt), len(job.emitted), job.cached_tokens or 0
        timeline = Timeline(  # by position, which costs half
            prefill.queue_s, prefill.prefill_s, prefill.transfer_s, prefill.exposed_s,
            first_at - started, None if second_at is None else second_at - started,
            decoded.decode_s, decoded.decode_tokens, prefill.transfer_bytes, prefill.pulled_tokens,
            self.placed_at - started,
        )  # fmt: skip
        if self.stream is not None:
            self._close()
            self.stream.finish(
                Done(finished.reason, finished.stop_token, cached, 1, self.route(), timeline), self.metrics
            )
            return
        reason, mode, decode = FINISH_REASONS[finished.reason], choice.mode, choice.decode.endpoint.node
        name = None if choice.prefill is None else choice.prefill.endpoint.node
        usage = TokenUsage(
            num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(cached), RouteReport(mode, name,
            decode, backend, 1, timeline)
        )  # fmt: skip
        assert self.asked is not None  # it has no stream
        body = self.asked.completion(exchange.id, self.model, job.emitted, reason, usage)
        exchange.reply(
            200, body, named_headers(JSON, mode, name, decode, backend), self._close
        )  # its client does not wait for the books
        first, second, last, arrived = self.first_seen, self.second_seen, self.last_seen, exchange.arrived
        noted = (  # times to tokens as the client saw them
            num_prompt, num_output, cached, 1, first - arrived, None if second is None else second - arrived,
            None if num_output == 1 else (last - first) / (num_output - 1), prefill.queue_s, prefill.transfer_s,
            prefill.transfer_bytes,
        )  # fmt: skip
        self.metrics.note((mode, reason, backend), noted)

    def _close(self) -> None:
        """Nothing of it is left in the books."""
        shared, job, record, prefill, decode = self.shared, self.job, self.record, self.prefill, self.decode
        ledger, request = shared.cluster.ledger, job.request
        self.is_over, self.exchange.on_gone = True, None
        self._drop_timer()
        shared.selector.note_end(len(job.prompt), len(job.emitted))
        if prefill is not None:
            ledger.leave(prefill)
        if decode is not None:
            decode.way = None
            ledger.leave(decode)
        ledger.close(request)
        shared.open.leave(request)
        record.attempts, record.cached_tokens = 1, job.cached_tokens
        shared.explainer.close(record, None, "done")
        shared.waiting.poke()

    # ------------------------------------------------------------ clocks, and what else happens

    def _watch(self, now: float, due: float) -> None:
        """Have an alarm by then, and before any clock runs out that is started until it rings."""
        rounds, seconds = self.local_rounds if self.prefill is None else self.remote_rounds, due - now
        if seconds >= rounds.seconds:
            self.round = rounds.join(self, now)
        else:
            self.timer = self.shared.timers.set(max(seconds, 0.0), self.ring)

    def ring(self) -> None:
        """Time to look at the clocks."""
        self.timer = self.round = None
        if self.is_over or self.run is not None:
            return
        try:
            now, due = self.shared.clock(), min((self.job.deadline, *general.clocks(self).values()))
            if now < due:
                self._watch(now, due)
            else:
                self._become().look()
        except Exception as error:  # the top of what happens to a request
            self._fail(error)

    def _drop_timer(self) -> None:
        if self.round is not None:
            self.round.pop(self, None)
        elif self.timer is not None:
            self.shared.timers.drop(self.timer, self.ring)
        self.round = self.timer = None

    def route(self) -> RequestRoute:
        """As far as it is known."""
        choice = self.choice
        assert choice is not None  # it has nodes
        prefill = None if choice.prefill is None else choice.prefill.endpoint.node
        return RequestRoute(choice.mode, prefill, choice.decode.endpoint.node, self.backend, self.job.cached_tokens)

    def _become(self) -> Run:
        """The general machine, as it would be by now; everything comes there from now on."""
        self._drop_timer()
        if self.decode is not None:
            self.decode.way = None
        self.run = general.become(self)
        return self.run

    def _gone(self, error: errors.PdclusterError) -> None:
        """Its client left, or the router stops."""
        self._become()
        if self.exchange.on_gone is not None:
            self.exchange.on_gone(error)

    def _told(self) -> OpenRequest:
        return general.told(self, self._fail)

    def _fail(self, error: Exception) -> None:
        """The error as its answer, unless it has one."""
        if self.is_over:
            logger.error("request %s: something failed after its end", self.job.request, exc_info=error)
            if not self.exchange.finished:
                fail(self.exchange, error, self.metrics)
            return
        (self.run or self._become()).fail(error)
