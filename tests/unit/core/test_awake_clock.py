"""A clock that does not count stalls of its owner."""

from __future__ import annotations

from pdcluster.core.awake_clock import AwakeClock


def test_it_follows_the_clock_behind_it_while_it_is_read_often() -> None:
    now = [100.0]
    clock = AwakeClock(0.5, lambda: now[0])
    for _ in range(10):
        now[0] += 0.5
        assert clock() == now[0]


def test_a_stall_counts_no_more_than_the_usual_pause() -> None:
    now = [100.0]
    clock = AwakeClock(0.5, lambda: now[0])
    now[0] += 60.0
    assert clock() == 100.5
    now[0] += 0.25
    assert clock() == 100.75
