"""Writes what the Helm chart repeats: rules, dashboards, the table of values in its README, and in the schema of its
values the names of settings and the defaults of pools. Tests keep them equal.

python scripts/chart.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pdcluster.settings.config import SECTIONS, keys

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "pdcluster"
BEGIN, END = "<!-- values: made by scripts/chart.py -->", "<!-- end of values -->"


def copies() -> dict[Path, str]:
    """Files of the chart that stand elsewhere, too."""
    found = {CHART / "files" / "rules.yml": (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()}
    for dashboard in sorted((ROOT / "deploy" / "grafana").glob("*.json")):
        found[CHART / "files" / "dashboards" / dashboard.name] = dashboard.read_text()
    return found


def documented() -> Iterator[tuple[str, str]]:
    """(path, text) of each value of values.yaml that has a comment `# -- text` above it."""
    path: list[tuple[int, str]] = []
    about = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        if (comment := re.fullmatch(r"\s*# -- (.*)", line)) is not None:
            about = comment[1]
            continue
        key = re.match(r"(\s*)([A-Za-z]\w*):", line)
        if key is None:
            continue
        indent = len(key[1])
        path = [each for each in path if each[0] < indent] + [(indent, key[2])]
        if about:
            yield ".".join(name for _, name in path), about
            about = ""


def value_at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def table() -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = ["| value | default | what it is |", "|---|---|---|"]
    for path, about in documented():
        shown = json.dumps(value_at(values, path), ensure_ascii=False)
        shown = shown if len(shown) <= 60 else "see values.yaml"
        lines.append(f"| `{path}` | {f'`{shown}`' if shown != 'see values.yaml' else shown} | {about} |")
    return "\n".join(lines)


def readme() -> str:
    """The README with the present table."""
    text = (CHART / "README.md").read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def schema() -> str:
    """The schema of values with the present settings. What stands for a pool stands for the defaults of pools, too."""
    found = json.loads((CHART / "values.schema.json").read_text())
    own = found["properties"]
    pool = own["pools"]["items"]["properties"]
    for section, part in (
        ("node", pool),
        ("router", own["router"]["properties"]),
        ("bootstrap", own["bootstrap"]["properties"]),
    ):
        names = [key.path for key in keys(SECTIONS[section]) if not key.flag_only]
        part["settings"]["propertyNames"] = {"enum": names}
    own["poolDefaults"]["properties"] = {name: part for name, part in pool.items() if name not in ("name", "role")}
    return json.dumps(found, indent=1) + "\n"


def main() -> None:
    files = {CHART / "README.md": readme(), CHART / "values.schema.json": schema(), **copies()}
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    print(f"wrote {len(files)} files of {CHART.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
