"""Which node prefills and which decodes: a pure function of the request and the ClusterView.

This is the cold cost (uncached tokens + 1) × (requests in flight + 1), the product score of LMetric (arXiv 2026): it needs no calibration,
follows the prefix cache while nodes are idle and the load when they are not. Ties go to the node with fewer requests, then by name, so that
replicas agree.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from pdcluster.errors import Unavailable
from pdcluster_router.generation import Mode
from pdcluster_router.view import ClusterView, NodeView

Force = Literal["auto", "remote", "local"]


@dataclass(frozen=True, slots=True)
class Query:
    """What a choice depends on. excluded: incarnations that failed this request already; busy: those that said to come back later, which is a
    reason to prefer another of the same pool, but none to leave the pool."""

    num_tokens: int
    hashes: bytes
    excluded: Set[str] = frozenset()
    busy: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    node: NodeView
    cached_tokens: int
    cost: float


@dataclass(frozen=True, slots=True)
class Choice:
    """decode is the node that runs the request to its end; prefill is None in mode local."""

    mode: Mode
    prefill: NodeView | None
    decode: NodeView
    candidates: tuple[Candidate, ...]


def score(node: NodeView, query: Query) -> Candidate:
    cached = min(node.cached_tokens(query.hashes), query.num_tokens)
    return Candidate(node, cached, (query.num_tokens - cached + 1) * (node.num_requests + 1))


def best(candidates: list[Candidate]) -> NodeView:
    return min(candidates, key=lambda c: (c.cost, c.node.num_requests, c.node.name)).node


def usable(view: ClusterView, query: Query) -> list[NodeView]:
    """Nodes that take work and are large enough."""
    return [node for node in view.nodes if node.accepts_work and node.max_len >= query.num_tokens]


def fresh(nodes: list[NodeView], query: Query) -> list[NodeView]:
    """Those that have not failed this request; those that have only when there is no other."""
    return [node for node in nodes if node.endpoint.incarnation not in query.excluded] or nodes


def ready(candidates: list[Candidate], query: Query) -> list[Candidate]:
    """Those that are not busy; all when all are."""
    return [c for c in candidates if c.node.endpoint.incarnation not in query.busy] or candidates


def pick(view: ClusterView, query: Query, force: Force = "auto") -> Choice:
    """Prefill and decode apart when both pools have a node; local on the best node when one pool is empty or one mixed node is best at both.

    force "local" keeps every request on one node, "remote" refuses to. Raises Unavailable when no node takes work (or no pair may)."""
    nodes = usable(view, query)
    if not nodes:
        raise Unavailable(f"none of {len(view.nodes)} known nodes takes work now; see that nodes are up and not draining")
    if force != "remote":
        nodes = fresh(nodes, query)
    scored = [score(node, query) for node in nodes]
    prefills = [score(node, query) for node in fresh([node for node in nodes if node.role != "decode"], query)]
    decodes = [score(node, query) for node in fresh([node for node in nodes if node.role != "prefill"], query)]
    if force == "local" or (force == "auto" and not (prefills and decodes)):
        return Choice("local", None, best(ready(scored, query)), tuple(scored))
    if not (prefills and decodes):
        raise Unavailable(f"mode remote needs a prefill and a decode node, there are {len(prefills)} and {len(decodes)}; start one or use mode auto")
    prefill = best(ready(prefills, query))
    others = ready([c for c in decodes if c.node is not prefill and c.node.can_exchange(prefill)], query)
    if force == "auto" and (not others or best(ready(decodes, query)) is prefill):
        return Choice("local", None, prefill, tuple(scored))
    if not others:
        raise Unavailable(f"mode remote needs a second node that can exchange KV with {prefill.name}; start one or use mode auto")
    return Choice("remote", prefill, best(others), tuple(scored))


def pick_decode(view: ClusterView, query: Query, prefill: NodeView) -> NodeView | None:
    """Another decode node for KV that `prefill` holds; None when there is none."""
    avoid = {*query.excluded, prefill.endpoint.incarnation}
    able = (node for node in view.nodes if node.accepts_work and node.role != "prefill" and node.can_exchange(prefill))
    nodes = [node for node in able if node.endpoint.incarnation not in avoid]
    return best(ready([score(node, query) for node in nodes], query)) if nodes else None
