"""Which nodes may take which leg of a request, before any policy compares them. Every policy filters here.

Most requests may go to any node that takes work. Then the view's own pools are the answer.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec
from msgspec.structs import replace

from pdcluster.core.errors import NoNodeTakesWork, Unavailable
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.policy.base import Candidate, Query
from pdcluster_router.policy.predicted.node_rows import Pool


class Pools(msgspec.Struct, frozen=True):
    """Nodes for each leg.

    is_split: some node is there for one leg alone.
    """

    prefill: Pool
    decode: Pool
    local: Pool
    is_split: bool


def pools(query: Query, view: ClusterView) -> Pools:
    """The pools for a query.

    Raises NoNodeTakesWork when no node takes work, or a leg lacks one and may not go without. Raises Unavailable when
    the client's own mode has no nodes.
    """
    usable = _usable(query, view)
    if not usable.rows:
        raise no_node(len(view.nodes))
    if query.force != "remote" and query.fallback != "deny":
        usable = fresh(usable, query, view)  # when a pool is empty, one working node beats a pair with a failed one
    found = _by_leg(usable, query, view)
    if query.force == "remote" and not (found.prefill and found.decode):
        counts = f"{len(found.prefill)} and {len(found.decode)}"
        raise Unavailable(
            f"mode remote needs a prefill and a decode node, there are {counts}; start one or use mode auto"
        )
    if query.force == "auto" and query.fallback == "deny" and not (found.prefill and found.decode):
        gone = "decode" if found.prefill else "prefill"
        raise NoNodeTakesWork(
            f"no {gone} node takes work, and router.fallback is deny; start one, or allow one node with on-failure"
        )
    return found if query.force == "local" or may_be_local(query, found) else _in_pairs(found, usable, query, view)


def _in_pairs(found: Pools, usable: Pool, query: Query, view: ClusterView) -> Pools:
    """The pools where the request needs a pair: of the prefill nodes, those with a partner.

    Nodes that failed the request count again where there is no pair without them.
    """
    prefill = found.prefill.only(lambda row: bool(partners(found.decode, view.reported(row), view)))
    if prefill:
        return replace(found, prefill=prefill)
    if not query.excluded:
        return found
    again = replace(query, excluded=frozenset())
    return _in_pairs(_by_leg(usable, again, view), usable, again, view)


def _by_leg(usable: Pool, query: Query, view: ClusterView) -> Pools:
    roster = view.roster
    if usable is roster.accepting and not query.excluded:
        return Pools(roster.prefill, roster.decode, usable, roster.is_split)
    prefill, decode, local = (
        fresh(pool, query, view) for pool in (usable & roster.prefill, usable & roster.decode, usable)
    )
    is_split = bool(prefill and decode) and any(view.nodes[row].role != "mixed" for row in local.rows)
    return Pools(prefill, decode, local, is_split)


def may_be_local(query: Query, found: Pools) -> bool:
    """Whether one node may serve although a pair could: nobody asked for a pair, and the operator's fallback allows
    it.
    """
    return query.force == "auto" and (query.fallback != "deny" or not found.is_split)


def _usable(query: Query, view: ClusterView) -> Pool:
    """Nodes that take work of this length."""
    accepting = view.roster.accepting
    if query.num_tokens <= view.roster.shortest_max_len:
        return accepting
    return accepting.only(lambda row: view.nodes[row].max_len >= query.num_tokens)


def fresh(pool: Pool, query: Query, view: ClusterView) -> Pool:
    """Nodes that have not failed the request; failed ones only when there is no other."""
    return (_without(pool, query.excluded, view) or pool) if query.excluded else pool


def ready(pool: Pool, query: Query, view: ClusterView) -> Pool:
    """Nodes that are not busy; all when all are."""
    return (_without(pool, query.busy, view) or pool) if query.busy else pool


def _without(pool: Pool, left_out: Set[str], view: ClusterView) -> Pool:
    if not left_out:
        return pool
    rows = {view.roster.row_of.get(incarnation) for incarnation in left_out}
    return pool.only(lambda row: row not in rows)


def partners(pool: Pool, prefill: NodeView, view: ClusterView) -> Pool:
    """Decode nodes that can receive KV from `prefill`."""
    able, own = view.roster.partners(pool, prefill), view.roster.row_of.get(prefill.incarnation)
    return able.only(lambda row: row != own) if own in able.members else able


def partners_of_parked(query: Query, view: ClusterView, prefill: NodeView) -> Pool:
    """Decode nodes for KV that `prefill` holds. None that failed the request; busy ones last."""
    able = _without(_usable(query, view) & view.roster.decode, query.excluded, view)
    return ready(partners(able, prefill, view), query, view)


def no_node(num_known: int) -> NoNodeTakesWork:
    return NoNodeTakesWork(
        f"none of {num_known} known nodes takes work now; see that nodes are up, not cordoned and not draining"
    )


def no_partner(prefill: NodeView) -> Unavailable:
    return Unavailable(
        f"mode remote needs a second node that can exchange KV with {prefill.name}; start one or use mode auto"
    )


def rejected(query: Query, view: ClusterView) -> tuple[Candidate, ...]:
    """Nodes that could not be chosen, and why."""
    usable = _usable(query, view)
    if len(usable.rows) == view.size:
        return ()
    nodes = (node for row, node in enumerate(view.nodes) if row not in usable.members)
    return tuple(
        Candidate(node, "local", query.cached_on(node), rejected_by=why_not(node, query.num_tokens)) for node in nodes
    )


def why_not(node: NodeView, num_tokens: int) -> str:
    """The rule that keeps a node from a request of that length; "" for none."""
    if node.is_cordoned:
        return "cordoned"
    if node.load is not None and node.load.draining:
        return "draining"
    if node.load is not None and node.load.stuck:
        return "stuck"
    if node.max_len < num_tokens:
        return f"takes {node.max_len} tokens"
    return ""
