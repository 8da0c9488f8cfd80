"""The timings of requests that their router ended: at a stop string, or as their node got no last word out. They are
those of what was done, for clients, metrics, traces and operators alike."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from request_scene import CLUSTERS, Scene
from scripted_cluster import FakeCluster
from scripted_dispatcher import TEXT

from pdcluster.core import messages as m
from pdcluster.telemetry import timeline
from pdcluster_router.core.tracing import Tracing
from pdcluster_router.operate.reading import usage_of

A, X = (TEXT.encode(letter, add_special_tokens=False)[0] for letter in "aX")
# What the scene's nodes report.
REPORTED = {"queue_s": 0.25, "prefill_s": 0.5, "transfer_s": 0.1, "exposed_s": 0.05, "transfer_bytes": 4096}
QUEUED_S, COMPUTED_S = 2.0, 3.0


class Spans:
    """Implements tracing.SpanSink."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def record(self, span: Any) -> None:
        self.recorded.append(span)


def asked(nodes: str, **fields: object) -> Scene:
    scene = Scene(FakeCluster(CLUSTERS[nodes]()))
    spans = Spans()
    scene.app.tracing = Tracing(spans, 1.0)
    scene.spans = spans  # type: ignore[attr-defined]
    scene.ask(**{"prompt": [5, 6, 7], "max_tokens": 9, "stop": ["X"], **fields})
    return scene


def computed(scene: Scene) -> None:
    """The prompt waits for two seconds and is computed in three."""
    scene.moment += QUEUED_S
    scene.step("scheduled", 2, ())
    scene.moment += COMPUTED_S


def usage(scene: Scene) -> dict[str, Any]:
    assert scene.exchange.finished and scene.exchange.status == 200
    answer = json.loads(scene.line.sent.partition(b"\r\n\r\n")[2])
    assert answer["choices"][0]["finish_reason"] == "stop"
    return answer["usage"]  # type: ignore[no-any-return]


def timings(scene: Scene) -> dict[str, Any]:
    """As its client has them; operators and the trace have the same."""
    own = usage(scene)
    (explained,) = scene.dispatch.explainer.explain_all(scene.exchange.id)
    record = msgspec.to_builtins(explained)
    told = usage_of(record)
    assert told["completion_tokens"] == own["completion_tokens"] and timeline.spans_of(told)
    for name in ("queue_s", "prefill_s", "transfer_s", "decode_s", "decode_tokens", "transfer_bytes"):
        assert record["outcome"]["timeline"][name] == own["pdcluster"]["timeline"][name]
    (attempt,) = (span for span in scene.spans.recorded if span.name == "attempt 1")  # type: ignore[attr-defined]
    assert attempt.attributes["pdcluster.timeline.prefill_s"] == own["pdcluster"]["timeline"]["prefill_s"]
    assert attempt.attributes["pdcluster.tokens"] == own["completion_tokens"]
    return own["pdcluster"]["timeline"]  # type: ignore[no-any-return]


def counted(scene: Scene, name: str) -> float:
    """How many times a histogram has."""
    lines = generate_latest(scene.metrics.registry).decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"pdcluster_{name}_seconds_count"))


async def test_a_stop_string_behind_the_nodes_report_ends_with_that() -> None:
    scene = asked("a pair")
    computed(scene)
    scene.step("reserved", 0, ())
    scene.step("token", 0, (A,))
    scene.step("delivered", 2, ())
    scene.moment += 0.5
    scene.step("row", 0, (X,))
    found = timings(scene)
    assert {name: found[name] for name in REPORTED} == REPORTED
    assert (found["decode_s"], found["decode_tokens"]) == (pytest.approx(0.5), 1)
    assert usage(scene)["pdcluster"]["transfer"] == "tcp"
    assert [type(message) for _, message in scene.cluster.sent].count(m.Cancel) == 1, "of the decode leg"
    assert counted(scene, "kv_transfer") == 1


async def test_a_stop_string_waits_a_moment_for_the_report_that_is_on_its_way_and_cancels_at_once() -> None:
    scene = asked("a pair")
    computed(scene)
    scene.step("reserved", 0, ())
    scene.step("token", 0, (A,))
    scene.step("row", 0, (X,))
    assert not scene.exchange.finished
    assert [(node, type(message)) for node, message in scene.cluster.sent][-1] == ("d0", m.Cancel)
    scene.step("row", 0, (A,))  # sent before it knew
    scene.step("delivered", 2, ())
    assert {name: timings(scene)[name] for name in REPORTED} == REPORTED
    assert usage(scene)["completion_tokens"] == 2
    assert [type(message) for _, message in scene.cluster.sent].count(m.Cancel) == 1


async def test_without_a_report_it_ends_soon_with_what_the_router_saw() -> None:
    scene = asked("a pair")
    computed(scene)
    scene.step("reserved", 0, ())
    scene.step("token", 0, (A,))
    scene.step("row", 0, (X,))
    scene.moment += scene.dispatch.shared.settings.late_report_s
    scene.timers.ring()
    found = timings(scene)
    assert (found["queue_s"], found["prefill_s"]) == (pytest.approx(QUEUED_S), pytest.approx(COMPUTED_S))
    assert counted(scene, "kv_transfer") == 0, "nobody said how long that took"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_in_the_first_token_ends_at_once_with_the_times_of_the_prompt(stream: bool) -> None:
    scene = asked("a pair", stream=stream)
    computed(scene)
    scene.step("token", 0, (X,))  # held until there is a slot
    scene.moment += 7.0
    scene.step("reserved", 0, ())
    assert scene.exchange.finished
    if stream:
        assert scene.line.sent.count(b'"finish_reason":"stop"') == 1 and b"[DONE]" in scene.line.sent
        (explained,) = scene.dispatch.explainer.explain_all(scene.exchange.id)
        assert explained.outcome is not None
        found: Any = msgspec.to_builtins(explained.outcome.timeline)
    else:
        found = timings(scene)
    assert (found["queue_s"], found["prefill_s"]) == (pytest.approx(QUEUED_S), pytest.approx(COMPUTED_S))
    assert (found["transfer_s"], found["transfer_bytes"], found["decode_s"], found["decode_tokens"]) == (0, 0, 0, 0)
    assert counted(scene, "kv_transfer") == 0 and counted(scene, "prefill_queue") == 1
    assert {node for node, message in scene.cluster.sent if isinstance(message, m.Cancel)} == {"p0", "d0"}


async def test_a_node_that_serves_alone() -> None:
    scene = asked("one node")
    computed(scene)
    scene.step("row", 0, (A,))
    scene.moment += 0.5
    scene.step("row", 0, (X,))
    found = timings(scene)
    assert (found["queue_s"], found["prefill_s"]) == (pytest.approx(QUEUED_S), pytest.approx(COMPUTED_S))
    assert (found["decode_s"], found["decode_tokens"]) == (pytest.approx(0.5), 1)


async def test_a_word_that_comes_late_makes_no_time_negative() -> None:
    scene = asked("a pair")
    scene.moment += COMPUTED_S
    scene.step("token", 0, (X,))
    scene.moment += 1.0
    scene.step("scheduled", 2, ())
    scene.step("reserved", 0, ())
    found = timings(scene)
    assert (found["queue_s"], found["prefill_s"]) == (pytest.approx(COMPUTED_S), 0)


async def test_a_second_attempt_has_its_own_times() -> None:
    scene = asked("two nodes")
    scene.moment += 1.0
    scene.step("row", 0, (A,))
    scene.step("lost", 1, ())
    computed(scene)
    scene.step("row", 0, (A,))
    scene.moment += 0.25
    scene.step("row", 0, (X,))
    found = usage(scene)["pdcluster"]["timeline"]
    assert (found["queue_s"], found["prefill_s"]) == (pytest.approx(QUEUED_S), pytest.approx(COMPUTED_S))
    assert (found["decode_s"], found["decode_tokens"], found["placed_s"]) == (
        pytest.approx(0.25), 1, pytest.approx(1.0),
    )  # fmt: skip


async def test_the_times_of_a_node_that_got_no_last_word_out() -> None:
    scene = asked("one node", max_tokens=2, stop=None)
    computed(scene)
    scene.step("row", 0, (A,))
    scene.moment += 0.5
    scene.step("row", 0, (A,))
    scene.step("lost", 1, ())
    found = json.loads(scene.line.sent.partition(b"\r\n\r\n")[2])["usage"]["pdcluster"]["timeline"]
    assert (found["queue_s"], found["prefill_s"]) == (pytest.approx(QUEUED_S), pytest.approx(COMPUTED_S))
    assert (found["decode_s"], found["decode_tokens"]) == (pytest.approx(0.5), 1)
