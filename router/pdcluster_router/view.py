"""What the router believes about the cluster at one moment, as immutable values for the policy. No sockets, no clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pdcluster.cost import NodeCost
from pdcluster.messages import Endpoint, Load, Role
from pdcluster_router.pace import Pace, Work, completed, pace, typical_cost


@dataclass(frozen=True, slots=True)
class Pending:
    """What this router sent that the node's last report does not count yet; added to the report. prefill_tokens and prefill_pairs: prompt work that
    is not cached there; context_tokens: KV of the rows, when they decode."""

    requests: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    rows: int = 0
    context_tokens: int = 0


NOTHING_PENDING = Pending()


@dataclass(frozen=True)
class NodeView:
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
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    kv_bytes_per_token: int = 0

    @cached_property
    def name(self) -> str:
        return self.endpoint.node

    @cached_property
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

    @cached_property
    def num_requests(self) -> int:
        """Requests on the node: what it reported and what is on its way, or this router's own count where that is more."""
        reported = self.load.waiting + self.load.running if self.load is not None else 0
        return max(self.in_flight, reported + self.pending.requests)

    @cached_property
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
        return self.work.prefill_tokens

    @property
    def prefill_pairs(self) -> int:
        return self.work.prefill_pairs

    @property
    def rows(self) -> int:
        """Rows that are taken, by whatever: reservations, remote prefills and what is on its way, too."""
        return self.pending.rows + (self.load.slots_used if self.load is not None else 0)

    @cached_property
    def pace(self) -> Pace | None:
        """None while the node's own cost model is not known."""
        cost = completed(self.cost, None)
        return pace(cost, self.work) if cost is not None else None

    @cached_property
    def num_prompts(self) -> int:
        """Requests that wait for their prompt to be computed, or whose prompt is being computed."""
        return self.pending.requests + (self.load.waiting if self.load is not None else 0) + (self.work.prefill_tokens > 0)


@dataclass(frozen=True)
class ClusterView:
    nodes: tuple[NodeView, ...]

    @cached_property
    def accepting(self) -> tuple[NodeView, ...]:
        """Nodes that take work, by name, so that the order of reports changes nothing."""
        return tuple(sorted((node for node in self.nodes if node.accepts_work), key=lambda node: (node.name, node.incarnation)))

    @cached_property
    def shortest_max_len(self) -> int:
        return min((node.max_len for node in self.nodes), default=0)

    @cached_property
    def typical_cost(self) -> NodeCost | None:
        """For nodes that have not run a kind of step; None while nobody has."""
        by_name = sorted(self.nodes, key=lambda node: (node.name, node.incarnation))
        return typical_cost([node.cost for node in by_name if node.cost is not None])

    def pace_of(self, node: NodeView) -> Pace | None:
        """None while nothing is known of steps of some kind, anywhere."""
        if node.pace is not None:
            return node.pace
        cost = completed(node.cost, self.typical_cost)
        return pace(cost, node.work) if cost is not None else None
