"""The choices of small replays, as digests: a replay may become faster, but it must choose as before."""

from __future__ import annotations

import hashlib

import pytest

from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.replay.feed import IMMEDIATE, FeedSpec
from pdcluster_router.replay.node import Task
from pdcluster_router.replay.routing import ReplayRouter
from pdcluster_router.replay.scenario import Conditions, Layout, at_load, oracle, replay
from pdcluster_router.replay.workloads import generate

LATE_AND_LOSSY = FeedSpec(delay_s=0.1, loss=0.05)


@pytest.mark.parametrize(
    ("kind", "count", "nodes", "load", "feed", "digest"),
    [
        ("chat", 200, Layout(prefill=8, decode=4), 0.9, IMMEDIATE, "463b432b32c9e222"),
        ("everything", 200, Layout(prefill=3, decode=2), 1.3, LATE_AND_LOSSY, "08f2457c1093a611"),
        (
            "documents", 150, Layout(prefill=2, decode=2, mixed=2, cache_tokens=400_000), 1.0, FeedSpec(0.02),
            "f1ebc9bc5cef1930",
        ),
    ],
)  # fmt: skip
def test_a_replay_chooses_as_ever(
    kind: str, count: int, nodes: Layout, load: float, feed: FeedSpec, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names of nodes only: predicted seconds may differ in their last bits between machines."""
    chosen: list[tuple[int, str, str, str]] = []
    sent = ReplayRouter.sent

    def note(self: ReplayRouter, task: Task, choice: RoutingDecision, now: float) -> None:
        names = [node.name if node is not None else "" for node in (choice.prefill, choice.decode, choice.pull)]
        chosen.append((task.number, *names))  # type: ignore[arg-type]
        sent(self, task, choice, now)

    monkeypatch.setattr(ReplayRouter, "sent", note)
    trace = generate(kind, count, seed=1)
    replay(at_load(trace, nodes, oracle(trace, nodes), load), nodes, "seconds", Conditions(feed))
    assert hashlib.sha256(repr(chosen).encode()).hexdigest()[:16] == digest
