"""How bench.router judges routers: each by what it adds to the same worker's latency."""

from __future__ import annotations

from bench.harness.http_load import Outcome
from bench.router import added_rows, against_rivals


def seen(milliseconds: float) -> list[Outcome]:
    return [Outcome(seconds=1.0, latencies=[milliseconds / 1e3] * 10)]


def test_the_same_is_taken_off_every_router_at_every_load() -> None:
    for name in ("pdcluster", "smg", "dynamo"):
        for case in ("local", "P/D"):
            rows = added_rows(name, case, seen(1.0), seen(2.0), worker_s=0.06e-3)
            assert {row.metric: round(row.value, 6) for row in rows} == {
                "added latency p50, idle": 0.94, "added latency p99, idle": 0.94,
                "added latency p50, half": 1.94, "added latency p99, half": 1.94,
            }  # fmt: skip


def test_a_rival_that_answers_sooner_is_the_better_one() -> None:
    rows = added_rows("pdcluster", "local", seen(0.5), seen(1.17), worker_s=0.06e-3)
    rows += added_rows("smg", "local", seen(0.6), seen(1.00), worker_s=0.06e-3)
    found = {row.metric: row for row in against_rivals(rows)}
    idle, half = found["added latency p50, idle vs best rival"], found["added latency p50, half vs best rival"]
    assert (idle.holds, half.holds) == (True, False) and half.against == "smg"
    assert half.ratio is not None and round(half.ratio, 3) == round((1.00 - 0.06) / (1.17 - 0.06), 3)
