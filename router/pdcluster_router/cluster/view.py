"""What the router believes about the cluster at one moment, as values for policies.

It uses no sockets and no clocks. A view has a table of numbers, a row per node (`node_row.NodeRow`), which compiled
code reads, and a NodeView per node as of its last report. `ClusterView.replaced` takes over all that did not change, so
a report costs one row. `ClusterView.sent` changes some numbers of a row. Row numbers follow node names, so the order in
which nodes came changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdcluster.bootstrap.card import NATIVE, Capabilities
from pdcluster.core.messages import Endpoint, Load, Role
from pdcluster.cost.cost import NodeCost
from pdcluster_router.cluster.pacing import COLD, completed, typical_cost
from pdcluster_router.core.node_row import COMPUTES, DECODES, SERVES, NodeRow, derive
from pdcluster_router.policy.predicted import compiled

Column = NDArray[np.float64]
Bits = NDArray[np.int64]
# Media that a node's bits can name. Further ones carry no KV.
MOST_MEDIA = 62


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
    # Prompt tokens of batch requests, which are not among the others; and their part of the rows.
    batch_tokens: int = 0
    batch_rows: int = 0


NOTHING_PENDING = InFlightWork()


class NodeView(msgspec.Struct, frozen=True):
    """One reachable node."""

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
    # It has no weights and no pool. Then its reports say that it drains, too.
    is_sleeping: bool = False
    pending: InFlightWork = NOTHING_PENDING
    # Fitted by the node to its own steps; None before its first report of it.
    cost: NodeCost | None = None
    # Bytes/s to other nodes by name, as far as measured.
    bandwidth: Mapping[str, float] = {}
    # 0 where unknown.
    kv_bytes_per_token: int = 0
    # Digests of the models that it serves (NodeCard.model_digest).
    models: frozenset[str] = frozenset()
    # What its engine can do.
    capabilities: Capabilities = NATIVE

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

    def can_give(self, other: NodeView) -> bool:
        """Whether the other node can fetch cached KV from this one."""
        return self.capabilities.pulls and other.capabilities.pulls and self.can_exchange(other)

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

    @property
    def num_requests(self) -> int:
        """Requests on the node: those reported and in flight, or this router's own count where that is higher."""
        reported = self.load.waiting + self.load.running if self.load is not None else 0
        return max(self.in_flight, reported + self.pending.requests)

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

    @property
    def decode_rows(self) -> int:
        """Rows that decode or will."""
        return self.pending.rows + (self.load.rows if self.load is not None else 0)

    @property
    def context_tokens(self) -> int:
        """Tokens of KV that the decode rows attend to."""
        return self.pending.context_tokens + (self.load.context_tokens if self.load is not None else 0)

    @property
    def num_prompts(self) -> int:
        """Requests whose prompt waits or is being computed."""
        return self.pending.prompts + (self.load.waiting if self.load is not None else 0) + (self.prefill_tokens > 0)

    def row(self, cost: NodeCost, media: int = 0) -> NodeRow:
        """The node as numbers, under the given costs."""
        prefill, decode, load = cost.prefill, cost.decode, self.load
        numbers: list[Any] = [
            float(self.role != "decode"),
            float(self.role != "prefill"),
            float(self.max_len if self.accepts_work else -1),
            float(self.block_tokens),
            float(self.kv_bytes_per_token),
            float(self.capabilities.pulls),
            float(self.capabilities.first_token == "decode"),
            media,
            prefill.fixed_s,
            prefill.token_s,
            prefill.pair_s,
            float(prefill.chunk_tokens or inf),
            decode.fixed_s,
            decode.row_s,
            decode.context_s,
            prefill.error.spread,
            prefill.error.doubt,
            *(NOT_REPORTED if load is None else _reported(load)),
            float(self.in_flight),
            *map(float, self.pending),
        ]
        node = NodeRow(*numbers)
        derive(node)
        return node


NOT_REPORTED = (0.0,) * 15


def _reported(load: Load) -> tuple[float, ...]:
    """The reported fields of a NodeRow."""
    numbers = (
        1,
        load.waiting,
        load.waiting + load.running,
        load.waiting_tokens,
        load.waiting_pairs,
        load.rows,
        load.context_tokens,
        load.itl_s,
        load.slots,
        load.slots_used,
        load.pages_free + load.pages_cached,
        load.pages_parked,
        load.pages_total,
        load.batch_tokens,
        load.batch_rows,
    )
    return tuple(map(float, numbers))


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


class Roster:
    """The nodes of a view, and the legs that each may take. It stays the same while nodes only report loads.

    Later views share it until that changes.
    """

    def __init__(self, nodes: Sequence[NodeView], former_names: tuple[str, ...] = ()) -> None:
        names = tuple(node.endpoint.node for node in nodes)
        # Records keep them, so equal ones are one object.
        self.names = former_names if former_names == names else names
        # Rows by incarnation.
        self.row_of = {node.incarnation: row for row, node in enumerate(nodes)}
        self.shortest_max_len = min((node.max_len for node in nodes), default=0)
        # Models that every node serves.
        self.models_of_all = frozenset.intersection(*(node.models for node in nodes)) if nodes else frozenset()
        # Of each node the longest request and its models.
        self._lengths = [(node.max_len, node.models) for node in nodes]
        # The shortest of a model's nodes, of models that were asked for; 0 where no node serves it.
        self._shortest_of: dict[str, int] = {}
        # Rows of the nodes that take work.
        self.accepting = frozenset(row for row, node in enumerate(nodes) if node.accepts_work)
        # Of these, the ones that give cached KV to others.
        self.givers = frozenset(row for row in self.accepting if nodes[row].capabilities.pulls)
        # Whether some node leaves the first token to the decode node.
        self.leaves_first = any(node.capabilities.first_token == "decode" for node in nodes)
        # The bits of each node for a request that may go anywhere.
        self.legs: Bits = np.array([_legs_of(node) for node in nodes], np.int64)
        # A bit for each transfer medium of a node.
        backends = dict.fromkeys(name for node in nodes for name in node.backends)
        bits = {name: 1 << number for number, name in enumerate(backends) if number < MOST_MEDIA}
        self.media = [sum({bits.get(name, 0) for name in node.backends}) for node in nodes]
        self.rows_of_name: dict[str, tuple[int, ...]] = {}
        for row, name in enumerate(self.names):
            self.rows_of_name[name] = (*self.rows_of_name.get(name, ()), row)
        # A zero for each node. Read-only.
        self.zeros: Column = np.zeros(len(nodes))
        # Filled by `policy.eligibility`, which derives it from this roster.
        self.plans: dict[object, Any] = {}
        self._paths: dict[int, tuple[Mapping[str, float], Column]] = {}

    def takes_all(self, num_tokens: int, model: str) -> bool:
        """Whether every node serves the model with so many tokens. The rule of nearly all requests."""
        return num_tokens <= self.shortest_max_len and (not model or model in self.models_of_all)

    def takes_model(self, num_tokens: int, model: str) -> bool:
        """Whether every node that serves the model does so with so many tokens, and some node serves it."""
        shortest = self._shortest_of.get(model)
        if shortest is None:
            shortest = min((length for length, models in self._lengths if model in models), default=0)
            self._shortest_of[model] = shortest
        return num_tokens <= shortest

    def is_partner(self, first: int, row: int) -> bool:
        """Whether KV can move between two nodes."""
        return first != row and self.media[first] & self.media[row] != 0

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
            and former.capabilities == now.capabilities
        )
        if former.load is now.load and former.is_cordoned is now.is_cordoned:
            return is_alike  # only work was sent to it
        return is_alike and former.accepts_work == now.accepts_work


def _legs_of(node: NodeView) -> int:
    if not node.accepts_work:
        return 0
    return SERVES | (COMPUTES if node.role != "decode" else 0) | (DECODES if node.role != "prefill" else 0)


# This router's requests on a node, and the work that the node's last report does not count.
OnNode = tuple[int, InFlightWork]
# Counts by incarnation.
Counts = Callable[[str], OnNode]


class ClusterView:
    """All reachable nodes that reported, ordered by name.

    A view does not change for its readers: only `note_sent` writes it, for an owner whom nobody else reads.

    reported: the nodes as of their last reports. Their in_flight and pending may be old.
    table: a NodeRow per node.
    typical: step costs for nodes that ran too few steps. None: derived from the nodes, while any ran enough.
    """

    def __init__(self, nodes: Iterable[NodeView], typical: NodeCost | None = None) -> None:
        reported = sorted(nodes, key=_by_name)
        self._start(reported, {}, Roster(reported), typical or _typical_of(reported), None)

    def _start(
        self,
        reported: list[NodeView],
        sent: dict[int, OnNode],
        roster: Roster,
        typical: NodeCost | None,
        table: NDArray[Any] | None,
    ) -> ClusterView:
        self.reported, self._sent, self.roster, self.typical = reported, sent, roster, typical
        if table is None:
            rows = [self._numbers(self.node(row), roster.media[row]) for row in range(len(reported))]
            table = np.array(rows, NodeRow.dtype)
        self.table = table
        # Made when somebody asks.
        self._nodes: tuple[NodeView, ...] | None = None
        return self

    def replaced(self, changed: Mapping[str, NodeView]) -> ClusterView:
        """The view with some nodes replaced, by incarnation. Everything else is kept."""
        reported, sent, table, is_same = self.reported.copy(), self._sent.copy(), _copied(self.table), True
        for incarnation, node in changed.items():
            row = self.roster.row_of[incarnation]
            is_same = is_same and self.roster.holds_for(reported[row], node)
            reported[row] = node
            sent.pop(row, None)
            table[row] = self._numbers(node, self.roster.media[row])
        view = ClusterView.__new__(ClusterView)
        if is_same:
            return view._start(reported, sent, self.roster, self.typical, table)
        return view._start(reported, sent, Roster(reported, self.roster.names), self.typical, None)

    def priced(self, typical: NodeCost | None) -> ClusterView:
        """The view with other typical costs."""
        return ClusterView.__new__(ClusterView)._start(self.reported, self._sent.copy(), self.roster, typical, None)

    def sent(self, changed: Iterable[str], counts: Counts) -> ClusterView:
        """The view after work on its way to some nodes changed: this router sent some, or some ended."""
        view = ClusterView.__new__(ClusterView)._start(
            self.reported, self._sent.copy(), self.roster, self.typical, _copied(self.table)
        )
        view.note_sent(changed, counts)
        return view

    def note_sent(self, changed: Iterable[str], counts: Counts) -> None:
        """As `sent`, but in place. Only for a view that no other caller has."""
        note_sent, row_of, table = compiled.active.note_sent, self.roster.row_of, self.table
        self._nodes = None
        for incarnation in changed:
            row = row_of.get(incarnation)
            if row is not None:  # else the leg is on a node that left, or whose link is down
                in_flight, pending = self._sent[row] = counts(incarnation)
                note_sent(table[row : row + 1], in_flight, tuple(pending))

    @property
    def size(self) -> int:
        return len(self.reported)

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        if self._nodes is None:
            self._nodes = tuple([self.node(row) for row in range(len(self.reported))])
        return self._nodes

    def node(self, row: int) -> NodeView:
        """The node with what was sent to it since."""
        sent = self._sent.get(row)
        return self.reported[row] if sent is None else self.reported[row].sent(*sent)

    def paths(self, row: int) -> Column:
        """Bytes/s from the node of that row to each node; zeros for row -1. Read-only."""
        return self.roster.zeros if row < 0 else self.roster.paths(row, self.reported[row].bandwidth)

    def row(self, row: int) -> NodeRow:
        """A copy of a row of the table."""
        return NodeRow(*self.table[row].tolist())

    def row_of(self, node: NodeView) -> NodeRow:
        """The numbers of a node that may have left the view."""
        row = self.roster.row_of.get(node.incarnation)
        return node.row(self._cost_of(node)) if row is None else self.row(row)

    def _numbers(self, node: NodeView, media: int) -> tuple[float, ...]:
        return node.row(self._cost_of(node), media).numbers()

    def _cost_of(self, node: NodeView) -> NodeCost:
        return completed(node.cost, self.typical) or COLD

    def typical_now(self) -> NodeCost | None:
        """Typical costs by the last reports."""
        return _typical_of(self.reported)

    def find(self, incarnation: str) -> NodeView | None:
        row = self.roster.row_of.get(incarnation)
        return None if row is None else self.node(row)


def _typical_of(nodes: Iterable[NodeView]) -> NodeCost | None:
    return typical_cost([node.cost for node in nodes if node.cost is not None])


def _copied(table: NDArray[Any]) -> NDArray[Any]:
    """A copy, by words: numpy copies records field by field."""
    return table.view(np.uint64).copy().view(NodeRow.dtype)


def _by_name(node: NodeView) -> tuple[str, str]:
    return node.endpoint.node, node.endpoint.incarnation
