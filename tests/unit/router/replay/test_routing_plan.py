"""Which mixes `bench.routing` compares modes on."""

from __future__ import annotations

import pytest

from bench.routing import FORCED, RECORDED, modes, plan_of
from pdcluster.errors import ConfigError


def test_each_mix_that_is_asked_for_has_as_many_seeds_and_every_way_runs_on_each() -> None:
    plan = plan_of(RECORDED, quick=False, num_mode_seeds=3, chosen=("recorded", "agent"))
    assert [(each.name, each.seed) for each in plan.mixes] == [*(("recorded", n) for n in range(3)), *(("agent", n) for n in (11, 12, 13))]
    by_way = {way: {run.workload for run in modes(plan) if run.force == force} for way, force in FORCED.items()}
    assert all(workloads == set(plan.mixes) for workloads in by_way.values())


def test_more_seeds_begin_with_the_same_ones() -> None:
    few, more = (plan_of(RECORDED, quick=False, num_mode_seeds=number).mixes for number in (2, 3))
    assert set(few) < set(more) and len(more) == 9 * 3


def test_a_mix_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="no mix agents; use some of recorded, chat"):
        plan_of(RECORDED, quick=False, chosen=("agents",))
