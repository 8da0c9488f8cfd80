"""Prints the tables that the fault tests filled, after the tests, whichever process they ran in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from fault_matrix import Sums, joined, table_of

TABLE, PART = "fault table: ", "part of the fault table: "


@pytest.fixture
def show_table(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Call it with a title and a text."""
    return lambda title, text: record_property(TABLE + title, text)


@pytest.fixture
def add_to_table(record_property: Callable[[str, object], None]) -> Callable[[str, Sums], None]:
    """Call it with the title of a table that several tests fill and with what this one adds to it."""
    return lambda title, sums: record_property(PART + title, {cell: dict(counts) for cell, counts in sums.items()})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    parts: dict[str, list[Mapping[str, Mapping[str, int]]]] = {}
    for name, value in (each for report in reports for each in report.user_properties):
        if name.startswith(TABLE):
            _show(terminalreporter, name.removeprefix(TABLE), value)
        elif name.startswith(PART):
            parts.setdefault(name.removeprefix(PART), []).append(value)
    for title, each in parts.items():
        _show(terminalreporter, f"{title}, {len(each)} parts", table_of(joined(each)))


def _show(terminalreporter: pytest.TerminalReporter, title: str, text: str) -> None:
    terminalreporter.section(title)
    terminalreporter.write_line(text)
