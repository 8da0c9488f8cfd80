"""What a router remembers of the prompt work that it sent."""

from __future__ import annotations

import pytest

from pdcluster_router.policy.selector import RecentWork


def test_a_steady_stream_is_as_many_nodes_as_it_keeps_busy() -> None:
    sent = RecentWork(5.0)
    for number in range(1000):
        sent.add(0.1, 0.05 * number)  # twenty times a second
    assert sent.per_second(50.0) == pytest.approx(2.0, rel=0.02)


def test_it_is_forgotten_and_never_negative() -> None:
    sent = RecentWork(5.0)
    assert sent.per_second(3.0) == 0.0
    sent.add(0.11, 1.0)
    shares = [sent.per_second(moment) for moment in (1.0, 2.0, 6.0, 100.0)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 1e-6 * shares[0]
    assert sent.per_second(0.5) == shares[0], "a moment before the last one is that one"
