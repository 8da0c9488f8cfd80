"""Published and textbook policies: round-robin, random, power-of-two, least-load, session, prefix, kv-cost,
conductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from msgspec.structs import replace

from pdcluster.core.messages import HASH_BYTES
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.node_row import alone_s
from pdcluster_router.policy.base import Decision, Query, Terms
from pdcluster_router.policy.candidates import LegName
from pdcluster_router.policy.scored import Scored

# Hashes of integers and names that look random and are equal on every router. No state.

MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """64 bits that depend on every bit of every value (splitmix64's finaliser over a sum with odd steps)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def number_of(name: str) -> int:
    return crc32(name.encode())


# Different salts, so that chance sends the two legs to different nodes.
LEG_SALT: dict[LegName, int] = {"prefill": 1, "decode": 2, "local": 1}


class RoundRobin:
    """Each decision takes the next node by name. The term is the node's distance from its turn."""

    name = "round-robin"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        distances = (float((index - query.counter) % len(nodes)) for index in range(len(nodes)))
        return [(distance, (("turns", distance),)) for distance in distances]


class Random:
    """Uniform over nodes. Query.counter is the seed."""

    name = "random"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        drawn = mix(query.counter, LEG_SALT[leg]) % len(nodes)
        return [(float(index != drawn), (("not_drawn", float(index != drawn)),)) for index in range(len(nodes))]


class PowerOfTwo:
    """Two random nodes; the one with fewer requests wins (Mitzenmacher, 2001; Ray Serve's default). The others come
    behind both.
    """

    name = "power-of-two"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        drawn = self._drawn(len(nodes), mix(query.counter, LEG_SALT[leg]))
        most = max((node.num_requests for node in nodes), default=0)
        return [self._score(node.num_requests, 0 if index in drawn else most + 1) for index, node in enumerate(nodes)]

    def _score(self, requests: int, behind: int) -> tuple[float, Terms]:
        return float(requests + behind), (("requests", float(requests)), ("not_drawn", float(behind)))

    def _drawn(self, num: int, chance: int) -> set[int]:
        if num == 1:
            return {0}
        first = chance % num
        second = (chance >> 32) % (num - 1)
        return {first, second + (second >= first)}


class LeastLoad:
    """Work by time, as SMG's `least_load`: waiting tokens ÷ the node's rate + 0.15 × k ÷ (1 − k), where k is the share
    of KV pages in use.

    On decode legs the tokens are those of the contexts. Without a fitted rate it assumes 2,000 tokens a second, as
    there.
    """

    name = "least-load"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        return [self._score(node, leg) for node in nodes]

    def _score(self, node: NodeView, leg: LegName) -> tuple[float, Terms]:
        queued_s = node.prefill_tokens / self._rate(node)
        decode = (node.context_tokens + node.decode_rows) / self._rate(node) if leg != "prefill" else 0.0
        full = _share_used(node)
        pressure = 0.15 * full / max(1.0 - full, 0.01)
        return queued_s + decode + pressure, (("queued", queued_s), ("decoding", decode), ("kv", pressure))

    def _rate(self, node: NodeView) -> float:
        token_s = node.cost.prefill.token_s if node.cost is not None else 0.0
        return 1.0 / token_s if token_s > 0 else 2000.0


def _share_used(node: NodeView) -> float:
    load = node.load
    return (
        1.0 - (load.pages_free + load.pages_cached) / load.pages_total if load is not None and load.pages_total else 0.0
    )


# Sticky conversations by consistent hashing with bounded load (Mirrokni, Thorup, Zadimoghaddam, 2016; SMG's
# `prefix_hash` has the same bound).
#
# The key is the session, or the hash of the prompt's first blocks. Nodes are ordered by a hash of (key, node). The
# first one with fewer requests than `bound` × the mean wins. A node that comes or goes moves only its own keys. It
# looks at no cache.

KEY_TOKENS = 256


class Session:
    name = "session"

    def __init__(self, bound: float = 1.25) -> None:
        self._bound = bound

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        limit = self._bound * (sum(node.num_requests for node in nodes) + 1) / len(nodes)
        key = session_key(query, nodes[0].block_tokens)
        return [_score(node, key, limit) for node in nodes]


def _score(node: NodeView, key: int, limit: float) -> tuple[float, Terms]:
    place = mix(key, number_of(node.name)) / 2**64
    over = float(node.num_requests + 1 > limit and node.num_requests > 0)
    return over + place, (("over_bound", over), ("place", place))


def session_key(query: Query, block_tokens: int) -> int:
    """The key. A prompt shorter than a block uses its length, so that it does not always go to one node."""
    if query.session:
        return number_of(query.session)
    blocks = min(max(KEY_TOKENS // block_tokens, 1), len(query.hashes) // HASH_BYTES)
    return (
        int.from_bytes(query.hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES][:8], "little")
        if blocks
        else query.num_tokens
    )


# SGLang's cache-aware rule (sgl-router, later SMG `cache_aware`): match prefixes while the load is even, balance it
# when it is not.
#
# The load is uneven when (most − least requests) > `spread` and most > `ratio` × least. Then the fewest requests win.
# Otherwise the longest match wins if it covers more than `match` of the prompt, else the node that caches least. Its
# trees are approximate; the index here is exact.


class Prefix:
    name = "prefix"

    def __init__(self, match: float = 0.3, spread: float = 64.0, ratio: float = 1.5) -> None:
        self._match = match
        self._spread = spread
        self._ratio = ratio

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        requests = [float(node.num_requests) for node in nodes]
        matches = [query.cached_on(node) / query.num_tokens for node in nodes]
        if max(requests) - min(requests) > self._spread and max(requests) > self._ratio * min(requests):
            return [(cost, (("requests", cost),)) for cost in requests]
        if max(matches) > self._match:
            return [(-share, (("matched", -share),)) for share in matches]
        return [(size, (("cache_size", size),)) for size in map(_cache_size, nodes)]


def _cache_size(node: NodeView) -> float:
    """Pages in use or cached."""
    return float(node.load.pages_total - node.load.pages_free) if node.load is not None else 0.0


# Dynamo's KV router: weight × blocks to prefill + blocks that decode; least wins (docs/components/router, "cost
# function").
#
# Blocks to prefill are those waiting on the node and the request's own, less `credit` × cached blocks. The credit
# shrinks by 1 ÷ (1 + `decay` × e), where e is the node's waiting prefill beyond the least loaded one's, in units of the
# request. On decode legs of a remote request only decoding blocks count.


class KvCost:
    name = "kv-cost"

    def __init__(self, weight: float = 1.0, credit: float = 1.0, decay: float = 0.0) -> None:
        self._weight = weight
        self._credit = credit
        self._decay = decay

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        least = min(node.prefill_tokens for node in nodes)
        return [self._score(node, leg, query, least) for node in nodes]

    def _score(self, node: NodeView, leg: LegName, query: Query, least: float) -> tuple[float, Terms]:
        block = node.block_tokens
        decoding = node.context_tokens / block
        if leg == "decode":
            return decoding, (("decode_blocks", decoding),)
        excess = (node.prefill_tokens - least) / max(query.num_tokens, 1)
        credit = self._credit / (1.0 + self._decay * excess)
        prefill = (
            self._weight * max(node.prefill_tokens + query.num_tokens - credit * query.cached_on(node), 0.0) / block
        )
        return prefill + decoding, (("prefill_blocks", prefill), ("decode_blocks", decoding))


# The product of uncached work and load: LMetric's score (arXiv 2026).
#
# (uncached tokens + 1) × (requests in flight + 1). It needs no calibration. It follows the prefix cache while nodes are
# idle, and the load otherwise.


class Product:
    """Implements scored.Rule."""

    name = "product"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        return [self._score(node, query) for node in nodes]

    def _score(self, node: NodeView, query: Query) -> tuple[float, Terms]:
        uncached, requests = query.num_tokens - query.cached_on(node) + 1.0, node.num_requests + 1.0
        return uncached * requests, (("uncached_tokens", uncached), ("requests", requests))


# Mooncake's Conductor (FAST'25, algorithm 1): the prefill node with the least predicted TTFT, the decode node with the
# least predicted TPOT.
#
# TTFT is queue plus compute of the uncached part. Where another node's prefix is at least `balance` times as long, it
# is queue + transfer + compute behind that prefix, and the choice pulls it (over a measured bandwidth only). Its early
# rejection is our admission. While no node knows step costs, the product score stands in.


class Conductor:
    """Implements Policy."""

    name = "conductor"

    def __init__(self, balance: float = 2.0) -> None:
        self._balance = balance
        self._cold = Scored(Product())

    def choose(self, query: Query, view: ClusterView) -> Decision:
        if view.typical is None:
            decision = self._cold.choose(query, view)
            return replace(decision, record=replace(decision.record, policy=self.name))
        rule = Algorithm1(view, self._balance)
        decision = Scored(rule).choose(query, view)
        source = rule.source(decision.first, query)
        return decision if source is None else decision.pulling(source)

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        rule = Algorithm1(view, self._balance) if view.typical is not None else Product()
        return Scored(rule).choose_decode(query, view, prefill)


@dataclass(frozen=True, slots=True)
class Algorithm1:
    """Implements scored.Rule for one view."""

    view: ClusterView
    balance: float
    name: str = Conductor.name

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        score = self._tpot if leg == "decode" else self._ttft
        return [score(node, query) for node in nodes]

    def source(self, node: NodeView, query: Query) -> NodeView | None:
        """The node with the longest prefix, when `node` should fetch it; None otherwise."""
        best = max((each for each in self.view.nodes if each.accepts_work), key=query.held_on)
        own = query.cached_on(node)
        if query.held_on(best) <= own or query.held_on(best) < self.balance * own or not best.can_give(node):
            return None
        return best if best.bandwidth.get(node.name, 0.0) > 0 else None

    def _ttft(self, node: NodeView, query: Query) -> tuple[float, Terms]:
        row = self.view.row_of(node)
        source, cached = self.source(node, query), query.cached_on(node)
        transfer = 0.0
        if source is not None:
            missing = query.held_on(source) - cached
            transfer = missing * node.kv_bytes_per_token / source.bandwidth[node.name]
            cached += missing
        compute = alone_s(row, max(query.num_tokens - cached, 1), cached) * row.stretch
        return row.wait_s + transfer + compute, (("wait", row.wait_s), ("transfer", transfer), ("compute", compute))

    def _tpot(self, node: NodeView, query: Query) -> tuple[float, Terms]:
        row = self.view.row_of(node)
        context = row.context_tokens + query.num_tokens
        tpot = row.decode_fixed_s + row.each_row_s * (row.rows + 1) + row.context_s * context
        return tpot, (("tpot", tpot),)
