"""The Helm chart without helm: its values fit the schema, each is documented and used, and what it repeats is the same."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "pdcluster"
_SPEC = importlib.util.spec_from_file_location("chart", ROOT / "scripts" / "chart.py")
assert _SPEC is not None
assert _SPEC.loader is not None
chart = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(chart)

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(file.read_text() for file in sorted((CHART / "templates").iterdir()))
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
# Handed to Kubernetes as they are.
WHOLE = (
    "resources",
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "settings",
    "annotations",
    "pod",
)


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Paths of all values that a user may set one by one."""
    if isinstance(values, dict) and values and path.rsplit(".", 1)[-1] not in WHOLE and path != "poolDefaults":
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    else:
        yield path


@pytest.mark.parametrize("file", [CHART / "values.yaml", *EXAMPLES], ids=lambda file: file.stem)
def test_values_fit_the_schema(file: Path) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(yaml.safe_load(file.read_text()), SCHEMA)


def test_values_of_the_readme_fit_the_schema() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL)
    shown = [found for block in blocks if set(found := yaml.safe_load(block)) <= set(VALUES)]
    assert len(shown) >= 3
    for values in shown:
        jsonschema.validate(values, SCHEMA)


@pytest.mark.parametrize("path", sorted(leaves(VALUES)))
def test_each_value_is_documented_known_and_used(path: str) -> None:
    assert path in dict(chart.documented()), "it has no comment that begins with # --"
    known: Any = SCHEMA
    for name in path.split("."):
        known = known["properties"][name]
    parent, _, name = path.rpartition(".")
    used = re.search(rf"\.Values\.{re.escape(path)}\b", TEMPLATES) is not None
    is_scheduling = name in WHOLE and f'"places" .Values.{parent})' in TEMPLATES
    assert used or is_scheduling or path in ("pools", "poolDefaults"), "no template uses it"


@pytest.mark.parametrize("key", sorted(SCHEMA["properties"]["pools"]["items"]["properties"]))
def test_each_key_of_a_pool_is_documented_and_used(key: str) -> None:
    nodes = "".join((CHART / "templates" / name).read_text() for name in ("nodes.yaml", "_pods.tpl"))
    is_scheduling = key in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints")
    assert f"$pool.{key}" in nodes or is_scheduling
    pool = (CHART / "README.md").read_text().partition("## A pool")[2].partition("## Values")[0]
    assert f"`{key}`" in pool
    assert key in ("name", "role") or key in VALUES["poolDefaults"]


def test_the_readmes_table_is_the_values() -> None:
    assert (CHART / "README.md").read_text() == chart.readme(), "run python scripts/chart.py"


def test_the_schema_knows_the_settings_and_the_defaults_of_pools() -> None:
    assert (CHART / "values.schema.json").read_text() == chart.schema(), "run python scripts/chart.py"
    names = SCHEMA["properties"]["pools"]["items"]["properties"]["settings"]["propertyNames"]["enum"]
    assert "node.kv.memory_bytes" in names and "router.policy" not in names and "node.ready_fd" not in names


def test_rules_and_dashboards_are_those_of_deploy() -> None:
    for file, content in chart.copies().items():
        assert file.read_text() == content, "run python scripts/chart.py"


def test_the_chart_has_the_packages_version() -> None:
    version = re.search(r'VERSION = "(.+)"', (ROOT / "pdcluster" / "core" / "version.py").read_text())
    assert version is not None
    made = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert made["appVersion"] == made["version"] == version[1]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [("router.replicas", "2"), ("pools", []), ("log.level", "loud"), ("router.settings", {"ruter.http": 1}),
     ("router.settings", {"node.tp": 1}), ("poolDefaults.settings", {"node.threds": 1}), ("cache.hostPath", "/var/cache"), ("unknown", 1), ("router.unknown", 1), ("auth.clusterKey", "secret")],
)  # fmt: skip
def test_wrong_values_are_refused(path: str, wrong: object) -> None:
    given: Any = wrong
    for name in reversed(path.split(".")):
        given = {name: given}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(given, SCHEMA)
