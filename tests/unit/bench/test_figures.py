"""Figures that benches record: the newest of each kind, and a page that follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness import figures


def row(metric: str, case: str, value: float, **more: Any) -> dict[str, Any]:
    empty = {"unit": "ms", "against": "", "against_value": None, "ratio": None, "spread": None, "goal": None}
    return {"metric": metric, "case": case, "value": value, **empty, "holds": None, "interval": None, **more}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(figures, "TABLE", tmp_path / "figures.md")
    return tmp_path


def test_a_figure_replaces_the_one_before_it_and_no_other(place: Path) -> None:
    figures.record([row("latency", "one row", 3.0), row("latency", "two rows", 4.0)], "python -m bench.a")
    figures.record([row("latency", "one row", 2.0), row("rate", "one row", 9.0)], "python -m bench.a --quick")
    found = {(each["metric"], each["case"]): (each["value"], each["command"]) for each in figures.read()}
    assert found == {
        ("latency", "one row"): (2.0, "python -m bench.a --quick"),
        ("latency", "two rows"): (4.0, "python -m bench.a"),
        ("rate", "one row"): (9.0, "python -m bench.a --quick"),
    }
    assert all(each["machine"] and each["commit"] and each["date"] for each in figures.read())


def test_the_page_has_a_table_for_each_command_and_says_which_goals_are_missed(place: Path) -> None:
    beside = {"against": "memmove", "against_value": 4.0, "ratio": 0.5, "spread": 0.25}
    figures.record([row("rate", "a|b", 2.0, goal=0.9, holds=False, **beside)], "python -m bench.a")
    figures.record([row("rate", "c", 2.0, goal=0.4, holds=True, **beside)], "python -m bench.b")
    page = (place / "figures.md").read_text()
    assert page.count("## `python -m bench.") == 2 and figures.machine() in page
    assert "| rate | a\\|b | 2 ms | memmove | 4 | 0.5 | 0.9 missed | 25% |" in page
    assert "| rate | c | 2 ms | memmove | 4 | 0.5 | 0.4 | 25% |" in page


def test_the_page_in_the_documents_is_the_one_of_the_recorded_figures() -> None:
    assert figures.TABLE.read_text() == figures.table(figures.read()), "run python -m bench.harness.figures"
