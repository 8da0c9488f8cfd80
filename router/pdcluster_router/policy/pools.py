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
    computing, decoding = able(query, view)
    if not decoding.rows:
        raise no_node(len(view.nodes))
    if query.force != "remote" and query.fallback != "deny":
        # when a pool is empty, one working node beats a pair with a failed one
        computing, decoding = fresh(computing, query, view), fresh(decoding, query, view)
    found = _by_leg(computing, decoding, query, view)
    if query.force == "remote" and not (found.prefill and found.decode):
        counts = f"{len(found.prefill)} and {len(found.decode)}"
        if computing is not decoding or len(computing) < len(view.roster.accepting):
            counts += f" for a request of {query.row_tokens} tokens"
        raise Unavailable(
            f"mode remote needs a prefill and a decode node, there are {counts}; start one or use mode auto"
        )
    if query.force == "auto" and query.fallback == "deny" and not (found.prefill and found.decode):
        gone = "decode" if found.prefill else "prefill"
        raise NoNodeTakesWork(
            f"no {gone} node takes work, and router.fallback is deny; start one, or allow one node with on-failure"
        )
    if query.force == "local" or may_be_local(query, found):
        return found
    return _in_pairs(found, (computing, decoding), query, view)


def _in_pairs(found: Pools, able_nodes: tuple[Pool, Pool], query: Query, view: ClusterView) -> Pools:
    """The pools where the request needs a pair: of the prefill nodes, those with a partner.

    able_nodes: those that can compute the prompt, and those that can decode. Nodes that failed the request count again
    where there is no pair without them.
    """
    prefill = found.prefill.only(lambda row: bool(partners(found.decode, view.reported(row), view)))
    if prefill:
        return replace(found, prefill=prefill)
    if not query.excluded:
        return found
    again = replace(query, excluded=frozenset())
    return _in_pairs(_by_leg(*able_nodes, again, view), able_nodes, again, view)


def _by_leg(computing: Pool, decoding: Pool, query: Query, view: ClusterView) -> Pools:
    roster = view.roster
    if decoding is computing is roster.accepting and not query.excluded:
        return Pools(roster.prefill, roster.decode, decoding, roster.is_split)
    prefill, decode, local = (
        fresh(pool, query, view) for pool in (computing & roster.prefill, decoding & roster.decode, decoding)
    )
    is_split = bool(prefill and decode) and any(
        view.reported(row).role != "mixed" for row in (*prefill.rows, *decode.rows)
    )
    return Pools(prefill, decode, local, is_split)


def may_be_local(query: Query, found: Pools) -> bool:
    """Whether one node may serve although a pair could: nobody asked for a pair, and the operator's fallback allows
    it.
    """
    return query.force == "auto" and (query.fallback != "deny" or not found.is_split)


def able(query: Query, view: ClusterView) -> tuple[Pool, Pool]:
    """Nodes that take work and serve the model: those that can compute the prompt, and those that can decode, too."""
    accepting = view.roster.accepting
    if view.roster.takes_all(query.row_tokens, query.model):
        return accepting, accepting
    computing = accepting.only(lambda row: not unfit(view.reported(row), query, decodes=False))
    return computing, computing.only(lambda row: not unfit(view.reported(row), query))


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
    found, own = view.roster.partners(pool, prefill), view.roster.row_of.get(prefill.incarnation)
    return found.only(lambda row: row != own) if own in found.members else found


def partners_of_parked(query: Query, view: ClusterView, prefill: NodeView) -> Pool:
    """Decode nodes for KV that `prefill` holds. None that failed the request; busy ones last."""
    decode = _without(able(query, view)[1] & view.roster.decode, query.excluded, view)
    return ready(partners(decode, prefill, view), query, view)


def no_node(num_known: int) -> NoNodeTakesWork:
    return NoNodeTakesWork(
        f"none of {num_known} known nodes takes work now; see that nodes are up, not cordoned and not draining"
    )


def no_partner(prefill: NodeView) -> Unavailable:
    return Unavailable(
        f"mode remote needs a second node that can exchange KV with {prefill.name}; start one or use mode auto"
    )


def rejected(query: Query, view: ClusterView) -> tuple[Candidate, ...]:
    """Nodes that could not be chosen for any leg of theirs, and why."""
    roster = view.roster
    if len(roster.accepting.rows) == view.size and roster.takes_all(query.row_tokens, query.model):
        return ()
    reasons = ((node, why_not(node, query, decodes=node.role == "decode")) for node in view.nodes)
    return tuple(
        Candidate(node, "local", query.cached_on(node), rejected_by=reason) for node, reason in reasons if reason
    )


def why_not(node: NodeView, query: Query, *, decodes: bool = True) -> str:
    """The rule that keeps a node from a request; "" for none. decodes: it shall decode, not only compute the prompt."""
    if node.is_cordoned:
        return "cordoned"
    if node.load is not None and node.load.draining:
        return "draining"
    if node.load is not None and node.load.stuck:
        return "stuck"
    return unfit(node, query, decodes=decodes)


def unfit(node: NodeView, query: Query, *, decodes: bool = True) -> str:
    """Why a node that takes work can never take this request; "" when it can."""
    if not node.serves(query.model):
        return "serves another model"
    if node.max_len < (query.row_tokens if decodes else query.num_tokens + 1):
        return f"takes {node.max_len} tokens"
    return ""
