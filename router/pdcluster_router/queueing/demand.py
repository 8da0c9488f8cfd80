"""How full each pool of nodes is, and how many nodes its work needs. Pure; the time is passed in.

A pool is all nodes of one role. Its *saturation* is what its predicted work needs ÷ what its nodes can do within the
service level:

1. Prompts. Node-seconds that come each second, by the cost models that route, and those that wait on nodes and in
   routers, which are to be gone after CLEAR_S.
2. Rows. Tokens of answers that come each second ÷ what a node makes at the largest batch that keeps the inter-token
   limit; or the rows that there are ÷ that batch, when that is more. Prompts and rows of one node share its time, so
   both add up.
3. Pages. Those in use ÷ PAGES of all, when that is more than 1 and 2. Batch rows' part of them does not count.

Work R, in nodes or rows, needs (R + SPREAD √R) ÷ TARGET of them: by chance more comes at times, for few nodes by a
larger share (square-root staffing: Halfin and Whitt 1981). The rest of TARGET is for growth while a node starts.

Batch requests fill what there is. They ask for the first node of a pool and keep the last one, and need no others.

So queues count by their work and not by their length, and work is seen when it comes and not when it waits. All numbers
are the nodes' reports or the routers' demand, so every router finds nearly the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, sqrt

from pdcluster.bootstrap.demand import ROLES, RoleDemand, RouterDemand
from pdcluster.core.messages import Role
from pdcluster.cost.cost import NodeCost
from pdcluster_router.cluster.pacing import COLD, completed
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.room import COMFORT
from pdcluster_router.queueing.fairness import QueuedRequest

# Share of nodes' time that is planned for, and standard deviations of what comes at once.
TARGET, SPREAD = 0.8, 1.0
# Share of the KV pages that is planned for.
PAGES = 0.9
# Seconds after which work that waits is to be gone.
CLEAR_S = 20.0
# Rates are means with exponential forgetting: long enough for a few requests a second to make one.
LATELY_S = 20.0
# A pool that is full to this much more than a whole number of nodes needs no further one.
SLACK = 0.02
# Less work than this, in nodes, is none: a few minutes after the last request.
IDLE = 1e-2
# The first of these roles that has nodes gets the prompts that wait in routers.
SERVING: tuple[Role, ...] = ("prefill", "mixed", "decode")
# The first of these roles that has nodes gets the answers of requests that no node takes.
DECODING: tuple[Role, ...] = ("decode", "mixed", "prefill")


class DemandMeter:
    """Work that clients ask one router for. Owned by one thread."""

    def __init__(self, lately_s: float = LATELY_S) -> None:
        self._lately_s = lately_s
        self._prompt_s = dict.fromkeys(ROLES, 0.0)
        self._answers = dict.fromkeys(ROLES, 0.0)
        self._rates = dict.fromkeys(ROLES, (0.0, 0.0))
        self._began: float | None = None
        self._sampled = 0.0
        self._number = 0

    def arrived(self, first: Role, work_s: float, decode: Role) -> None:
        """A request came, whose prompt would be `work_s` on a node of role `first`."""
        self._prompt_s[first] += work_s
        self._answers[decode] += 1.0

    def report(self, router: str, now: float, held: Sequence[QueuedRequest], usual_output: float) -> RouterDemand:
        """The demand as of now. Call it about once a second.

        held: requests that wait in the router.
        usual_output: tokens of an answer.
        """
        self._sample(now)
        self._number += 1
        roles = tuple((role, RoleDemand(rate, answers * usual_output)) for role, (rate, answers) in self._rates.items())
        return RouterDemand(router, self._number, roles, sum(one.work for one in held if not one.is_batch), len(held))

    def _sample(self, now: float) -> None:
        if self._began is None:
            self._began = self._sampled = now
        since_s = now - self._sampled
        if since_s <= 0:
            return
        # The first samples count as if the time before had been like them.
        known_s = now - self._began
        weight = -(exp(-since_s / self._lately_s) - 1.0) / -(exp(-known_s / self._lately_s) - 1.0)
        for role, (prompts, answers) in self._rates.items():
            self._rates[role] = (
                prompts + weight * (self._prompt_s[role] / since_s - prompts),
                answers + weight * (self._answers[role] / since_s - answers),
            )
            self._prompt_s[role] = self._answers[role] = 0.0
        self._sampled = now


def unplaced(view: ClusterView, num_tokens: int) -> tuple[Role, float, Role]:
    """What `DemandMeter.arrived` is told of a request that no node takes now: whom it would go to if they did."""
    roles = {node.role for node in view.nodes}
    first = next((role for role in SERVING if role in roles), SERVING[0])
    decode = next((role for role in DECODING if role in roles), DECODING[0])
    return first, (view.typical or COLD).prefill.seconds(num_tokens), decode


@dataclass(frozen=True, slots=True)
class PoolSignal:
    """saturation: 1 is full.
    wanted: nodes that the pool's work needs; 0 when there was none for minutes.
    """

    role: Role
    num_nodes: int
    saturation: float
    wanted: int


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """What signals are measured by.

    itl_s: the inter-token limit; 0: COMFORT times a lone row's time.
    """

    itl_s: float = 0.0
    clear_s: float = CLEAR_S
    pages: float = PAGES


def pool_signals(view: ClusterView, demands: Sequence[RouterDemand], levels: PoolLevels) -> dict[Role, PoolSignal]:
    """A signal for each role that has nodes. While requests wait, one for the others, too.

    demands: of all routers, the own one included.
    """
    by_role: dict[Role, list[NodeView]] = {role: [] for role in ROLES}
    for node in view.nodes:
        if node.accepts_work:
            by_role[node.role].append(node)
    serving = next((role for role in SERVING if by_role[role]), None)
    held_s, waits = sum(each.held_s for each in demands), any(each.num_held for each in demands)
    found = {}
    for role, nodes in by_role.items():
        coming = RoleDemand(
            sum(each.of(role).prompt_s for each in demands), sum(each.of(role).output_tokens for each in demands)
        )
        if nodes:
            found[role] = _signal(role, nodes, view, coming, held_s if role == serving else 0.0, levels)
        elif waits:
            found[role] = PoolSignal(role, 0, 1.0, 1)
    return found


def _signal(
    role: Role,
    nodes: Sequence[NodeView],
    view: ClusterView,
    coming: RoleDemand,
    held_s: float,
    levels: PoolLevels,
) -> PoolSignal:
    costs = [completed(node.cost, view.typical) for node in nodes]
    prompts = coming.prompt_s + held_s / levels.clear_s
    room = tokens_s = waiting_s = 0.0
    for node, cost in zip(nodes, costs, strict=True):
        rows, pace = _batch(node, cost, levels)
        room, tokens_s = room + rows, tokens_s + pace
        if cost is not None and node.prefill_tokens:
            waiting_s += cost.prefill.work_s(node.prefill_tokens, node.prefill_pairs)
    num = len(nodes)
    prompts += waiting_s / levels.clear_s
    rows = max(
        float(sum(node.decode_rows - _batch_rows(node) for node in nodes)),
        coming.output_tokens / tokens_s * room if tokens_s else 0.0,
    )
    use = staffed(prompts) / num + (staffed(rows) / room if room else 0.0)
    saturation = max(use, _pages(nodes) / levels.pages)
    full = num * saturation
    is_used = full > IDLE or any(_has_batch(node) for node in nodes)
    return PoolSignal(role, num, saturation, max(ceil(full - SLACK), int(is_used)))


def staffed(work: float) -> float:
    """What so much work needs, in the same unit."""
    return (work + SPREAD * sqrt(work)) / TARGET


def _batch(node: NodeView, cost: NodeCost | None, levels: PoolLevels) -> tuple[float, float]:
    """The most rows that keep the inter-token limit on the node, and the tokens that they make each second."""
    slots = node.load.slots if node.load is not None else 1
    if cost is None:
        return float(slots), 0.0
    decode, rows = cost.decode, node.decode_rows
    context = node.context_tokens / rows if rows else 0.0
    each_s = decode.row_s + decode.context_s * context
    limit_s = levels.itl_s or COMFORT * (decode.fixed_s + each_s)
    most = min(max((limit_s - decode.fixed_s) / each_s, 1.0), slots) if each_s > 0 else float(slots)
    step_s = decode.fixed_s + most * each_s
    return most, most / step_s if step_s > 0 else 0.0


def _batch_rows(node: NodeView) -> int:
    return node.pending.batch_rows + (node.load.batch_rows if node.load is not None else 0)


def _has_batch(node: NodeView) -> bool:
    return _batch_rows(node) > 0 or node.pending.batch_tokens + (node.load.batch_tokens if node.load else 0) > 0


def _pages(nodes: Sequence[NodeView]) -> float:
    loads = [node.load for node in nodes if node.load is not None]
    used = sum(
        (load.pages_total - load.pages_free - load.pages_cached) * (1.0 - load.batch_rows / max(load.slots_used, 1))
        for load in loads
    )
    return used / max(sum(load.pages_total for load in loads), 1)
