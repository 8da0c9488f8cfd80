"""Writes the tables of state machines into ARCHITECTURE.md, from the code: `python scripts/state_tables.py`"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "router")]

from pdcluster.core.lifecycle import CHECKING, READING, RESIDENCE, WRITING  # noqa: E402
from pdcluster_router.request.states import ATTEMPT, REQUEST  # noqa: E402

TABLES: dict[str, Mapping[tuple[Enum, str], Enum]] = {
    "a ticket at its writer": WRITING,
    "a ticket at its reader": READING,
    "a Commit at its reader": CHECKING,
    "a sequence in the scheduler": RESIDENCE,
    "a request at the router (`router:request/states.py`)": REQUEST,
    "its running attempt": ATTEMPT,
}


def table_of(title: str, table: Mapping[tuple[Enum, str], Enum]) -> str:
    """One row per state, its events in the order of the code."""
    begins = {state for state, _ in table}
    lines = [f"| {title} | event | next |", "|---|---|---|"]
    for state in dict.fromkeys(state for state, _ in table):
        moves = [(event, after) for (before, event), after in table.items() if before is state]
        nexts = (f"{after.name.lower()}{'' if after in begins else ' (end)'}" for _, after in moves)
        lines.append(f"| {state.name.lower()} | {', '.join(event for event, _ in moves)} | {', '.join(nexts)} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    for title, table in TABLES.items():
        head = re.escape(f"| {title} | event | next |")
        text, num = re.subn(rf"{head}(\n\|.*)+", table_of(title, table).replace("\\", r"\\"), text)
        if num != 1:
            raise SystemExit(f"ARCHITECTURE.md has {num} tables that begin with '| {title} |', not one")
    return text


if __name__ == "__main__":
    path = ROOT / "ARCHITECTURE.md"
    path.write_text(updated(path.read_text()))
