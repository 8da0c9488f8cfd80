"""What the router believes about the cluster at one moment, as immutable values for the policy. No sockets, no clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdcluster.cost import NodeCost
from pdcluster.messages import Endpoint, Load, Role


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


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node that can be reached.

    in_flight: requests this router has on the node; load: the node's last report, None before the first one.
    backends: transfer media it has; a node without any serves in mode local only.
    cost: fitted by the node to its own steps, None before its first report of it. bandwidth: bytes/s to other nodes, by incarnation, as far as it was
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

    @property
    def name(self) -> str:
        return self.endpoint.node

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

    @property
    def num_requests(self) -> int:
        """Requests on the node: what it reported and what is on its way, or this router's own count where that is more."""
        reported = self.load.waiting + self.load.running if self.load is not None else 0
        return max(self.in_flight, reported + self.pending.requests)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that wait for being computed."""
        return self.pending.prefill_tokens + (self.load.waiting_tokens if self.load is not None else 0)

    @property
    def prefill_pairs(self) -> int:
        return self.pending.prefill_pairs + (self.load.waiting_pairs if self.load is not None else 0)

    @property
    def rows(self) -> int:
        """Rows taken and reserved on the node."""
        return self.pending.rows + (self.load.slots_used if self.load is not None else 0)

    @property
    def context_tokens(self) -> int:
        return self.pending.context_tokens + (self.load.context_tokens if self.load is not None else 0)


@dataclass(frozen=True, slots=True)
class ClusterView:
    nodes: tuple[NodeView, ...]
