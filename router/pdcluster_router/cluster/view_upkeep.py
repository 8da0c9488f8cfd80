"""Keeps the view of policies up to date: a report costs one row, work sent to a node some numbers of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdcluster.bootstrap.card import NodeCard
from pdcluster.core.messages import Endpoint, Load
from pdcluster.cost.cost import NodeCost
from pdcluster.wire.router_link import LinkState, NodeLink
from pdcluster_router.cluster.legs import Ledger
from pdcluster_router.cluster.view import ClusterView, NodeView

# How long typical step costs stay valid.
TYPICAL_S = 1.0

# A slower path counts as unmeasured.
LEAST_BYTES_S = 1.0


@dataclass(slots=True)
class NodeState:
    """What the router knows of one boot of one node."""

    card: NodeCard
    endpoint: Endpoint
    link: NodeLink | None = None
    load: Load | None = None
    # Of `card`. Reading it there hashes.
    models: frozenset[str] = frozenset()
    # From the last report or answer. `load` stays as reported: a drain must see a report made after the cordon.
    is_cordoned: bool = False
    # From the last report.
    cost: NodeCost | None = None
    redial_at: float = 0.0
    # False: the bootstrap no longer lists it, but its link still stands.
    is_listed: bool = True

    @property
    def is_up(self) -> bool:
        return self.link is not None and self.link.state is LinkState.UP


class ViewUpkeep:
    """Owned by the router's event loop.

    nodes: by incarnation, kept by the node table.
    """

    def __init__(self, nodes: Mapping[str, NodeState], ledger: Ledger) -> None:
        self._nodes, self._ledger = nodes, ledger
        self._view = ClusterView(())
        # Whether a caller may still have the current view.
        self._is_lent = False
        # Nodes that reported since the view was made.
        self._reported: set[str] = set()
        # False: nodes came or left since the view was made.
        self._is_whole = True
        # When typical costs expire; 0: compute them with the next view.
        self._typical_until = 0.0

    def note_change(self) -> None:
        """Nodes came or left."""
        self._is_whole = False

    def note_report(self, incarnation: str, *, is_first: bool, has_cost: bool) -> None:
        """A node reported. has_cost: its step costs may be others."""
        self._is_whole = self._is_whole and not is_first
        self._reported.add(incarnation)
        if has_cost and self._view.typical is None:
            self._typical_until = 0.0  # compute typical costs at once when the first node reports some

    def view(self) -> ClusterView:
        """The view as of now.

        A call updates only what changed since the last one. It rebuilds the view only after nodes came or left.
        """
        self._bring_up()
        self._is_lent = True
        return self._view

    def glance(self) -> ClusterView:
        """As `view`, for a caller that keeps nothing.

        Work sent since is written into the last view in place, unless a caller of `view` may still have it.
        """
        self._bring_up()
        return self._view

    def _bring_up(self) -> None:
        changed, before = self._ledger.take_changed(), self._view
        if not self._is_whole:
            self._view = ClusterView(
                [self._view_of(state) for state in self._nodes.values() if state.is_up and state.load is not None]
            )
            self._is_whole, self._typical_until = True, 0.0
        else:
            if self._reported:
                self._view = before.replaced(self._replacements())
                changed -= self._reported
            if changed and self._is_lent and self._view is before:
                self._view = self._view.sent(changed, self._ledger.counts)
            elif changed:
                self._view.note_sent(changed, self._ledger.counts)
        self._reported.clear()
        if time.monotonic() >= self._typical_until:
            self._look_at_costs()
        if self._view is not before:
            self._is_lent = False

    def _look_at_costs(self) -> None:
        """Compute typical step costs, and a new view where they changed.

        They stand in where a node has too few steps of its own. TYPICAL_S bounds how often nodes are recomputed.
        """
        self._typical_until = time.monotonic() + TYPICAL_S
        found = self._view.typical_now()
        if found != self._view.typical:
            self._view = self._view.priced(found)

    def _replacements(self) -> dict[str, NodeView]:
        """New values of the nodes that reported and are in the view."""
        row_of = self._view.roster.row_of
        return {
            incarnation: self._view_of(self._nodes[incarnation])
            for incarnation in self._reported
            if incarnation in row_of
        }

    def _view_of(self, state: NodeState) -> NodeView:
        card, load = state.card, state.load
        assert load is not None  # without a load it is not in the view
        return NodeView(
            endpoint=state.endpoint,
            role=load.role or card.role,
            in_flight=self._ledger.in_flight(card.incarnation),
            pending=self._ledger.pending.of(card.incarnation),
            load=load,
            block_tokens=card.hash_block_tokens,
            max_len=card.max_len,
            backends=card.backends,
            is_cordoned=state.is_cordoned,
            cost=state.cost,
            bandwidth={
                path.peer: path.bytes_s for path in load.paths if path.is_chosen and path.bytes_s >= LEAST_BYTES_S
            },
            kv_bytes_per_token=card.fingerprint.layout.token_bytes,
            models=state.models,
        )
