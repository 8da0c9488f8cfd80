"""One request's life, as a state machine without a task: choose nodes, run attempts until one ends well, tell the sink
what the client may see, give exactly one answer.

`attempt` is the state machine of one attempt; this one holds a place at the gate, retries, watches the clocks and
cancels on the way out. It is moved by what nodes say (`read`, straight from their links), by alarms, by the gate and by
whoever cancels. Each of these may happen while it is at work (a node that answers at once, a sink that has enough):
what nodes say then waits its turn, a cancel is seen before the next of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdcluster.core import errors
from pdcluster.core.messages import Finished, LegTimings, TokenRow
from pdcluster_router.cluster.legs import Body, ClusterLinks, FastTokenPath
from pdcluster_router.core.generation import Done, Generation, Sink, Timeline, TokenChunk
from pdcluster_router.core.job import HashedPrompt, Job, RetryAttempt
from pdcluster_router.explain.recorder import Explainer, Record
from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.policy.selector import Decision, PolicySelector
from pdcluster_router.queueing.admission import check_fits
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.queueing.waiting import WaitingRequests
from pdcluster_router.request.attempt import Attempt
from pdcluster_router.request.begun import Begun
from pdcluster_router.request.forks import ForkGroups
from pdcluster_router.request.open_requests import OpenRequest, OpenRequests
from pdcluster_router.request.retries import DispatchSettings, RetryBudget, Shut
from pdcluster_router.request.serving import ServedModels
from pdcluster_router.request.timers import Timers

logger = logging.getLogger(__name__)

# What a prompt's token takes while it waits: in a list, packed, and its share of the hashes.
BYTES_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Shared:
    """What all requests of one router share."""

    cluster: ClusterLinks
    models: ServedModels
    selector: PolicySelector
    settings: DispatchSettings
    waiting: WaitingRequests
    explainer: Explainer
    clock: Callable[[], float] = time.monotonic
    open: OpenRequests = field(default_factory=OpenRequests)
    shut: Shut = field(default_factory=Shut)
    timers: Timers = field(default_factory=Timers)
    fork_groups: ForkGroups = field(default_factory=ForkGroups)
    named: HashedPrompt = field(default_factory=HashedPrompt)


def job_of(shared: Shared, generation: Generation, started: float) -> Job:
    """Raises PdclusterError where nobody knows its model."""
    chain = shared.models.chain(generation.model, generation.salt)
    packed, hashes = shared.named.of(generation.token_ids, chain)
    deadline = started + generation.deadline_s
    job = Job(
        generation.request,
        generation.token_ids,
        generation.sampling,
        deadline,
        chain,
        generation.mode,
        generation.session,
    )
    job.packed, job.hashes, job.num_hashed = packed, hashes, 0
    job.has_prompt_logprobs = generation.sampling.prompt_logprobs is None
    return job


class Run:
    """Implements generation.Running. Owned by the router's event loop. One answer: the sink hears `on_done` or
    `on_error` once, or nothing after a cancel."""

    __slots__ = (
        "_attempt",
        "_budget",
        "_choice",
        "_due",
        "_first_token_at",
        "_generation",
        "_has_way",
        "_is_at_work",
        "_is_over",
        "_job",
        "_num_placed",
        "_pause",
        "_pending_messages",
        "_placed_at",
        "_record",
        "_report_by",
        "_second_token_at",
        "_shared",
        "_sink",
        "_started",
        "_timer",
    )  # fmt: skip

    def __init__(
        self, shared: Shared, generation: Generation, sink: Sink, job: Job, record: Record, started: float
    ) -> None:
        self._shared, self._generation, self._sink = shared, generation, sink
        self._job, self._record, self._started = job, record, started
        self._budget = RetryBudget(shared.settings)
        self._attempt: Attempt | None = None
        self._pending_messages: deque[tuple[str, Body]] = deque()
        self._first_token_at: float | None = None
        self._second_token_at: float | None = None
        self._report_by: float | None = None
        self._placed_at = started
        self._is_at_work = self._is_over = self._has_way = False
        self._num_placed = 0
        self._timer: int | None = None
        self._due = 0.0
        self._pause: asyncio.TimerHandle | None = None
        self._choice: RoutingDecision | None = None

    @classmethod
    def of(cls, shared: Shared, generation: Generation, sink: Sink) -> Run:
        """A request that comes now. Raises PdclusterError where nobody knows its model."""
        started = shared.clock()
        job = job_of(shared, generation, started)
        record = shared.explainer.open(generation.request, generation.standing, started, generation.client_id)
        return cls(shared, generation, sink, job, record, started)

    def enter(self) -> None:
        """What nodes and operators say of the request comes here."""
        shared, request = self._shared, self._job.request
        shared.open.enter(request, self._told)
        shared.cluster.ledger.open(request, self.read)

    def start(self) -> None:
        self.enter()
        generation, fork_groups = self._generation, self._shared.fork_groups
        if generation.leads:
            fork_groups.enter(generation.request)
        if generation.parent is None or not fork_groups.follow(generation.parent, self._led):
            self._step(self._place)

    # ------------------------------------------------------------ what was begun elsewhere (`plain_run`)

    def place(self) -> None:
        """It has no nodes yet."""
        self._step(self._place)

    def hold(self, decision: Decision, now: float) -> None:
        """It has none, and may not go where this would send it."""
        self._step(self._hold, decision, now)

    def go_on(self, choice: RoutingDecision, placed_at: float, begun: Begun | None) -> None:
        """It has nodes. begun: None when nothing was sent to them."""
        shared = self._shared
        self._choice, self._placed_at, self._num_placed = choice, placed_at, 1
        self._attempt = attempt = Attempt(
            self._job, choice, shared.cluster, shared.selector, shared.settings.stages, shared.clock
        )
        if begun is None:
            self._step(attempt.start)
            return
        self._first_token_at = begun.first_token_at
        attempt.go_on(begun)
        self._watch(attempt.due)

    def reserve(self) -> None:
        """Its prompt was sent, and the decode node that was chosen takes nothing: on this one again, which notes that,
        or on another."""
        assert self._attempt is not None  # it has nodes
        self._step(self._attempt.reserve_anywhere)

    # ------------------------------------------------------------ what moves it

    def _led(self, incarnation: str | None) -> None:
        """It is known where its leader decodes. Until then its leader's deadline is its own."""
        if not self._is_over:
            self._job.fork_of, self._job.fork_on = self._generation.parent, incarnation
            self._step(self._place)

    def read(self, incarnation: str, body: Body) -> None:
        """A node said something."""
        attempt = self._attempt
        if self._is_at_work or attempt is None:
            self._pending_messages.append((incarnation, body))
        elif type(body) is TokenRow and body.position > 1 and not self._is_over and attempt.goes_on(incarnation, body):
            self._go_on(attempt, body)
        else:
            self._step(self._hear, incarnation, body)

    def cancel(self, reason: str) -> None:
        """Implements generation.Running."""
        if not self._is_over:
            self._close("cancelled", reason)

    def _told(self) -> OpenRequest:
        """For operators."""
        job, choice = self._job, self._choice
        told = OpenRequest(job.request, self._generation.model, len(job.prompt), self._started, self.fail)
        if choice is None:
            return told
        prefill = choice.prefill.name if choice.prefill is not None else None
        num_output, decode = len(job.emitted), choice.decode.name
        return replace(
            told, attempts=self._num_placed, mode=choice.mode, prefill=prefill, decode=decode, num_output=num_output
        )

    def finish(self, num_output: int) -> None:
        """Implements generation.Running."""
        if not self._is_over:
            self._shared.selector.note_end(len(self._job.prompt), num_output)
            self._close(None, "a stop string came")

    def fail(self, error: Exception) -> None:
        if not self._is_over:
            self._close(error.code if isinstance(error, errors.PdclusterError) else "internal", str(error))
            self._sink.on_error(error)

    def _step(self, action: Callable[..., None], *words: object) -> None:
        """One thing that happened, and whatever nodes said meanwhile. Of an attempt that fails in it becomes another
        one, or the answer."""
        self._is_at_work = True
        if self._has_way:
            self._shut_way()
        try:
            while not self._is_over:
                try:
                    action(*words)
                    if self._pending_messages:
                        self._read_messages()
                    break
                except RetryAttempt as failure:
                    action, words = self._after(failure), ()
            attempt = self._attempt
            if attempt is not None and not self._is_over:
                due = attempt.due if self._report_by is None else self._report_by
                if self._timer is None or due < self._due:
                    self._watch(due)
        except Exception as error:  # the top of what happens to a request: its sink hears of it
            if self._is_over:
                logger.exception("request %s: something failed after its end", self._job.request)
            self.fail(error)
        finally:
            self._is_at_work = False

    def _shut_way(self) -> None:
        """What comes next may be more than a row that goes on."""
        self._has_way = False
        if self._attempt is not None:
            self._attempt.open_way(None)

    def _read_messages(self) -> None:
        while self._pending_messages and self._attempt is not None and not self._is_over:
            self._hear(*self._pending_messages.popleft())

    def _go_on(self, attempt: Attempt, row: TokenRow) -> None:
        """Nothing of the request is another but that there is more. Where its sink takes that without a Chunk, most
        rows do not come here."""
        try:
            take = self._sink.way()
            is_taken = take is not None and take(row.position, row.tokens)
        except Exception as error:  # the top of what happens to a request, as in `_step`
            self.fail(error)
            return
        if take is not None and is_taken:
            attempt.open_way(FastTokenPath(take, self.fail))
            self._has_way = True
        else:
            self._step(self._tell, attempt, TokenChunk(row.position, row.tokens, row.logprobs, (), attempt.route()))

    def _hear(self, incarnation: str, body: Body) -> None:
        attempt = self._attempt
        assert attempt is not None  # what comes before is kept
        for chunk in attempt.handle(incarnation, body):
            if self._first_token_at is None and (first := attempt.first_token_at) is not None:
                self._first_token_at = first
                self._record.first_token(first)
            self._tell(attempt, chunk)
            if self._is_over:
                return
        if attempt.finished is not None and attempt.is_done:
            self._done_or_wait(attempt)

    def _tell(self, attempt: Attempt, chunk: TokenChunk) -> None:
        self._sink.on_chunk(chunk)
        if self._generation.leads and not self._is_over:
            self._shared.fork_groups.settle(self._job.request, attempt.decodes_on)

    # ------------------------------------------------------------ clocks

    def _watch(self, due: float) -> None:
        """Have an alarm that is not later than what comes next. Without an attempt there is none: the gate has its own
        clocks, a pause is one."""
        if self._timer is not None:
            self._drop_timer()
        shared = self._shared
        seconds = max(due - shared.clock(), 0.0)
        if self._report_by is None and seconds > shared.settings.stages.liveness_s:
            seconds, due = (
                shared.settings.stages.liveness_s,
                due - seconds + shared.settings.stages.liveness_s,
            )  # its first row moves it no more
        self._due = due
        self._timer = shared.timers.set(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.look()

    def look(self) -> None:
        """A clock may have run out."""
        if not self._is_over and self._attempt is not None:
            self._step(self._look)

    def _look(self) -> None:
        attempt, now = self._attempt, self._shared.clock()
        assert attempt is not None
        if self._report_by is not None:
            if now >= self._report_by:
                logger.debug("no report of the prefill leg within %s s", self._shared.settings.late_report_s)
                self._finish(attempt)
        elif now >= attempt.next_deadline():
            attempt.expire()
            attempt.next_deadline()

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._shared.timers.drop(self._timer, self._ring)
            self._timer = None

    # ------------------------------------------------------------ places

    def _place(self) -> None:
        """Nodes for the next attempt, at once or when it is the request's turn."""
        self._pause = None
        job, standing, now = self._job, self._generation.standing, self._shared.clock()
        if now >= job.deadline:
            raise errors.DeadlineExceeded(f"request {job.request} found no room by its deadline", "request")
        is_paid, waiting = self._num_placed > 0, self._shared.waiting
        try:
            decision = self._decide(now)
        except errors.Unavailable as cause:
            waiting.park(self._queued(now), cause, self._decide, lambda answer: self._placed(answer, now))
            return
        going = waiting.at_once(decision, standing.tenant, is_paid=is_paid)
        if going is not None:
            self._begin(going, now)
        else:
            self._hold(decision, now)

    def _hold(self, decision: Decision, now: float) -> None:
        """Until it is its turn."""
        self._shared.waiting.hold(self._queued(now), decision, self._decide, lambda answer: self._placed(answer, now))

    def _queued(self, now: float) -> QueuedRequest:
        job, standing = self._job, self._generation.standing
        num_tokens, is_paid = len(job.prompt), self._num_placed > 0
        return QueuedRequest(
            job.request, standing.tenant, self._shared.settings.headroom.cold_token_s * num_tokens,
            BYTES_PER_TOKEN * num_tokens, now, job.deadline, standing.weight, standing.priority, is_paid,
        )  # fmt: skip

    def _placed(self, answer: Decision | errors.PdclusterError, asked: float) -> None:
        """The gate's answer to a request that waited."""
        if isinstance(answer, Decision):
            self._step(lambda: self._begin(answer, asked))
        else:
            self.fail(answer)

    def _begin(self, decision: Decision, asked: float) -> None:
        shared = self._shared
        self._choice = decision.choice
        self._num_placed += 1
        self._placed_at = now = shared.clock()
        self._job.tries = self._budget.attempts
        self._record.decided(decision, asked, now)
        choice, query = decision.choice, decision.query
        shared.selector.note_sent(choice, query.num_tokens, query.cached_on(choice.first), now)
        if self._num_placed == 1 and self._generation.parent is None:
            shared.selector.note_prefix(*self._record.prefix)
        self._attempt = Attempt(
            self._job, decision.choice, shared.cluster, shared.selector, shared.settings.stages, shared.clock
        )
        self._attempt.start()

    def _decide(self, now: float) -> Decision:
        job, shared = self._job, self._shared
        shared.shut.apply(job, now)
        try:
            decision = shared.selector.follow(job, now) or shared.selector.choose(job, now)
            self._record.consider(decision, now)
            return decision
        except errors.Unavailable:
            check_fits(len(job.prompt) + len(job.emitted), shared.cluster.view())
            raise
        except errors.PdclusterError:
            raise
        except Exception as error:  # a policy's bug, which must not take those with it that wait beside this request
            logger.exception(
                "the routing policy %s failed on request %s", shared.selector.holder.live.name, job.request
            )
            raise errors.PdclusterError(
                f"internal error: the routing policy failed ({type(error).__name__}); see the router's log"
            ) from error

    # ------------------------------------------------------------ ends of attempts

    def _after(self, failure: RetryAttempt) -> Callable[[], None]:
        """The attempt is over without an answer: what to do next. Raises the cause when there is nothing."""
        attempt = self._attempt
        assert attempt is not None
        self._second_token_at = self._second_token_at or attempt.second_token_at
        attempt.stop(str(failure))
        self._attempt = None
        self._job.fork_on = None
        attempt.finished = attempt.finished or self._ending()
        if attempt.is_done:
            return lambda: self._finish(attempt)
        self._record.failed(str(failure))
        now = self._shared.clock()
        self._shared.shut.note(failure, now)
        pause_s = min(self._budget.spend(failure, self._job, now), max(self._job.deadline - now, 0.0))
        return self._place if pause_s <= 0.0 else lambda: self._place_in(pause_s)

    def _place_in(self, seconds: float) -> None:
        self._pause = asyncio.get_running_loop().call_later(seconds, self._step, self._place)

    def _ending(self) -> Finished | None:
        """The last word that a lost node did not get out, when its tokens came before it."""
        job = self._job
        info = next((info for info in self._shared.models.models() if info.id == self._generation.model), None)
        ending = job.ending(info.eos_token_ids, info.max_len) if info is not None else job.ending((), None)
        return (
            None if ending is None else Finished(job.request, 0, ending[0], len(job.emitted), LegTimings(), ending[1])
        )

    def _done_or_wait(self, attempt: Attempt) -> None:
        """The prefill node's timings may come a moment after the decode node's last word."""
        if not attempt.awaits_report:
            self._finish(attempt)
        elif self._report_by is None:
            self._report_by = self._shared.clock() + self._shared.settings.late_report_s

    def _finish(self, attempt: Attempt) -> None:
        self._second_token_at = self._second_token_at or attempt.second_token_at
        done = self._done(attempt)
        self._close(None, "done")
        self._sink.on_done(done)

    def _done(self, attempt: Attempt) -> Done:
        finished, started, route = attempt.finished, self._started, attempt.route()
        assert finished is not None
        self._shared.selector.note_end(len(self._job.prompt), finished.num_output)
        prefill = attempt.prefill_timings if route.mode == "remote" else finished.timings
        timeline = Timeline(  # by position, which costs half
            prefill.queue_s,
            prefill.prefill_s,
            prefill.transfer_s,
            prefill.exposed_s,
            self._first_token_at - started if self._first_token_at is not None else None,
            self._second_token_at - started if self._second_token_at is not None else None,
            finished.timings.decode_s,
            finished.timings.decode_tokens,
            prefill.transfer_bytes,
            prefill.pulled_tokens,
            self._placed_at - started,
        )
        return Done(
            finished.reason, finished.stop_token, self._job.cached_tokens or 0, self._budget.attempts, route, timeline
        )

    def _close(self, error: str | None, reason: str) -> None:
        """However it ended: nothing of it is left on the nodes, in the queue or in the books. error: its code, None for
        a good end."""
        shared, request = self._shared, self._job.request
        self._is_over = True
        self._drop_timer()
        if self._pause is not None:
            self._pause.cancel()
        if self._attempt is not None:
            self._attempt.stop(reason)
        else:
            shared.waiting.leave(request)
        shared.cluster.ledger.close(request)
        shared.open.leave(request)
        if self._generation.leads:
            shared.fork_groups.settle(request, None)
        self._record.attempts, self._record.cached_tokens = self._budget.attempts, self._job.cached_tokens
        shared.explainer.close(self._record, error, reason)
        shared.waiting.poke()
