"""Rows of a benchmark: one figure each, beside what it is measured against. Printing and JSON only; it measures nothing
itself.

Every bench judges by the same five:

 - value: what was measured, with its unit.
 - beside (`against`, `against_value`): the rival, ceiling or allowance of the same run, in the same unit.
 - ratio: how many times as good the value is: value ÷ beside where more is better, beside ÷ value where less is. Of
   something measured in turns it is the median of the turns' ratios.
 - goal: the least ratio that was promised; None: no promise.
 - holds: whether ratio ≥ goal; None: no promise.

`spread` is (max - min) / median over the repeats (narrower of turns), `interval` where the ratio lies with 95 %
certainty if it was measured in enough turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.harness.figures import command_line, record

Better = Literal["more", "less"]
# A ratio beside nothing at all, so that it stays a number.
MOST_RATIO = 1e6


def times_as_good(value: float, beside: float, better: Better = "more") -> float:
    """The ratio of two figures of the same unit."""
    good, bad = (value, beside) if better == "more" else (beside, value)
    if bad > 0:
        return min(good / bad, MOST_RATIO)
    return MOST_RATIO if good > 0 else 1.0


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


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. turns: the ratio was measured in turns."""

    metric: str
    case: str
    value: float
    unit: str
    _: KW_ONLY
    against: str = ""
    against_value: float | None = None
    better: Better = "more"
    goal: float | None = None
    spread: float | None = None
    turns: Paired | None = None

    def __post_init__(self) -> None:
        if self.goal is not None and self.ratio is None:
            raise ValueError(f"{self.metric} of {self.case} has a goal and nothing beside it; give against_value")

    @property
    def ratio(self) -> float | None:
        if self.turns is not None:
            return self.turns.median
        return None if self.against_value is None else times_as_good(self.value, self.against_value, self.better)

    @property
    def holds(self) -> bool | None:
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.turns is None else self.turns.interval

    def fields(self) -> dict[str, Any]:
        """As it is kept."""
        names = "metric", "case", "value", "unit", "against", "against_value", "better", "ratio", "spread", "goal"
        found = {name: getattr(self, name) for name in (*names, "holds", "interval")}
        return found | {"better": None if self.ratio is None else self.better, "in_turns": self.turns is not None}


def row(
    metric: str,
    case: str,
    samples: Sequence[float],
    unit: str,
    *,
    against: str = "",
    against_value: float | None = None,
    better: Better = "more",
    goal: float | None = None,
) -> Row:
    """A row from repeated measurements of one figure, the median as its value."""
    value = statistics.median(samples)
    spread = (max(samples) - min(samples)) / value if value and len(samples) > 1 else None
    return Row(
        metric, case, value, unit, against=against, against_value=against_value, better=better, goal=goal, spread=spread
    )


def row_of_turns(
    metric: str,
    case: str,
    own: Sequence[float],
    unit: str,
    *,
    against: str,
    other: Sequence[float],
    better: Better = "more",
    goal: float | None = None,
) -> Row:
    """A row from turns, in each of which both sides were measured: own and other have one sample of each."""
    turns = paired([times_as_good(mine, theirs, better) for mine, theirs in zip(own, other, strict=True)])
    value, beside = statistics.median(own), statistics.median(other)
    return Row(
        metric, case, value, unit, against=against, against_value=beside, better=better, goal=goal, spread=turns.spread,
        turns=turns,
    )  # fmt: skip


def print_rows(rows: Iterable[Row]) -> None:
    """A table for people: one line per row, figures that miss their goal say so."""
    header = (
        "metric",
        "case",
        "value",
        "unit",
        "against",
        "its value",
        "better",
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
        arguments.json.write_text(json.dumps([row.fields() for row in rows], indent=1) + "\n")
    if arguments.record:
        record([row.fields() for row in rows], command_line())


def _cells(row: Row) -> tuple[str, ...]:
    holds = {None: "", True: "yes", False: "NO"}[row.holds]
    return (
        row.metric,
        row.case,
        _figure(row.value),
        row.unit,
        row.against,
        _figure(row.against_value),
        "" if row.ratio is None else row.better,
        _figure(row.ratio),
        "" if row.spread is None else f"{row.spread:.0%}",
        "" if row.interval is None else f"{row.interval[0]:.2f} to {row.interval[1]:.2f}",
        _figure(row.goal),
        holds,
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
