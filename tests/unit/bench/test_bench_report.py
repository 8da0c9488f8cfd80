"""What a bench says of a figure beside another one, and of a ratio that was measured in turns."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.harness.report import MOST_RATIO, Better, Row, median_interval, print_rows, row, row_of_turns, times_as_good


def test_of_41_turns_the_median_lies_between_the_14th_and_the_28th() -> None:
    assert median_interval(random.Random(1).sample(range(1, 42), 41)) == (14, 28)


def test_of_six_turns_it_lies_between_the_extremes_and_of_five_nobody_knows() -> None:
    assert median_interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    assert median_interval([3, 1, 2, 5, 4]) is None
    assert median_interval([]) is None


def test_19_of_20_intervals_hold_the_median_of_what_was_drawn_from() -> None:
    draw = random.Random(2)
    found = [median_interval([draw.expovariate(1.0) for _ in range(21)]) for _ in range(4000)]
    inside = sum(each is not None and each[0] <= 0.6931 <= each[1] for each in found)
    assert 0.95 <= inside / len(found) <= 0.99


def test_the_interval_stands_beside_its_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = [0.5 + index / 100 for index in range(41)]
    found = row_of_turns("metric", "case", ratios, "GB/s", against="engine", other=[1.0] * 41)
    assert found.ratio == statistics.median(ratios)
    print_rows([found])
    assert "0.63 to 0.77" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "beside", "better", "ratio"),
    [
        (3.0, 2.0, "more", 1.5), (2.0, 3.0, "less", 1.5), (0.0, 2.0, "more", 0.0), (0.0, 2.0, "less", MOST_RATIO),
        (-0.1, 2.0, "less", MOST_RATIO), (2.0, 0.0, "less", 0.0), (2.0, 0.0, "more", MOST_RATIO), (0.0, 0.0, "less", 1.0),
    ],
)  # fmt: skip
def test_a_ratio_says_how_many_times_as_good(value: float, beside: float, better: Better, ratio: float) -> None:
    assert times_as_good(value, beside, better) == ratio


@pytest.mark.parametrize(("better", "holds"), [("more", False), ("less", True)])
def test_a_goal_holds_where_the_ratio_reaches_it_and_nothing_else_decides(better: Better, holds: bool) -> None:
    once = row("m", "c", [2.0], "ms", against="x", against_value=3.0, better=better, goal=1.4)
    turns = row_of_turns("m", "c", [2.0, 2.0], "ms", against="x", other=[3.0, 3.0], better=better, goal=1.4)
    for found in (once, turns):
        assert found.holds is holds and found.ratio is not None and holds == (found.ratio >= 1.4)
        told = found.fields()
        assert (told["ratio"], told["holds"], told["better"]) == (found.ratio, holds, better)
    assert row("m", "c", [2.0], "ms", against="x", against_value=3.0).holds is None


def test_a_goal_wants_something_beside_the_figure() -> None:
    with pytest.raises(ValueError, match="m of c has a goal and nothing beside it"):
        Row("m", "c", 1.0, "ms", goal=0.9)
