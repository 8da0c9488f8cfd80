"""What the router believes about the cluster at one moment, as immutable values for the policy. No sockets, no clocks.

A view is mostly the view before it: `replaced` keeps all that did not change, so that a report costs its own node's row. Nodes have row numbers, by
name, so that the order in which they came changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import msgspec
import numpy as np

from pdcluster.cost import NodeCost
from pdcluster.messages import Endpoint, Load, Role
from pdcluster_router.once import once
from pdcluster_router.pace import Pace, Work, completed, is_known, pace, typical_cost
from pdcluster_router.stations import Column, Pool, Station, Stations


class Pending(msgspec.Struct, frozen=True, gc=False):
    """What this router sent that the node's last report does not count yet; added to the report. prefill_tokens and prefill_pairs: prompt work that
    is not cached there; context_tokens: KV of the rows, when they decode; prompts: requests whose prompt is to be computed there."""

    requests: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    rows: int = 0
    context_tokens: int = 0
    prompts: int = 0


NOTHING_PENDING = Pending()


class NodeView(msgspec.Struct, frozen=True, dict=True):
    """One node that can be reached. What follows from the fields is computed once, so a view is best kept while nothing on the node changed.

    in_flight: requests this router has on the node; load: the node's last report, None before the first one.
    backends: transfer media it has; a node without any serves in mode local only.
    cost: fitted by the node to its own steps, None before its first report of it. bandwidth: bytes/s to other nodes, by name, as far as it was
    measured. kv_bytes_per_token: 0 where unknown.
    """

    endpoint: Endpoint
    role: Role
    in_flight: int
    load: Load | None
    block_tokens: int
    max_len: int
    backends: tuple[str, ...] = ()
    is_cordoned: bool = False
    pending: Pending = NOTHING_PENDING
    cost: NodeCost | None = None
    bandwidth: Mapping[str, float] = {}
    kv_bytes_per_token: int = 0

    def sent(self, in_flight: int, pending: Pending) -> NodeView:
        """The same node and report, after this router sent it something or heard of the end of it. Written out, since it is done for every leg of
        every request."""
        return NodeView(
            self.endpoint,
            self.role,
            in_flight,
            self.load,
            self.block_tokens,
            self.max_len,
            self.backends,
            self.is_cordoned,
            pending,
            self.cost,
            self.bandwidth,
            self.kv_bytes_per_token,
        )

    @property
    def name(self) -> str:
        return self.endpoint.node

    @property
    def incarnation(self) -> str:
        return self.endpoint.incarnation

    def can_exchange(self, other: NodeView) -> bool:
        """Whether KV can move between the two."""
        return not set(self.backends).isdisjoint(other.backends)

    @property
    def accepts_work(self) -> bool:
        return not self.is_cordoned and not (self.load is not None and self.load.draining)

    @property
    def has_slack(self) -> bool:
        """Whether a reservation may sit on the node while the prompt is still computed: fewer rows than slots, a quarter of the pages left."""
        load = self.load
        return load is not None and load.running < load.slots and 4 * (load.pages_free + load.pages_cached) >= load.pages_total

    @once
    def num_requests(self) -> int:
        """Requests on the node: what it reported and what is on its way, or this router's own count where that is more."""
        reported = self.load.waiting + self.load.running if self.load is not None else 0
        return max(self.in_flight, reported + self.pending.requests)

    @once
    def work(self) -> Work:
        """What the node reported, and what this router sent since."""
        load, pending = self.load, self.pending
        if load is None:
            return Work(pending.prefill_tokens, pending.prefill_pairs, pending.rows, pending.context_tokens)
        return Work(
            load.waiting_tokens + pending.prefill_tokens,
            load.waiting_pairs + pending.prefill_pairs,
            load.rows + pending.rows,
            load.context_tokens + pending.context_tokens,
            load.itl_s,
        )

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that wait for being computed."""
        return self.pending.prefill_tokens + (self.load.waiting_tokens if self.load is not None else 0)

    @property
    def prefill_pairs(self) -> int:
        return self.pending.prefill_pairs + (self.load.waiting_pairs if self.load is not None else 0)

    @property
    def rows(self) -> int:
        """Rows that are taken, by whatever: reservations, remote prefills and what is on its way, too."""
        return self.pending.rows + (self.load.slots_used if self.load is not None else 0)

    @once
    def pace(self) -> Pace | None:
        """None while the node's own cost model is not known."""
        cost = completed(self.cost, None)
        return pace(cost, self.work) if cost is not None else None

    @once
    def num_prompts(self) -> int:
        """Requests that wait for their prompt to be computed, or whose prompt is being computed."""
        return self.pending.prompts + (self.load.waiting if self.load is not None else 0) + (self.prefill_tokens > 0)

    @once
    def own_station(self) -> Station | None:
        """None while the node's own cost model is not known."""
        cost = self.cost
        return self.station(cost) if cost is not None and is_known(cost) else None

    def station(self, cost: NodeCost) -> Station:
        """The node in numbers, when steps cost that: its `pace` and its room, written out, since it is done for every leg of every request."""
        load, pending, prefill, decode = self.load, self.pending, cost.prefill, cost.decode
        in_flight, prompts, requests = self.in_flight, pending.prompts, pending.requests
        tokens, pairs, rows, context_tokens = pending.prefill_tokens, pending.prefill_pairs, pending.rows, pending.context_tokens
        itl_s = missing_rows = tight = spare_pages = 0.0
        if load is not None:
            left, total = load.pages_free + load.pages_cached, load.pages_total
            missing = load.slots_used + rows - load.slots + 1
            if missing > 0 and load.slots:
                missing_rows = missing / load.slots
            if left < total // 4:
                tight = 1.0 / max(total - left, 1)
            spare_pages = left - context_tokens / self.block_tokens
            tokens, pairs, itl_s = tokens + load.waiting_tokens, pairs + load.waiting_pairs, load.itl_s
            rows, context_tokens = rows + load.rows, context_tokens + load.context_tokens
            prompts, requests = prompts + load.waiting, requests + load.waiting + load.running
        chunk, fixed_s, token_s, pair_s = prefill.chunk_tokens, prefill.fixed_s, prefill.token_s, prefill.pair_s
        depth = pairs / tokens if tokens > 0 else context_tokens / rows / 2 if rows > 0 else 0.0
        if depth < chunk / 2:
            depth = chunk / 2
        added_s = decode.row_s * rows + decode.context_s * context_tokens
        backlog_s = step_s = 0.0
        if chunk > 0:
            step_s = fixed_s + token_s * chunk + pair_s * (chunk * depth)
        if tokens > 0:
            backlog_s = fixed_s * (tokens / chunk if tokens > chunk > 0 else 1.0) + token_s * tokens + pair_s * pairs
        stretch = 1.0 + added_s / step_s if step_s > 0 else 1.0
        tpot_s = decode.fixed_s + added_s
        return Station(
            0.0 if self.role == "decode" else 1.0,
            float(prompts + (tokens > 0)),
            float(in_flight if in_flight > requests else requests),
            backlog_s * stretch,
            backlog_s,
            stretch,
            fixed_s,
            token_s,
            pair_s,
            chunk or inf,
            decode.fixed_s,
            decode.row_s,
            decode.context_s,
            rows,
            context_tokens,
            added_s,
            tpot_s,
            itl_s if rows and itl_s > tpot_s else tpot_s,
            (step_s if step_s > decode.fixed_s else decode.fixed_s) + added_s,
            missing_rows,
            tight,
            spare_pages,
            self.block_tokens,
            self.kv_bytes_per_token,
            prefill.error.doubt,
        )


class Groups:
    """Nodes that have the same transfer media. of: each node's group; exchange: 1 where two groups have a medium in common."""

    def __init__(self, media: Sequence[frozenset[str]]) -> None:
        kinds = {each: number for number, each in enumerate(dict.fromkeys(media))}
        self.of = np.array([kinds[each] for each in media], np.int64)
        self.exchange = np.array([[float(not one.isdisjoint(other)) for other in kinds] for one in kinds]).reshape(len(kinds), len(kinds))


class Roster:
    """Who is in a view, and which legs each node may take: all that stays as it is when nodes only report loads. Kept from view to view.

    row_of: by incarnation. prefill, decode: nodes that may take such a leg; decode_only: those that compute no prompts for others. is_split: whether
    both legs have nodes, and some node is there for one of them alone."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        size = len(nodes)
        self.names = tuple(node.endpoint.node for node in nodes)
        self.row_of = {node.incarnation: row for row, node in enumerate(nodes)}
        self.shortest_max_len = min((node.max_len for node in nodes), default=0)
        accepting = [(row, node.role) for row, node in enumerate(nodes) if node.accepts_work]
        self.accepting = Pool([row for row, _ in accepting], size)
        self.prefill = Pool([row for row, role in accepting if role != "decode"], size)
        self.decode = Pool([row for row, role in accepting if role != "prefill"], size)
        self.decode_only = Pool([row for row, role in accepting if role == "decode"], size)
        self.is_split = bool(self.prefill and self.decode) and any(role != "mixed" for _, role in accepting)
        self.rows_of_name: dict[str, tuple[int, ...]] = {}
        for row, name in enumerate(self.names):
            self.rows_of_name[name] = (*self.rows_of_name.get(name, ()), row)
        self._media = tuple(frozenset(node.backends) for node in nodes)
        self._paths: dict[int, tuple[Mapping[str, float], Column]] = {}

    def partners(self, pool: Pool, node: NodeView) -> Pool:
        """Those that KV of `node` can go to; itself too, if it is in the pool."""
        media = frozenset(node.backends)
        return pool.part(media, lambda row: not media.isdisjoint(self._media[row]))

    @once
    def groups(self) -> Groups:
        """Of nodes with the same media."""
        return Groups(self._media)

    @once
    def nothing(self) -> Column:
        """A zero for each node; not to be written to."""
        return np.zeros(len(self.names))

    def paths(self, node: NodeView) -> Column:
        """Bytes a second from the node to each of the others, 0 where it is not known; not to be written to."""
        row = self.row_of.get(node.incarnation, -1)
        kept = self._paths.get(row)
        if kept is not None and kept[0] is node.bandwidth:
            return kept[1]
        found = np.zeros(len(self.names))
        for name, bytes_s in node.bandwidth.items():
            for other in self.rows_of_name.get(name, ()):
                found[other] = bytes_s
        if row >= 0:
            self._paths[row] = node.bandwidth, found
        return found

    @staticmethod
    def holds_for(former: NodeView, now: NodeView) -> bool:
        """Whether a node that changed leaves the roster as it is."""
        is_alike = former.role == now.role and former.max_len == now.max_len and former.backends == now.backends
        if former.load is now.load and former.is_cordoned is now.is_cordoned:
            return is_alike  # it was only sent something
        return is_alike and former.accepts_work == now.accepts_work


class ClusterView:
    """All nodes that can be reached and have reported; never changed once made.

    nodes: by name, so that the order of reports changes nothing; a node's place is its row. typical: what a step costs where a node has not run
    enough of its kind; None: told from the nodes, or, where is_told, known by nobody."""

    def __init__(self, nodes: Iterable[NodeView], typical: NodeCost | None = None, *, is_told: bool = False) -> None:
        self.nodes = tuple(sorted(nodes, key=_by_name))
        self.typical = typical
        self._is_told = is_told
        self._stations: Stations | None = None

    def replaced(self, changed: Mapping[str, NodeView], typical: NodeCost | None = None, *, is_told: bool = False) -> ClusterView:
        """The same nodes, some of which changed, by incarnation. What was worked out for the others is kept."""
        nodes, roster, rows = list(self.nodes), self.roster, []
        is_same = True
        for incarnation, node in changed.items():
            row = roster.row_of[incarnation]
            is_same = is_same and roster.holds_for(nodes[row], node)
            nodes[row] = node
            rows.append(row)
        view = ClusterView.__new__(ClusterView)
        view.nodes, view.typical, view._is_told = tuple(nodes), typical, is_told
        if is_same:
            view.__dict__["roster"] = roster
        if typical is not None:
            view.__dict__["typical_cost"] = typical
        view._stations = None
        if self._stations is not None and typical is not None and typical is self.typical:
            view._stations = self._stations.replaced({row: view._station(nodes[row]) for row in rows})
        return view

    @once
    def roster(self) -> Roster:
        return Roster(self.nodes)

    @property
    def stations(self) -> Stations:
        """For a view that has a typical cost: every node has a pace then."""
        if self._stations is None:
            self._stations = Stations.of([self._station(node) for node in self.nodes])
        return self._stations

    def station_of(self, node: NodeView) -> Station:
        """Of one that may have left the view since."""
        row = self.roster.row_of.get(node.incarnation)
        return self._station(node) if row is None else self.stations.one(row)

    def _station(self, node: NodeView) -> Station:
        own = node.own_station
        if own is not None:
            return own
        cost = completed(node.cost, self.typical_cost)
        assert cost is not None  # it is asked for where a typical one is known
        return node.station(cost)

    @once
    def accepting(self) -> tuple[NodeView, ...]:
        """Nodes that take work."""
        return tuple(self.nodes[row] for row in self.roster.accepting.rows)

    @once
    def typical_cost(self) -> NodeCost | None:
        """For nodes that have not run a kind of step; None while nobody has."""
        if self.typical is not None or self._is_told:
            return self.typical
        return typical_cost([node.cost for node in self.nodes if node.cost is not None])

    def find(self, incarnation: str) -> NodeView | None:
        row = self.roster.row_of.get(incarnation)
        return None if row is None else self.nodes[row]

    def pace_of(self, node: NodeView) -> Pace | None:
        """None while nothing is known of steps of some kind, anywhere."""
        if node.pace is not None:
            return node.pace
        cost = completed(node.cost, self.typical_cost)
        return pace(cost, node.work) if cost is not None else None


def _by_name(node: NodeView) -> tuple[str, str]:
    return node.endpoint.node, node.endpoint.incarnation
