"""Prints the tables that the fault tests filled, after the tests."""

from __future__ import annotations

import pytest

TABLES = pytest.StashKey[list[tuple[str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLES] = []


@pytest.fixture
def show_table(request: pytest.FixtureRequest):
    """Call it with a title and a text."""
    return lambda title, text: request.config.stash[TABLES].append((title, text))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, text in config.stash[TABLES]:
        terminalreporter.section(title)
        terminalreporter.write_line(text)
