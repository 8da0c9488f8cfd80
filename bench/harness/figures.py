"""The newest figure of each kind: `bench/figures.json`, and the table of it in `docs/figures.md`.

Benches add their rows with `--record`. `python -m bench.harness.figures` writes the table anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "bench" / "figures.json"
TABLE = ROOT / "docs" / "figures.md"
HEAD = """# Figures

The newest figure of each kind, each beside its ceiling or rival of the same run. Ratios say more than values: the
machines are shared and noisy. `goal` is the least ratio that was promised, `spread` is that of the repeats. Benches add
their rows with `--record`, and write this page.
"""

Figure = dict[str, Any]


def command_line() -> str:
    """How this process was started, as one types it."""
    module = sys.modules["__main__"].__spec__
    name = f"python -m {module.name}" if module is not None else sys.argv[0]
    return " ".join([name, *(word for word in sys.argv[1:] if word != "--record")])


def machine() -> str:
    """The CPU and how many of its cores this process may use."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "CPU")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The checkout's commit, with a plus where it has changes."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def record(rows: Sequence[Mapping[str, Any]], command: str) -> None:
    """Keep these rows instead of older ones of the same metric and case, and write the table."""
    origin = {"machine": machine(), "commit": commit(), "command": command, "date": time.strftime("%Y-%m-%d")}
    kept = {(each["metric"], each["case"]): each for each in read()}
    kept.update({(row["metric"], row["case"]): {**row, **origin} for row in rows})
    FIGURES.write_text(json.dumps(sorted(kept.values(), key=_order), indent=1) + "\n")
    TABLE.write_text(table(read()))


def read() -> list[Figure]:
    """All figures, by command."""
    figures: list[Figure] = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    return figures


def table(figures: Sequence[Figure]) -> str:
    """The page: a table for each command."""
    parts = [HEAD]
    for (command, machine_name, commit_name, date), rows in groupby(figures, key=_origin):
        parts.append(f"\n## `{command}`\n\n{machine_name}; commit {commit_name}, {date}.\n")
        parts.append(
            "| figure | case | value | beside | its value | ratio | goal | spread |\n|---|---|---|---|---|---|---|---|"
        )
        parts += [_line(row) for row in rows]
    return "\n".join(parts) + "\n"


def _order(figure: Figure) -> tuple[str, ...]:
    return (*_origin(figure), figure["metric"], figure["case"])


def _origin(figure: Figure) -> tuple[str, str, str, str]:
    return figure["command"], figure["machine"], figure["commit"], figure["date"]


def _line(row: Figure) -> str:
    goal = "" if row["goal"] is None else f"{row['goal']:.4g}" + ("" if row["holds"] else " missed")
    spread = "" if row["spread"] is None else f"{row['spread']:.0%}"
    cells = (
        row["metric"], row["case"], f"{row['value']:.4g} {row['unit']}", row["against"], _number(row["against_value"]),
        _number(row["ratio"]), goal, spread,
    )  # fmt: skip
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    TABLE.write_text(table(read()))
