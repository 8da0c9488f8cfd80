"""Asks the routing policy for a request: makes the Query, and holds the policy objects.

Policies may be replaced while requests run. Waiting for room is in `queueing`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from math import exp

from msgspec.structs import replace

from pdcluster.core.errors import NoNodeTakesWork, Unavailable
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import Mode
from pdcluster_router.core.job import Job
from pdcluster_router.policy.base import Decision, Fallback, Force, Policy, Query, ShadowRecord
from pdcluster_router.policy.cache_pressure import CachePressure
from pdcluster_router.policy.eligibility import why_not
from pdcluster_router.policy.pull import BY_TOKENS, PullRule
from pdcluster_router.policy.scored import alone

# Prompt work that a router sent to nodes lately. Pure; the caller passes the time.
#
# Running rows tell the same by Little's law, but badly while they are few: an idle moment looks like an idle cluster.
# Work of other routers is not in here.

# Spans a few answers of a usual model, and some tens of requests of a busy node.
LATELY_S = 5.0


class RecentWork:
    """Seconds of work with exponential forgetting. Owned by one thread."""

    def __init__(self, lately_s: float = LATELY_S) -> None:
        self._lately_s = lately_s
        self._work_s = 0.0
        self._moment = 0.0

    def add(self, node: NodeView, new_tokens: int, cached_tokens: int, now: float) -> None:
        """A prompt was sent to the node. Unknown costs count as nothing."""
        cost = node.cost
        if cost is not None:
            self._work_s = self._left_s(now) + cost.prefill.seconds(new_tokens, cached_tokens)
            self._moment = now

    def per_second(self, now: float) -> float:
        """Nodes that this work keeps busy."""
        return self._left_s(now) / self._lately_s if self._work_s else 0.0

    def _left_s(self, now: float) -> float:
        since_s = now - self._moment
        return self._work_s * exp(-since_s / self._lately_s) if since_s > 0.0 else self._work_s


Cached = Callable[[bytes], Mapping[str, int]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PolicyHolder:
    """The policy in force, and a shadow whose choices are only recorded. A decision uses one object throughout."""

    live: Policy
    shadow: Policy | None = None
    # For policies that choose no pull.
    pulls: PullRule = BY_TOKENS


NO_NODES: frozenset[str] = frozenset()
NOTHING_HELD: dict[str, int] = {}

# Stands for the policy where a request follows another choice of its prompt.
FORK = "fork"

# Tokens of an answer, while none has ended.
USUAL_OUTPUT = 256.0

# Answers that this guess counts for.
PRIOR = 10

NEWEST = 0.02
# Least weight of the newest answer. While there were few, all weigh the same.
FEW = 1 / NEWEST


class PolicySelector:
    """Makes decisions. Owned by the router's event loop.

    held: leading blocks of a chain that each node holds.
    expected: blocks that it will soon hold; None: none.
    view: as of now; a decision reads it before the next one.
    num_held: requests that wait; set by the owner of the hold queue.
    force, fallback: the router's own settings.
    """

    def __init__(
        self,
        holder: PolicyHolder,
        view: Callable[[], ClusterView],
        held: Cached,
        *,
        force: Force = "auto",
        fallback: Fallback = "conditional",
        itl_s: float = 0.0,
        expected: Cached | None = None,
    ) -> None:
        self.holder = holder
        self._view = view
        self._held = held
        self._expected = expected
        self.num_held: Callable[[], int] = _nobody
        self._force = force
        self._fallback = fallback
        self._itl_s = itl_s
        self._usual_output, self._usual_prompt = USUAL_OUTPUT, 0.0
        self._num_ended = 0
        self._counter = 0
        self._previous: Mode | None = None
        # To serving nodes, and to decode nodes.
        self._sent_serving, self._sent_decoding = RecentWork(), RecentWork()
        self._lost = CachePressure()

    @property
    def usual_output(self) -> float:
        """Tokens of an answer, as lately."""
        return self._usual_output

    def blocked(self) -> str | None:
        """Why no node would take a short request now; None: one would. Asking has no effect."""
        try:
            self.holder.live.choose(Query(1, force=self._force, fallback=self._fallback), self._view())
        except Unavailable as error:
            return str(error)
        except Exception as error:  # a policy's bug must not end whoever asks
            logger.exception("the routing policy %s failed", self.holder.live.name)
            return f"the routing policy failed ({type(error).__name__}); see the router's log"
        return None

    def choose(self, job: Job, now: float, others: frozenset[str] = NO_NODES) -> Decision:
        """Choose nodes. Raises Unavailable when no node may take it: NoNodeTakesWork unless the client's own
        mode is why.

        others: incarnations that it takes only where there are no more.
        """
        query, live, shadow = self.query(job, now, others), self.holder.live, self.holder.shadow
        view = self._view()
        try:
            decision = self.holder.pulls.apply(live.choose(query, view))
        except Unavailable as cause:
            if job.force is not None or isinstance(cause, NoNodeTakesWork):
                raise
            raise NoNodeTakesWork(str(cause)) from cause  # the router's own mode is not the request's fault
        self._counter += 1
        if query.force == "auto":  # a required mode says nothing about which is better
            self._previous = decision.record.mode
        return decision if shadow is None else _compared_with(shadow, decision)

    def follow(self, job: Job, now: float) -> Decision | None:
        """Place a fork on the node that decodes its parent; None when it must not share, or that node takes no work."""
        if job.fork_on is None:
            return None
        view = self._view()
        node, query = view.find(job.fork_on), self.query(job, now)
        if node is None or why_not(node, query) or job.busy_s(node.endpoint.incarnation, now):
            return None
        return alone(FORK, node, query, view)

    def choose_decode(self, job: Job, now: float, prefill: NodeView, avoid: Set[str]) -> NodeView | None:
        """Another decode node for KV that waits on `prefill`.

        avoid: nodes that just refused or failed it. Nodes that failed earlier attempts come last.
        """
        view, query, live = self._view(), self.query(job, now), self.holder.live
        fresh = live.choose_decode(replace(query, excluded=query.excluded | avoid), view, prefill)
        return fresh or live.choose_decode(replace(query, excluded=frozenset(avoid)), view, prefill)

    def note_sent(self, decision: Decision, now: float) -> None:
        """The prompt goes as decided."""
        query = decision.query
        self.note_prompt(decision, query.num_tokens, query.cached_on(decision.first), now)

    def note_prompt(self, decision: Decision, num_tokens: int, cached_tokens: int, now: float) -> None:
        """The prompt goes as decided.

        Fetched and shared tokens are not computed there. At least one token is.
        """
        node = decision.first
        known = num_tokens if decision.record.policy == FORK else max(cached_tokens, decision.pull_tokens)
        if known >= num_tokens:
            known = num_tokens - 1
        sent = self._sent_decoding if node.role == "decode" else self._sent_serving
        sent.add(node, num_tokens - known, known, now)

    def note_prefix(self, seen_tokens: int, kept_tokens: int) -> None:
        """Note the prefix of a prompt that first goes to a node. See CachePressure."""
        self._lost.note(seen_tokens, kept_tokens)

    def note_end(self, num_prompt: int, num_output: int) -> None:
        """An answer ended. Its length predicts others better than what clients allow."""
        self._num_ended = num = self._num_ended + 1
        weight = prompt_weight = NEWEST
        if num < FEW:
            weight, prompt_weight = max(1 / (num + PRIOR), NEWEST), 1 / num
        self._usual_output += weight * (num_output - self._usual_output)
        self._usual_prompt += prompt_weight * (num_prompt - self._usual_prompt)

    def query(self, job: Job, now: float, others: frozenset[str] = NO_NODES) -> Query:
        """The Query of a request. Asking has no effect, so dry runs may."""
        cached, held = self._cached(job)
        return Query(  # by position, which costs half
            len(job.prompt) + len(job.emitted),
            job.hashes_so_far(),
            cached,
            frozenset(job.excluded) if job.excluded else NO_NODES,
            others.union(node for node, until in job.busy.items() if until > now) if job.busy else others,
            self._output_left(job),
            job.session,
            job.force or self._force,
            self._fallback,
            held,
            self._counter,
            self._previous,
            self._itl_s,
            self.num_held(),
            self._usual_prompt,
            self._sent_serving.per_second(now),
            self._sent_decoding.per_second(now),
            self._lost.share(self._usual_prompt),
            job.model,
            job.most_tokens,
        )

    def _cached(self, job: Job) -> tuple[Mapping[str, int], Mapping[str, int] | None]:
        """Query.cached and Query.held."""
        hashes, block_tokens = job.hashes_so_far(), job.chain.block_tokens
        depths = self._held(hashes)
        held = {incarnation: depth * block_tokens for incarnation, depth in depths.items()} if depths else NOTHING_HELD
        expected = self._expected(hashes) if self._expected is not None else None
        cached = _with(held, expected, block_tokens) if expected else held
        return cached, None if cached is held else held

    def _output_left(self, job: Job) -> int:
        """Tokens still to come, as a guess; at least one."""
        output, usual = job.sampling.max_tokens - len(job.emitted), round(self._usual_output)
        if output > usual:
            output = usual
        return output if output > 1 else 1


def _with(held: Mapping[str, int], expected: Mapping[str, int], block_tokens: int) -> Mapping[str, int]:
    """Tokens by node, with expected ones where that is more. `held` itself where nothing is expected."""
    more = {node: depth * block_tokens for node, depth in expected.items() if depth * block_tokens > held.get(node, 0)}
    return {**held, **more} if more else held


def _nobody() -> int:
    return 0


def _compared_with(shadow: Policy, decision: Decision) -> Decision:
    """The decision with what a shadow would have done. A shadow that finds no node, or fails, has done nothing."""
    try:
        other = shadow.choose(decision.query, decision.view).record
    except Unavailable:
        return decision
    except Exception:  # a bug of a shadow must not fail a request
        logger.exception("the shadow policy %s failed", shadow.name)
        return decision
    mine = decision.record
    agrees = (other.mode, other.prefill, other.decode) == (mine.mode, mine.prefill, mine.decode)
    told = ShadowRecord(other.policy, other.mode, other.prefill, other.decode, agrees)
    return replace(decision, record=replace(mine, shadow=told))
