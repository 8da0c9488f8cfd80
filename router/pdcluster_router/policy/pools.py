"""Which nodes may take which leg of a request, before any policy compares them. Every policy filters through here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdcluster.errors import Unavailable
from pdcluster_router.policy.base import Candidate, LegName, Query
from pdcluster_router.view import ClusterView, NodeView


@dataclass(frozen=True, slots=True)
class Pools:
    """Nodes for each leg, sorted by name so that the order of reports changes nothing; rejected: the others, and why."""

    prefill: tuple[NodeView, ...]
    decode: tuple[NodeView, ...]
    local: tuple[NodeView, ...]
    rejected: tuple[Candidate, ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether some node is there for one leg alone."""
        return bool(self.prefill and self.decode) and any(node.role != "mixed" for node in self.local)


def pools(query: Query, view: ClusterView) -> Pools:
    """Raises Unavailable when no node takes work, or the wanted mode has no nodes."""
    usable, rejected = _usable(query, view)
    if not usable:
        raise Unavailable(f"none of {len(view.nodes)} known nodes takes work now; see that nodes are up and not draining")
    if query.force != "remote" and query.fallback != "deny":
        usable = fresh(usable, query)  # a pool may turn empty: better one node that works than a pair with one that failed
    found = Pools(
        prefill=fresh([node for node in usable if node.role != "decode"], query),
        decode=fresh([node for node in usable if node.role != "prefill"], query),
        local=fresh(usable, query),
        rejected=rejected,
    )
    if query.force == "remote" and not (found.prefill and found.decode):
        counts = f"{len(found.prefill)} and {len(found.decode)}"
        raise Unavailable(f"mode remote needs a prefill and a decode node, there are {counts}; start one or use mode auto")
    if query.force == "auto" and query.fallback == "deny" and not (found.prefill and found.decode):
        gone = "decode" if found.prefill else "prefill"
        raise Unavailable(f"no {gone} node takes work, and router.fallback is deny; start one, or allow one node with on-failure")
    return found


def may_be_local(query: Query, found: Pools) -> bool:
    """Whether one node may take the request although a pair could: nobody asked for a pair, and if nodes have roles, their operator allows it."""
    return query.force == "auto" and (query.fallback != "deny" or not found.is_split)


def _usable(query: Query, view: ClusterView) -> tuple[Sequence[NodeView], tuple[Candidate, ...]]:
    """Nodes that take work of this length, by name."""
    usable: Sequence[NodeView] = view.accepting
    if len(usable) == len(view.nodes) and query.num_tokens <= view.shortest_max_len:
        return usable, ()
    usable = [node for node in usable if node.max_len >= query.num_tokens]
    reasons = ((node, why_not(node, query.num_tokens)) for node in view.nodes)
    return usable, tuple(Candidate(node, "local", query.cached_on(node), rejected_by=reason) for node, reason in reasons if reason)


def why_not(node: NodeView, num_tokens: int) -> str:
    """The rule that keeps a node from taking a request of that length; "" for none."""
    if node.is_cordoned:
        return "cordoned"
    if node.load is not None and node.load.draining:
        return "draining"
    if node.max_len < num_tokens:
        return f"takes {node.max_len} tokens"
    return ""


def fresh(nodes: Sequence[NodeView], query: Query) -> tuple[NodeView, ...]:
    """Those that have not failed this request; those that have only when there is no other."""
    if not query.excluded:
        return tuple(nodes)
    return tuple(node for node in nodes if node.incarnation not in query.excluded) or tuple(nodes)


def ready(nodes: Iterable[NodeView], query: Query) -> tuple[NodeView, ...]:
    """Those that have not said to come back later; all when all have."""
    nodes = tuple(nodes)
    if not query.busy:
        return nodes
    return tuple(node for node in nodes if node.incarnation not in query.busy) or nodes


def partners(nodes: Iterable[NodeView], prefill: NodeView) -> tuple[NodeView, ...]:
    """Decode nodes that can take KV from `prefill`."""
    return tuple(node for node in nodes if node is not prefill and node.can_exchange(prefill))


def partners_of_parked(query: Query, view: ClusterView, prefill: NodeView) -> tuple[NodeView, ...]:
    """Decode nodes for KV that `prefill` holds already: none that failed the request, those that are not busy first."""
    able = [node for node in view.nodes if node.role != "prefill" and not why_not(node, query.num_tokens)]
    apart = [node for node in able if node.incarnation not in query.excluded and node.incarnation != prefill.incarnation]
    return ready(sorted(partners(apart, prefill), key=_name), query)


def no_partner(prefill: NodeView) -> Unavailable:
    return Unavailable(f"mode remote needs a second node that can exchange KV with {prefill.name}; start one or use mode auto")


def rejected(nodes: Iterable[NodeView], kept: Iterable[NodeView], leg: LegName, query: Query, why: str) -> tuple[Candidate, ...]:
    """Candidates for the record: those of `nodes` that are not among `kept`."""
    names = {node.incarnation for node in kept}
    return tuple(Candidate(node, leg, query.cached_on(node), rejected_by=why) for node in nodes if node.incarnation not in names)


def _name(node: NodeView) -> tuple[str, str]:
    return node.name, node.incarnation
