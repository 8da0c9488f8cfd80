"""One request's life, as one coroutine: choose nodes, run attempts until one ends well, stream what the client may see, give exactly one answer.

`attempt` is the state machine of one attempt; this module waits for its events and clocks, retries, and cancels on the way out. Nothing here
knows HTTP, sockets or tokenizers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry

from pdcluster import errors
from pdcluster.messages import Finished, Timings
from pdcluster.metrics import ExplainMetrics, HoldMetrics
from pdcluster_router.admission import Slo, check_fits
from pdcluster_router.attempt import Attempt, Cluster, RetryAttempt, StageDeadlines
from pdcluster_router.chooser import Chooser, Decision
from pdcluster_router.explain import Explainer, Record
from pdcluster_router.fairness import Held
from pdcluster_router.gate import Gate
from pdcluster_router.generation import Chunk, Done, Generation, ModelInfo, Standing, Timeline
from pdcluster_router.headroom import Headroom
from pdcluster_router.hold import HoldLimits
from pdcluster_router.job import HashChain, Job
from pdcluster_router.legs import Letters
from pdcluster_router.open_requests import OpenRequest, OpenRequests
from pdcluster_router.waiting import Waiting

if TYPE_CHECKING:
    from pdcluster.api.text import TextModel

logger = logging.getLogger(__name__)

RETRY_PAUSES_S = (0.0, 0.1, 0.5)
"""Before the first retry, the second, and later ones."""

SHUT_S = 0.1
"""Longest time that a node's refusal of one request counts for the others: a small one may find room where a large one did not."""

BYTES_PER_TOKEN = 16
"""What a prompt's token takes while it waits: in a list, packed, and its share of the hashes."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """retries: new attempts after the first that failed (refusals for want of room do not count,
    they wait); hold_s: how long a request may wait for room without getting on;
    late_report_s: how long a finished request waits for the prefill node's report, which only the timeline needs."""

    retries: int = 3
    hold_s: float = 60.0
    late_report_s: float = 0.02
    stages: StageDeadlines = field(default_factory=StageDeadlines)
    hold: HoldLimits = field(default_factory=HoldLimits)
    headroom: Headroom = field(default_factory=Headroom)
    slo: Slo = field(default_factory=Slo)


class Models(Protocol):
    """What the router knows of the models behind it."""

    def models(self) -> Sequence[ModelInfo]: ...

    def text(self, model: str) -> TextModel: ...

    def chain(self, model: str, salt: bytes) -> HashChain:
        """How the model's nodes name KV for this tenant; raises UnknownModel or Unavailable."""
        ...


class Dispatch:
    """Implements generation.Dispatcher over a Cluster. Owned by the router's event loop."""

    def __init__(
        self,
        cluster: Cluster,
        models: Models,
        chooser: Chooser,
        settings: DispatchSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: HoldMetrics | None = None,
        explainer: Explainer | None = None,
    ) -> None:
        self.explainer = explainer or Explainer(settings.headroom, ExplainMetrics(CollectorRegistry()), time.time)
        gate = Gate(settings.hold, settings.headroom, settings.slo)
        self.waiting = Waiting(gate, metrics or HoldMetrics(CollectorRegistry()), clock, settings.stages.hold_s)
        self._cluster = cluster
        self._models = models
        self._chooser = chooser
        chooser.num_held = lambda: self.waiting.num_held
        self._settings = settings
        self._clock = clock
        self.open = OpenRequests()
        self._shut: dict[str, float] = {}

    def models(self) -> Sequence[ModelInfo]:
        return self._models.models()

    def text(self, model: str) -> TextModel:
        return self._models.text(model)

    def is_ready(self) -> bool:
        return bool(self._models.models()) and any(node.accepts_work for node in self._cluster.view().nodes)

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk | Done, None]:
        """Run one request to its one answer; see the contract in `generation`."""
        started = self._clock()
        with (
            self.open.entered(generation.request, generation.model, len(generation.token_ids), started, generation.hang_up) as entry,
            self.explainer.entered(generation.request, generation.standing, started, generation.client_id) as record,
        ):
            async with aclosing(self._generate(generation, entry, record)) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        entry.num_output = event.position + len(event.token_ids)
                    entry.is_done = isinstance(event, Done)
                    with entry.outside():
                        yield event

    async def _generate(self, generation: Generation, entry: OpenRequest, record: Record) -> AsyncGenerator[Chunk | Done, None]:
        started = entry.started
        job = self._job(generation, started)
        inbox = self._cluster.ledger.open_inbox(job.request)
        budget = RetryBudget(self._settings)
        first_token_at = second_token_at = None
        is_placed = False
        try:
            while True:
                asked = self._clock()
                decision = await self._place(job, generation.standing, is_paid=is_placed)
                is_placed = True
                entry.place(decision.choice)
                record.decided(decision, asked, self._clock())
                attempt = Attempt(job, decision.choice, self._cluster, self._chooser, self._settings.stages, self._clock)
                try:
                    async with aclosing(self._run(attempt, job, inbox)) as chunks:
                        async for chunk in chunks:
                            if first_token_at is None and attempt.first_token_at is not None:
                                first_token_at = attempt.first_token_at
                                record.first_token(first_token_at)
                            yield chunk
                    second_token_at = second_token_at or attempt.second_token_at
                    break
                except RetryAttempt as failure:
                    second_token_at = second_token_at or attempt.second_token_at
                    attempt.finished = attempt.finished or self._ending(job, generation.model)
                    if attempt.is_done:
                        break
                    self._note_refusal(failure)
                    pause_s = budget.spend(failure, job, self._clock())
                    await asyncio.sleep(min(pause_s, max(job.deadline - self._clock(), 0.0)))
            yield self._done(attempt, job, budget.attempts, started, first_token_at, second_token_at)
        finally:
            record.attempts, record.cached_tokens = budget.attempts, job.cached_tokens
            self._cluster.ledger.close_inbox(job.request)
            self.waiting.poke()

    def _job(self, generation: Generation, now: float) -> Job:
        return Job(
            request=generation.request,
            prompt=generation.token_ids,
            sampling=generation.sampling,
            deadline=now + generation.deadline_s,
            chain=self._models.chain(generation.model, generation.salt),
            force=generation.mode,
            session=generation.session,
        )

    async def _place(self, job: Job, standing: Standing, *, is_paid: bool) -> Decision:
        """Nodes for the next attempt, at once or when it is the request's turn. is_paid: it had a place before, and comes back."""
        now = self._clock()
        if now >= job.deadline:
            raise errors.DeadlineExceeded(f"request {job.request} found no room by its deadline", "request")
        size_bytes = BYTES_PER_TOKEN * len(job.prompt)
        held = Held(job.request, standing.tenant, 0.0, size_bytes, now, job.deadline, standing.weight, standing.priority, is_paid)
        return await self.waiting.place(held, lambda moment: self._decide(job, moment))

    def _note_refusal(self, failure: RetryAttempt) -> None:
        """Nobody else tries a node that just had no room: all that wait would, one after the other, and be refused one after the other."""
        if failure.incarnation is None or not isinstance(failure.cause, errors.Overloaded):
            return
        now = self._clock()
        self._shut = {incarnation: until for incarnation, until in self._shut.items() if until > now}
        self._shut[failure.incarnation] = now + min(failure.cause.retry_after_s, SHUT_S)

    def _decide(self, job: Job, now: float) -> Decision:
        for incarnation, until in self._shut.items():
            if until > now:
                job.busy[incarnation] = max(job.busy.get(incarnation, now), until)
        try:
            return self._chooser.choose(job, now)
        except errors.Unavailable:
            check_fits(len(job.prompt) + len(job.emitted), self._cluster.view())
            raise
        except errors.PdclusterError:
            raise
        except Exception as error:  # a policy's bug, which must not take those with it that wait beside this request
            logger.exception("the routing policy %s failed on request %s", self._chooser.holder.live.name, job.request)
            raise errors.PdclusterError(f"internal error: the routing policy failed ({type(error).__name__}); see the router's log") from error

    def _ending(self, job: Job, model: str) -> Finished | None:
        """The last word that a lost node did not get out, when its tokens came before it."""
        info = next((info for info in self._models.models() if info.id == model), None)
        ending = job.ending(info.eos_token_ids, info.max_len) if info is not None else job.ending((), None)
        return None if ending is None else Finished(job.request, 0, ending[0], len(job.emitted), Timings(), ending[1])

    async def _run(self, attempt: Attempt, job: Job, inbox: Letters) -> AsyncGenerator[Chunk, None]:
        """Events of one attempt until it is done; whatever ends it, both legs are cancelled if they still run."""
        reason = "client left"
        try:
            attempt.start()
            while not attempt.is_done:
                event = await inbox.get(attempt.next_deadline() - self._clock())
                if event is None:
                    attempt.expire()
                    continue
                for chunk in attempt.handle(event):
                    yield chunk
            await self._late_report(attempt, inbox)
            reason = "done"
        except (RetryAttempt, errors.PdclusterError) as error:
            reason = str(error)
            raise
        finally:
            attempt.stop(reason)

    async def _late_report(self, attempt: Attempt, inbox: Letters) -> None:
        """The prefill node's timings may come a moment after the decode node's last word."""
        until = self._clock() + self._settings.late_report_s
        while attempt.awaits_report:
            event = await inbox.get(until - self._clock())
            if event is None:
                logger.debug("no report of the prefill leg within %s s", self._settings.late_report_s)
                return
            attempt.handle(event)

    def _done(self, attempt: Attempt, job: Job, attempts: int, started: float, first_token_at: float | None, second_token_at: float | None) -> Done:
        finished = attempt.finished
        assert finished is not None
        self._chooser.note_output(finished.num_output)
        prefill = attempt.prefill_timings if attempt.route().mode == "remote" else finished.timings
        timeline = Timeline(
            queue_s=prefill.queue_s,
            prefill_s=prefill.prefill_s,
            transfer_s=prefill.transfer_s,
            exposed_s=prefill.exposed_s,
            ttft_s=first_token_at - started if first_token_at is not None else None,
            ttst_s=second_token_at - started if second_token_at is not None else None,
            decode_s=finished.timings.decode_s,
            decode_tokens=finished.timings.decode_tokens,
            transfer_bytes=prefill.transfer_bytes,
            pulled_tokens=prefill.pulled_tokens,
        )
        return Done(finished.reason, finished.stop_token, job.cached_tokens or 0, attempts, attempt.route(), timeline)


class RetryBudget:
    """Decides after a failed attempt whether there is another. Refusals for want of room may go on for hold_s from the first one after the last
    token that was emitted; anything else counts. The first retry comes at once, because most failures are a node's end; later ones after a pause,
    because what fails again at once may be a path that is coming back."""

    def __init__(self, settings: DispatchSettings) -> None:
        self._settings = settings
        self._held_since: float | None = None
        self._emitted = 0
        self._failures = 0

    @property
    def attempts(self) -> int:
        """The one that runs now included; refusals are not attempts."""
        return self._failures + 1

    def spend(self, failure: RetryAttempt, job: Job, now: float) -> float:
        """Seconds to wait before the next attempt; raises the cause when there must not be one."""
        if isinstance(failure.cause, errors.Overloaded):
            if self._held_since is None or len(job.emitted) > self._emitted:
                self._held_since, self._emitted = now, len(job.emitted)
            if now >= self._held_since + self._settings.hold_s:
                raise failure.cause
            return 0.0
        if failure.incarnation is not None:
            job.excluded.add(failure.incarnation)
        self._failures += 1
        if self._failures > self._settings.retries:
            raise errors.Unavailable(f"request {job.request} failed {self._failures} times, last: {failure.cause}") from failure.cause
        logger.warning("request %s: attempt failed (%s), trying again", job.request, failure.cause)
        return RETRY_PAUSES_S[min(self._failures, len(RETRY_PAUSES_S)) - 1]
