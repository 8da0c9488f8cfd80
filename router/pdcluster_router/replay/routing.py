"""The router of a replay: the production policy and prefix index over what simulated nodes report. No time passes here.

What the live router keeps in its ledger is kept here, too: requests that a node's last report does not know yet.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdcluster.cost import NodeCost, num_pairs
from pdcluster.messages import Endpoint
from pdcluster_router.generation import Mode
from pdcluster_router.index import PrefixIndex
from pdcluster_router.policy.base import Choice, Force, Policy, Query
from pdcluster_router.replay.feed import IMMEDIATE, Feed, FeedSpec
from pdcluster_router.replay.node import SimNode, Task
from pdcluster_router.replay.trace import Blocks
from pdcluster_router.view import ClusterView, NodeView, Pending


class Holdings(Protocol):
    """Who holds how much of a prompt: the production index, or the truth."""

    def expect(self, node: str, blocks: Blocks, until: float) -> None: ...

    def computed(self, node: str, blocks: Blocks) -> None:
        """The node has computed what was expected of it."""
        ...

    def depths(self, blocks: Blocks, now: float) -> dict[str, int]:
        """Leading blocks by node, with those that are expected."""
        ...

    def held(self, blocks: Blocks) -> dict[str, int]:
        """Without them."""
        ...


class Indexed:
    """Implements Holdings by the production index, which follows the nodes' feeds."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def expect(self, node: str, blocks: Blocks, until: float) -> None:
        if blocks:
            self._index.expect(node, b"".join(blocks), until)

    def computed(self, node: str, blocks: Blocks) -> None:
        """The node itself says so to the index."""

    def depths(self, blocks: Blocks, now: float) -> dict[str, int]:
        return self._index.depths(b"".join(blocks), now) if blocks else {}

    def held(self, blocks: Blocks) -> dict[str, int]:
        return self._index.depths(b"".join(blocks)) if blocks else {}


class Truth:
    """Implements Holdings by looking into the nodes: what the index says when nothing is late or lost, at a tenth of the cost. For large sweeps."""

    def __init__(self, nodes: Sequence[SimNode]) -> None:
        self._caches = [(node.name, node.cache) for node in nodes]
        self._expected: dict[str, Counter[bytes]] = {node.name: Counter() for node in nodes}

    def expect(self, node: str, blocks: Blocks, until: float) -> None:
        expected = self._expected[node]
        for block in blocks:
            expected[block] += 1

    def computed(self, node: str, blocks: Blocks) -> None:
        expected = self._expected[node]
        for block in blocks:
            expected[block] -= 1
            if not expected[block]:
                del expected[block]

    def depths(self, blocks: Blocks, now: float) -> dict[str, int]:
        held = self.held(blocks)
        expected = {name: depth for name, chain in self._expected.items() if (depth := _depth(chain, blocks)) > held.get(name, 0)}
        return {**held, **expected} if expected else held

    def held(self, blocks: Blocks) -> dict[str, int]:
        return {name: depth for name, cache in self._caches if (depth := cache.depth(blocks))}


def _depth(held: Counter[bytes], blocks: Blocks) -> int:
    if not blocks or blocks[0] not in held:
        return 0
    low, high = 1, len(blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low


EXPECTED_S = 5.0
"""How long blocks are expected of a node after a request was sent to it, beyond the wait that the node reports."""


@dataclass(slots=True)
class _Account:
    """What one node was sent. Entries move out of the sums once a report from after their moment came."""

    in_flight: int = 0
    requests: int = 0
    tokens: int = 0
    pairs: float = 0.0
    rows: int = 0
    context: int = 0
    sent: deque[tuple[float, int, float]] = field(default_factory=deque)
    reserved: deque[tuple[float, int]] = field(default_factory=deque)

    def send_prompt(self, now: float, tokens: int, pairs: float) -> None:
        self.requests, self.tokens, self.pairs = self.requests + 1, self.tokens + tokens, self.pairs + pairs
        self.sent.append((now, tokens, pairs))

    def settle(self, report_s: float) -> None:
        while self.sent and self.sent[0][0] <= report_s:
            _, tokens, pairs = self.sent.popleft()
            self.requests, self.tokens, self.pairs = self.requests - 1, self.tokens - tokens, self.pairs - pairs
        while self.reserved and self.reserved[0][0] <= report_s:
            _, context = self.reserved.popleft()
            self.rows, self.context = self.rows - 1, self.context - context

    def pending(self) -> Pending:
        return Pending(self.requests, self.tokens, round(self.pairs), self.rows, self.context)


class Paths:
    """Bytes a second between nodes as they last were, waits for the link included: what nodes report of their paths. A path is as fast as the slower
    of what its source sends and its target receives."""

    NEWEST = 0.2

    def __init__(self, nodes: Sequence[str], bandwidth: float) -> None:
        self._sends = dict.fromkeys(nodes, bandwidth)
        self._receives = dict.fromkeys(nodes, bandwidth)
        self.rates = {source: dict.fromkeys(nodes, bandwidth) for source in nodes}

    def observe(self, source: str, target: str, rate: float) -> None:
        self._sends[source] += self.NEWEST * (rate - self._sends[source])
        self._receives[target] += self.NEWEST * (rate - self._receives[target])
        for node in self.rates:
            self.rates[source][node] = min(self._sends[source], self._receives[node])
            self.rates[node][target] = min(self._sends[node], self._receives[target])


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """expected_output: what the router takes for the length of an answer, as it cannot know. sees_truth: without feeds and index; see Truth."""

    policy: Policy
    feed: FeedSpec = IMMEDIATE
    force: Force = "auto"
    expected_output: int = 256
    seed: int = 0
    bandwidth: float = 1e10
    sees_truth: bool = False


class ReplayRouter:
    """Owned by one simulation."""

    def __init__(self, nodes: Sequence[SimNode], spec: RouterSpec) -> None:
        self.index = PrefixIndex()
        self._spec = spec
        chance = random.Random(f"feed {spec.seed}")
        self.feeds = [Feed(node, None if spec.sees_truth else self.index, spec.feed, chance) for node in nodes]
        self.holdings: Holdings = Truth(nodes) if spec.sees_truth else Indexed(self.index)
        self._accounts = {node.name: _Account() for node in nodes}
        self._endpoints = {node.name: Endpoint(node.name, node.name, f"sim://{node.name}") for node in nodes}
        self._costs: Mapping[str, NodeCost] = {node.name: node.cost for node in nodes}
        self._paths = Paths([node.name for node in nodes], spec.bandwidth)
        self._counter = spec.seed * 1_000_003
        self._previous: Mode | None = None

    def choose(self, task: Task, now: float) -> Choice:
        """Raises Unavailable when no node may take it."""
        view = self.view(now)
        choice = self._spec.policy.choose(self.query(task, now, view), view)
        self._counter += 1
        self._previous = choice.mode
        return choice

    def view(self, now: float) -> ClusterView:
        """What is known by now."""
        for feed in self.feeds:
            feed.update(now)
        return ClusterView(tuple(self._node_view(feed) for feed in self.feeds))

    def query(self, task: Task, now: float, view: ClusterView) -> Query:
        request = task.request
        block_tokens = self.feeds[0].node.spec.block_tokens
        cached = {name: depth * block_tokens for name, depth in self.holdings.depths(request.blocks, now).items()}
        return Query(
            num_tokens=request.num_tokens,
            hashes=b"".join(request.blocks),
            cached=cached,
            held={name: depth * block_tokens for name, depth in self.holdings.held(request.blocks).items()},
            expected_output=self._spec.expected_output,
            session=str(request.session) if request.session >= 0 else "",
            force=self._spec.force,
            counter=self._counter,
            previous=self._previous,
        )

    def sent(self, task: Task, choice: Choice, now: float) -> None:
        """The request goes as chosen."""
        first, request = choice.first, task.request
        cached = min(self.holdings.depths(request.blocks, now).get(first.name, 0) * first.block_tokens, request.num_tokens - 1)
        account = self._accounts[first.name]
        account.in_flight += 1
        account.send_prompt(now, request.num_tokens - cached, num_pairs(request.num_tokens - cached, cached))
        if choice.prefill is not None:
            decode = self._accounts[choice.decode.name]
            decode.in_flight += 1
            decode.rows += 1
            decode.context += request.num_tokens
        wait_s = first.pace.wait_s if first.pace is not None else 0.0
        self.holdings.expect(first.name, request.blocks, now + wait_s + EXPECTED_S)

    def computed(self, task: Task, node: str) -> None:
        self.holdings.computed(node, task.request.blocks)

    def reserved(self, task: Task, decode: str, now: float) -> None:
        """The decode node answered; its next report counts the row."""
        self._accounts[decode].reserved.append((now, task.request.num_tokens))

    def moved(self, source: str, target: str, num_bytes: float, seconds: float) -> None:
        """A transfer is over."""
        self._paths.observe(source, target, num_bytes / seconds)

    def left(self, node: str) -> None:
        """A leg of a request on the node is over."""
        self._accounts[node].in_flight -= 1

    def _node_view(self, feed: Feed) -> NodeView:
        node, account = feed.node, self._accounts[feed.node.name]
        account.settle(feed.report_s)
        return NodeView(
            endpoint=self._endpoints[node.name],
            role=node.role,
            in_flight=account.in_flight,
            load=feed.report,
            block_tokens=node.spec.block_tokens,
            max_len=node.spec.cache_tokens // node.spec.block_tokens * node.spec.block_tokens,
            backends=("sim",),
            pending=account.pending(),
            cost=self._costs[node.name],
            bandwidth=self._paths.rates[node.name],
            kv_bytes_per_token=node.spec.kv_bytes_per_token,
        )
