"""What bench.routing --autoscale says of a rule that costs more than another."""

from __future__ import annotations

from dataclasses import fields

import pytest

from bench.parts.autoscale import rows_of
from pdcluster_router.replay.report import ScalingFigures
from pdcluster_router.replay.trace import Trace
from pdcluster_router.replay.workloads import generate


def rule(name: str, goodput: float, node_hours: float) -> ScalingFigures:
    values = {field.name: 0 for field in fields(ScalingFigures)} | {"goodput": goodput, "node_hours": node_hours}
    return ScalingFigures(**{**values, "rule": name})  # type: ignore[arg-type]


@pytest.fixture
def trace() -> Trace:
    return generate("chat", 3, 0)


@pytest.mark.parametrize(
    ("node_hours", "ratio", "holds"), [(15.51, 0.645, False), (9.5, 1.053, False), (8.9, 1.124, True)]
)
def test_node_hours_hold_where_they_are_less_however_good_the_goodput(
    trace: Trace, node_hours: float, ratio: float, holds: bool
) -> None:
    found = [rule("predicted", 3.3, node_hours), rule("kv-or-queue", 3.2, 10.0), rule("waiting", 2.9, 1.0)]
    found.append(rule("oracle", 9.9, 1.0))
    rows = {row.metric: row for row in rows_of(trace, {each.rule: each for each in found}) if row.case.endswith("ours")}
    hours = rows["node-hours"]
    assert hours.holds is holds and hours.ratio is not None and round(hours.ratio, 3) == ratio
    assert (hours.against, hours.against_value, hours.better) == ("kv-or-queue", 10.0, "less")
    assert rows["goodput"].holds is True
