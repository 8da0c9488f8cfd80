"""Rows as a table, JSON, YAML or names. Formatting only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text

STATE_COLOURS = {
    "ready": "green", "degraded": "yellow", "cordoned": "yellow", "connecting": "yellow", "stuck": "red",
    "not ready": "red", "open": "red", "half_open": "yellow",
}  # fmt: skip
# Of a table that no terminal shows.
PIPE_WIDTH = 400


class PrintFormat(StrEnum):
    """How a command prints what it found."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class PrintedColumn:
    """One column. key: of a row. is_wide: only with -o wide."""

    title: str
    key: str
    is_wide: bool = False
    is_number: bool = False


def console(*, is_error: bool = False) -> Console:
    """rich takes NO_COLOR and the width from the terminal."""
    stream = sys.stderr if is_error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False, emoji=False)


def show(
    rows: Sequence[Mapping[str, object]], columns: Sequence[PrintedColumn], output: PrintFormat, *, name: str = "name"
) -> None:
    """Print rows. JSON and YAML have every key of a row, tables only the columns."""
    if output is PrintFormat.NAME:
        for row in rows:
            print(row[name])
    elif output in (PrintFormat.JSON, PrintFormat.YAML):
        show_data(list(rows), output)
    else:
        console().print(table(rows, [each for each in columns if output is PrintFormat.WIDE or not each.is_wide]))


def show_data(value: object, output: PrintFormat) -> None:
    """Print any JSON value."""
    if output is PrintFormat.YAML:
        import yaml

        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), end="")
    else:
        print(json.dumps(value, indent=2, ensure_ascii=False))


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[PrintedColumn]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column.title, justify="right" if column.is_number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(row.get(column.key)) for column in columns))
    return made


def _cell(value: object) -> Text:
    text = "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
    return Text(text, style=STATE_COLOURS.get(text, ""))


@contextmanager
def screen() -> Iterator[Console]:
    """The terminal's other screen while the block runs; plain output where there is no terminal."""
    found = console()
    if not found.is_terminal:
        yield found
        return
    with found.screen():
        yield found


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1000:.0f} ms" if value < 1.0 else f"{value:.1f} s"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""
