"""Which nodes may take which leg of a request, before any policy compares them. Every policy filters here.

The answer is `Legs`: a few bits for each node. A node is ruled out by `why_not`, because it failed the request
(Query.excluded), or because nobody can take its KV. Most requests may go to any node that takes work; their legs are
cached with the roster.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pdcluster.core.errors import NoNodeTakesWork, Unavailable
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.node_row import BUSY, COMPUTES, DECODES, SERVES
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.candidates import Candidate

Rows = tuple[int, ...]


class Legs(msgspec.Struct, frozen=True):
    """What each node may do for a request.

    bits: of each node (`records`). Policies may copy them, and change the copy.
    may_be_local: one node may serve although a pair could: nobody asked for a pair, and the operator allows it.
    wants_local: the policy compares mode local although a pair is possible.
    is_split: both legs have nodes, and some node takes only one of them.
    num_ruled_out: nodes that could not be chosen for any leg of theirs (`rejected`).
    """

    bits: NDArray[Any]
    may_be_local: bool
    wants_local: bool
    is_split: bool = False
    num_ruled_out: int = 0

    def rows(self, leg: int) -> Rows:
        """Nodes that may take a leg; busy ones only where all are."""
        return self.ready(self.all_rows(leg))

    def all_rows(self, leg: int) -> Rows:
        """Nodes that may take a leg, with the busy ones."""
        return tuple(np.nonzero(self.bits & leg)[0].tolist())

    def ready(self, rows: Rows) -> Rows:
        """These nodes without the busy ones, unless all are."""
        return tuple([row for row in rows if not self.bits[row] & BUSY]) or rows


def legs_of(query: Query, view: ClusterView) -> Legs:
    """The legs of a query.

    Raises NoNodeTakesWork when no node takes work, or a leg lacks one and may not go without. Raises Unavailable when
    the client's own mode has no nodes.
    """
    roster = view.roster
    is_usual = not query.excluded
    if is_usual and roster.takes_all(query.row_tokens, query.model):
        key: object = (query.force, query.fallback)
    else:  # several versions of the weights, or adapters
        is_usual = is_usual and roster.takes_model(query.row_tokens, query.model)
        key = (query.force, query.fallback, query.model)
    found = roster.plans.get(key) if is_usual else None
    if found is None:
        found = _legs_of(query, view)
        if is_usual:
            roster.plans[key] = found
    return replace(found, bits=with_busy(found.bits, query.busy, view)) if query.busy else found


def _legs_of(query: Query, view: ClusterView) -> Legs:
    computing, decoding = able(query, view)
    if not decoding:
        raise no_node(view.size)
    if query.force != "remote" and query.fallback != "deny":
        # when a leg has no node, one working node beats a pair with a failed one
        computing, decoding = fresh(computing, query, view), fresh(decoding, query, view)
    prefill, decode = _by_role(computing, decoding, query, view)
    is_split = bool(prefill and decode) and any(view.reported[row].role != "mixed" for row in (*prefill, *decode))
    _check_pair(prefill, decode, query, view)
    may_be_local = query.force == "auto" and (query.fallback != "deny" or not is_split)
    if query.force == "local":
        prefill = ()
    elif not may_be_local:
        prefill, decode = _in_pairs(computing, decoding, query, view)
    bits = _bits(view.size, {COMPUTES: prefill, DECODES: decode, SERVES: fresh(decoding, query, view)})
    wants_local = query.force == "auto" and (query.fallback == "conditional" or not is_split)
    num_ruled_out = len(rejected(query, view))
    return Legs(bits, query.force == "local" or may_be_local, wants_local, is_split, num_ruled_out)


def _check_pair(prefill: Rows, decode: Rows, query: Query, view: ClusterView) -> None:
    """Raises where a leg that may not go without has no node."""
    if prefill and decode:
        return
    if query.force == "remote":
        counts = f"{len(prefill)} and {len(decode)}"
        if not view.roster.takes_all(query.row_tokens, query.model):
            counts += f" for a request of {query.row_tokens} tokens"
        raise Unavailable(
            f"mode remote needs a prefill and a decode node, there are {counts}; start one or use mode auto"
        )
    if query.force == "auto" and query.fallback == "deny":
        gone = "decode" if prefill else "prefill"
        raise NoNodeTakesWork(
            f"no {gone} node takes work, and router.fallback is deny; start one, or allow one node with on-failure"
        )


def _in_pairs(computing: Rows, decoding: Rows, query: Query, view: ClusterView) -> tuple[Rows, Rows]:
    """The nodes where the request needs a pair: of the prefill nodes, those with a partner.

    Nodes that failed the request count again where there is no pair without them.
    """
    prefill, decode = _by_role(computing, decoding, query, view)
    paired = tuple(row for row in prefill if partners(decode, row, view))
    if paired or not query.excluded:
        return paired or prefill, decode
    return _in_pairs(computing, decoding, replace(query, excluded=frozenset()), view)


def _by_role(computing: Rows, decoding: Rows, query: Query, view: ClusterView) -> tuple[Rows, Rows]:
    legs = view.roster.legs
    prefill, decode = (
        tuple([row for row in rows if legs[row] & leg]) for rows, leg in ((computing, COMPUTES), (decoding, DECODES))
    )
    return fresh(prefill, query, view), fresh(decode, query, view)


def _bits(size: int, rows_of: dict[int, Rows]) -> NDArray[Any]:
    bits = np.zeros(size, np.int64)
    for leg, rows in rows_of.items():
        bits[list(rows)] |= leg
    return bits


def with_busy(bits: NDArray[Any], busy: Set[str], view: ClusterView) -> NDArray[Any]:
    """The bits, with BUSY for these incarnations."""
    bits = bits.copy()
    bits[[row for incarnation in busy if (row := view.roster.row_of.get(incarnation)) is not None]] |= BUSY
    return bits


def able(query: Query, view: ClusterView) -> tuple[Rows, Rows]:
    """Nodes that take work and serve the model: those that can compute the prompt, and those that can decode, too."""
    accepting = tuple(sorted(view.roster.accepting))
    if view.roster.takes_all(query.row_tokens, query.model):
        return accepting, accepting
    computing = tuple([row for row in accepting if not unfit(view.reported[row], query, decodes=False)])
    return computing, tuple([row for row in computing if not unfit(view.reported[row], query)])


def fresh(rows: Rows, query: Query, view: ClusterView) -> Rows:
    """Nodes that have not failed the request; failed ones only when there is no other."""
    return without(rows, query.excluded, view) or rows if query.excluded else rows


def without(rows: Rows, left_out: Set[str], view: ClusterView) -> Rows:
    gone = {view.roster.row_of.get(incarnation) for incarnation in left_out}
    return tuple([row for row in rows if row not in gone])


def partners(rows: Iterable[int], first: int, view: ClusterView) -> Rows:
    """Nodes of `rows` that can receive KV from the node of row `first`."""
    return tuple([row for row in rows if view.roster.is_partner(first, row)])


def decoders_for(query: Query, view: ClusterView, prefill: NodeView) -> NDArray[Any]:
    """Bits with DECODES for nodes that can take KV that `prefill` holds. None that failed the request."""
    media = set(prefill.backends)
    decode = [
        row
        for row in without(able(query, view)[1], query.excluded, view)
        if view.roster.legs[row] & DECODES
        and view.reported[row].incarnation != prefill.incarnation
        and not media.isdisjoint(view.reported[row].backends)
    ]
    return with_busy(_bits(view.size, {DECODES: tuple(decode)}), query.busy, view)


def no_node(num_known: int) -> NoNodeTakesWork:
    return NoNodeTakesWork(
        f"none of {num_known} known nodes takes work now; see that nodes are up, awake, not cordoned and not draining"
    )


def no_partner(prefill: NodeView) -> Unavailable:
    return Unavailable(
        f"mode remote needs a second node that can exchange KV with {prefill.name}; start one or use mode auto"
    )


def rejected(query: Query, view: ClusterView, most: int | None = None) -> tuple[Candidate, ...]:
    """Nodes that could not be chosen for any leg of theirs, and why. most: of them; None: all."""
    roster = view.roster
    if len(roster.accepting) == view.size and roster.takes_all(query.row_tokens, query.model):
        return ()
    reasons = ((node, why_not(node, query, decodes=node.role == "decode")) for node in view.reported)
    found = (
        Candidate(node.name, "local", query.cached_on(node), rejected_by=reason) for node, reason in reasons if reason
    )
    return tuple(islice(found, most))


def why_not(node: NodeView, query: Query, *, decodes: bool = True) -> str:
    """The rule that keeps a node from a request; "" for none. decodes: it shall decode, not only compute the prompt."""
    if node.is_sleeping:
        return "asleep"
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
    if node.max_len < (query.row_tokens if decodes else query.least_tokens):
        return f"takes {node.max_len} tokens"
    return ""
