"""Rows of a benchmark: one figure each, beside what it is measured against. Printing and JSON only; it measures nothing itself.

A figure stands beside its rival or ceiling from the same run (`against`, `against_value`); `ratio` is value / against_value, `spread` is
(max - min) / median over the repeats (narrower of `paired` ones), `goal` the least ratio that was promised and `holds` whether it was met (None: no
promise).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Row:
    metric: str
    case: str
    value: float
    unit: str
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    spread: float | None = None
    goal: float | None = None
    holds: bool | None = None


class Paired(NamedTuple):
    """A ratio that was measured in many turns. spread: from their tenth to their ninetieth percentile, over the median: of so many turns on a machine
    with neighbours the extremes say nothing."""

    median: float
    spread: float


def paired(ratios: Sequence[float]) -> Paired:
    """Of the ratios of turns, in each of which both sides were measured one after the other."""
    ordered, median = sorted(ratios), statistics.median(ratios)
    tenth = len(ordered) // 10
    return Paired(median, (ordered[len(ordered) - 1 - tenth] - ordered[tenth]) / median)


def row(
    metric: str,
    case: str,
    samples: Sequence[float],
    unit: str,
    *,
    against: str = "",
    against_value: float | None = None,
    goal: float | None = None,
) -> Row:
    """A row from repeated measurements of one figure, the median as its value."""
    value = statistics.median(samples)
    ratio = value / against_value if against_value else None
    spread = (max(samples) - min(samples)) / value if value and len(samples) > 1 else None
    holds = None if goal is None or ratio is None else ratio >= goal
    return Row(metric, case, value, unit, against, against_value, ratio, spread, goal, holds)


def print_rows(rows: Iterable[Row]) -> None:
    """A table for people: one line per row, figures that miss their goal say so."""
    header = ("metric", "case", "value", "unit", "against", "its value", "ratio", "spread", "goal", "holds")
    table = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def write_json(rows: Iterable[Row], path: Path) -> None:
    """The same rows, as a JSON list of objects."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _cells(row: Row) -> tuple[str, ...]:
    holds = {None: "", True: "yes", False: "NO"}[row.holds]
    return (
        row.metric,
        row.case,
        _figure(row.value),
        row.unit,
        row.against,
        _figure(row.against_value),
        _figure(row.ratio),
        "" if row.spread is None else f"{row.spread:.0%}",
        _figure(row.goal),
        holds,
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
