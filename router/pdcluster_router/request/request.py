"""One request's life, as a state machine without a task: choose nodes, run attempts until one ends well, pass tokens to
the sink, give exactly one answer.

Messages of nodes (`node_events`, straight from their links), timers, the gate and whoever cancels move it. Each of
these may happen while it is at work: a node may answer at once, and a sink may have enough. Then messages of nodes wait
their turn. A cancel is seen before the next of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from msgspec import structs

from pdcluster.core import errors
from pdcluster.core.messages import Finished, TokenRow
from pdcluster.telemetry.log import Log, requests
from pdcluster_router.cluster.legs import Body, FastTokenPath
from pdcluster_router.core.generation import Done, Generation, RequestRoute, Sink, Timeline, TokenChunk
from pdcluster_router.core.job import Job, RetryAttempt
from pdcluster_router.explain.recorder import Record
from pdcluster_router.explain.request_log import log_ended, log_placed
from pdcluster_router.explain.request_trace import ChoiceTrace
from pdcluster_router.policy.base import Decision
from pdcluster_router.request import node_events
from pdcluster_router.request.attempt import Attempt
from pdcluster_router.request.open_requests import OpenRequest
from pdcluster_router.request.placement import Placement
from pdcluster_router.request.retries import RetryBudget
from pdcluster_router.request.shared import Shared, job_of, longest_of, served_now
from pdcluster_router.request.states import HAS_SLOT, REQUEST, AttemptState, RequestState
from pdcluster_router.request.timers import Timed

log = Log("request")

R = RequestState


def _give_up(reason: str) -> None:
    raise RetryAttempt(errors.NodeDrains(reason), None)


def ignore(chunk: TokenChunk) -> None:
    """Take tokens that nobody waits for."""


# Of a request that ended before it had nodes.
NO_ROUTE = RequestRoute("local", None, None, "")
# Errors that say that no node takes a request.
NO_ROOM = (errors.Unavailable, errors.Overloaded, errors.ContextTooLong)


class Request(Timed):
    """Implements generation.Running. Owned by the router's event loop.

    One answer: the sink gets `on_done` or `on_error` once, or nothing after a cancel.
    """

    # The running attempt, or the last one until another begins. Class defaults cost nothing until they are set.
    attempt: Attempt | None = None
    budget: RetryBudget | None = None
    pause: asyncio.TimerHandle | None = None
    trace: ChoiceTrace | None = None
    is_at_work = False
    # Attempts as clients count them.
    attempts = 1
    # Tokens sent when a node's limit last ended an attempt.
    cut_at = 0

    def __init__(
        self, shared: Shared, generation: Generation, sink: Sink, job: Job, record: Record, started: float
    ) -> None:
        self.shared, self.generation, self.sink = shared, generation, sink
        self.job, self.record, self.started = job, record, started
        self.state = R.WAITING
        self.pending_messages: list[tuple[str, Body]] = []
        self.placement = Placement(shared, generation, job, record)

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
        shared.open[generation.request] = self._listed
        shared.cluster.ledger.readers[generation.request] = self.read
        if generation.leads:
            shared.fork_groups.enter(generation.request)
        if generation.parent is not None and shared.fork_groups.follow(generation.parent, self._parent_placed):
            self.state = R.FORKING
        else:
            self._step(self._place)

    # ------------------------------------------------------------ what moves it

    def _parent_placed(self, incarnation: str | None) -> None:
        """It is known where its parent decodes. Until then its parent's deadline is its own."""
        if self.state is R.FORKING:
            self.state = REQUEST[self.state, "parent placed"]
            self.job.fork_of, self.job.fork_on = self.generation.parent, incarnation
            self._step(self._place)

    def read(self, incarnation: str, body: Body) -> None:
        """A message of a node."""
        attempt = self.attempt
        if self.is_at_work or self.state is not R.RUNNING or attempt is None:
            self.pending_messages.append((incarnation, body))
        elif type(body) is TokenRow and body.position > 1 and node_events.continues(attempt, incarnation, body):
            self._continue(attempt, body)
        else:
            self._step(node_events.handle, attempt, incarnation, body)

    def cancel(self, reason: str) -> None:
        """Implements generation.Running."""
        if self.state is not R.ENDED:
            self._close("cancelled", reason)

    def finish(self, num_output: int) -> None:
        """Implements generation.Running. Its sink may be at work here, so `_step` ends it."""
        attempt = self.attempt
        if self.state is R.ENDED or attempt is None:
            return
        known = attempt.finished.timings if attempt.finished is not None else attempt.seen_timings(num_output)
        attempt.finished = Finished(self.job.request, 0, "stop", num_output, known)
        node_events.leave_decode(attempt, "a stop string came")
        if not self.is_at_work:
            self._step(lambda: None)

    def hold(self, reason: str) -> None:
        """Take it off its nodes. It goes on from what it has when the gate lets it."""
        if self.state is R.RUNNING:
            self._step(_give_up, reason)

    def pass_over(self, seconds: float) -> None:
        """It waited through a pause, which counts for none of its times. Until its next attempt it may go on with the
        weights that are there now.
        """
        self.job.deadline += seconds
        self.job.may_change_weights = True
        if self.budget is not None:
            self.budget.pass_over(seconds)

    def fail(self, error: Exception) -> None:
        if self.state is R.ENDED:
            return
        attempt, num_output = self.attempt, len(self.job.emitted)
        if isinstance(error, NO_ROOM) and attempt is not None and self._is_at_limit(num_output):
            attempt.finished = Finished(self.job.request, 0, "length", num_output, attempt.seen_timings(num_output))
            self._finish(attempt, attempt.finished)
            return
        code = error.code if isinstance(error, errors.PdclusterError) else "internal"
        self._close(code, str(error), partial(self.sink.on_error, error))

    def abort(self) -> None:
        """End it with the tokens it has, which may be none. An embedding has nothing, and fails."""
        attempt, job = self.attempt, self.job
        if self.state is R.ENDED:
            return
        if job.pooling is not None:
            self.fail(errors.Cancelled(f"request {job.request} was aborted"))
        elif attempt is not None and attempt.finished is not None and attempt.is_complete:
            self._finish(attempt, attempt.finished)
        else:
            self._end_well(self._aborted(), len(job.emitted), "aborted")

    def ring(self) -> None:
        """The timer rings: look at the clocks."""
        self.drop_timer(self.shared.timers)
        if self.state is R.RUNNING:
            self._step(self._look)

    def _step(self, action: Callable[..., None], *arguments: object) -> None:
        """One event, and the messages that came meanwhile. An attempt that fails becomes another one, or the answer."""
        self.is_at_work, attempt = True, self.attempt
        if attempt is not None and attempt.has_fast_path:
            attempt.leave_fast_path()
        try:
            while self.state is not R.ENDED:
                try:
                    action(*arguments)
                    while self.pending_messages and self.state is R.RUNNING:
                        node_events.handle(self.attempt, *self.pending_messages.pop(0))  # type: ignore[arg-type]
                    attempt = self.attempt
                    if attempt is not None and attempt.finished is not None:
                        self._finish_if_complete(attempt, attempt.finished)
                    break
                except RetryAttempt as failure:
                    action, arguments = self._after(failure), ()
            attempt = self.attempt
            if self.state is R.RUNNING and attempt is not None and attempt.due < self.timer_due:
                shared = self.shared
                buckets = shared.local_rounds if attempt.prefill is None else shared.remote_rounds
                self.set_timer(attempt.due, shared.clock(), shared.timers, buckets)
        except Exception as error:  # the top of what happens to a request: its sink gets the error
            if self.state is R.ENDED:
                log.exception("something failed after the end of a request", request=self.job.request)
            self.fail(error)
        finally:
            self.is_at_work = False

    def _continue(self, attempt: Attempt, row: TokenRow) -> None:
        """Pass on a row that only continues. While the sink takes these without a TokenChunk, most do not come here."""
        try:
            take = self.sink.fast_token_path()
            is_taken = take is not None and take(row.position, row.tokens)
        except Exception as error:  # the top of what happens to a request, as in `_step`
            self.fail(error)
            return
        if take is not None and is_taken:
            assert attempt.decode is not None  # it sent the row
            attempt.decode.way = FastTokenPath(take, self.fail)
            attempt.has_fast_path = True
        else:
            self._step(attempt.emit, TokenChunk(row.position, row.tokens, row.logprobs, (), attempt.route()))

    def _emit(self, chunk: TokenChunk) -> None:
        """Pass on new tokens of a parent. Its forks may follow to the node that decodes it."""
        self.sink.on_chunk(chunk)
        attempt = self.attempt
        if self.state is R.ENDED or attempt is None:
            return
        decode = attempt.decode if attempt.state in HAS_SLOT and attempt.finished is None else None
        self.shared.fork_groups.settle(self.job.request, None if decode is None else decode.endpoint.incarnation)

    def _look(self) -> None:
        now, attempt = self.shared.clock(), self.attempt
        assert attempt is not None  # one runs
        attempt.look_at_clocks(now)
        if now < attempt.due:
            return
        if attempt.state is AttemptState.REPORTING and attempt.finished is not None:
            log.debug("no report of the prefill leg in time", request=self.job.request)
            self._finish(attempt, attempt.finished)
            return
        node_events.expire(attempt, now)
        attempt.look_at_clocks(now)

    # ------------------------------------------------------------ attempts

    def _place(self) -> None:
        """Begin the next attempt, at once or when it is the request's turn."""
        self.pause, now = None, self.shared.clock()
        decision = self.placement.place(now, self._placed)
        if decision is not None:
            self._begin(decision, now)

    def _placed(self, answer: Decision | errors.PdclusterError, asked: float) -> None:
        """The gate's answer to a request that waited."""
        if isinstance(answer, Decision):
            self._step(self._begin, answer, asked)
        else:
            self.fail(answer)

    def _begin(self, decision: Decision, asked: float) -> None:
        """Begin an attempt. The decision is noted after it was sent, so that nodes begin meanwhile."""
        shared, job, placement = self.shared, self.job, self.placement
        placement.num_placed += 1
        job.tries, now, job.may_change_weights = self.attempts, shared.clock(), False
        if self.trace is not None:
            label = "" if job.served is None else job.served.weights.label
            job.trace = self.trace.placed(decision.record, asked, now, label)
        if requests.is_on():
            log_placed(self.record, placement.num_placed, decision.record)
        emit = self._emit if self.generation.leads else self.sink.on_chunk
        self.attempt = attempt = Attempt(shared, job, self.record, decision, now, emit)
        self.state = REQUEST[self.state, "begin"]
        try:
            node_events.begin(attempt)
        finally:
            self.record.decided(decision, asked, now)
            shared.selector.note_sent(decision, now)
            if placement.num_placed == 1 and self.generation.parent is None:
                shared.selector.note_prefix(self.record.ideal or 0, decision.record.most_cached)

    def _after(self, failure: RetryAttempt) -> Callable[[], None]:
        """The attempt is over without an answer: what to do next. Raises the cause when there is nothing."""
        attempt, job = self.attempt, self.job
        assert attempt is not None  # it failed
        attempt.route()  # as it is: an answer of these tokens names it
        node_events.stop(attempt, str(failure))
        if isinstance(failure.cause, errors.OutgrewNode):
            self.cut_at = len(job.emitted)
        else:
            finished = attempt.finished or self._ending(attempt)
            attempt.finished = finished
            if finished is not None and attempt.is_complete:
                return lambda: self._finish(attempt, finished)
        attempt.finished = None
        self.state = REQUEST[self.state, "retry"]
        self.drop_timer(self.shared.timers)
        job.fork_on = None
        self.record.failed(str(failure))
        now = self.shared.clock()
        if self.trace is not None:
            self.trace.failed(now, str(failure))
        self.shared.refusing.note(failure, now)
        if self.budget is None:
            self.budget = RetryBudget(self.shared.settings)
        pause_s = min(self.budget.spend(failure, job, now), max(job.deadline - now, 0.0))
        self.attempts = self.budget.attempts
        return self._place if pause_s <= 0.0 else lambda: self._place_in(pause_s)

    def _place_in(self, seconds: float) -> None:
        self.pause = asyncio.get_running_loop().call_later(seconds, self._step, self._place)

    def _listed(self) -> OpenRequest:
        """For operators."""
        job, attempt = self.job, self.attempt
        model, num_prompt = self.generation.model, len(job.prompt)
        listed = OpenRequest(
            job.request, model, num_prompt, self.started, self.fail, self.abort, self.hold, self.pass_over,
            self.state is R.RUNNING,
        )  # fmt: skip
        if attempt is None:
            return listed
        decision = attempt.decision
        return replace(
            listed, attempts=self.placement.num_placed, mode=decision.mode, prefill=decision.prefill,
            decode=decision.decode, num_output=len(job.emitted), placed_at=attempt.placed_at,
            first_token_at=job.first_token_at,
        )  # fmt: skip

    # ------------------------------------------------------------ ends

    def _ending(self, attempt: Attempt) -> Finished | None:
        """The last message that a lost node did not send, when its tokens came before it."""
        job = self.job
        info = served_now(self.shared.models, self.generation, job) or job.served
        ending = job.ending(info.eos_token_ids, info.max_len) if info is not None else job.ending((), None)
        if ending is None:
            return None
        num_output = len(job.emitted)
        return Finished(job.request, 0, ending[0], num_output, attempt.seen_timings(num_output), ending[1])

    def _finish_if_complete(self, attempt: Attempt, finished: Finished) -> None:
        """The prefill node's timings may come a moment after the decode node's first message."""
        if len(self.job.emitted) < finished.num_output or self.state is R.ENDED:
            return
        if finished.reason == "length" and self._is_cut(attempt, finished):
            name = attempt.route().decode
            raise RetryAttempt(errors.OutgrewNode(f"the answer is as long as node {name} takes requests"), None)
        is_reported = attempt.prefill is None or attempt.report is not None or attempt.finished_by is attempt.prefill
        has_begun = attempt.state is AttemptState.DECODING or attempt.state is AttemptState.REPORTING
        if is_reported or (attempt.finished_by is None and not has_begun):
            self._finish(attempt, finished)
        elif attempt.state is not AttemptState.REPORTING:
            attempt.await_report()

    def _is_cut(self, attempt: Attempt, finished: Finished) -> bool:
        """Whether its node's own limit ended it, and a larger node can go on. An attempt must have added tokens."""
        job = self.job
        num_output, num_tokens = finished.num_output, len(job.prompt) + finished.num_output
        if num_output >= job.sampling.max_tokens or num_output <= self.cut_at:
            return False
        node = attempt.prefill_node if attempt.finished_by is attempt.prefill else attempt.decode_node
        return node is not None and node.max_len <= num_tokens < longest_of(self.shared, self.generation, job)

    def _is_at_limit(self, num_output: int) -> bool:
        """Whether what was sent is all that nodes with room for it could make."""
        longest = longest_of(self.shared, self.generation, self.job)
        return num_output > 0 and (num_output == self.cut_at or len(self.job.prompt) + num_output >= longest > 0)

    def _finish(self, attempt: Attempt, finished: Finished) -> None:
        self._end_well(self._done(attempt, finished), finished.num_output, "done")

    def _end_well(self, done: Done, num_output: int, reason: str) -> None:
        self.record.done = structs.replace(done, vector=b"") if done.vector else done
        self.record.num_output = num_output
        if self.trace is not None:
            self.trace.done(done, num_output, self.shared.clock())
        self._close(None, reason, partial(self.sink.on_done, done))

    def _aborted(self) -> Done:
        """Its end by force. Its timeline has what the router saw."""
        job, attempt, started = self.job, self.attempt, self.started
        route = NO_ROUTE if attempt is None else attempt.route()
        first_s = None if job.first_token_at is None else job.first_token_at - started
        second_s = None if job.second_token_at is None else job.second_token_at - started
        placed_s = None if attempt is None else attempt.placed_at - started
        timeline = Timeline(ttft_s=first_s, ttst_s=second_s, placed_s=placed_s)
        weights = job.weights_ranges(len(job.emitted))
        return Done("abort", None, job.cached_tokens or 0, self.attempts, route, timeline, weights=weights)

    def _done(self, attempt: Attempt, finished: Finished) -> Done:
        started, job, route = self.started, self.job, attempt.route()
        if job.pooling is None:
            self.shared.selector.note_end(len(job.prompt), finished.num_output)
        is_local = route.mode == "local"
        prefill = finished.timings if is_local else attempt.report or attempt.seen_timings(finished.num_output)
        timeline = Timeline(  # by position, which costs half
            prefill.queue_s,
            prefill.prefill_s,
            prefill.transfer_s,
            prefill.exposed_s,
            job.first_token_at - started if job.first_token_at is not None else None,
            job.second_token_at - started if job.second_token_at is not None else None,
            finished.timings.decode_s,
            finished.timings.decode_tokens,
            prefill.transfer_bytes,
            prefill.pulled_tokens,
            attempt.placed_at - started,
        )
        return Done(
            finished.reason, finished.stop_token, job.cached_tokens or 0, self.attempts, route, timeline,
            attempt.vector, job.weights_ranges(finished.num_output),
        )  # fmt: skip

    def _close(self, error: str | None, reason: str, answer: Callable[[], None] | None = None) -> None:
        """However it ended: nothing of it is left on the nodes, in the queue or in the books.

        error: its code, None for a good end. answer: passes the end to the sink, before its forks are released: they
        may end, too, and then its client leaves.
        """
        shared, request, attempt = self.shared, self.job.request, self.attempt
        self.state = REQUEST[self.state, "end"]
        if self.timer_due != math.inf:
            self.drop_timer(shared.timers)
        if self.pause is not None:
            self.pause.cancel()
        if attempt is not None and attempt.state is not AttemptState.OVER:
            node_events.stop(attempt, reason)
        else:
            shared.waiting.leave(request)
        shared.cluster.ledger.readers.pop(request, None)
        shared.open.pop(request, None)
        self.record.attempts, self.record.cached_tokens = self.attempts, self.job.cached_tokens
        if self.trace is not None:
            self.trace.ended(shared.clock(), error, reason)
        if requests.is_on():
            num_output = len(self.job.emitted)
            if attempt is not None and attempt.finished is not None:
                num_output = attempt.finished.num_output
            log_ended(self.record, num_output, error, reason, self.job.weights_ranges(num_output))
        shared.explainer.close(self.record, error, reason)
        if shared.waiting.waiters:
            shared.waiting.poke()
        try:
            if answer is not None:
                answer()
        finally:
            if self.generation.leads:
                shared.fork_groups.settle(request, None)
                if attempt is not None:
                    attempt.emit = ignore  # drop the reference cycle
