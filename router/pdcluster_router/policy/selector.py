"""Asks the routing policy for a request: makes the Query, and holds the policy objects.

Policies may be replaced while requests run. Waiting for room is in `queueing`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from math import exp
from typing import Protocol

from msgspec.structs import replace

from pdcluster.core.errors import NoNodeTakesWork, Unavailable
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import Mode
from pdcluster_router.core.job import Job
from pdcluster_router.policy.base import Decision, Fallback, Force, Policy, Query, ShadowRecord
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

    def add(self, work_s: float, now: float) -> None:
        """A prompt of so many seconds was sent."""
        self._work_s, self._moment = self._left_s(now) + work_s, now

    def per_second(self, now: float) -> float:
        """Nodes that this work keeps busy."""
        return self._left_s(now) / self._lately_s if self._work_s else 0.0

    def _left_s(self, now: float) -> float:
        since_s = now - self._moment
        return self._work_s * exp(-since_s / self._lately_s) if since_s > 0.0 else self._work_s


# Weight of the newest prompt.
NEWEST_PREFIX = 1 / 128

# Usual prompts that count as kept at the start, so that one lost prefix says little.
USUAL_PROMPTS = 16 * NEWEST_PREFIX


class CachePressure:
    """How much of what prompts could have had cached no node had kept: means over prompts, in tokens.

    A full cache is not a scarce one. Most of what an old cache holds is never asked for again, and a copy in its place
    costs nothing. Earlier prompts are those that came through this router (`prefix_index.ideal_cache`). Owned by one
    thread.
    """

    __slots__ = ("_kept", "_lost")

    def __init__(self) -> None:
        self._kept = self._lost = 0.0

    def note(self, seen_tokens: int, kept_tokens: int) -> None:
        """Note a prompt: leading tokens that an earlier one had, and that some node holds or soon will."""
        lost = seen_tokens - kept_tokens
        self._lost += NEWEST_PREFIX * ((lost if lost > 0 else 0) - self._lost)
        self._kept += NEWEST_PREFIX * (kept_tokens - self._kept)

    def share(self, usual_tokens: float) -> float:
        """Share of what could have been cached that was not, from 0 to 1.

        usual_tokens: of a prompt; 0: unknown, and so is the share.
        """
        lost = self._lost
        return lost / (lost + self._kept + USUAL_PROMPTS * usual_tokens) if lost > 0.0 and usual_tokens > 0.0 else 0.0


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


class WaitingCounts(Protocol):
    """Counts of requests that wait.

    num_all: all of them.
    num_taken: those that some node takes.
    """

    num_all: int

    @property
    def num_taken(self) -> int: ...


class PolicySelector:
    """Makes decisions. Owned by the router's event loop.

    held: leading blocks of a chain that each node holds.
    expected: blocks that it will soon hold; None: none.
    view: as of now; a decision reads it before the next one.
    queue: requests that wait; set by their owner.
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
        self.queue: WaitingCounts | None = None
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
    def force(self) -> Force:
        """The router's own mode."""
        return self._force

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
        sent = self._sent_decoding if decision.first.role == "decode" else self._sent_serving
        sent.add(decision.work_s, now)

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
        hashes, block_tokens, num_emitted = job.hashes_so_far(), job.chain.block_tokens, len(job.emitted)
        depths = self._held(hashes)
        held = {node: depth * block_tokens for node, depth in depths.items()} if depths else NOTHING_HELD
        expected = self._expected(hashes) if self._expected is not None else None
        cached = _with(held, expected, block_tokens) if expected else held
        # Tokens still to come, as a guess; at least one.
        output = max(min(job.sampling.max_tokens - num_emitted, round(self._usual_output)), 1)
        return Query(  # by position, which costs half
            len(job.prompt) + num_emitted,
            hashes,
            cached,
            frozenset(job.excluded) if job.excluded else NO_NODES,
            others.union(node for node, until in job.busy.items() if until > now) if job.busy else others,
            output,
            job.session,
            job.force or (self._force if job.sampling.prompt_logprobs is None else self._force_with_prompt(job)),
            self._fallback,
            None if cached is held else held,
            self._counter,
            self._previous,
            self._itl_s,
            self.queue.num_taken if self.queue is not None and self.queue.num_all else 0,
            self._sent_serving.per_second(now),
            self._sent_decoding.per_second(now),
            self._lost.share(self._usual_prompt),
            job.model,
            job.most_tokens,
            1 if job.pooling is None else 0,
        )

    def _force_with_prompt(self, job: Job) -> Force:
        """The mode of a request that wants its prompt's logprobs. Only a node that computed the prompt has them, and
        nodes that leave the first token to others tell none.
        """
        is_local = self._force == "auto" and job.awaits_prompt_logprobs and self._view().roster.leaves_first
        return "local" if is_local else self._force


def _with(held: Mapping[str, int], expected: Mapping[str, int], block_tokens: int) -> Mapping[str, int]:
    """Tokens by node, with expected ones where that is more. `held` itself where nothing is expected."""
    more = {node: depth * block_tokens for node, depth in expected.items() if depth * block_tokens > held.get(node, 0)}
    return {**held, **more} if more else held


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
