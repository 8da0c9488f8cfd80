"""What all requests of one router share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster.core import errors
from pdcluster_router.cluster.legs import ClusterLinks
from pdcluster_router.core.generation import Generation, ModelInfo
from pdcluster_router.core.job import HashedPrompt, Job
from pdcluster_router.explain.recorder import Explainer
from pdcluster_router.policy.selector import PolicySelector
from pdcluster_router.queueing.demand import DemandMeter
from pdcluster_router.queueing.waiting import WaitingRequests
from pdcluster_router.request.forks import ForkGroups
from pdcluster_router.request.open_requests import OpenRequests
from pdcluster_router.request.retries import DispatchSettings, RefusingNodes
from pdcluster_router.request.serving import ServedModels
from pdcluster_router.request.timers import TimerBuckets, Timers


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
    refusing: RefusingNodes = field(default_factory=RefusingNodes)
    timers: Timers = field(default_factory=Timers)
    fork_groups: ForkGroups = field(default_factory=ForkGroups)
    named: HashedPrompt = field(default_factory=HashedPrompt)
    demand: DemandMeter = field(default_factory=DemandMeter)
    # Looks at requests on one node, and on two, before any of their stages can be over.
    local_rounds: TimerBuckets = field(init=False)
    remote_rounds: TimerBuckets = field(init=False)

    def __post_init__(self) -> None:
        stages = self.settings.stages
        object.__setattr__(self, "local_rounds", TimerBuckets(self.timers, stages.local_s))
        object.__setattr__(self, "remote_rounds", TimerBuckets(self.timers, stages.remote_s))


def job_of(shared: Shared, generation: Generation, started: float) -> Job:
    """Raises PdclusterError where nobody knows its model."""
    served = generation.served
    check_model(shared.models, generation)
    weights = None if served is None else served.weights.digest
    chain = shared.models.chain(generation.model, generation.salt, weights)
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
        "" if served is None else served.digest,
        0 if generation.is_open_ended else len(generation.token_ids) + _num_asked(generation),
        "" if served is None else served.adapter,
    )
    job.pooling, job.served = generation.pooling, served
    job.is_batch = generation.standing.is_batch
    job.packed, job.hashes, job.num_hashed = packed, hashes, 0
    job.has_prompt_logprobs = generation.sampling.prompt_logprobs is None
    return job


def _num_asked(generation: Generation) -> int:
    return generation.sampling.max_tokens if generation.pooling is None else 0


def served_now(models: ServedModels, generation: Generation, job: Job) -> ModelInfo | None:
    """The request's version of its model as nodes have it now. None: none has it."""
    versions, served = models.versions(generation.model), job.served
    if served is None:
        return versions[0] if versions else None
    return next((info for info in versions if info.digest == served.digest), None)


def longest_of(shared: Shared, generation: Generation, job: Job) -> int:
    """Tokens that the largest node of its version takes; 0 where nothing is known."""
    info = served_now(shared.models, generation, job) or job.served
    if info is not None:
        return info.max_len
    nodes = shared.cluster.view().nodes
    return max((node.max_len for node in nodes if node.serves(job.model)), default=0)


def check_model(models: ServedModels, generation: Generation) -> None:
    """Raises ModelChanged when what the request was prepared for is served no more, under any weights."""
    served = generation.served
    if served is None:
        return
    versions = models.versions(generation.model)
    if versions and versions[0].text == served.text:
        return
    names = ", ".join(info.id for info in models.models())
    raise errors.ModelChanged(
        f"the model {generation.model!r} is served no more as the request was prepared for it: its name has other "
        f"text, or no node carries it; send the request again, the models are: {names or 'none yet'}"
    )


def check_weights(models: ServedModels, generation: Generation, job: Job) -> None:
    """Raises NoNodeTakesWork when no node has the request's version any more. While it may wait, one may come back."""
    served = job.served
    if served is None or served_now(models, generation, job) is not None:
        return
    newest = models.versions(generation.model)[0].weights
    raise errors.NoNodeTakesWork(
        f"no node has the weights {served.weights} any more, which the request began with; with weights_change=replay "
        f"it goes on with the newest, now {newest}"
    )
