"""Prints the effective settings of this machine as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pdcluster.core.errors import ConfigError
from pdcluster.settings import flags
from pdcluster.settings.config import SECTIONS, LoadedSection, keys, load
from pdcluster.settings.keys import SEPARATOR, Key, Section, joined

SettingsFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=flags.FILE_HELP)]
SettingPairs = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=flags.SET_HELP)]
SectionName = Annotated[
    str | None, typer.Option("--section", metavar="NAME", help="only node, router, bootstrap or up")
]


# What is wrong with a section that a process would find only when it starts.
Find = Callable[[LoadedSection[Any]], Iterable[str]]


def show_settings(file: Path | None, pairs: Sequence[str], only: str | None, find: Find = lambda loaded: ()) -> None:
    """Print every key with its value, its source and its variable.

    Raises ConfigError with all that is wrong: in keys, and what `find` says.
    """
    from rich.console import Console  # of no other command
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("key", "value", "from", "variable"):
        table.add_column(title, overflow="fold", no_wrap=title == "key")
    if only is not None and only not in SECTIONS:
        raise ConfigError(f"--section is {only!r}, but must be one of {', '.join(SECTIONS)}")
    given = flags.assignments(list(pairs))
    problems: list[str] = []
    warnings: list[str] = []
    for name, cls in SECTIONS.items():
        try:
            loaded = load(cls, given, file)  # also of the sections that are not shown, so that their errors are
        except ConfigError as error:
            problems += str(error).split(SEPARATOR)
            continue
        if only not in (None, name):
            continue
        problems += find(loaded)
        warnings += loaded.config.warnings()
        for key in _shown(cls):
            table.add_row(key.path, key.show(loaded.values[key.path]), loaded.origins[key.path], key.variable)
    if problems:
        raise ConfigError(joined(problems))
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False)
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr, flush=True)


def _shown(cls: type[Section]) -> list[Key]:
    return [key for key in keys(cls) if not key.flag_only]
