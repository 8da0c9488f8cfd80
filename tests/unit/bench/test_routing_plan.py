"""Which mixes `bench.routing` compares modes on, and under which loads."""

from __future__ import annotations

from dataclasses import fields

import pytest

from bench.parts.routing_runs import Run, Workload
from bench.routing import FORCED, OURS, RECORDED, Way, modes, plan_of, without_peak
from pdcluster.core.errors import ConfigError
from pdcluster_router.replay.report import Figures
from pdcluster_router.replay.scenario import Layout


def test_each_mix_that_is_asked_for_has_as_many_seeds_and_every_way_runs_on_each() -> None:
    plan = plan_of(RECORDED, quick=False, num_mode_seeds=3, chosen=("recorded", "agent"))
    assert [(each.name, each.seed) for each in plan.mixes] == [
        *(("recorded", n) for n in range(3)),
        *(("agent", n) for n in (11, 12, 13)),
    ]
    by_way = {
        way: {run.workload for run in modes(plan.mixes, plan.mode_loads) if run.force == force}
        for way, force in FORCED.items()
    }
    assert all(workloads == set(plan.mixes) for workloads in by_way.values())


def test_more_seeds_begin_with_the_same_ones() -> None:
    few, more = (plan_of(RECORDED, quick=False, num_mode_seeds=number).mixes for number in (2, 3))
    assert set(few) < set(more) and len(more) == 9 * 3


def test_a_mix_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="no mix agents; use some of recorded, chat"):
        plan_of(RECORDED, quick=False, chosen=("agents",))


def figures(goodput: float) -> Figures:
    values = {field.name: 0.0 for field in fields(Figures)}
    return Figures(**{**values, "goodput": goodput})


def under_loads(mix: str, by_way: dict[Way, dict[float, float]]) -> dict[Run, Figures]:
    """Goodputs of a mix by way and load."""
    layout = Layout(mixed=4)
    return {
        Run(Workload(mix), layout, OURS, load, force=FORCED[way], by_all=True): figures(goodput)
        for way, points in by_way.items()
        for load, goodput in points.items()
    }


def test_a_mix_needs_higher_loads_while_any_way_is_best_at_the_highest() -> None:
    falls, rises = {0.7: 3.0, 1.0: 4.0, 1.15: 3.9}, {0.7: 3.0, 1.0: 4.0, 1.15: 4.1}
    found = under_loads("chat", {"static": falls, "auto": falls, "colocated": falls}) | under_loads(
        "agent", {"static": falls, "auto": rises}
    )
    assert without_peak(found) == {"agent"}
    assert without_peak(found | under_loads("agent", {"static": {1.3: 3.0}, "auto": {1.3: 4.0}})) == set()


def test_a_peak_is_one_of_the_mean_over_seeds() -> None:
    layout = Layout(mixed=4)
    at = {
        seed: {load: Run(Workload("rag", seed=seed), layout, OURS, load, by_all=True) for load in (1.0, 1.15)}
        for seed in (1, 2)
    }
    found = {at[1][1.0]: figures(4.0), at[1][1.15]: figures(5.0), at[2][1.0]: figures(4.0), at[2][1.15]: figures(2.0)}
    assert without_peak(found) == set()
