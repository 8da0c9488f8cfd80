"""Prints the effective settings of this machine as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdcluster.core.errors import ConfigError
from pdcluster.settings import flags
from pdcluster.settings.config import SECTIONS, keys, load
from pdcluster.settings.keys import Key, Section


def show_settings(file: Path | None, pairs: Sequence[str], only: str | None) -> None:
    """Print every key with its value, its source and its variable. Raises ConfigError when one is wrong."""
    table = Table(box=None, pad_edge=False)
    for title in ("key", "value", "from", "variable"):
        table.add_column(title, overflow="fold", no_wrap=title == "key")
    if only is not None and only not in SECTIONS:
        raise ConfigError(f"--section is {only!r}, but must be one of {', '.join(SECTIONS)}")
    given = flags.assignments(list(pairs))
    for name, cls in SECTIONS.items():
        loaded = load(cls, given, file)  # also of the sections that are not shown, so that their errors are
        for key in _shown(cls) if only in (None, name) else []:
            table.add_row(key.path, key.show(loaded.values[key.path]), loaded.origins[key.path], key.variable)
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False)


def _shown(cls: type[Section]) -> list[Key]:
    return [key for key in keys(cls) if not key.flag_only]
