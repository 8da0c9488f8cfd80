"""What a bench says of a ratio that was measured in turns."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.harness.report import Row, median_interval, paired, print_rows


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
    assert paired(ratios).median == statistics.median(ratios)
    print_rows([Row("metric", "case", 1.0, "GB/s", ratio=0.7, interval=paired(ratios).interval)])
    assert "0.63 to 0.77" in capsys.readouterr().out
