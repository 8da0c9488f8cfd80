"""What a routing decision costs the router, by the size of the cluster: `python -m bench.choose`

Clusters of 8, 64 and 1,000 nodes, half prefill and half decode, some busy; every node holds the system prompt and three
hold more, so exact prefix routing is on. Between two decisions one node reports and two get or end a leg, as they do
between two requests; `choose` is the policy alone over the view made from that, `view` the upkeep. The other rows are
what else a request pays around its choice. Time is of this process's own core.

Not measured: hashing, the index (bench.index), the router around it (bench.router).
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.core.messages import HASH_BYTES, Endpoint, Load, Role
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster.settings.config import cache_directory
from pdcluster.telemetry.metrics import ExplainMetrics
from pdcluster_router.cluster.view import ClusterView, InFlightWork, NodeView
from pdcluster_router.core.generation import ANYBODY
from pdcluster_router.explain.recorder import Explainer
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.pull import BY_TOKENS
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.prefix_index.ideal_cache import IdealCache
from pdcluster_router.queueing.headroom import Headroom

GOALS_US = {8: 50.0, 1000: 1000.0}
NUM_TOKENS, SYSTEM_TOKENS, TALK_TOKENS = 4000, 512, 3008
BATCH = 20


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster, and reports and legs that its nodes could have next."""

    view: ClusterView
    query: Query
    reports: tuple[NodeView, ...]

    @property
    def name(self) -> str:
        return f"{len(self.view.nodes)} nodes"


def make_case(number: int, chance: random.Random) -> Case:
    nodes = [make_node(index, number, chance) for index in range(number)]
    cached = dict.fromkeys((node.incarnation for node in nodes), SYSTEM_TOKENS)
    cached.update((node.incarnation, TALK_TOKENS) for node in chance.sample(nodes, 3))
    hashes = chance.randbytes(NUM_TOKENS // 32 * HASH_BYTES)
    view = ClusterView(nodes)
    return Case(
        view,
        Query(NUM_TOKENS, hashes, cached, held=cached),
        tuple(make_node(chance.randrange(number), number, chance) for _ in range(200)),
    )


def make_node(index: int, number: int, chance: random.Random) -> NodeView:
    """Prefill nodes have run no rows, as in a cluster with roles; bandwidth is known to those that each wrote to
    last."""
    role: Role = "decode" if index % 2 else "prefill"
    waiting, rows = (0, chance.randrange(20)) if index % 2 else (chance.randrange(3), 0)
    cost = NodeCost(
        PrefillCost(0.005, 1e-4 * chance.uniform(0.9, 1.1), 1e-9, 512, 20 if index % 2 else 100),
        DecodeCost(0.008 * chance.uniform(0.9, 1.1), 2e-4, 1e-8, 100 if index % 2 else 0),
    )
    load = Load(
        waiting,
        rows,
        1000 * waiting,
        1000 * rows,
        4000,
        4000 - 32 * rows,
        0,
        0,
        0,
        32,
        rows,
        waiting_pairs=500_000 * waiting,
        rows=rows,
    )
    bandwidth = {f"n{other:04d}": 1e9 for other in chance.sample(range(number), min(number, 8))}
    endpoint = Endpoint(f"n{index:04d}", f"n{index:04d}-boot", "127.0.0.1:1")
    return NodeView(
        endpoint, role, 0, load, 32, 1 << 17, ("shm",), cost=cost, bandwidth=bandwidth, kv_bytes_per_token=1024
    )


def next_view(case: Case, view: ClusterView, turn: int) -> ClusterView:
    """One node reported, another got a leg, a third ended one."""
    reported = case.reports[turn % len(case.reports)]
    begun, ended = view.reported[turn % view.size], view.reported[(7 * turn + 3) % view.size]
    counts = {begun.incarnation: (1, InFlightWork(1, 1000, 500_000)), ended.incarnation: (0, InFlightWork())}
    told = view.replaced({reported.incarnation: reported.sent(turn % 3, InFlightWork())})
    return told.sent(counts, counts.__getitem__)


def microseconds(call: Callable[[int], object], num_calls: int, prepare: Callable[[], object] = tuple) -> list[float]:
    """Per call, of each batch; the first one warms up. Between batches things are prepared, and garbage is
    collected."""
    samples = []
    for number in range(max(num_calls // BATCH, 3) + 1):
        prepare()
        gc.collect()
        started = time.process_time()
        for turn in range(number * BATCH, (number + 1) * BATCH):
            call(turn)
        samples.append((time.process_time() - started) / BATCH * 1e6)
    return samples[1:]


def measure(case: Case, num_calls: int) -> list[Row]:
    policy, headroom = make_policy("seconds"), Headroom()
    explainer, seen = Explainer(ExplainMetrics(CollectorRegistry()), time.time), IdealCache()
    views = [case.view] * BATCH
    choices = [policy.choose(case.query, case.view)]

    def upkeep(turn: int) -> None:
        views[turn % BATCH] = next_view(case, views[(turn - 1) % BATCH], turn)

    def renew() -> None:
        """So that nothing is left of an earlier choice."""
        for turn in range(BATCH):
            upkeep(turn)

    def choose(turn: int) -> None:
        choices[0] = policy.choose(case.query, views[turn % BATCH])

    def both(turn: int) -> None:
        upkeep(turn)
        choose(turn)

    def explain(turn: int) -> None:
        record = explainer.open(f"r{turn}", ANYBODY, 0.0)
        record.decided(choices[0], 0.0, 0.0)
        record.first_token(0.1)
        record.cached_tokens = SYSTEM_TOKENS
        explainer.close(record, None)

    rows = [_row("choose", case, microseconds(choose, num_calls, renew))]
    measured: list[tuple[str, Callable[[int], object]]] = [
        ("view: a report and two legs", upkeep),
        ("view and choose", both),
        ("gate: does it go", lambda _: headroom.has_open(choices[0])),
        ("pull rule", lambda _: BY_TOKENS.apply(choices[0])),
        ("seen blocks", lambda _: seen.note(case.query.hashes)),
        ("explain, from decision to end", explain),
    ]
    return rows + [_row(name, case, microseconds(call, num_calls)) for name, call in measured]


def _row(name: str, case: Case, samples: list[float]) -> Row:
    goal_us = GOALS_US.get(len(case.view.nodes)) if name == "choose" else None
    if goal_us is None:
        return row(name, case.name, samples, "us")
    return row(name, case.name, samples, "us", against="goal", against_value=goal_us, better="less", goal=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.choose", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    add_output_flags(parser)
    chosen = parser.parse_args()
    compiled.load(cache_directory())
    rows: list[Row] = []
    for number in (8, 64, 1000):
        rows += measure(make_case(number, random.Random(number)), 200 if chosen.quick else 2000)
    print_rows(rows)
    save(rows, chosen)


if __name__ == "__main__":
    main()
