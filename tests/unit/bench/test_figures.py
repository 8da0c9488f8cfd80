"""Figures that benches record: the newest of each kind, and a page that follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness import figures
from bench.harness.report import Row, times_as_good


def row(metric: str, case: str, value: float, **more: Any) -> dict[str, Any]:
    return Row(metric, case, value, "ms", **more).fields()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(figures, "TABLE", tmp_path / "figures.md")
    monkeypatch.setattr(figures, "README", tmp_path / "README.md")
    monkeypatch.setattr(figures, "SHOWN", ())
    (tmp_path / "README.md").write_text(f"# Read me\n{figures.BEGIN}\n{figures.END}\nthe rest\n")
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
    beside = {"against": "memmove", "against_value": 4.0, "spread": 0.25}
    figures.record([row("rate", "a|b", 2.0, goal=0.9, **beside)], "python -m bench.a")
    figures.record([row("rate", "c", 2.0, goal=0.4, better="less", **beside)], "python -m bench.b")
    page = (place / "figures.md").read_text()
    assert page.count("## `python -m bench.") == 2 and figures.machine() in page
    assert "| rate | a\\|b | 2 ms | memmove | 4 | more | 0.5 | 0.9 missed | 25% |" in page
    assert "| rate | c | 2 ms | memmove | 4 | less | 2 | 0.4 | 25% |" in page


def test_two_rows_of_one_name_are_refused(place: Path) -> None:
    with pytest.raises(ValueError, match=r"stand twice among the rows: .*exposed"):
        figures.record([row("exposed", "one", 1.0), row("exposed", "one", 2.0)], "python -m bench.a")
    assert figures.read() == []


def test_the_readme_shows_recorded_figures(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SHOWN", (("a step", "time", "one row"), ("a rate", "rate", "c")))
    slow = row("time", "one row", 3.0, against="vLLM", against_value=2.0, better="less", goal=1.0)
    rate = {**row("rate", "c", 6.0, against="memmove", against_value=4.0, goal=0.9), "unit": "GB/s"}
    figures.record([slow, rate], "python -m bench.a")
    lines = (place / "README.md").read_text().splitlines()
    assert lines[0] == "# Read me" and lines[-1] == "the rest"
    assert "| a step | 3 ms | vLLM: 2 ms | 0.67, goal 1 missed |" in lines
    assert "| a rate | 6 GB/s | memmove: 4 GB/s | 1.50 |" in lines


def test_the_readme_is_the_one_of_the_recorded_figures() -> None:
    assert figures.README.read_text() == figures.readme(figures.read()), "run python -m bench.harness.figures"


def test_recorded_figures_are_judged_by_their_ratio_and_their_goal_alone() -> None:
    for figure in figures.read():
        value, beside, better, ratio = (figure[name] for name in ("value", "against_value", "better", "ratio"))
        assert (ratio is None) == (beside is None) == (better is None), figure
        if not figure["in_turns"] and ratio is not None:
            assert ratio == pytest.approx(times_as_good(value, beside, better)), figure
        assert figure["holds"] == (None if figure["goal"] is None else ratio >= figure["goal"]), figure


def test_the_page_in_the_documents_is_the_one_of_the_recorded_figures() -> None:
    assert figures.TABLE.read_text() == figures.table(figures.read()), "run python -m bench.harness.figures"
