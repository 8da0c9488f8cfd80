"""Rows of a benchmark: one figure each, beside what it is measured against. Printing and JSON only; it measures nothing
itself.

A figure stands beside its rival or ceiling from the same run (`against`, `against_value`); `ratio` is value /
against_value, `spread` is (max - min) / median over the repeats (narrower of `paired` ones), `interval` where the ratio
lies with 95 % certainty if it was measured in enough turns, `goal` the least ratio that was promised and `holds`
whether it was met (None: no promise).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness.figures import command_line, record


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
    interval: tuple[float, float] | None = None


class Paired(NamedTuple):
    """A ratio that was measured in many turns. spread: from their tenth to their ninetieth percentile, over the median:
    of so many turns on a machine with neighbours the extremes say nothing. interval: see `median_interval`."""

    median: float
    spread: float
    interval: tuple[float, float] | None


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Where the median of what the samples are drawn from lies, in at least 95 % of such draws, whatever its shape;
    None of too few. Less than k of n lie below it as often as less than k of n coins show heads."""
    ordered, below, outside = sorted(samples), 0.0, 0
    while (below := below + math.comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    return (ordered[outside - 1], ordered[-outside]) if outside else None


def paired(ratios: Sequence[float]) -> Paired:
    """Of the ratios of turns, in each of which both sides were measured one after the other."""
    ordered, median = sorted(ratios), statistics.median(ratios)
    tenth = len(ordered) // 10
    return Paired(median, (ordered[len(ordered) - 1 - tenth] - ordered[tenth]) / median, median_interval(ordered))


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
    header = (
        "metric",
        "case",
        "value",
        "unit",
        "against",
        "its value",
        "ratio",
        "spread",
        "95 % of it",
        "goal",
        "holds",
    )
    table = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """`--json FILE` and `--record`; `save` does what they say."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--record", action="store_true", help="keep the rows in bench/figures.json and docs/figures.md")


def save(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Write the rows to where the flags of `add_output_flags` say."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.record:
        record([asdict(row) for row in rows], command_line())


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
        "" if row.interval is None else f"{row.interval[0]:.2f} to {row.interval[1]:.2f}",
        _figure(row.goal),
        holds,
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
