"""Alerts: each has its runbook and both of its cases, and Prometheus's own tool agrees where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_parses(rule: dict[str, str]) -> None:
    assert promql_parser.parse(rule["expr"]) is not None


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_runbook_about_it(name: str) -> None:
    page = ROOT / ALERTS[name]["annotations"]["runbook"]
    assert page.read_text().startswith(f"# {name}\n")
    assert page.name in (page.parent / "index.md").read_text()


def test_every_runbook_is_of_an_alert() -> None:
    pages = {page.read_text().partition("\n")[0].removeprefix("# ") for page in (ROOT / "docs/runbooks").glob("*.md")}
    assert pages - {"Runbooks"} == set(ALERTS)


def test_every_alert_is_tested_firing_and_not_firing() -> None:
    cases = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    seen = {(test["alertname"], bool(test["exp_alerts"])) for case in cases for test in case["alert_rule_test"]}
    assert seen == {(name, fires) for name in ALERTS for fires in (True, False)}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's package prometheus")
def test_promtool_agrees() -> None:
    for words in (("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")):
        done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, timeout=60.0)
        assert done.returncode == 0, done.stdout + done.stderr
