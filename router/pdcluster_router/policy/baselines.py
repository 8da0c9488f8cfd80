"""Policies that look at no cache: round-robin, random, power-of-two, least-load. Textbook rules, and what every router has to beat."""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_router.cluster.view import NodeView
from pdcluster_router.policy.base import LegName, Query, Terms
from pdcluster_router.policy.chance import mix

LEG_SALT: dict[LegName, int] = {"prefill": 1, "decode": 2, "local": 1}
"""So that chance sends the two legs to different nodes."""


class RoundRobin:
    """Each decision takes the next node by name. The term is the node's distance from its turn."""

    name = "round-robin"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        distances = (float((index - query.counter) % len(nodes)) for index in range(len(nodes)))
        return [(distance, (("turns", distance),)) for distance in distances]


class Random:
    """Uniform over nodes; Query.counter is the seed."""

    name = "random"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        drawn = mix(query.counter, LEG_SALT[leg]) % len(nodes)
        return [(float(index != drawn), (("not_drawn", float(index != drawn)),)) for index in range(len(nodes))]


class PowerOfTwo:
    """Two nodes at random, the one with fewer requests (Mitzenmacher, 2001; Ray Serve's default). The others come after both, whatever they have."""

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
    """Work by time, as SMG's `least_load`: tokens that wait ÷ the node's rate + 0.15 × k ÷ (1 − k), k the share of KV pages in use. On decode legs
    the tokens are those of the contexts. Without a fitted rate 2,000 tokens a second stand in, as there."""

    name = "least-load"

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        return [self._score(node, leg) for node in nodes]

    def _score(self, node: NodeView, leg: LegName) -> tuple[float, Terms]:
        work = node.work
        queued_s = work.prefill_tokens / self._rate(node)
        decode = (work.context_tokens + work.rows) / self._rate(node) if leg != "prefill" else 0.0
        full = _share_used(node)
        pressure = 0.15 * full / max(1.0 - full, 0.01)
        return queued_s + decode + pressure, (("queued", queued_s), ("decoding", decode), ("kv", pressure))

    def _rate(self, node: NodeView) -> float:
        token_s = node.cost.prefill.token_s if node.cost is not None else 0.0
        return 1.0 / token_s if token_s > 0 else 2000.0


def _share_used(node: NodeView) -> float:
    load = node.load
    return 1.0 - (load.pages_free + load.pages_cached) / load.pages_total if load is not None and load.pages_total else 0.0
