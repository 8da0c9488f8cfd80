"""What the router believes about the cluster at one moment, as immutable values for policies.

It uses no sockets and no clocks. `ClusterView.replaced` takes over all that did not change, so a report costs the row
of one node. `ClusterView.sent` changes only some numbers of that row. It makes no NodeView: `ClusterView.node` makes it
on the first read. Row numbers follow node names, so the order in which nodes came changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar, overload

import msgspec
import numpy as np

from pdcluster.core.messages import Endpoint, Load, Role
from pdcluster.cost.cost import NodeCost
from pdcluster_router.cluster.pacing import NodePacing, NodeWork, completed, is_known, pace, typical_cost
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.predicted.cost_model import NUM_STATION
from pdcluster_router.policy.predicted.node_rows import Column, NodeRow, Pool, Table
from pdcluster_router.policy.predicted.node_state import IS_OWN, NUM_COLUMNS, settle

T = TypeVar("T")


class lazy_property(Generic[T]):
    """A property that is computed on first read and stored in the object. For objects of one thread.

    `functools.cached_property` takes a lock, which costs more than the small sums of a view.
    """

    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work = work
        self._name = work.__name__
        self.__doc__ = work.__doc__

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> lazy_property[T]: ...

    @overload
    def __get__(self, owner: object, kind: type[Any]) -> T: ...

    def __get__(self, owner: object | None, kind: type[Any]) -> T | lazy_property[T]:
        """Compute and store the value. Without `__set__` here, Python reads the stored value from then on."""
        if owner is None:
            return self
        value = owner.__dict__[self._name] = self._work(owner)
        return value


class InFlightWork(NamedTuple):
    """Work that this router sent and the node's last report does not count."""

    requests: int = 0
    # Prompt work that the node has not cached: tokens, and their (query, key) pairs.
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    rows: int = 0
    # Tokens of KV of the rows, once they decode.
    context_tokens: int = 0
    # Requests whose prompt the node is to compute.
    prompts: int = 0


NOTHING_PENDING = InFlightWork()


class NodeView(msgspec.Struct, frozen=True, dict=True):
    """One reachable node.

    Derived values are computed once and stored. So keep a view while nothing on its node changes.
    """

    endpoint: Endpoint
    role: Role
    # This router's requests on the node.
    in_flight: int
    # The last report; None before the first.
    load: Load | None
    block_tokens: int
    max_len: int
    # Its transfer media. A node without any serves in mode local only.
    backends: tuple[str, ...] = ()
    is_cordoned: bool = False
    pending: InFlightWork = NOTHING_PENDING
    # Fitted by the node to its own steps; None before its first report of it.
    cost: NodeCost | None = None
    # Bytes/s to other nodes by name, as far as measured.
    bandwidth: Mapping[str, float] = {}
    # 0 where unknown.
    kv_bytes_per_token: int = 0
    # Digests of the models that it serves (NodeCard.model_digest).
    models: frozenset[str] = frozenset()

    def sent(self, in_flight: int, pending: InFlightWork) -> NodeView:
        """The same node and report with other work in flight."""
        return msgspec.structs.replace(self, in_flight=in_flight, pending=pending)

    @property
    def name(self) -> str:
        return self.endpoint.node

    @property
    def incarnation(self) -> str:
        return self.endpoint.incarnation

    def can_exchange(self, other: NodeView) -> bool:
        """Whether KV can move between the two nodes."""
        return not set(self.backends).isdisjoint(other.backends)

    def serves(self, model: str) -> bool:
        """model: a digest; "" for any."""
        return not model or model in self.models

    @property
    def accepts_work(self) -> bool:
        return not self.is_cordoned and not (self.load is not None and (self.load.draining or self.load.stuck))

    @property
    def has_slack(self) -> bool:
        """Whether a reservation may wait here while the prompt is computed.

        It may with fewer rows than slots and a quarter of the pages free.
        """
        load = self.load
        return (
            load is not None
            and load.running < load.slots
            and 4 * (load.pages_free + load.pages_cached) >= load.pages_total
        )

    @lazy_property
    def num_requests(self) -> int:
        """Requests on the node: those reported and in flight, or this router's own count where that is higher."""
        reported = self.load.waiting + self.load.running if self.load is not None else 0
        return max(self.in_flight, reported + self.pending.requests)

    @lazy_property
    def work(self) -> NodeWork:
        """The reported work plus the work sent since."""
        load, pending = self.load, self.pending
        if load is None:
            return NodeWork(pending.prefill_tokens, pending.prefill_pairs, pending.rows, pending.context_tokens)
        return NodeWork(
            load.waiting_tokens + pending.prefill_tokens,
            load.waiting_pairs + pending.prefill_pairs,
            load.rows + pending.rows,
            load.context_tokens + pending.context_tokens,
            load.itl_s,
        )

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        return self.pending.prefill_tokens + (self.load.waiting_tokens if self.load is not None else 0)

    @property
    def prefill_pairs(self) -> int:
        return self.pending.prefill_pairs + (self.load.waiting_pairs if self.load is not None else 0)

    @property
    def rows(self) -> int:
        """Rows in use, with reservations, remote prefills and work in flight."""
        return self.pending.rows + (self.load.slots_used if self.load is not None else 0)

    @lazy_property
    def pace(self) -> NodePacing | None:
        """The node's pacing; None while its own cost model is unknown."""
        cost = completed(self.cost, None)
        return pace(cost, self.work) if cost is not None else None

    @lazy_property
    def num_prompts(self) -> int:
        """Requests whose prompt waits or is being computed."""
        return self.pending.prompts + (self.load.waiting if self.load is not None else 0) + (self.prefill_tokens > 0)

    @property
    def has_own_cost(self) -> bool:
        """Whether its cost model is fitted to enough of its own steps (`pacing.is_known`)."""
        return self.cost is not None and is_known(self.cost)

    @lazy_property
    def own_node_row(self) -> NodeRow | None:
        """`node_row` by the node's own costs; None while they are unknown."""
        cost = self.cost
        return self.node_row(cost) if cost is not None and is_known(cost) else None

    def node_row(self, cost: NodeCost) -> NodeRow:
        """The node's row under the given costs."""
        numbers = self.numbers(cost)
        settle(numbers)
        return NodeRow(*numbers[:NUM_STATION])

    def numbers(self, cost: NodeCost) -> list[float]:
        """A table row with 0 for each derived number. `policy.predicted.node_state.settle` fills those in."""
        load, prefill, decode, pending = self.load, cost.prefill, cost.decode, self.pending
        told = (0.0,) * 13
        tight = 0.0
        if load is not None:
            left, total = load.pages_free + load.pages_cached, load.pages_total
            if left < total // 4:
                tight = 1.0 / max(total - left, 1)
            prompts = load.waiting, load.waiting + load.running, load.waiting_tokens, load.waiting_pairs
            told = (
                1.0,
                *prompts,
                load.rows,
                load.context_tokens,
                load.itl_s,
                load.slots,
                load.slots_used,
                left,
                load.pages_parked,
                total,
            )
        follows = 0.0
        columns = (
            self.role != "decode",
            *(follows,) * 5,
            *(prefill.fixed_s, prefill.token_s, prefill.pair_s, prefill.chunk_tokens or inf),
            *(decode.fixed_s, decode.row_s, decode.context_s),
            *(follows,) * 7,
            *(tight, follows, self.block_tokens, self.kv_bytes_per_token, prefill.error.doubt),
            *told,
            *(self.has_own_cost, prefill.error.spread, self.max_len if self.accepts_work else -1),
            *(self.in_flight, *pending),
        )
        return [*map(float, columns)]


class PathRates(Mapping[str, float]):
    """A node's bandwidth to all nodes of a view at once.

    names: of the nodes, in order.
    column: bytes/s to each. Read-only.
    """

    def __init__(self, names: tuple[str, ...], rows: Mapping[str, int], column: Column) -> None:
        self.names, self._rows, self.column = names, rows, column

    def __getitem__(self, name: str) -> float:
        return float(self.column[self._rows[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Groups:
    """Nodes grouped by transfer media.

    Two nodes can exchange KV when their groups share a medium.
    """

    def __init__(self, media: Sequence[frozenset[str]]) -> None:
        kinds = {each: number for number, each in enumerate(dict.fromkeys(media))}
        # The group of each node.
        self.of = np.array([kinds[each] for each in media], np.int64)
        # 1.0 where two groups share a medium.
        self.exchange = np.array([[float(not one.isdisjoint(other)) for other in kinds] for one in kinds]).reshape(
            len(kinds), len(kinds)
        )


class Roster:
    """The nodes of a view, and the legs that each may take. It stays the same while nodes only report loads.

    Later views share it until that changes.
    """

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        size = len(nodes)
        self.names = tuple(node.endpoint.node for node in nodes)
        # Rows by incarnation.
        self.row_of = {node.incarnation: row for row, node in enumerate(nodes)}
        # Two boots of one node are in the view.
        self.has_namesakes = len(set(self.names)) < len(self.names)
        self.shortest_max_len = min((node.max_len for node in nodes), default=0)
        # Models that every node serves.
        self.models_of_all = frozenset.intersection(*(node.models for node in nodes)) if nodes else frozenset()
        accepting = [(row, node.role) for row, node in enumerate(nodes) if node.accepts_work]
        self.accepting = Pool([row for row, _ in accepting], size)
        # Nodes that may take such a leg.
        self.prefill = Pool([row for row, role in accepting if role != "decode"], size)
        self.decode = Pool([row for row, role in accepting if role != "prefill"], size)
        # Nodes that compute no prompts for others.
        self.decode_only = Pool([row for row, role in accepting if role == "decode"], size)
        # Both legs have nodes, and some node takes only one of them.
        self.is_split = bool(self.prefill and self.decode) and any(role != "mixed" for _, role in accepting)
        self.rows_of_name: dict[str, tuple[int, ...]] = {}
        for row, name in enumerate(self.names):
            self.rows_of_name[name] = (*self.rows_of_name.get(name, ()), row)
        self._media = tuple(frozenset(node.backends) for node in nodes)
        # Incarnations that compute prompts in mode remote, and in mode local.
        self.serving = frozenset(nodes[row].incarnation for row in self.prefill.rows)
        self.all_accepting = frozenset(nodes[row].incarnation for row in self.accepting.rows)
        # Filled by `policy.scales`, which derives it from this roster.
        self.plans: dict[object, Any] = {}
        self._paths: dict[int, tuple[Mapping[str, float], Column]] = {}

    def takes_all(self, num_tokens: int, model: str) -> bool:
        """Whether every node serves the model with so many tokens. The rule of nearly all requests."""
        return num_tokens <= self.shortest_max_len and (not model or model in self.models_of_all)

    def partners(self, pool: Pool, node: NodeView) -> Pool:
        """Nodes of the pool that can receive KV from `node`, itself included if it is in the pool."""
        media = frozenset(node.backends)
        return pool.part(media, lambda row: not media.isdisjoint(self._media[row]))

    @lazy_property
    def groups(self) -> Groups:
        """The nodes' media groups."""
        return Groups(self._media)

    @lazy_property
    def nothing(self) -> Column:
        """A zero for each node. Read-only."""
        return np.zeros(len(self.names))

    def paths(self, row: int, bandwidth: Mapping[str, float]) -> Column:
        """Bytes/s to each node from the node of that row, which reports `bandwidth`; 0 where unknown. Read-only.

        row: -1 for a node that left.
        """
        kept = self._paths.get(row)
        if kept is not None and kept[0] is bandwidth:
            return kept[1]
        if isinstance(bandwidth, PathRates) and bandwidth.names == self.names:
            found = bandwidth.column
        else:
            found = np.zeros(len(self.names))
            for name, bytes_s in bandwidth.items():
                for other in self.rows_of_name.get(name, ()):
                    found[other] = bytes_s
        if row >= 0:
            self._paths[row] = bandwidth, found
        return found

    @staticmethod
    def holds_for(former: NodeView, now: NodeView) -> bool:
        """Whether the roster stays valid when a node changes from `former` to `now`."""
        is_alike = (
            former.role == now.role
            and former.max_len == now.max_len
            and former.backends == now.backends
            and former.models == now.models
        )
        if former.load is now.load and former.is_cordoned is now.is_cordoned:
            return is_alike  # only work was sent to it
        return is_alike and former.accepts_work == now.accepts_work


# This router's requests on a node, and the work that the node's last report does not count.
OnNode = tuple[int, InFlightWork]
# Counts by incarnation.
Counts = Callable[[str], OnNode]


# What a view derives once from its nodes.
OF_NODES = ("nodes", "accepting", "rows")


class ClusterView:
    """All reachable nodes that reported, ordered by name. Immutable for its readers.

    So the order of reports changes nothing. A node's row is its index.

    typical: step costs for nodes that ran too few steps. None: derived from the nodes, or, with is_told, unknown.
    """

    def __init__(self, nodes: Iterable[NodeView], typical: NodeCost | None = None, *, is_told: bool = False) -> None:
        self._reported: list[NodeView] = sorted(nodes, key=_by_name)
        # An OnNode entry: since the node's entry in `_reported`, only its work in flight changed.
        self._nodes: list[NodeView | OnNode] = list(self._reported)
        self._table: Table | None = None
        self.typical = typical
        self._is_told = is_told

    def replaced(
        self, changed: Mapping[str, NodeView], typical: NodeCost | None = None, *, is_told: bool = False
    ) -> ClusterView:
        """The view with some nodes replaced, by incarnation. Derived values of the others are kept."""
        keeps_table = self._table is not None and typical is not None and typical is self.typical
        nodes: Sequence[NodeView | OnNode] = self._nodes if keeps_table else self.nodes
        view, roster, is_same = self._like(nodes, typical, is_told=is_told), self.roster, True
        view._reported = list(self._reported if keeps_table else self.nodes)
        if typical is not None:
            view.__dict__["typical_cost"] = typical
        if self._table is not None and keeps_table:
            view._table = self._table.copy()
        for incarnation, node in changed.items():
            row = roster.row_of[incarnation]
            is_same = is_same and roster.holds_for(self._reported[row], node)
            view._reported[row] = view._nodes[row] = node
            if view._table is not None:
                view._table[row] = view._numbers(node)
        if is_same:
            view.__dict__["roster"] = roster
        return view

    def sent(self, changed: Iterable[str], counts: Counts) -> ClusterView:
        """The view after work on its way to some nodes changed: this router sent some, or some ended."""
        if self._table is None:
            known = {name: row for name in changed if (row := self.roster.row_of.get(name)) is not None}
            return self.replaced(
                {name: self.node(row).sent(*counts(name)) for name, row in known.items()},
                self.typical,
                is_told=self._is_told,
            )
        view, table, nodes, roster = (
            ClusterView.__new__(ClusterView),
            self._table.copy(),
            self._nodes.copy(),
            self.roster,
        )
        view.__dict__.update(
            _nodes=nodes,
            _reported=self._reported,
            _table=table,
            typical=self.typical,
            _is_told=self._is_told,
            roster=roster,
            typical_cost=self.typical_cost,
        )
        view.note_sent(changed, counts)
        return view

    def note_sent(self, changed: Iterable[str], counts: Counts) -> None:
        """As `sent`, but in place. Only for a view with a table that no other caller has."""
        note_sent, row_of, nodes, table = compiled.in_use().note_sent, self.roster.row_of, self._nodes, self._table
        own = self.__dict__
        if not own.keys().isdisjoint(OF_NODES):  # a roster that was not there asked for them
            for name in OF_NODES:
                own.pop(name, None)
        for incarnation in changed:
            row = row_of.get(incarnation)
            if row is not None:  # else the leg is on a node that left, or whose link is down
                in_flight, pending = nodes[row] = counts(incarnation)
                note_sent(table, row, in_flight, *pending)

    @staticmethod
    def _like(nodes: Sequence[NodeView | OnNode], typical: NodeCost | None, *, is_told: bool) -> ClusterView:
        view = ClusterView.__new__(ClusterView)
        view._nodes, view._table, view.typical, view._is_told = list(nodes), None, typical, is_told
        return view

    @property
    def size(self) -> int:
        return len(self._nodes)

    @lazy_property
    def nodes(self) -> tuple[NodeView, ...]:
        return tuple([self.node(row) for row in range(len(self._nodes))])

    def reported(self, row: int) -> NodeView:
        """The node as of its last report. Its in_flight and pending may be old: read only what reports change."""
        return self._reported[row]

    def node(self, row: int) -> NodeView:
        found = self._nodes[row]
        if isinstance(found, tuple):
            found = self._nodes[row] = self._sent_node(row, *found)
        return found

    def _sent_node(self, row: int, in_flight: int, pending: InFlightWork) -> NodeView:
        """The NodeView of a node that work was sent to since it reported."""
        assert self._table is not None  # only a view with a table knows more than the reports
        numbers, node = self._table[row].tolist(), self._reported[row].sent(in_flight, pending)
        if numbers[IS_OWN]:
            node.__dict__["own_node_row"] = NodeRow(*numbers[:NUM_STATION])
        return node

    @lazy_property
    def roster(self) -> Roster:
        return Roster(self.nodes)

    @property
    def has_table(self) -> bool:
        """Whether this view, or one that it was made from, has its table."""
        return self._table is not None

    @property
    def table(self) -> Table:
        """A row per node, in the columns of `policy.predicted.cost_model` and `node_state`. Read-only.

        Only for a view with typical costs, in which every node has a pace.
        """
        if self._table is None:
            rows = [self._numbers(node) for node in self.nodes]
            self._table = np.array(rows, np.float64).reshape(len(rows), NUM_COLUMNS)
        return self._table

    @lazy_property
    def rows(self) -> list[list[float]]:
        """The table as lists, for policy code that is not compiled."""
        rows: list[list[float]] = self.table.tolist()
        return rows

    def node_row_of(self, node: NodeView) -> NodeRow:
        """The row of a node that may have left the view."""
        row = self.roster.row_of.get(node.incarnation)
        return node.node_row(self._cost_of(node)) if row is None else self.node_row(row)

    def node_row(self, row: int) -> NodeRow:
        return NodeRow(*self.table[row, :NUM_STATION].tolist())

    def _numbers(self, node: NodeView) -> list[float]:
        numbers = node.numbers(self._cost_of(node))
        settle(numbers)
        return numbers

    def _cost_of(self, node: NodeView) -> NodeCost:
        cost = completed(node.cost, self.typical_cost)
        assert cost is not None  # only called where typical costs are known
        return cost

    @lazy_property
    def accepting(self) -> tuple[NodeView, ...]:
        """Nodes that take work."""
        return tuple([self.node(row) for row in self.roster.accepting.rows])

    @lazy_property
    def typical_cost(self) -> NodeCost | None:
        """Costs for nodes that have not run a kind of step; None while unknown."""
        return self.typical if self.typical is not None or self._is_told else self.typical_now()

    def typical_now(self) -> NodeCost | None:
        """Typical costs by the last reports."""
        return typical_cost([node.cost for node in self._reported if node.cost is not None])

    def find(self, incarnation: str) -> NodeView | None:
        row = self.roster.row_of.get(incarnation)
        return None if row is None else self.node(row)

    def pace_of(self, node: NodeView) -> NodePacing | None:
        """A node's pacing; None while some step cost is unknown everywhere."""
        if node.pace is not None:
            return node.pace
        cost = completed(node.cost, self.typical_cost)
        return pace(cost, node.work) if cost is not None else None


def _by_name(node: NodeView) -> tuple[str, str]:
    return node.endpoint.node, node.endpoint.incarnation
