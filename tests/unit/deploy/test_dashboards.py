"""The dashboards are what their description makes, and every query parses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import promql_parser
import pytest

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
    assert set(re.findall(r"\$(\w+)", expr)) <= {"node", "pool", "tenant", "__rate_interval"}
    plain = expr.replace("$__rate_interval", "1m")
    assert promql_parser.parse(re.sub(r"\$\w+", ".*", plain)) is not None


def test_titles_are_unique_and_each_panel_says_what_it_shows() -> None:
    for plan in PLANS.values():
        titles = [panel.title for row in plan.rows for panel in row.panels]
        assert len(titles) == len(set(titles))
        assert all(panel.about.endswith(".") for row in plan.rows for panel in row.panels)
