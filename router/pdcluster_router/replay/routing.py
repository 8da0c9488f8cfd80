"""The router of a replay: the production selector, policy, prefix index, gate and hold queue over simulated nodes.

No time passes here. It also keeps the ledger of requests that a node's last report does not count.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pdcluster.bootstrap.demand import RouterDemand
from pdcluster.core.errors import PdclusterError, Unavailable
from pdcluster.core.messages import Endpoint, Load, Role, Sampling
from pdcluster.cost.cost import NodeCost, num_pairs
from pdcluster_router.cluster.pacing import typical_cost
from pdcluster_router.cluster.view import ClusterView, InFlightWork, NodeView, PathRates
from pdcluster_router.core.job import HashChain, Job
from pdcluster_router.policy.base import Decision, Force, Policy, Query
from pdcluster_router.policy.pull import BY_TOKENS, PullRule
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.prefix_index.ideal_cache import IdealCache
from pdcluster_router.prefix_index.index import PrefixIndex
from pdcluster_router.queueing.admission import Slo, check_fits
from pdcluster_router.queueing.demand import DemandMeter, PoolLevels, pool_signals, unplaced
from pdcluster_router.queueing.fairness import QueuedRequest
from pdcluster_router.queueing.gate import Gate, Released
from pdcluster_router.queueing.headroom import MODES, Headroom
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.replay.feed import IMMEDIATE, Feed, FeedSpec
from pdcluster_router.replay.node import SimNode, Task

# No one is refused for waiting long, so policies are compared by all waits.
PATIENT = HoldLimits(count=1 << 40, size_bytes=1 << 60, age_s=math.inf)

BYTES_PER_TOKEN = 8
# Clients allow more tokens than answers take, so the router uses the usual length.
MOST_OUTPUT = 1 << 20

TICK_S = 0.05
SOONEST_S = 0.005

# How long blocks of a sent request are expected, beyond the wait that the node reports.
EXPECTED_S = 5.0


@dataclass(slots=True)
class _Account:
    """What one node was sent, and the report that the view counts, with its path speeds then (rates). Entries leave the
    sums once a later report came.
    """

    in_flight: int = 0
    requests: int = 0
    tokens: int = 0
    pairs: float = 0.0
    rows: int = 0
    context: int = 0
    sent: deque[tuple[float, int, float]] = field(default_factory=deque)
    reserved: deque[tuple[float, int]] = field(default_factory=deque)
    seen: Load | None = None
    seen_s: float = -1.0
    rates: Mapping[str, float] = field(default_factory=dict)
    is_changed: bool = False
    # False: it is not there, or about to go.
    serves: bool = True

    def send_prompt(self, now: float, tokens: int, pairs: float) -> None:
        self.is_changed = True
        self.in_flight += 1
        self.requests, self.tokens, self.pairs = self.requests + 1, self.tokens + tokens, self.pairs + pairs
        self.sent.append((now, tokens, pairs))

    def send_row(self, context: int) -> None:
        self.is_changed = True
        self.in_flight, self.rows, self.context = self.in_flight + 1, self.rows + 1, self.context + context

    def leave(self) -> None:
        self.is_changed = True
        self.in_flight -= 1

    def settle(self, report_s: float) -> None:
        while self.sent and self.sent[0][0] < report_s:
            self.is_changed = True
            _, tokens, pairs = self.sent.popleft()
            self.requests, self.tokens, self.pairs = self.requests - 1, self.tokens - tokens, self.pairs - pairs
        while self.reserved and self.reserved[0][0] < report_s:
            self.is_changed = True
            _, context = self.reserved.popleft()
            self.rows, self.context = self.rows - 1, self.context - context

    def pending(self) -> InFlightWork:
        return InFlightWork(self.requests, self.tokens, round(self.pairs), self.rows, self.context, self.requests)


class PathSpeeds:
    """Bytes/s between nodes as last seen, link waits included. A path is as fast as the slower of source and target."""

    NEWEST = 0.2

    def __init__(self, nodes: Sequence[str], bandwidth: float) -> None:
        self._names = tuple(sorted(nodes))
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._sends = dict.fromkeys(nodes, bandwidth)
        # Made anew with each observation, since reports keep what they saw.
        self._receives = np.full(len(nodes), bandwidth)
        # Cached until something else is observed.
        self._told: dict[str, PathRates] = {}

    def observe(self, source: str, target: str, rate: float) -> None:
        self._sends[source] += self.NEWEST * (rate - self._sends[source])
        self._receives = self._receives.copy()
        row = self._rows[target]
        before = float(self._receives[row])
        self._receives[row] = before + self.NEWEST * (rate - before)
        self._told.clear()

    def rates(self, source: str) -> PathRates:
        """Rates from `source` to each node. The same object until something is observed."""
        told = self._told.get(source)
        if told is None:
            column = np.minimum(self._sends[source], self._receives)
            told = self._told[source] = PathRates(self._names, self._rows, column)
        return told


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router's configuration.

    hold: no one is refused for waiting unless it says so.
    is_gated: False: every request is sent at once.
    """

    policy: Policy
    feed: FeedSpec = IMMEDIATE
    force: Force = "auto"
    seed: int = 0
    bandwidth: float = 1e10
    hold: HoldLimits = PATIENT
    is_gated: bool = True
    pulls: PullRule = BY_TOKENS
    headroom: Headroom = field(default_factory=Headroom)
    slo: Slo = field(default_factory=Slo)


class Recorded(Job, eq=False):
    """A request of a trace: its hashes are known, its tokens are not."""

    def hashes_so_far(self) -> bytes:
        return self.hashes


@dataclass(frozen=True, slots=True)
class ReplayPlacement:
    """A request that waits no more: where it goes, or why it cannot go."""

    task: Task
    decision: Decision | None
    error: PdclusterError | None = None


class ReplayRouter:
    """Owned by one simulation."""

    def __init__(self, nodes: Sequence[SimNode], spec: RouterSpec) -> None:
        self.index = PrefixIndex()
        chance = random.Random(f"feed {spec.seed}")
        self.feeds = {node.name: Feed(node, self.index, spec.feed, chance) for node in nodes}
        self.gate = Gate(spec.hold, spec.headroom, spec.slo)
        self._headroom = spec.headroom
        self._is_gated = spec.is_gated
        self._now = 0.0
        self._selector = PolicySelector(
            PolicyHolder(spec.policy, pulls=spec.pulls),
            self._view,
            self.index.depths,
            force=spec.force,
            expected=self._expected,
        )
        self._known = IdealCache()
        self._demand = DemandMeter()
        self._asked = RouterDemand("replay", 0)
        self._selector.queue = self.gate.queue
        self._endpoints = {node.name: Endpoint(node.name, node.name, f"sim://{node.name}") for node in nodes}
        self._costs: Mapping[str, NodeCost] = {node.name: node.cost for node in nodes}
        self._paths = PathSpeeds([node.name for node in nodes], spec.bandwidth)
        self._accounts = {node.name: _Account(rates=self._paths.rates(node.name)) for node in nodes}
        # Feeds by the nodes' order, and when each is to be looked at.
        self._in_order = list(self.feeds.values())
        self._next_s = [feed.next_s for feed in self._in_order]
        self._due = sorted((moment, number) for number, moment in enumerate(self._next_s))
        # Nodes whose caches changed, and whose views may have.
        self._touched: set[int] = set()
        self._altered: set[str] = set(self.feeds)
        for number, node in enumerate(nodes):
            node.cache.changed = partial(self._touched.add, number)
        self._held: dict[str, tuple[Task, Recorded]] = {}
        self._block_tokens = nodes[0].spec.block_tokens
        self._longest = max(map(_max_len, nodes))
        self._typical = typical_cost(list(self._costs.values()))
        self._seen = ClusterView(map(self._new_view, self.feeds.values()), self._typical)

    # ------------------------------------------------------------ who goes where, and when

    def try_admit(self, task: Task, now: float) -> Decision | None:
        """Where the request goes at once; None: it is held. Raises what the gate raises."""
        self._hear(now)
        job = self._job(task)
        check_fits(Query(task.request.num_tokens), self._view(), self._longest)
        if not self._is_gated:
            return self._selector.choose(job, now)
        held = QueuedRequest(job.request, "", 0.0, BYTES_PER_TOKEN * task.request.num_tokens, now, job.deadline)
        decision = self.gate.try_admit(held, lambda *_: self._chosen(job, now), now)
        if decision is not None:
            return decision
        self._held[job.request] = task, job
        return None

    def _chosen(self, job: Recorded, now: float) -> Decision:
        """The choice for a request that comes, whose work is counted also where no node takes it."""
        try:
            decision = self._selector.choose(job, now)
        except Unavailable:
            self._demand.arrived(*unplaced(self._view(), len(job.prompt)))
            raise
        self._demand.arrived(decision.first.role, decision.work_s, decision.decode.role)
        return decision

    @property
    def num_held(self) -> int:
        return len(self._held)

    def release(self, now: float) -> Iterator[ReplayPlacement]:
        """Requests whose time is over, then those with room, each scored against a view that counts the one before."""
        self._hear(now)
        for late in self.gate.expire(now):
            yield self._placed(late)
        while self._held and not self._is_full():
            found = self.gate.release(partial(self._choose_held, now), now)
            if not found:
                return
            yield self._placed(found[0])

    def _choose_held(self, now: float, held: QueuedRequest, others: frozenset[str]) -> Decision:
        return self._selector.choose(self._held[held.request][1], now, others)

    def _placed(self, one: Released) -> ReplayPlacement:
        return ReplayPlacement(self._held.pop(one.held.request)[0], one.decision, one.error)

    def next_look(self, now: float) -> float:
        """When a node may have worked off enough backlog, or a request waited too long."""
        soonest_s = self._headroom.soonest_s(self._view()) or TICK_S
        due = self.gate.queue.next_expiry()
        return min(now + max(soonest_s, SOONEST_S), max(due, now) if due is not None else math.inf)

    # ------------------------------------------------------------ pools that scale

    def sample(self, now: float) -> None:
        self._asked = self._demand.report("replay", now, self.gate.queue.waiting(), self._selector.usual_output)

    def set_serving(self, node: str, serves: bool) -> None:
        self._accounts[node].serves = serves
        self._accounts[node].is_changed = True
        self._altered.add(node)

    def wanted(self, role: Role, now: float) -> int:
        signal = pool_signals(self._view(), [self._asked], PoolLevels()).get(role)
        return 0 if signal is None else signal.wanted

    def num_waiting_for(self, role: Role) -> int:
        """Those that wait while a node could compute their prompts wait for rows."""
        waits_for_rows = "remote" not in self._headroom.full_modes(self._view())
        return self.num_held if (role == "decode") == waits_for_rows or role == "mixed" else 0

    def _is_full(self) -> bool:
        view = self._view()
        return len(self._headroom.full_modes(view)) == len(MODES)

    def _job(self, task: Task) -> Recorded:
        request = task.request
        return Recorded(
            request=str(task.number),
            prompt=range(request.num_tokens),
            sampling=Sampling(max_tokens=MOST_OUTPUT, seed=0),
            deadline=math.inf,
            chain=HashChain(b"", self._block_tokens),
            session=str(request.session) if request.session >= 0 else "",
            hashes=b"".join(request.blocks),
        )

    # ------------------------------------------------------------ what it knows

    def _hear(self, now: float) -> None:
        """Take in what has arrived by now."""
        self._now = now
        ready, due = self._touched, self._due
        while due and due[0][0] <= now:
            moment, number = heapq.heappop(due)
            if moment == self._next_s[number]:  # else it was planned again since
                ready.add(number)
                self._next_s[number] = math.nan
        for number in sorted(ready):
            feed = self._in_order[number]
            report_s = feed.report_s
            feed.update(now)
            if (moment := feed.next_s) != self._next_s[number]:
                self._next_s[number] = moment
                heapq.heappush(due, (moment, number))
            if feed.report_s != report_s:
                self._altered.add(feed.node.name)
        ready.clear()

    def _view(self) -> ClusterView:
        """The same object as long as nothing changed, since views cache what follows from them."""
        if self._altered:
            changed = {name: new for name in self._altered if (new := self._changed(self.feeds[name])) is not None}
            self._altered.clear()
            if changed:
                self._seen = self._seen.replaced(changed)
        return self._seen

    def _expected(self, hashes: bytes) -> Mapping[str, int]:
        return self.index.expected.depths(hashes, self._now)

    def _kept_blocks(self, hashes: bytes) -> int:
        return max((*self.index.depths(hashes).values(), *self._expected(hashes).values()), default=0)

    # ------------------------------------------------------------ what happens

    def sent(self, task: Task, choice: Decision, now: float) -> None:
        """The request goes as chosen."""
        first, request = choice.first, task.request
        hashes = b"".join(request.blocks)
        cached = min(self.index.depth(first.name, hashes) * first.block_tokens, request.num_tokens - 1)
        self._altered.add(first.name)
        self._accounts[first.name].send_prompt(
            now, request.num_tokens - cached, num_pairs(request.num_tokens - cached, cached)
        )
        self._selector.note_sent(choice, now)
        self._selector.note_prefix(
            self._known.note(hashes) * first.block_tokens, self._kept_blocks(hashes) * first.block_tokens
        )
        if choice.prefill is not None:
            self._altered.add(choice.decode.name)
            self._accounts[choice.decode.name].send_row(request.num_tokens)
        if hashes:
            self.index.expect(first.name, hashes, now + choice.view.row_of(first).wait_s + EXPECTED_S)

    def reserved(self, task: Task, decode: str, now: float) -> None:
        """The decode node answered. Its next report counts the row."""
        self._accounts[decode].reserved.append((now, task.request.num_tokens))

    def moved(self, source: str, target: str, num_bytes: float, seconds: float) -> None:
        """A transfer is over."""
        self._paths.observe(source, target, num_bytes / seconds)

    def left(self, node: str) -> None:
        """A leg of a request on the node is over."""
        self._altered.add(node)
        self._accounts[node].leave()

    def ended(self, task: Task) -> None:
        """An answer is complete."""
        self._selector.note_end(task.request.num_tokens, task.request.num_output)

    def _changed(self, feed: Feed) -> NodeView | None:
        """The node's current view; None when nothing changed."""
        account = self._accounts[feed.node.name]
        account.settle(feed.report_s)
        if account.seen_s != feed.report_s:
            rates = self._paths.rates(feed.node.name)
            account.is_changed = account.is_changed or account.seen is not feed.report or rates is not account.rates
            account.seen, account.seen_s, account.rates = feed.report, feed.report_s, rates
        if not account.is_changed:
            return None
        account.is_changed = False
        return self._new_view(feed)

    def _new_view(self, feed: Feed) -> NodeView:
        node, account = feed.node, self._accounts[feed.node.name]
        return NodeView(
            endpoint=self._endpoints[node.name],
            role=node.role,
            in_flight=account.in_flight,
            load=feed.report,
            block_tokens=node.spec.block_tokens,
            max_len=_max_len(node),
            backends=("sim",),
            is_cordoned=not account.serves,
            pending=account.pending(),
            cost=self._costs[node.name],
            bandwidth=account.rates,
            kv_bytes_per_token=node.spec.kv_bytes_per_token,
        )


def _max_len(node: SimNode) -> int:
    """The longest request: what its cache holds."""
    return node.spec.cache_tokens // node.spec.block_tokens * node.spec.block_tokens
