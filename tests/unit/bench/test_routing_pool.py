"""Rounds of bench.routing --real: how they are ordered, judged, and judged together."""

import itertools
import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from bench.harness.report import Row, save
from bench.parts.real_turns import Answer
from bench.parts.routing_real import (
    LIMITS,
    WAYS,
    Floor,
    Round,
    Turn,
    by_limit,
    figures,
    judged,
    orders,
    pooled,
    ratio,
    what_was_in_time,
)
from bench.routing import main, report
from pdcluster.core.errors import ConfigError


def _write(rows: list[Row], path: Path) -> None:
    save(rows, Namespace(json=path, record=False))


def in_time(way: str, case: str, count: int) -> Row:
    return Row(f"in time, {way}", case, count, "requests", against="asked", against_value=10)


def written(path: Path, *good: tuple[int, int, int]) -> Path:
    """A run of the bench: of each round how many of 10 were in time at every limit, by auto, on one node, on two."""
    rows = [
        in_time(way, f"real, seed 1, round {number}, limits x {limit:g}", count)
        for number, counts in enumerate(good)
        for way, count in zip(WAYS, counts, strict=True)
        for limit in LIMITS
    ]
    _write([Row("goodput auto", "real", 3.0, "1/s"), *rows], path)
    return path


def a_round(auto: int, local: int, remote: int, num_asked: int = 10) -> Round:
    turns = (Turn(num_asked, (good,) * len(LIMITS), Counter({"p": 2, "p+d": 1})) for good in (auto, local, remote))
    return dict(zip(WAYS, turns, strict=True))


def test_rounds_of_several_runs_are_judged_as_one(tmp_path: Path) -> None:
    files = [written(tmp_path / "a.json", (9, 8, 2), (9, 6, 2)), written(tmp_path / "b.json", (8, 9, 2))]
    *rows, found = pooled(files, seed=0)
    assert [row.value for row in rows[: len(WAYS)]] == pytest.approx([26 / 30, 23 / 30, 6 / 30])
    assert found.against == "colocated" and "3 rounds, 30 requests a way, ratio 1.130" in found.case
    assert 8 / 9 <= found.value <= 1.5, "a bound between the worst and the best round"


def test_what_a_run_writes_is_judged_again_from_its_file_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [a_round(9, 8, 5), a_round(7, 3, 8), a_round(8, 6, 6)]
    rows = list(figures(found, rate=1.25, seconds=8.0, seed=4))
    assert [row.value for row in rows[: len(WAYS)]] == pytest.approx([1.0, 17 / 24, 19 / 24])
    report(rows)
    _write(rows, tmp_path / "run.json")
    printed = capsys.readouterr().out
    assert "1.2/s asked; p 67%, p+d 33%" in printed and printed.count("goodput auto ÷ better static") == len(LIMITS)
    assert "1 of 1 goals are missed" in printed and "in time," not in printed
    monkeypatch.setattr(
        "sys.argv",
        ["routing", "--pool", str(tmp_path / "run.json"), "--seed", "4", "--json", str(tmp_path / "pool.json")],
    )
    main()
    assert "3 rounds, 30 requests a way, ratio 1.263" in capsys.readouterr().out
    judged_first, judged_again = (json.loads((tmp_path / name).read_text())[-1] for name in ("run.json", "pool.json"))
    assert judged_first == judged_again and judged_again["holds"] is False


def test_more_rounds_that_agree_raise_the_bound(tmp_path: Path) -> None:
    few = written(tmp_path / "few.json", (9, 9, 2), (8, 9, 2), (9, 8, 2))
    many = [written(tmp_path / f"{number}.json", (9, 9, 2), (8, 9, 2), (9, 8, 2)) for number in range(12)]
    bounds = [list(pooled(files, seed=0))[-1].value for files in ([few], many)]
    assert bounds[0] < bounds[1] < 1.0


def test_a_file_without_rounds_is_refused_by_name(tmp_path: Path) -> None:
    _write([Row("goodput", "x", 1.0, "1/s")], tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"other\.json has no rounds"):
        list(pooled([tmp_path / "other.json"], seed=0))


def test_a_file_of_the_method_before_is_refused_and_says_what_it_lacks(tmp_path: Path) -> None:
    _write(
        [in_time(way, "real, seed 1, round 0", 9) for way in WAYS],
        tmp_path / "old.json",
    )
    with pytest.raises(ConfigError, match=r"old\.json lacks .*auto"):
        list(pooled([tmp_path / "old.json"], seed=0))


def test_the_better_static_way_is_chosen_again_in_each_draw() -> None:
    """Two static ways that take turns in being good: each draw has its own better one, so auto, as good as each on
    average, is below it."""
    found = [a_round(6, 9, 3), a_round(6, 3, 9)] * 10
    row = judged(found, seed=0)
    assert ratio([{way: each[way].good for way in WAYS} for each in found]) == pytest.approx(1.0)
    assert row.value < 0.95 and row.holds is False


def test_rounds_that_all_agree_leave_no_doubt() -> None:
    row = judged([a_round(9, 6, 9)] * 5, seed=0)
    assert (row.value, row.against, row.holds) == (1.0, "static P/D", True)


def test_goodput_counts_a_request_at_every_limit_that_it_meets() -> None:
    turn = Turn(10, (0, 1, 2, 3, 4, 5, 6), Counter())
    assert turn.good == pytest.approx(3.0)
    found = [dict.fromkeys(WAYS, turn) | {"auto": Turn(10, (0, 2, 2, 3, 4, 5, 3), Counter())}]
    assert [row.value for row in by_limit(found)] == pytest.approx([0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.5])


def test_six_rounds_have_every_order_once_whatever_the_seed() -> None:
    for seed in range(20):
        drawn = orders(15, seed)
        assert len(drawn) == 15 and sorted(drawn[:6]) == sorted(drawn[6:12]) == sorted(itertools.permutations(WAYS))
    assert orders(12, 1) == orders(12, 1) != orders(12, 2)


def test_an_answer_has_a_limit_for_its_first_token_and_one_for_the_others() -> None:
    floor = Floor(first_s=0.1, token_s=0.001, next_s=0.01)
    assert floor.needed(Answer(1000, ttft_s=1.1, tpot_s=0.02)) == pytest.approx((0.2, 1.0)), (
        "5 times 1.1 s would do, 2 times 10 ms is met just so"
    )
    assert floor.needed(Answer(1000, ttft_s=11.0, tpot_s=0.02)) == pytest.approx((2.0, 1.0))
    assert floor.needed(Answer(1, ttft_s=3.0, tpot_s=0.01)) == pytest.approx((1.0, 0.5)), (
        "a short prompt has the time of a mean one: 0.6 s"
    )


def test_what_is_late_is_told_by_who_answered_and_by_which_token() -> None:
    """An answer is in time where both of its parts are."""
    floor = Floor(first_s=0.1, token_s=0.001, next_s=0.01)
    answers = [
        Answer(1000, ttft_s=1.1, tpot_s=tpot_s, path=path)
        for tpot_s, path in ((0.01, "d"), (0.03, "d"), (0.03, "p+d"), (0.03, "d"))
    ]
    found = what_was_in_time(5, floor, [*answers, Answer(1000, ttft_s=9.0, tpot_s=0.01, path="d")])
    assert found.num_good == tuple(1 + 3 * (limit > 1.5) + (limit > 9 / 5.5) for limit in LIMITS)
    assert (found.paths, found.late_first, found.late_next) == ({"d": 4, "p+d": 1}, {"d": 1}, {"d": 2, "p+d": 1})
    rows = [
        row
        for row in figures([dict.fromkeys(WAYS, found)], rate=1.0, seconds=8.0, seed=0)
        if row.metric == "late, auto"
    ]
    assert [row.value for row in rows] == [0.5, 1.0]
    assert "the 4 answered by d: 25% late with the first token, 50% with the others" in rows[0].case
