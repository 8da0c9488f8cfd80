"""The newest figure of each kind: `bench/figures.json`, and what is made from it: the page `docs/figures.md`, and the
README's table of a few.

Benches add their rows with `--record`. `python -m bench.harness.figures` writes both anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "bench" / "figures.json"
TABLE = ROOT / "docs" / "figures.md"
README = ROOT / "README.md"
HEAD = """# Figures

The newest figure of each kind, each beside its ceiling or rival of the same run. The machines are shared and noisy, so
ratios say more than values.

- `ratio` is how many times as good the value is: value ÷ beside where more is better, beside ÷ value where less is.
  `better` says which. Of figures that were measured in turns with what is beside them, it is the median of the turns'.
- `goal` is the least ratio that was promised. It is missed where the ratio is less. Nothing else decides that.
- `spread` is that of the repeats.

Benches add their rows with `--record`, and write this page.
"""
# What the README shows: what it is in words, and the figure's metric and case.
SHOWN = (
    ("prefill of 512 tokens, one core, bfloat16", "prefill MFU", "512 tokens"),
    ("decode step of one row, context 128, one core", "decode MBU", "batch 1, context 128"),
    ("from the first token to the first decode step on the other node", "hand-over p50", "shm, 32 tokens"),
    ("second token, where KV takes half as long to send as its prompt to compute", "ttst", "link takes 50% of prefill"),
    ("KV over shared memory with digests, 16 MiB", "protocol.shm", "16 MiB, digests on"),
    ("KV over tcp with digests, 64 MiB", "protocol.tcp", "64 MiB, digests on"),
    ("first token of a second turn, 480 tokens fetched", "TTFT of turn 2", "shm, answer of 512, 480 pulled"),
    ("requests a second at 1.5 times the capacity, in time", "goodput", "processes, load 1.5"),
    ("node-hours of autoscaling, a recorded hour (replay)", "node-hours", "conversation_trace, ours"),
    ("node-hours of autoscaling, a day with bursts (replay)", "node-hours", "day, ours"),
    ("requests a second of one router core", "requests/s per core, in turns", "pdcluster local"),
)
BEGIN, END = "<!-- figures: made by python -m bench.harness.figures -->", "<!-- end of figures -->"

Figure = dict[str, Any]


def command_line() -> str:
    """How this process was started, as one types it."""
    module = sys.modules["__main__"].__spec__
    name = f"python -m {module.name.removesuffix('.__main__')}" if module is not None else sys.argv[0]
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
    """Keep these rows instead of older ones of the same metric and case, and write the tables.

    Raises ValueError where two rows have both in common: one would hide the other.
    """
    twice = [name for name, count in Counter((row["metric"], row["case"]) for row in rows).items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} figures stand twice among the rows: {twice[:3]}; give each a metric of its own")
    origin = {"machine": machine(), "commit": commit(), "command": command, "date": time.strftime("%Y-%m-%d")}
    kept = {(each["metric"], each["case"]): each for each in read()}
    kept.update({(row["metric"], row["case"]): {**row, **origin} for row in rows})
    FIGURES.write_text(json.dumps(sorted(kept.values(), key=_order), indent=1) + "\n")
    write()


def write() -> None:
    """The page, and the README's table."""
    figures = read()
    TABLE.write_text(table(figures))
    README.write_text(readme(figures))


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
            "| figure | case | value | beside | its value | better | ratio | goal | spread |\n"
            "|---|---|---|---|---|---|---|---|---|"
        )
        parts += [_line(row) for row in rows]
    return "\n".join(parts) + "\n"


def readme(figures: Sequence[Figure]) -> str:
    """The README with the present table. Raises KeyError for a figure that is not recorded."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{shown_table(figures)}\n{END}{after}"


def shown_table(figures: Sequence[Figure]) -> str:
    found = {(row["metric"], row["case"]): row for row in figures}
    lines = ["| what | value | beside | times as good |", "|---|---|---|---|"]
    for what, *name in SHOWN:
        row = found[name[0], name[1]]
        goal = "" if row["holds"] is not False else f", goal {row['goal']:.3g} missed"
        value, beside = (f"{_number(row[name])} {row['unit']}" for name in ("value", "against_value"))
        lines.append(f"| {what} | {value} | {row['against']}: {beside} | {row['ratio']:.2f}{goal} |")
    return "\n".join(lines)


def _order(figure: Figure) -> tuple[str, ...]:
    return (*_origin(figure), figure["metric"], figure["case"])


def _origin(figure: Figure) -> tuple[str, str, str, str]:
    return figure["command"], figure["machine"], figure["commit"], figure["date"]


def _line(row: Figure) -> str:
    goal = "" if row["goal"] is None else f"{row['goal']:.4g}" + ("" if row["holds"] else " missed")
    spread = "" if row["spread"] is None else f"{row['spread']:.0%}"
    value, beside = _number(row["value"]), _number(row["against_value"])
    cells = (
        row["metric"], row["case"], f"{value} {row['unit']}", row["against"], beside, row["better"] or "",
        _number(row["ratio"]), goal, spread,
    )  # fmt: skip
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    write()
