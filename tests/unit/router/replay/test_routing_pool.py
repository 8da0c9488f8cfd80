"""Rounds of bench.routing --real that are judged together."""

from pathlib import Path

import pytest

from bench.report import Row, write_json
from bench.routing_real import pooled
from pdcluster.errors import ConfigError


def written(path: Path, *good: tuple[int, int, int]) -> Path:
    """A start of the bench: of each round how many of 10 were in time, by auto, on one node, on two."""
    ways = ("auto", "local", "remote")
    rows = [
        Row(f"in time, {way}", f"real, seed 1, round {number}", count, "requests", "asked", 10)
        for number, counts in enumerate(good)
        for way, count in zip(ways, counts, strict=True)
    ]
    write_json([Row("goodput auto", "real", 3.0, "1/s"), *rows], path)
    return path


def test_rounds_of_several_starts_are_judged_as_one(tmp_path: Path) -> None:
    files = [written(tmp_path / "a.json", (9, 8, 2), (9, 6, 2)), written(tmp_path / "b.json", (8, 9, 2))]
    *shares, judged = pooled(files, seed=0)
    assert [row.value for row in shares] == pytest.approx([26 / 30, 23 / 30, 6 / 30])
    assert judged.against == "colocated" and "3 rounds, 30 requests a way, ratio 1.130" in judged.case
    assert 8 / 9 <= judged.value <= 1.5, "a bound between the worst and the best round"


def test_more_rounds_that_agree_raise_the_bound(tmp_path: Path) -> None:
    few = written(tmp_path / "few.json", (9, 9, 2), (8, 9, 2), (9, 8, 2))
    many = [written(tmp_path / f"{number}.json", (9, 9, 2), (8, 9, 2), (9, 8, 2)) for number in range(12)]
    bounds = [list(pooled(files, seed=0))[-1].value for files in ([few], many)]
    assert bounds[0] < bounds[1] < 1.0


def test_a_file_without_rounds_is_refused_by_name(tmp_path: Path) -> None:
    write_json([Row("goodput", "x", 1.0, "1/s")], tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"other\.json has no whole rounds"):
        list(pooled([tmp_path / "other.json"], seed=0))
