"""Whether a request has room on nodes with a small backlog. Pure; reads a ClusterView.

A node is *open* for prompts while less than `backlog_s` of work waits there. That is enough to keep it busy, and so
little that the router still decides what comes next. The policy chooses among nodes. It may choose
one that is not open, for its cache, while some suitable node of that leg is open.

Rows share their node's steps, so one row too many slows all of them. A first token mostly has time. So a request waits
while the rows of its decode node are at their limit, but for no more than HALF of its first token's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import Mode
from pdcluster_router.policy.base import Query, RoutingDecision, suits_all
from pdcluster_router.policy.pools import why_not
from pdcluster_router.policy.predicted import compiled, passing

MODES: tuple[Mode, ...] = ("remote", "local")


@dataclass(frozen=True, slots=True)
class Headroom:
    """Whether nodes have room for a request."""

    # Seconds of prompt work that may wait on a node.
    backlog_s: float = 0.25
    # Seconds for a prompt token on a node that has not measured it.
    cold_token_s: float = 50e-6

    def prefill_s(self, node: NodeView, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of a prompt on the node when nothing else runs there."""
        if node.cost is None:
            return self.cold_token_s * new_tokens
        return node.cost.prefill.seconds(new_tokens, cached_tokens)

    def own_s(self, node: NodeView, query: Query) -> float:
        """Seconds of the request's uncached prompt on the node."""
        cached = query.cached_on(node) if query.cached else 0
        new, cost = query.num_tokens - cached, node.cost
        if new < 1:
            new = 1
        return self.cold_token_s * new if cost is None else cost.prefill.seconds(new, cached)

    def ttft_s(self, node: NodeView, query: Query) -> float:
        """Estimated time to first token of a request that goes to the node now."""
        return self.waiting_s(node) + self.own_s(node, query)

    def waiting_s(self, node: NodeView) -> float:
        """Seconds of prompt work that waits on the node."""
        node_row = node.own_node_row  # mostly computed already, for the choice
        if node_row is not None:
            return node_row.backlog_s
        if node.cost is None:
            return self.cold_token_s * node.prefill_tokens
        tokens = node.prefill_tokens
        return node.cost.prefill.work_s(tokens, node.prefill_pairs) if tokens else 0.0

    @staticmethod
    def takes_row(node: NodeView) -> bool:
        return node.load is None or node.rows < node.load.slots

    def is_open(self, node: NodeView, mode: str, *, has_row: bool) -> bool:
        """Whether the node is open for the leg that computes the prompt.

        has_row: some decode node could take it. If none can, prompts are computed ahead while those that wait for a
        decode node are few. Mode local needs a row of the node's own. An idle node is open whatever else is believed,
        so a wrong belief cannot hold requests for ever.
        """
        if _is_idle(node):
            return True
        load, is_local = node.load, mode == "local"
        parked, pages = (0, 0) if load is None else (load.pages_parked, load.pages_total)
        has_row = self.takes_row(node) if is_local else has_row
        return passing.has_room(
            self.waiting_s(node), self.backlog_s, is_local, has_row, load is not None, parked, pages
        )

    def goes(
        self, choice: RoutingDecision, query: Query, view: ClusterView, waited_s: float, *, may_slow: bool
    ) -> bool:
        """Whether the chosen nodes' numbers alone show that the request goes.

        It goes when `has_open` holds and, unless may_slow, `keeps_pace`. False: call those two.
        """
        if query.busy or not view.has_table:
            return False
        functions, row_of, is_local = compiled.in_use(), view.roster.row_of, choice.prefill is None
        decode = row_of[choice.decode.endpoint.incarnation]
        return functions.goes(
            functions.table(view),
            decode if choice.prefill is None else row_of[choice.prefill.endpoint.incarnation],
            decode,
            is_local,
            may_slow,
            query.num_tokens,
            query.expected_output,
            round(query.usual_tokens),
            query.itl_s,
            choice.predicted.ttft_s or 0.0,
            waited_s,
            self.backlog_s,
        )

    def has_open(self, choice: RoutingDecision, query: Query, view: ClusterView) -> bool:
        """Whether some node is open that could compute the prompt in the chosen mode. The chosen nodes are looked at
        first.
        """
        first, mode = choice.first, choice.mode
        has_row = (
            mode != "local" and _decodes(choice.decode) and self.takes_row(choice.decode)
        )  # in mode local its own rows are looked at
        if self.is_open(first, mode, has_row=has_row) and not _is_ruled_out(first, mode, query):
            return True
        has_row = has_row or self._has_row(view)
        if _is_any_nodes(choice, query, view):
            return self._any_open(mode, view, has_row=has_row)
        nodes = chain((first,), self._pool(mode, view))
        return any(self.is_open(node, mode, has_row=has_row) and _may_take(node, choice, query) for node in nodes)

    def keeps_pace(self, choice: RoutingDecision, query: Query, waited_s: float) -> bool:
        """Whether one more row keeps those of the decode node within their limit, or this request has no time left to
        wait.
        """
        node_row = choice.decode.own_node_row  # mostly computed already, for the choice
        if node_row is None or not node_row.rows:
            return True
        one, context = node_row, query.num_tokens + query.expected_output / 2
        if passing.keeps_pace(one.tpot_s, one.each_row_s, one.context_s, one.decode_fixed_s, context, query.itl_s):
            return True
        alone_s = self.prefill_s(choice.first, max(query.num_tokens, round(query.usual_tokens)))
        return passing.has_no_time(waited_s + (choice.predicted.ttft_s or 0.0), alone_s)

    def usable(self, choice: RoutingDecision, query: Query, view: ClusterView) -> frozenset[str]:
        """Incarnations that could compute the prompt in the chosen mode, open or not."""
        if _is_any_nodes(choice, query, view):
            return view.roster.all_accepting if choice.mode == "local" else view.roster.serving
        return frozenset(
            node.endpoint.incarnation for node in self._pool(choice.mode, view) if _may_take(node, choice, query)
        )

    def lacking(self, choice: RoutingDecision, query: Query, view: ClusterView, *, is_paced: bool) -> frozenset[str]:
        """Incarnations whose room a request lacks that cannot go in the chosen mode. A free one of these is its own.

        is_paced: it would slow down rows; nothing else is lacking.
        """
        if choice.mode == "local":
            return self.usable(choice, query, view)
        decoding = frozenset(node.endpoint.incarnation for node in view.nodes if _decodes(node))
        if is_paced:
            return decoding
        found = frozenset() if self._has_row(view) else decoding
        nodes = chain((choice.first,), self._pool(choice.mode, view))
        if any(self.is_open(node, choice.mode, has_row=True) and _may_take(node, choice, query) for node in nodes):
            return found
        return found | self.usable(choice, query, view)

    def full_modes(self, view: ClusterView) -> frozenset[Mode]:
        """Modes in which no request has room."""
        has_row = self._has_row(view)
        return frozenset(mode for mode in MODES if not self._any_open(mode, view, has_row=has_row))

    def soonest_s(self, view: ClusterView) -> float | None:
        """Seconds until the first of the nodes beyond their backlog has worked off the rest; None without any."""
        if view.has_table:
            functions = compiled.in_use()
            least_s = functions.least_excess_s(functions.table(view), self.backlog_s)
            if least_s >= 0.0:
                return least_s or None
        excess_s = [self.waiting_s(node) - self.backlog_s for node in view.nodes]
        return min((excess for excess in excess_s if excess > 0), default=None)

    def _any_open(self, mode: str, view: ClusterView, *, has_row: bool) -> bool:
        """Whether some node of the mode is open. The nodes' numbers say it, unless they have no costs of their own."""
        if view.has_table:
            functions, is_local = compiled.in_use(), mode == "local"
            rows = functions.rows(view.roster.accepting if is_local else view.roster.prefill)
            found = functions.any_open(functions.table(view), rows, is_local, has_row, self.backlog_s)
            if found >= 0:
                return found > 0
        return any(self.is_open(node, mode, has_row=has_row) for node in self._pool(mode, view))

    def _pool(self, mode: str, view: ClusterView) -> Iterator[NodeView]:
        return (node for node in view.nodes if node.accepts_work and (mode == "local" or node.role != "decode"))

    def _has_row(self, view: ClusterView) -> bool:
        if view.has_table:
            functions = compiled.in_use()
            return functions.any_row(functions.table(view), functions.rows(view.roster.decode))
        return any(_decodes(node) and self.takes_row(node) for node in view.nodes)


def _decodes(node: NodeView) -> bool:
    return node.role != "prefill" and node.accepts_work


def _is_idle(node: NodeView) -> bool:
    return node.load is not None and not (
        node.load.waiting or node.load.running or node.load.pages_parked or node.in_flight
    )


def _is_any_nodes(choice: RoutingDecision, query: Query, view: ClusterView) -> bool:
    """Whether every node that takes work may compute the prompt in the chosen mode."""
    is_free = not query.busy and not query.excluded and choice.suits is suits_all
    return is_free and view.roster.takes_all(query.row_tokens, query.model)


def _may_take(node: NodeView, choice: RoutingDecision, query: Query) -> bool:
    """Whether the policy could choose the node. One that failed the request is chosen only when there is no other."""
    if _is_ruled_out(node, choice.mode, query) or not choice.suits(node):
        return False
    excluded = query.excluded
    return node.endpoint.incarnation not in excluded or choice.first.endpoint.incarnation in excluded


def _is_ruled_out(node: NodeView, mode: Mode, query: Query) -> bool:
    """Whether the node cannot compute the prompt in this mode, or asked for a pause (`query.busy`)."""
    return bool(why_not(node, query, decodes=mode == "local")) or node.endpoint.incarnation in query.busy
