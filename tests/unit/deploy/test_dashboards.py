"""The dashboards are what their description makes, and every query parses, keeps to one cluster and counts once."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[3]


def loaded(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = loaded("dashboards_script", "scripts/dashboards.py")
PLANS = {plan.uid: plan for plan in SCRIPT.DASHBOARDS}
QUERIES = [
    pytest.param(query.expr, id=f"{plan.uid}/{panel.title}/{number}")
    for plan in PLANS.values() for row in plan.rows for panel in row.panels for number, query in enumerate(panel.queries)
]  # fmt: skip


@pytest.mark.parametrize("uid", PLANS)
def test_a_dashboards_file_is_what_its_description_makes(uid: str) -> None:
    plan = PLANS[uid]
    assert SCRIPT.file_of(plan).read_text() == SCRIPT.dashboard_of(plan), "run python scripts/dashboards.py"


@pytest.mark.parametrize("expr", QUERIES)
def test_every_query_parses_and_its_variables_exist(expr: str) -> None:
    assert set(re.findall(r"\$(\w+)", expr)) <= {"cluster", "node", "pool", "tenant", "__rate_interval"}
    assert promql_parser.parse(filled(expr)) is not None


def filled(expr: str) -> str:
    """With $cluster as a, and all of everything else."""
    return re.sub(r"\$\w+", ".*", expr.replace("$__rate_interval", "1m").replace("$cluster", "a"))


def selected(part: Any, around: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Each series that is read, and the aggregations around it, the outermost first."""
    if isinstance(part, promql_parser.VectorSelector):
        yield part, around
    elif isinstance(part, promql_parser.MatrixSelector):
        yield part.vector_selector, around
    elif isinstance(part, promql_parser.AggregateExpr):
        yield from selected(part.expr, (*around, str(part.op)))
    else:
        parts = [getattr(part, name, None) for name in ("expr", "lhs", "rhs")] + list(getattr(part, "args", None) or ())
        for each in parts:
            if each is not None:
                yield from selected(each, around)


@pytest.mark.parametrize("expr", QUERIES)
def test_every_query_is_of_one_cluster_and_of_processes_of_ours(expr: str) -> None:
    for series, _ in selected(promql_parser.parse(filled(expr))):
        given = {each.name: each.value for each in series.matchers.matchers}
        assert given.get("cluster") == "a", series.name
        assert series.name.startswith("pdcluster_") or given.get("component") == "router|node|bootstrap", series.name


@pytest.mark.parametrize("expr", QUERIES)
def test_what_all_routers_report_alike_is_never_added_up_over_them(expr: str) -> None:
    for series, around in selected(promql_parser.parse(filled(expr))):
        if series.name.startswith(("pdcluster_node_", "pdcluster_pool_")) and "in_flight" not in series.name:
            assert around[-1:] == ("max",), (series.name, around)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's package prometheus")
@pytest.mark.parametrize("title", ["Failed writes", "Chunks written again", "Pulls of cached KV"])
def test_a_counter_that_two_routers_report_is_shown_once(title: str, tmp_path: Path) -> None:
    (expr,) = [
        query.expr
        for plan in PLANS.values() for row in plan.rows for panel in row.panels for query in panel.queries
        if panel.title == title
    ]  # fmt: skip
    (name,) = set(re.findall(r"pdcluster_\w+", expr))
    series = [
        {"series": f'{name}{{cluster="{cluster}",process="router-{number}",node="p",reason="r"}}', "values": "0+15x60"}
        for cluster in "ab" for number in range(2)
    ]  # fmt: skip
    expected = {
        "expr": filled(expr),
        "eval_time": "10m",
        "exp_samples": [{"labels": '{node="p",reason="r"}', "value": 1}],
    }
    case = {"interval": "15s", "input_series": series, "promql_expr_test": [expected]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_titles_are_unique_and_each_panel_says_what_it_shows() -> None:
    for plan in PLANS.values():
        titles = [panel.title for row in plan.rows for panel in row.panels]
        assert len(titles) == len(set(titles))
        assert all(panel.about.endswith(".") for row in plan.rows for panel in row.panels)
