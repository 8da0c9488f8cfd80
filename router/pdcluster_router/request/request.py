"""One request's life, as a state machine without a task: choose nodes, run attempts until one ends well, tell the sink
what the client may see, give exactly one answer.

`states` has its states and their table. It is moved by what nodes say (`node_events`, straight from their links), by
alarms, by the gate and by whoever cancels. Each of these may happen while it is at work (a node that answers at once, a
sink that has enough): what nodes say then waits its turn, a cancel is seen before the next of it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from pdcluster.core import errors
from pdcluster.core.lifecycle import advance
from pdcluster.core.messages import Finished, LegTimings, Pull, Ticket, TokenRow
from pdcluster.telemetry.log import Log, requests
from pdcluster_router.cluster.legs import Body, FastTokenPath, RequestLeg
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import Done, Generation, ModelInfo, RequestRoute, Sink, Timeline, TokenChunk
from pdcluster_router.core.job import Job, RetryAttempt
from pdcluster_router.explain.recorder import Record
from pdcluster_router.explain.request_log import log_ended, log_placed
from pdcluster_router.explain.request_trace import ChoiceTrace
from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.policy.decisions import Decision, PackedDecision
from pdcluster_router.queueing.admission import check_fits
from pdcluster_router.queueing.demand import unplaced
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.request import node_events
from pdcluster_router.request.open_requests import OpenRequest
from pdcluster_router.request.retries import RetryBudget
from pdcluster_router.request.shared import Shared, check_model, job_of, served_now
from pdcluster_router.request.states import HAS_SLOT, REQUEST, RequestState
from pdcluster_router.request.timers import Round

log = Log("request")

# What a prompt's token takes while it waits: in a list, packed, and its share of the hashes.
BYTES_PER_TOKEN = 16
NO_TIMINGS = LegTimings()
OF_ATTEMPT = (
    "prefill", "decode", "decode_node", "pull", "ticket", "backend", "avoid", "held", "early", "decode_failures",
    "report", "finished", "finished_by", "told_route", "queue_by", "state_by", "places", "scheduled_at", "computed_at",
)  # fmt: skip
S = RequestState
# Errors that say that no node takes a request.
NO_ROOM = (errors.Unavailable, errors.Overloaded, errors.ContextTooLong)


class Request:
    """Implements generation.Running. Owned by the router's event loop. One answer: the sink hears `on_done` or
    `on_error` once, or nothing after a cancel.

    Of the attempt: prefill, decode: its legs; decode_node: where it is to decode; ticket, backend: of the pages there;
    avoid: nodes that refused or failed it; held: the first token, while no decode node has reserved; early: rows that
    came before their turn; base: tokens of earlier attempts; report: what the prefill node says it did; queue_by,
    state_by: when the prompt must have been taken up, and when this state must be over; due: not later than either;
    scheduled_at, computed_at: when it was told that the prompt was taken up, and had its first token.
    """

    # What most requests keep, so that none of them costs a store. These are of the request, those below of an attempt.
    first_token_at: float | None = None
    second_token_at: float | None = None
    budget: RetryBudget | None = None
    choice: RoutingDecision | None = None
    pause: asyncio.TimerHandle | None = None
    timer: int | None = None
    round: Round | None = None
    timer_due = math.inf
    num_placed = 0
    is_at_work = has_way = False
    # Tokens sent when a node's limit last ended an attempt, and the route of the last attempt.
    cut_at = 0
    last_route: RequestRoute | None = None
    trace: ChoiceTrace | None = None

    prefill: RequestLeg | None = None
    decode: RequestLeg | None = None
    decode_node: NodeView | None = None
    pull: Pull | None = None
    ticket: Ticket | None = None
    backend = ""
    avoid: frozenset[str] = frozenset()
    # Legs that decode nodes refused, which keep a place in line.
    places: Mapping[str, RequestLeg] = {}
    held: TokenRow | None = None
    early: Sequence[TokenRow] = ()
    base = decode_failures = 0
    report: LegTimings | None = None
    finished: Finished | None = None
    finished_by: RequestLeg | None = None
    told_route: RequestRoute | None = None
    queue_by = state_by = math.inf
    scheduled_at: float | None = None
    computed_at: float | None = None

    def __init__(
        self, shared: Shared, generation: Generation, sink: Sink, job: Job, record: Record, started: float
    ) -> None:
        self.shared, self.generation, self.sink = shared, generation, sink
        self.job, self.record, self.started = job, record, started
        self.state = S.WAITING
        self.pending_messages: list[tuple[str, Body]] = []
        self.placed_at = started
        self.due = job.deadline

    def _clear(self) -> None:
        """The attempt is over, and the next one begins with nothing of it."""
        for name in OF_ATTEMPT:
            self.__dict__.pop(name, None)
        self.base = len(self.job.emitted)
        self.due = self.job.deadline

    @property
    def attempts(self) -> int:
        """As clients count them."""
        return 1 if self.budget is None else self.budget.attempts

    @classmethod
    def of(cls, shared: Shared, generation: Generation, sink: Sink) -> Request:
        """A request that comes now. Raises PdclusterError where nobody knows its model."""
        started = shared.clock()
        job = job_of(shared, generation, started)
        record = shared.explainer.open(generation.request, generation.standing, started, generation.client_id)
        request = cls(shared, generation, sink, job, record, started)
        if generation.trace is not None:
            record.trace = generation.trace.trace_id
            request.trace = ChoiceTrace.of(generation.trace, generation, started)
        return request

    def start(self) -> None:
        shared, generation = self.shared, self.generation
        shared.open.enter(generation.request, self._told)
        shared.cluster.ledger.open(generation.request, self.read)
        if generation.leads:
            shared.fork_groups.enter(generation.request)
        if generation.parent is not None and shared.fork_groups.follow(generation.parent, self._led):
            self.state = S.FOLLOWING
        else:
            self._step(self._place)

    # ------------------------------------------------------------ what moves it

    def _led(self, incarnation: str | None) -> None:
        """It is known where its leader decodes. Until then its leader's deadline is its own."""
        if self.state is S.FOLLOWING:
            self.go("lead")
            self.job.fork_of, self.job.fork_on = self.generation.parent, incarnation
            self._step(self._place)

    def read(self, incarnation: str, body: Body) -> None:
        """A node said something."""
        if self.is_at_work or self.state is S.WAITING:
            self.pending_messages.append((incarnation, body))
        elif type(body) is TokenRow and body.position > 1 and node_events.goes_on(self, incarnation, body):
            self._go_on(body)
        else:
            self._step(node_events.handle, self, incarnation, body)

    def cancel(self, reason: str) -> None:
        """Implements generation.Running."""
        if self.state is not S.ENDED:
            self._close("cancelled", reason)

    def finish(self, num_output: int) -> None:
        """Implements generation.Running. Its sink may be at work here, so `_step` ends it."""
        if self.state is S.ENDED:
            return
        known = self.seen_timings(num_output) if self.finished is None else self.finished.timings
        self.finished = Finished(self.job.request, 0, "stop", num_output, known)
        node_events.leave_decode(self, "a stop string came")
        if not self.is_at_work:
            self._step(lambda: None)

    def fail(self, error: Exception) -> None:
        if self.state is S.ENDED:
            return
        if isinstance(error, NO_ROOM) and self._is_at_limit():
            job, self.told_route = self.job, self.last_route
            num_output = len(job.emitted)
            self.finished = Finished(job.request, 0, "length", num_output, self.seen_timings(num_output))
            self._finish()
            return
        code = error.code if isinstance(error, errors.PdclusterError) else "internal"
        self._close(code, str(error), lambda: self.sink.on_error(error))

    def go(self, event: str) -> None:
        """Raises IllegalTransition for an event that the table does not allow now."""
        self.state = advance(REQUEST, self.state, event)

    def _step(self, action: Callable[..., None], *words: object) -> None:
        """One thing that happened, and whatever nodes said meanwhile. Of an attempt that fails in it becomes another
        one, or the answer."""
        self.is_at_work = True
        if self.has_way:
            self._shut_way()
        try:
            while self.state is not S.ENDED:
                try:
                    action(*words)
                    if self.pending_messages:
                        self._read_messages()
                    self._finish_if_complete()
                    break
                except RetryAttempt as failure:
                    action, words = self._after(failure), ()
            if self.due < self.timer_due and self.has_nodes:
                self._watch()
        except Exception as error:  # the top of what happens to a request: its sink hears of it
            if self.state is S.ENDED:
                log.exception("something failed after the end of a request", request=self.job.request)
            self.fail(error)
        finally:
            self.is_at_work = False

    def _shut_way(self) -> None:
        """What comes next may be more than a row that goes on."""
        self.has_way = False
        if self.decode is not None:
            self.decode.way = None

    def _read_messages(self) -> None:
        while self.pending_messages and self.has_nodes:
            node_events.handle(self, *self.pending_messages.pop(0))

    def _go_on(self, row: TokenRow) -> None:
        """Nothing of the request is another but that there is more. Where its sink takes that without a Chunk, most
        rows do not come here."""
        try:
            take = self.sink.fast_token_path()
            is_taken = take is not None and take(row.position, row.tokens)
        except Exception as error:  # the top of what happens to a request, as in `_step`
            self.fail(error)
            return
        if take is not None and is_taken:
            assert self.decode is not None  # it said the row
            self.decode.way = FastTokenPath(take, self.fail)
            self.has_way = True
        else:
            self._step(self.tell, TokenChunk(row.position, row.tokens, row.logprobs, (), self.route()))

    def tell(self, chunk: TokenChunk) -> None:
        """New tokens, in their order."""
        self.sink.on_chunk(chunk)
        if self.generation.leads and self.state is not S.ENDED:
            decode = self.decode if self.state in HAS_SLOT and self.finished is None else None
            self.shared.fork_groups.settle(self.job.request, None if decode is None else decode.endpoint.incarnation)

    @property
    def has_nodes(self) -> bool:
        """Whether an attempt runs."""
        return self.prefill is not None or self.decode is not None

    @property
    def is_complete(self) -> bool:
        """Every token was emitted and the last word is here."""
        return self.finished is not None and len(self.job.emitted) >= self.finished.num_output

    def route(self) -> RequestRoute:
        """Asked for with every token, so made anew only when some part of it is another."""
        if self.told_route is None:
            job, choice, decode = self.job, self.choice, self.decode_node
            assert choice is not None  # it has nodes
            self.told_route = RequestRoute(
                choice.mode,
                None if choice.prefill is None else choice.prefill.endpoint.node,
                None if decode is None else decode.endpoint.node,
                (self.report or NO_TIMINGS).backend or self.backend,
                job.cached_tokens,
                job.tries,
            )
        return self.told_route

    def _told(self) -> OpenRequest:
        """For operators."""
        job, choice = self.job, self.choice
        told = OpenRequest(job.request, self.generation.model, len(job.prompt), self.started, self.fail)
        if choice is None:
            return told
        prefill = choice.prefill.name if choice.prefill is not None else None
        num_output, decode = len(job.emitted), choice.decode.name
        return replace(
            told, attempts=self.num_placed, mode=choice.mode, prefill=prefill, decode=decode, num_output=num_output,
            placed_at=self.placed_at, first_token_at=self.first_token_at,
        )  # fmt: skip

    # ------------------------------------------------------------ clocks

    def set_clock(self, seconds: float) -> None:
        """This state must be over by then."""
        self.state_by = moment = self.shared.clock() + seconds
        if moment < self.due:
            self.due = moment

    def _watch(self) -> None:
        """Have an alarm that is not later than what comes next. Without nodes there is none: the gate has its own
        clocks, a pause is one."""
        if self.timer_due != math.inf:
            self._drop_timer()
        shared, now = self.shared, self.shared.clock()
        seconds, rounds = self.due - now, shared.local_rounds if self.prefill is None else shared.remote_rounds
        if seconds >= rounds.seconds:
            self.timer_due, self.round = now + rounds.seconds, rounds.join(self, now)
        else:
            self.timer_due, self.timer = self.due, shared.timers.set(max(seconds, 0.0), self.ring)

    def ring(self) -> None:
        """Time to look at the clocks."""
        self.timer = self.round = None
        self.timer_due = math.inf
        if self.has_nodes:
            self._step(self._look)

    def _look(self) -> None:
        now, leg = self.shared.clock(), self.decode
        if leg is not None and (self.state is S.DECODING or self.state is S.DELIVERED):
            liveness_s = self.shared.settings.stages.liveness_s
            self.state_by = max(self.state_by, leg.heard_at + liveness_s)  # rows that went the short way moved no clock
        self.due = min(self.job.deadline, self.queue_by, self.state_by)
        if now < self.due:
            return
        if self.state is S.REPORTING:
            log.debug("no report of the prefill leg in time", request=self.job.request)
            self._finish()
            return
        node_events.expire(self, now)
        self.due = min(self.job.deadline, self.queue_by, self.state_by)

    def _drop_timer(self) -> None:
        if self.round is not None:
            self.round.pop(self, None)
        elif self.timer is not None:
            self.shared.timers.drop(self.timer, self.ring)
        self.round = self.timer = None
        self.timer_due = math.inf

    # ------------------------------------------------------------ places

    def _place(self) -> None:
        """Nodes for the next attempt, at once or when it is the request's turn."""
        self.pause = None
        job, now = self.job, self.shared.clock()
        if now >= job.deadline:
            raise errors.DeadlineExceeded(f"request {job.request} found no room by its deadline", "request")
        waiting, is_paid = self.shared.waiting, self.num_placed > 0
        if not is_paid and job.fork_on is None and (placed := self._placed_at_once(now)) is not None:
            self.shared.demand.arrived(placed.choice.first.role, placed.sent_s, placed.choice.decode.role)
            self._begin(placed, now)
            return
        try:
            decision = self._decide(now)
        except errors.Unavailable as cause:
            self._park(cause, now)
            return
        if not is_paid:
            self._arrived(decision)
        going = waiting.at_once(decision, self.generation.standing.tenant, is_paid=is_paid)
        if going is not None:
            self._begin(going, now)
        else:
            waiting.hold(self._queued(now), decision, self._decide, lambda answer: self._placed(answer, now))

    def _park(self, cause: errors.Unavailable, now: float) -> None:
        """No node takes it now. Its work is asked for all the same."""
        shared = self.shared
        found = unplaced(shared.cluster.view(), len(self.job.prompt), shared.settings.headroom.cold_token_s)
        held = structs.replace(self._queued(now), work=found[1])
        shared.waiting.park(held, cause, self._decide, lambda answer: self._placed(answer, now))
        if self.num_placed == 0:
            shared.demand.arrived(*found)

    def _arrived(self, decision: Decision) -> None:
        """Count the work of a request that comes, whatever becomes of it. A fork shares its leader's prompt."""
        first, decode = decision.choice.first, decision.choice.decode
        own_s = self.shared.settings.headroom.own_s(first, decision.query) if self.job.fork_on is None else 0.0
        self.shared.demand.arrived(first.role, own_s, decode.role)

    def _placed_at_once(self, now: float) -> PackedDecision | None:
        """Where it clearly goes, in a fraction of the time of `_decide`; None: that must be asked."""
        shared = self.shared
        shared.shut.apply(self.job, now)
        try:
            return shared.selector.place(self.job, shared.waiting.room_s, now)
        except errors.PdclusterError:
            return None  # `_decide` says so, too
        except Exception:  # a policy's bug, which would only make everything slow
            log.exception("to choose nodes at once failed", request=self.job.request)
            return None

    def _queued(self, now: float) -> QueuedRequest:
        job, standing = self.job, self.generation.standing
        num_tokens, is_paid = len(job.prompt), self.num_placed > 0
        return QueuedRequest(
            job.request, standing.tenant, self.shared.settings.headroom.cold_token_s * num_tokens,
            BYTES_PER_TOKEN * num_tokens, now, job.deadline, standing.weight, standing.priority, is_paid,
        )  # fmt: skip

    def _placed(self, answer: Decision | errors.PdclusterError, asked: float) -> None:
        """The gate's answer to a request that waited."""
        if isinstance(answer, Decision):
            self._step(self._begin, answer, asked)
        else:
            self.fail(answer)

    def _begin(self, decision: Decision | PackedDecision, asked: float) -> None:
        """Begin an attempt. The decision is noted after it was sent, so that nodes begin meanwhile."""
        shared, job = self.shared, self.job
        self.choice = choice = decision.choice
        self.num_placed += 1
        job.tries = self.attempts
        self.placed_at = now = shared.clock()
        if self.trace is not None:
            job.trace = self.trace.placed(choice, asked, now)
        if requests.is_on:
            log_placed(self.record, self.num_placed, choice)
        try:
            node_events.begin(self, choice)
        finally:
            self.record.decided(decision, asked, now)
            shared.selector.note_sent(decision, now)
            if self.num_placed == 1 and self.generation.parent is None:
                shared.selector.note_prefix(*self.record.prefix)

    def _decide(self, now: float, others: frozenset[str] = frozenset()) -> Decision:
        """What the policy would do now. others: nodes that it takes only where there are no more."""
        job, shared = self.job, self.shared
        shared.shut.apply(job, now)
        try:
            follows = job.fork_on is not None and job.fork_on not in others
            decision = shared.selector.follow(job, now) if follows else None
            decision = decision or shared.selector.choose(job, now, others)
            self.record.consider(decision, now)
            return decision
        except errors.Unavailable:
            check_model(shared.models, self.generation)
            longest = self._longest()
            if job.emitted and job.most_tokens > longest > 0:
                job.most_tokens = 0  # the larger nodes left; what was sent goes on as far as nodes take it
                return self._decide(now, others)
            check_fits(shared.selector.query(job, now, shared.cluster.view()), shared.cluster.view(), longest)
            raise
        except errors.PdclusterError:
            raise
        except Exception as error:  # a policy's bug, which must not take those with it that wait beside this request
            log.exception("the routing policy failed", policy=shared.selector.holder.live.name, request=job.request)
            raise errors.PdclusterError(
                f"internal error: the routing policy failed ({type(error).__name__}); see the router's log"
            ) from error

    # ------------------------------------------------------------ ends

    def _after(self, failure: RetryAttempt) -> Callable[[], None]:
        """The attempt is over without an answer: what to do next. Raises the cause when there is nothing."""
        self.last_route = self.route()
        node_events.stop(self, str(failure))
        if isinstance(failure.cause, errors.OutgrewNode):
            self.cut_at = len(self.job.emitted)
        else:
            self.finished = self.finished or self._ending()
            if self.is_complete:
                return self._finish
        self.go("retry")
        self._drop_timer()
        self._clear()
        self.job.fork_on = None
        self.record.failed(str(failure))
        now = self.shared.clock()
        if self.trace is not None:
            self.trace.failed(now, str(failure))
        self.shared.shut.note(failure, now)
        if self.budget is None:
            self.budget = RetryBudget(self.shared.settings)
        pause_s = min(self.budget.spend(failure, self.job, now), max(self.job.deadline - now, 0.0))
        return self._place if pause_s <= 0.0 else lambda: self._place_in(pause_s)

    def _place_in(self, seconds: float) -> None:
        self.pause = asyncio.get_running_loop().call_later(seconds, self._step, self._place)

    def _ending(self) -> Finished | None:
        """The last word that a lost node did not get out, when its tokens came before it."""
        job, info = self.job, self._info()
        ending = job.ending(info.eos_token_ids, info.max_len) if info is not None else job.ending((), None)
        if ending is None:
            return None
        num_output = len(job.emitted)
        return Finished(job.request, 0, ending[0], num_output, self.seen_timings(num_output), ending[1])

    def seen_timings(self, num_output: int) -> LegTimings:
        """What the attempt took as the router saw it, for what no node says."""
        now, placed = self.shared.clock(), self.placed_at
        computed = now if self.computed_at is None else self.computed_at
        scheduled = placed if self.scheduled_at is None else min(self.scheduled_at, computed)
        num_decoded = max(num_output - self.base - 1, 0)
        return LegTimings(
            queue_s=scheduled - placed,
            prefill_s=computed - scheduled,
            decode_s=now - computed if num_decoded else 0.0,
            decode_tokens=num_decoded,
        )

    def _finish_if_complete(self) -> None:
        """The prefill node's timings may come a moment after the decode node's first word."""
        if self.finished is None or self.state is S.ENDED or not self.is_complete:
            return
        if self._is_cut():
            name = self.route().decode
            raise RetryAttempt(errors.OutgrewNode(f"the answer is as long as node {name} takes requests"), None)
        is_over = self.prefill is None or self.report is not None or self.finished_by is self.prefill
        was_cut = self.finished_by is None and self.state is not S.DECODING and self.state is not S.REPORTING
        if is_over or was_cut:
            self._finish()
        elif self.state is not S.REPORTING:
            self.go("report")
            self.queue_by = math.inf
            self.set_clock(self.shared.settings.late_report_s)

    # ------------------------------------------------------------ limits

    def _info(self) -> ModelInfo | None:
        """Its model as nodes serve it; as they did where they do not any more."""
        return served_now(self.shared.models, self.generation) or self.generation.served

    def _longest(self) -> int:
        """Tokens that the largest node of its model takes; 0 where nothing is known."""
        info = self._info()
        if info is not None:
            return info.max_len
        nodes = self.shared.cluster.view().nodes
        return max((node.max_len for node in nodes if node.serves(self.job.model)), default=0)

    def _is_cut(self) -> bool:
        """Whether its node's own limit ended it, and a larger node can go on. An attempt must have added tokens."""
        finished, job, choice = self.finished, self.job, self.choice
        assert finished is not None and choice is not None
        num_output, num_tokens = finished.num_output, len(job.prompt) + finished.num_output
        if finished.reason != "length" or num_output >= job.sampling.max_tokens or num_output <= self.cut_at:
            return False
        node = choice.prefill if self.finished_by is self.prefill else self.decode_node
        return node is not None and node.max_len <= num_tokens < self._longest()

    def _is_at_limit(self) -> bool:
        """Whether what was sent is all that nodes with room for it could make."""
        num_output, longest = len(self.job.emitted), self._longest()
        return num_output > 0 and (num_output == self.cut_at or len(self.job.prompt) + num_output >= longest > 0)

    def _finish(self) -> None:
        assert self.finished is not None
        num_output = self.finished.num_output
        self.record.done = done = self._done(self.finished)
        self.record.num_output = num_output
        if self.trace is not None:
            self.trace.done(done, num_output, self.shared.clock())
        self._close(None, "done", lambda: self.sink.on_done(done))

    def _done(self, finished: Finished) -> Done:
        started, route = self.started, self.route()
        self.shared.selector.note_end(len(self.job.prompt), finished.num_output)
        prefill = finished.timings if route.mode == "local" else self.report or self.seen_timings(finished.num_output)
        timeline = Timeline(  # by position, which costs half
            prefill.queue_s,
            prefill.prefill_s,
            prefill.transfer_s,
            prefill.exposed_s,
            self.first_token_at - started if self.first_token_at is not None else None,
            self.second_token_at - started if self.second_token_at is not None else None,
            finished.timings.decode_s,
            finished.timings.decode_tokens,
            prefill.transfer_bytes,
            prefill.pulled_tokens,
            self.placed_at - started,
        )
        return Done(finished.reason, finished.stop_token, self.job.cached_tokens or 0, self.attempts, route, timeline)

    def _close(self, error: str | None, reason: str, tell: Callable[[], None] | None = None) -> None:
        """However it ended: nothing of it is left on the nodes, in the queue or in the books. error: its code, None for
        a good end. tell: of the end, before its forks hear of it: they may end, too, and then its client leaves."""
        shared, request = self.shared, self.job.request
        self.go("end")
        self._drop_timer()
        if self.pause is not None:
            self.pause.cancel()
        if self.has_nodes:
            node_events.stop(self, reason)
        else:
            shared.waiting.leave(request)
        shared.cluster.ledger.close(request)
        shared.open.leave(request)
        self.record.attempts, self.record.cached_tokens = self.attempts, self.job.cached_tokens
        if self.trace is not None:
            self.trace.ended(shared.clock(), error, reason)
        if requests.is_on:
            num_output = len(self.job.emitted) if self.finished is None else self.finished.num_output
            log_ended(self.record, num_output, error, reason)
        shared.explainer.close(self.record, error, reason)
        shared.waiting.poke()
        try:
            if tell is not None:
                tell()
        finally:
            if self.generation.leads:
                shared.fork_groups.settle(request, None)
