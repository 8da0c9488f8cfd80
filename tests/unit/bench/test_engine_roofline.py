"""`bench.engine`: what a decode step takes at least, and how fast it has to be beside a rival."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from bench import engine
from bench.engine import QUICK, Ceiling, Ceilings, Work
from bench.rivals.engines import Contender, _batch_goals

WORK = Work(layer_weights=900, head_weights=100, attention_flop=8, item_bytes=2, kv_bytes=10)


@pytest.mark.parametrize(
    ("batch", "context", "seconds"),
    [
        (1, 9, (2 * 1000 + 10 * 10) / 100),
        (8, 0, (2 * 1000 * 8 + 8 * 8) / 500),
        (8, 99, (2 * 1000 + 10 * 8 * 100) / 100),
    ],
    ids=["bytes of weights", "products", "bytes of contexts"],
)
def test_the_roofline_is_what_the_slower_of_bytes_and_products_takes(batch: int, context: int, seconds: float) -> None:
    assert Ceilings(WORK, flops=500.0, bandwidth=100.0).decode_seconds(batch, context) == pytest.approx(seconds)


@pytest.mark.parametrize(("rival_s", "goal"), [(0.06, 0.85), (0.09, 0.85 * 1.5), (0.5, 1.3)])
def test_many_rows_have_to_be_so_much_faster_or_near_the_roofline(rival_s: float, goal: float) -> None:
    no_process = cast(subprocess.Popen[str], None)
    contenders = [Contender(name, no_process, 0.0, "") for name in ("pdcluster", "vllm", "llama.cpp")]
    assert _batch_goals(contenders, [[0.1], [rival_s, 9.0, rival_s], [0.2]], least=0.06) == pytest.approx(
        {"vllm": goal}
    )


@pytest.mark.parametrize(
    ("taken", "tries", "seconds", "calls"),
    [([5.0, 3.0, 4.0], 3, 0.5, 3), ([0.25, 0.125, 0.25, 0.25, 0.25], 2, 0.8, 4), ([0.25, 0.5, 0.125], 1, 0.0, 1)],
)
def test_a_repeat_is_the_best_of_so_many_tries_and_of_what_begins_in_time(
    monkeypatch: pytest.MonkeyPatch, taken: list[float], tries: int, seconds: float, calls: int
) -> None:
    now, left = [100.0], list(taken)

    def run() -> None:
        now[0] += left.pop(0)

    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    best = engine._best_seconds(replace(QUICK, tries=tries, seconds=seconds), run)
    assert best == min(taken[:calls]) and len(left) == len(taken) - calls


def test_a_case_is_judged_by_what_its_ceiling_did_beside_it() -> None:
    """Not by the ceiling's best: the machine was twice as slow in the second turn, for both."""
    pairs = [(1.0, 0.5), (2.0, 1.0), (1.0, 0.625)]
    ceiling = Ceiling("read", 2e9, lambda: None, 4e9)
    milliseconds, rate = engine._beside_ceiling(
        "decode step", "decode MBU", "batch 1", 4e9, pairs, ceiling, "GB/s", 0.95
    )
    assert (milliseconds.value, rate.value, rate.against_value) == (1000.0, 4.0, 3.2)
    assert rate.ratio == 1.0 and rate.holds and rate.spread == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["matrix product (torch, float32)", "matrix product (our own, bfloat16)"])
def test_the_ceilings_that_are_shown_are_those_that_judge(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    floats = Ceiling("matrix product (torch, float32)", 1.0, lambda: None, 3e9)
    monkeypatch.setattr(engine, "float_product", lambda _: floats)
    rows = engine.ceiling_rows(QUICK, Ceiling(name, 1.0, lambda: None, 2e9), Ceiling("read", 1.0, lambda: None, 4e9))
    assert [(row.case, row.value) for row in rows if row.metric == "ceiling"] == [(name, 2.0), ("read", 4.0)]
    assert [(row.case, row.value) for row in rows if row.metric != "ceiling"] == (
        [] if name == floats.name else [(floats.name, 3.0)]
    )


def test_a_case_and_its_ceiling_take_turns() -> None:
    calls: list[str] = []
    engine._in_turns(
        replace(QUICK, repeats=2, tries=2, seconds=0.0), lambda: calls.append("case"), lambda: calls.append("ceiling")
    )
    assert calls == ["case", "ceiling", *["case", "case", "ceiling", "ceiling"] * 2]
