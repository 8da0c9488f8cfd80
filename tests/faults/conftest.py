"""Prints the tables that the fault tests filled, after the tests, whichever process they ran in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

TABLE = "fault table: "


@pytest.fixture
def show_table(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Call it with a title and a text."""
    return lambda title, text: record_property(TABLE + title, text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    for name, text in (each for report in reports for each in report.user_properties):
        if name.startswith(TABLE):
            terminalreporter.section(name.removeprefix(TABLE))
            terminalreporter.write_line(text)
