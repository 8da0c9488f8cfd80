"""Role controller: when a node should change its role, by the predicted backlog of both pools.

Pure: it is given the time and returns at most one flip. Rules, in order:

1. Nothing flips within dwell_s of the last flip. A cordoned node never flips.
2. A pool is *short* when it was over its high mark at every look for sustain_s. Prefill: seconds of waiting prompt work
   per node exceed backlog_high_s. Decode: the share of rows or KV pages in use exceeds use_high.
3. A pool can *spare* a node when, with one node less, it would be under its low mark. So a flip is not undone by its
   own effect.
4. When one pool is short and the other can spare a node, its least loaded spare node flips.
5. Each pool keeps a node, unless a mixed node stands in. Mixed nodes count for both pools and never flip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdcluster.core.messages import Role
from pdcluster_router.cluster.view import ClusterView, NodeView

Pool = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Seconds and shares of the rules."""

    backlog_high_s: float = 1.0
    backlog_low_s: float = 0.25
    use_high: float = 0.9
    use_low: float = 0.7
    sustain_s: float = 5.0
    dwell_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of role.

    why: for the event that explains it.
    """

    node: NodeView
    role: Role
    why: str


class RoleController:
    """The controller. One caller looks every second and carries flips out. One per cluster: several would undo each
    other.
    """

    def __init__(self, settings: RoleSettings) -> None:
        self._settings = settings
        self._short_since: dict[Pool, float] = {}
        self._flipped_at: float | None = None

    def decide(self, now: float, view: ClusterView) -> Flip | None:
        nodes = [node for node in view.nodes if node.accepts_work and node.load is not None]
        prefills, decodes = _pool(nodes, "prefill"), _pool(nodes, "decode")
        backlog_s, use = _backlog_s(prefills, view), _use(decodes)
        is_short = {
            "prefill": self._is_sustained("prefill", backlog_s > self._settings.backlog_high_s, now),
            "decode": self._is_sustained("decode", use > self._settings.use_high, now),
        }
        if is_short["prefill"] == is_short["decode"] or self._is_dwelling(now):
            return None
        if is_short["prefill"]:
            spare = self._spare_decode(decodes)
            why = f"{backlog_s:.2f} s of prompts wait per prefill node (high mark {self._settings.backlog_high_s:g} s)"
            return self._flip(spare, "prefill", f"{why}; decode nodes are {use:.0%} used", now)
        spare = self._spare_prefill(prefills, view)
        why = f"decode nodes are {use:.0%} used (high mark {self._settings.use_high:.0%})"
        return self._flip(spare, "decode", f"{why}; {backlog_s:.2f} s of prompts wait per prefill node", now)

    def _flip(self, node: NodeView | None, role: Role, why: str, now: float) -> Flip | None:
        if node is None:
            return None
        self._flipped_at = now
        self._short_since.clear()
        return Flip(node, role, why)

    def _is_sustained(self, pool: Pool, is_over: bool, now: float) -> bool:
        if not is_over:
            self._short_since.pop(pool, None)
            return False
        return now - self._short_since.setdefault(pool, now) >= self._settings.sustain_s

    def _is_dwelling(self, now: float) -> bool:
        return self._flipped_at is not None and now - self._flipped_at < self._settings.dwell_s

    def _spare_decode(self, decodes: Sequence[NodeView]) -> NodeView | None:
        """The least loaded decode node whose rows the others could carry."""
        own = [node for node in decodes if node.role == "decode"]
        if not own or len(decodes) < 2:
            return None
        spare = min(own, key=lambda node: (node.rows, node.name))
        others = [node for node in decodes if node is not spare]
        return spare if _use(others, extra=spare) < self._settings.use_low else None

    def _spare_prefill(self, prefills: Sequence[NodeView], view: ClusterView) -> NodeView | None:
        own = [node for node in prefills if node.role == "prefill"]
        if not own or len(prefills) < 2:
            return None
        spare = min(own, key=lambda node: (view.row_of(node).backlog_s, node.name))
        would_wait_s = _backlog_s(prefills, view) * len(prefills) / (len(prefills) - 1)
        return spare if would_wait_s < self._settings.backlog_low_s else None


def _pool(nodes: Sequence[NodeView], pool: Pool) -> list[NodeView]:
    other = "decode" if pool == "prefill" else "prefill"
    return [node for node in nodes if node.role != other]


def _backlog_s(prefills: Sequence[NodeView], view: ClusterView) -> float:
    """Seconds of prompts that wait, per node."""
    return sum(view.row_of(node).backlog_s for node in prefills) / len(prefills) if prefills else 0.0


def _use(decodes: Sequence[NodeView], extra: NodeView | None = None) -> float:
    """The larger share in use: rows, or pages that are neither free nor evictable.

    extra: a load to carry without its room.
    """
    loads = [node.load for node in decodes if node.load is not None]
    if not loads:
        return 1.0
    more = [extra.load] if extra is not None and extra.load is not None else []
    rows = sum(node.rows for node in (*decodes, *([extra] if extra is not None else [])))
    pages = sum(load.pages_total - load.pages_free - load.pages_cached for load in (*loads, *more))
    return max(
        rows / max(sum(load.slots for load in loads), 1), pages / max(sum(load.pages_total for load in loads), 1)
    )
