"""Rows as a table, JSON, YAML or names. Formatting only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from io import TextIOWrapper

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

STATE_COLOURS = {
    "ready": "green", "degraded": "yellow", "cordoned": "yellow", "connecting": "yellow", "stuck": "red",
    "not ready": "red", "open": "red", "half_open": "yellow",
}  # fmt: skip
# Of a table that no terminal shows.
PIPE_WIDTH = 400
# To which a narrow terminal cuts a text, at most.
MIN_TEXT_WIDTH = 4


class PrintFormat(StrEnum):
    """How a command prints what it found."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class PrintedColumn:
    """One column. key: of a row. is_wide: only with -o wide. text: what stands there, made of the whole row."""

    title: str
    key: str
    is_wide: bool = False
    is_number: bool = False
    text: Callable[[Mapping[str, object]], str] | None = None


def print_any_text() -> None:
    """Characters that the output's encoding lacks are printed as ?, instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


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
        show_table(rows, columns, is_wide=output is PrintFormat.WIDE)


def show_data(value: object, output: PrintFormat) -> None:
    """Print any JSON value."""
    if output is PrintFormat.YAML:
        import yaml

        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), end="")
    else:
        print(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(rows: Sequence[Mapping[str, object]], columns: Sequence[PrintedColumn], *, is_wide: bool) -> None:
    """One line for each row. A terminal that is too narrow cuts texts, never numbers; with is_wide it wraps lines."""
    out = console()
    if is_wide:
        out.width = max(out.width, PIPE_WIDTH)
    shown = [each for each in columns if is_wide or not each.is_wide]
    out.print(table(rows, shown, out.width), soft_wrap=is_wide)


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[PrintedColumn], width: int = PIPE_WIDTH) -> Table:
    """width: in characters. The widest texts are cut to it."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    cells = [[_cell(row, column) for column in columns] for row in rows]
    for column, most in zip(columns, _widths(cells, columns, width), strict=True):
        justify: JustifyMethod = "right" if column.is_number else "left"
        made.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis", max_width=most)
    for row in cells:
        made.add_row(*row)
    return made


def _widths(cells: Sequence[Sequence[Text]], columns: Sequence[PrintedColumn], width: int) -> list[int]:
    """What each column may take. The widest text gives way first, down to its title."""
    found = [
        max(cell_len(column.title), *(row[index].cell_len for row in cells), 1) if cells else cell_len(column.title)
        for index, column in enumerate(columns)
    ]
    too_wide = sum(found) + 2 * (len(columns) - 1) - width
    while too_wide > 0:
        widest = max(
            (index for index, column in enumerate(columns) if not column.is_number and found[index] > MIN_TEXT_WIDTH),
            key=lambda index: found[index],
            default=None,
        )
        if widest is None:
            break
        found[widest] -= 1
        too_wide -= 1
    return found


def _cell(row: Mapping[str, object], column: PrintedColumn) -> Text:
    value = row.get(column.key) if column.text is None else column.text(row)
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
