"""How full pools are, and how many nodes their work needs."""

from collections.abc import Sequence

import pytest

from pdcluster.bootstrap.demand import RoleDemand, RouterDemand
from pdcluster.core.messages import Endpoint, Load, Role
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.queueing.demand import CLEAR_S, DemandMeter, PoolLevels, PoolSignal, pool_signals, staffed
from pdcluster_router.queueing.fairness import QueuedRequest

COST = NodeCost(
    PrefillCost(fixed_s=0.0, token_s=1e-3, pair_s=0.0, chunk_tokens=512, samples=1000),
    DecodeCost(fixed_s=0.02, row_s=0.001, context_s=0.0, samples=1000),
)


def node(name: str, role: Role, **load: int) -> NodeView:
    base = Load(0, 0, 0, 0, pages_total=100, pages_free=100, pages_cached=0, pages_quarantined=0, pages_pinned=0,
                slots=256, slots_used=0)  # fmt: skip
    values = {field: load.get(field, getattr(base, field)) for field in base.__struct_fields__}
    return NodeView(Endpoint(name, f"{name}-boot", ""), role, 0, Load(**values), 16, 10_000, ("shm",), cost=COST)


LEVELS = PoolLevels()


def signals(nodes: Sequence[NodeView], *demands: RouterDemand, levels: PoolLevels = LEVELS) -> dict[Role, PoolSignal]:
    return pool_signals(ClusterView(nodes), demands, levels)


def demand(router: str, *, held_s: float = 0.0, held: int = 0, **roles: tuple[float, float]) -> RouterDemand:
    return RouterDemand(router, 1, tuple((role, RoleDemand(*rates)) for role, rates in roles.items()), held_s, held)  # type: ignore[arg-type]


PAIR = [node("p0", "prefill"), node("d0", "decode")]


def test_an_idle_cluster_wants_no_node() -> None:
    assert {role: (each.saturation, each.wanted) for role, each in signals(PAIR).items()} == {
        "prefill": (0.0, 0),
        "decode": (0.0, 0),
    }


def test_prompts_count_by_their_seconds_and_routers_add_up() -> None:
    one = signals(PAIR, demand("r0", prefill=(0.25, 0.0)))["prefill"]
    two = signals(PAIR, demand("r0", prefill=(0.5, 0.0)), demand("r1", prefill=(0.5, 0.0)))["prefill"]
    assert (one.saturation, one.wanted) == (pytest.approx(0.75 / 0.8), 1)
    assert (two.saturation, two.wanted) == (pytest.approx(2.0 / 0.8), 3)


def test_large_pools_need_less_room_for_chance() -> None:
    shares = [staffed(work) / work for work in (1.0, 4.0, 100.0)]
    assert shares == pytest.approx([2.5, 1.875, 1.375])


def test_work_that_waits_is_to_be_gone_in_time() -> None:
    held = signals(PAIR, demand("r0", held_s=4 * CLEAR_S, held=9))
    assert held["prefill"].saturation == pytest.approx(6.0 / 0.8) and held["decode"].saturation == 0.0
    busy = node("p0", "prefill", waiting_tokens=round(1000 * CLEAR_S))
    assert signals([busy, PAIR[1]])["prefill"].saturation == pytest.approx(2.0 / 0.8, rel=0.01)


def test_rows_count_by_what_keeps_the_limit() -> None:
    """A lone row takes 21 ms, so 22 rows take twice that. With a limit of 30 ms ten rows are full."""
    rows = [PAIR[0], node("d0", "decode", rows=22, running=22)]
    assert signals(rows)["decode"].saturation == pytest.approx(staffed(22) / 22)
    tight = signals(rows, levels=PoolLevels(itl_s=0.03))["decode"]
    assert (tight.saturation, tight.wanted) == (pytest.approx(staffed(22) / 10), 4)
    coming = signals(PAIR, demand("r0", decode=(0.0, 2 * 10 / 0.03)), levels=PoolLevels(itl_s=0.03))["decode"]
    assert coming.saturation == pytest.approx(staffed(20) / 10)


def test_batch_rows_need_no_pages_but_keep_the_last_node() -> None:
    """Else a night's batch has pools grow, and a pool of none loses the node that it runs on."""
    full = {"pages_free": 0, "slots_used": 8, "rows": 8}
    for num_batch, wanted in ((8, 1), (4, 1), (0, 2)):
        nodes = [PAIR[0], node("d0", "decode", **full, batch_rows=num_batch)]
        found = signals(nodes)["decode"]
        assert found.wanted == wanted, num_batch
        assert found.saturation <= (0.0 if num_batch == 8 else 0.6 if num_batch else 1.2), num_batch
    assert signals([node("p0", "prefill", batch_tokens=7)])["prefill"].wanted == 1


def test_a_pool_without_free_pages_is_full() -> None:
    full = [PAIR[0], node("d0", "decode", pages_free=0, pages_cached=10)]
    assert signals(full)["decode"].saturation == pytest.approx(1.0)


def test_prompts_and_rows_of_a_node_share_its_time() -> None:
    both = signals([node("m0", "mixed", rows=11, running=11)], demand("r0", mixed=(0.25, 0.0)))["mixed"]
    assert both.saturation == pytest.approx(staffed(0.25) + staffed(11) / 22)


def test_pools_without_nodes_are_wanted_while_requests_wait() -> None:
    assert signals([]) == {}
    assert {role: each.wanted for role, each in signals([], demand("r0", held=1)).items()} == {
        "prefill": 1,
        "decode": 1,
        "mixed": 1,
    }
    assert signals([PAIR[0]], demand("r0", held=1))["decode"].wanted == 1


def test_nodes_that_take_no_work_are_no_room() -> None:
    leaving = NodeView(
        **{**{field: getattr(PAIR[0], field) for field in PAIR[0].__struct_fields__}, "is_cordoned": True}
    )
    assert "prefill" not in signals([leaving, PAIR[1]])


def test_a_meter_tells_rates_from_the_first_second_on() -> None:
    meter = DemandMeter(lately_s=20.0)
    held = [QueuedRequest("r", "", 0.5, 8, 0.0, 9.0), QueuedRequest("s", "", 0.25, 8, 0.0, 9.0)]
    assert meter.report("boot", 100.0, [], 200.0).of("prefill") == RoleDemand()
    for second in range(1, 61):
        for _ in range(4):
            meter.arrived("prefill", 0.2, "decode")
        found = meter.report("boot", 100.0 + second, held, 200.0)
        assert found.of("prefill").prompt_s == pytest.approx(0.8) and found.of("decode").output_tokens == pytest.approx(
            800
        )
    assert (found.number, found.held_s, found.num_held) == (61, 0.75, 2)
    for second in range(61, 121):
        found = meter.report("boot", 100.0 + second, [], 200.0)
    assert found.of("prefill").prompt_s < 0.8 * 0.06
