"""Finds nodes for a request's next attempt: asks the policy and the gate, and waits for its turn."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from pdcluster.core import errors
from pdcluster.telemetry.log import Log
from pdcluster_router.core.generation import Generation
from pdcluster_router.core.job import Job
from pdcluster_router.explain.recorder import Record
from pdcluster_router.policy.base import Decision
from pdcluster_router.queueing.admission import check_fits
from pdcluster_router.queueing.demand import unplaced
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.request.shared import Shared, check_model, check_weights, longest_of

log = Log("request")

# What a prompt's token takes while it waits: in a list, packed, and its share of the hashes.
BYTES_PER_TOKEN = 16

# Receives the gate's answer to a request that waited, and when it began to wait.
Answer = Callable[[Decision | errors.PdclusterError, float], None]


class Placement:
    """Owned by its request.

    num_placed: attempts that began.
    """

    def __init__(self, shared: Shared, generation: Generation, job: Job, record: Record) -> None:
        self._shared, self._generation, self._job, self._record = shared, generation, job, record
        self.num_placed = 0

    def place(self, now: float, answer: Answer) -> Decision | None:
        """Where the next attempt goes at once; None: `answer` is called when it is its turn.

        Raises DeadlineExceeded, Overloaded, or what says that no node takes it.
        """
        job, shared, is_charged = self._job, self._shared, self.num_placed > 0
        if now >= job.deadline and not shared.waiting.pause.is_on:
            raise errors.DeadlineExceeded(f"request {job.request} found no room by its deadline", "request")
        try:
            decision = self.decide(now)
        except errors.Unavailable as cause:
            self._park(cause, now, answer)
            return None
        is_batch = self._generation.standing.is_batch
        if not is_charged and not is_batch:
            # A fork shares its parent's prompt.
            work_s = decision.work_s if job.fork_on is None else 0.0
            shared.demand.arrived(decision.first.role, work_s, decision.decode.role)
        try:
            going = shared.waiting.gate.at_once(decision, 0.0, is_charged=is_charged, is_batch=is_batch)
        except errors.Overloaded as error:
            shared.waiting.note_refusal(error, self._generation.standing.tenant)
            raise
        if going is None:
            shared.waiting.hold(self._queued(now), decision, self.decide, lambda found: answer(found, now))
        return going

    def decide(self, now: float, others: frozenset[str] = frozenset()) -> Decision:
        """What the policy would do now. others: nodes that it takes only where there are no more."""
        job, shared = self._job, self._shared
        shared.waiting.pause.check()
        if shared.refusing.until:
            shared.refusing.apply(job, now)
        try:
            follows = job.fork_on is not None and job.fork_on not in others
            decision = shared.selector.follow(job, now) if follows else None
            decision = decision or shared.selector.choose(job, now, others)
            self._record.consider(decision, now)
            return decision
        except errors.Unavailable as cause:
            check_model(shared.models, self._generation)
            if isinstance(cause, errors.NoNodeTakesWork) and self._changes_weights():
                return self.decide(now, others)
            check_weights(shared.models, self._generation, job)
            longest = longest_of(shared, self._generation, job)
            if job.emitted and job.most_tokens > longest > 0:
                job.most_tokens = 0  # the larger nodes left; the rest goes as far as nodes take it
                return self.decide(now, others)
            check_fits(shared.selector.query(job, now), shared.cluster.view(), longest)
            raise
        except errors.PdclusterError:
            raise
        except Exception as error:  # a policy's bug, which must not fail the requests that wait beside this one
            log.exception("the routing policy failed", policy=shared.selector.holder.live.name, request=job.request)
            raise errors.PdclusterError(
                f"internal error: the routing policy failed ({type(error).__name__}); see the router's log"
            ) from error

    def _changes_weights(self) -> bool:
        """Move a request that may go on under other weights to the newest version, where no node takes it under its
        own. One without a token may, unless it asked for its weights. Whether it moved.
        """
        job, generation, shared = self._job, self._generation, self._shared
        served = job.served
        if served is None or not self._may_change_weights():
            return False
        mode = job.force or shared.selector.force
        found = shared.models.successor(generation.model, served.digest, mode)
        if found is None or len(job.prompt) + len(job.emitted) >= found.max_len:
            return False
        log.info(
            "a request goes on with other weights", request=job.request, former=str(served.weights),
            weights=str(found.weights), tokens=len(job.emitted),
        )  # fmt: skip
        job.move_to(found, shared.models.chain(generation.model, generation.salt, found.weights.digest))
        return True

    def _may_change_weights(self) -> bool:
        """As the request says, else the router. Where the router says no: without a token, or after a pause, unless the
        request named its weights.
        """
        job, generation = self._job, self._generation
        if generation.weights_change is not None:
            return generation.weights_change == "replay"
        is_free = not generation.names_weights and (job.may_change_weights or not job.emitted)
        return is_free or self._shared.settings.weights_change == "replay"

    def _park(self, cause: errors.Unavailable, now: float, answer: Answer) -> None:
        """No node takes it now. Its work counts as demand all the same."""
        shared = self._shared
        found = unplaced(shared.cluster.view(), len(self._job.prompt))
        held = structs.replace(self._queued(now), work=found[1])
        shared.waiting.park(held, cause, self.decide, lambda placed: answer(placed, now))
        if self.num_placed == 0:
            shared.demand.arrived(*found)

    def _queued(self, now: float) -> QueuedRequest:
        job, standing = self._job, self._generation.standing
        num_bytes = BYTES_PER_TOKEN * len(job.prompt)
        return QueuedRequest(
            job.request, standing.tenant, 0.0, num_bytes, now, job.deadline, standing.weight, standing.priority,
            self.num_placed > 0,
        )  # fmt: skip
