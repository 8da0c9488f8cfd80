"""Rules of autoscaling: what others scale pools by, and ours. Pure: a rule sees a pool and says how many nodes it
wants.

1. predicted: the wanted nodes of `queueing.demand`, as KEDA or Ray get them.
2. waiting: KEDA on waiting requests, one node for each WAITING of them, kept for KEDA_WINDOW_S.
3. running: an HPA on how busy nodes are, as on CPU: the pool is sized so that they are BUSY of the time.
4. kv-or-queue: as llm-d's saturation: a node more when KV is FULL_KV used or FULL_QUEUE requests wait for each node, a
   node less when the others would stay well below.
5. oracle: sizes by work that will come while a node would start; a bound, since no one knows that.

A pool grows at once. It shrinks to the most that was wanted within the rule's window, by at most `fewer` nodes a look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

from pdcluster.core.errors import ConfigError

WAITING, KEDA_WINDOW_S = 5, 360.0
BUSY, TOLERANCE = 0.7, 0.1
FULL_KV, FULL_QUEUE = 0.8, 5.0
SPARE_KV, SPARE_QUEUE = 0.6, 2.0
HPA_WINDOW_S = 300.0
ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool as a rule sees it.

    num_nodes: that serve; num_coming: that start.
    num_waiting: requests in its nodes' queues, and in the router because of it.
    busy: share of the time since the last look in which its nodes ran steps.
    kv: share of pages in use.
    wanted: by the router's signal.
    needed: by work that comes within a node's start, in nodes.
    """

    num_nodes: int
    num_coming: int
    num_waiting: int
    busy: float
    kv: float
    wanted: int
    needed: float


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """wants: nodes for a pool.
    window_s: see above.
    fewer: nodes that may go at a look.
    """

    name: str
    wants: Callable[[PoolState], int]
    window_s: float = HPA_WINDOW_S
    fewer: int = ANY


def by_prediction(pool: PoolState) -> int:
    return pool.wanted


def by_waiting(pool: PoolState) -> int:
    return ceil(pool.num_waiting / WAITING)


def by_busy(pool: PoolState) -> int:
    ratio = pool.busy / BUSY
    return pool.num_nodes if abs(ratio - 1.0) <= TOLERANCE else ceil(pool.num_nodes * ratio)


def by_kv_or_queue(pool: PoolState) -> int:
    num = max(pool.num_nodes, 1)
    queue = pool.num_waiting / num
    if pool.kv >= FULL_KV or queue >= FULL_QUEUE:
        return pool.num_nodes + pool.num_coming + 1
    share = num / (num - 1) if num > 1 else 0.0
    if share and pool.kv * share < SPARE_KV and queue * share < SPARE_QUEUE:
        return num - 1
    return pool.num_nodes + pool.num_coming


def by_oracle(pool: PoolState) -> int:
    return ceil(pool.needed)


RULES: Mapping[str, ScalingRule] = {
    rule.name: rule
    for rule in (
        ScalingRule("predicted", by_prediction, fewer=1),
        ScalingRule("waiting", by_waiting, KEDA_WINDOW_S),
        ScalingRule("running", by_busy),
        ScalingRule("kv-or-queue", by_kv_or_queue, fewer=1),
        ScalingRule("oracle", by_oracle, window_s=0.0),
    )
}


def rules_of(text: str) -> list[ScalingRule]:
    """Rules by their names, separated by commas; `all` is each. Raises ConfigError."""
    names = list(RULES) if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in RULES]
    if unknown:
        raise ConfigError(f"no rule of autoscaling is called {unknown[0]!r}; use all or some of {', '.join(RULES)}")
    return [RULES[name] for name in names]


@dataclass(slots=True)
class PoolSize:
    """The size that a rule asks for, with its window. Owned by one simulation."""

    rule: ScalingRule
    least: int
    most: int
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def target(self, now: float, pool: PoolState) -> int:
        """Nodes that there should be, those that start included."""
        there = pool.num_nodes + pool.num_coming
        wanted = min(max(self.rule.wants(pool), self.least), self.most)
        while self._wanted and self._wanted[0][0] < now - self.rule.window_s:
            self._wanted.popleft()
        self._wanted.append((now, wanted))
        if wanted >= there:
            return wanted
        return max(max(each for _, each in self._wanted), there - self.rule.fewer)
