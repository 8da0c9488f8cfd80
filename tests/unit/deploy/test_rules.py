"""Alerts: each has its runbook, fires and does not, and tells clusters apart. Prometheus's own tool agrees where it is
installed."""

from __future__ import annotations

import re
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
CASES = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_parses(rule: dict[str, str]) -> None:
    assert promql_parser.parse(rule["expr"]) is not None


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_runbook_about_it(name: str) -> None:
    page = ROOT / ALERTS[name]["annotations"]["runbook_url"]
    assert page.read_text().startswith(f"# {name}\n")
    assert page.name in (page.parent / "index.md").read_text()


def test_every_runbook_is_of_an_alert() -> None:
    pages = {page.read_text().partition("\n")[0].removeprefix("# ") for page in (ROOT / "docs/runbooks").glob("*.md")}
    assert pages - {"Runbooks"} == set(ALERTS)


def test_every_alert_is_tested_firing_and_not_firing() -> None:
    seen = {(test["alertname"], bool(test["exp_alerts"])) for case in CASES for test in case.get("alert_rule_test", ())}
    assert seen == {(name, fires) for name in ALERTS for fires in (True, False)}


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_with_two_clusters_of_which_one_is_in_trouble(name: str) -> None:
    (case,) = [case for case in CASES if case["name"] == f"{name}: of two clusters, the one in trouble"]
    names = {label for each in case["input_series"] for label in re.findall(r'cluster="(\w+)"', each["series"])}
    (test,) = case["alert_rule_test"]
    assert names == {"a", "b"} and {each["exp_labels"]["cluster"] for each in test["exp_alerts"]} == {"a"}


def test_no_alert_fires_without_a_series() -> None:
    (case,) = [case for case in CASES if case["name"].startswith("no series")]
    assert {test["alertname"] for test in case["alert_rule_test"]} == set(ALERTS)
    assert not any(test["exp_alerts"] for test in case["alert_rule_test"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_aggregation_and_match_keeps_the_cluster(rule: dict[str, str]) -> None:
    assert all("cluster" in labels.split(", ") for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]))
    assert len(re.findall(r"\b(?:sum|max|min|count|avg)\b", rule["expr"])) == len(re.findall(r"\bby \(", rule["expr"]))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's package prometheus")
def test_promtool_agrees() -> None:
    for words in (("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")):
        done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, timeout=60.0)
        assert done.returncode == 0, done.stdout + done.stderr
