"""Counters and histograms show what prometheus_client's own would."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdcluster.telemetry.metrics import MAX_MEDIUM_LABELS, MOST_NOTED, ExplainMetrics, RouterMetrics
from pdcluster.telemetry.tally import BeforeScrape, Level, Spread, Tally

BUCKETS = (0.001, 0.5, 1.0, 10.0)


def shown(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0.0, 0.001, 0.002, 0.5, 1.0, 7.0, 10.0, 11.0])),
        max_size=20,
    )
)
def test_exposition_is_the_same(values: list[tuple[str, float]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter, histogram = (
        Counter("x_total", "Help.", ("k",), registry=theirs),
        Histogram("y", "Help.", ("k",), buckets=BUCKETS, registry=theirs),
    )
    tally, spread = (
        Tally("x", "Help.", ("k",), registry=ours),
        Spread("y", "Help.", ("k",), buckets=BUCKETS, registry=ours),
    )
    for label, value in values:
        counter.labels(label).inc(value)
        histogram.labels(label).observe(value)
        tally.labels(label).inc(value)
        spread.labels(label).observe(value)
    assert shown(ours) == shown(theirs)


def test_a_level_goes_up_and_down() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    for gauge in (Gauge("z", "Help.", registry=theirs), Level("z", "Help.", registry=ours)):
        gauge.inc()
        gauge.inc()
        gauge.dec()
    assert shown(ours) == shown(theirs)


def test_series_without_labels_are_there_from_the_start() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    Counter("x_total", "Help.", registry=theirs).inc(2)
    Histogram("y", "Help.", buckets=BUCKETS, registry=theirs)
    Tally("x", "Help.", registry=ours).labels().inc(2)
    Spread("y", "Help.", buckets=BUCKETS, registry=ours)
    assert shown(ours) == shown(theirs)


def test_another_number_of_labels_is_an_error() -> None:
    registry = CollectorRegistry()
    with pytest.raises(ValueError, match="has the labels k, not 2"):
        Tally("x", "Help.", ("k",), registry=registry).labels("a", "b")
    with pytest.raises(ValueError, match="has the labels none, not 1"):
        Spread("y", "Help.", buckets=BUCKETS, registry=registry).labels("a")


@given(st.lists(st.sampled_from([0.0, 0.001, 0.002, 0.5, 1.0, 7.0, 10.0, 11.0]), max_size=20))
def test_many_values_at_once_are_the_same_as_one_by_one(values: list[float]) -> None:
    one_by_one, at_once = CollectorRegistry(), CollectorRegistry()
    first, second = (
        Spread("y", "Help.", buckets=BUCKETS, registry=registry).labels() for registry in (one_by_one, at_once)
    )
    for value in values:
        first.observe(value)
    second.observe_all(values[:7])
    second.observe_all(values[7:])
    assert first.counts == second.counts and first.total == pytest.approx(second.total)


def test_what_is_counted_late_is_there_when_somebody_looks() -> None:
    registry = CollectorRegistry()
    BeforeScrape(lambda: tally.labels().inc(3), registry=registry)
    tally = Tally("x", "Help.", registry=registry)
    assert registry.get_sample_value("x_total") == 3 and registry.get_sample_value("x_total") == 6


ENDED = (100, 4, 32, 1, 0.5, None, 0.02, 0.25, 0.125, 4096)


def sample(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"pdcluster_{name}", labels)


def test_choices_that_ended_are_counted_by_how_they_ended() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for ending in (
        ("remote", "stop", "tcp"),
        ("remote", "stop", "tcp"),
        ("local", "length", ""),
        ("local", None, ""),
        (None, None, ""),
    ):
        metrics.note(ending, ENDED)
    assert [sample(metrics, f"{kind}_tokens_total") for kind in ("output", "prompt", "cached_prompt")] == [20, 400, 96]
    assert sample(metrics, "prompt_length_tokens_count") == 4 and sample(metrics, "output_length_tokens_count") == 3
    assert (
        sample(metrics, "choices_total", mode="remote", finish="stop") == 2 and sample(metrics, "attempts_total") == 3
    )
    assert sample(metrics, "time_to_first_token_seconds_sum", mode="local") == 1.0, (
        "one that failed later had a first token, too"
    )
    assert sample(metrics, "time_to_second_token_seconds_count", mode="local") is None, "there was none"
    assert sample(metrics, "prefill_queue_seconds_sum") == 0.75
    assert (
        sample(metrics, "kv_transfer_seconds_count", backend="tcp") == 2
        and sample(metrics, "kv_transfer_bytes_total", backend="tcp") == 8192
    )
    assert sample(metrics, "kv_transfer_seconds_count", backend="") is None


def test_what_is_not_counted_yet_is_bounded() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for _ in range(MOST_NOTED + 1):
        metrics.note(("local", "stop", ""), ENDED)
    assert metrics.output_tokens.value == 4 * MOST_NOTED
    assert sample(metrics, "output_tokens_total") == 4 * MOST_NOTED + 4


def test_media_are_counted_by_name_up_to_a_bound_since_their_names_are_the_words_of_nodes() -> None:
    metrics, num_named = RouterMetrics(CollectorRegistry()), 3 * MAX_MEDIUM_LABELS
    for number in range(num_named):
        metrics.note(("remote", "stop", f"medium-{number}"), ENDED)
        assert len(metrics._noted) <= MAX_MEDIUM_LABELS, (
            "what is not counted yet is bounded, too, however many names it has"
        )
    told = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pdcluster_kv_transfer_bytes_total"
    ]
    assert len(told) == MAX_MEDIUM_LABELS + 1 and sum(each.value for each in told) == 4096 * num_named
    assert sample(metrics, "kv_transfer_bytes_total", backend="medium-0") == 4096
    assert sample(metrics, "kv_transfer_seconds_count", backend="other") == num_named - MAX_MEDIUM_LABELS


def test_an_answer_is_counted_with_others_and_never_twice() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for number in range(MOST_NOTED + 2):
        metrics.answered("/v1/completions", 200 if number else 400, 0.25)
    assert sum(series.value for series in metrics.http_requests._series.values()) == MOST_NOTED + 1, (
        "what waits is bounded"
    )
    for _ in range(2):
        assert sample(metrics, "http_requests_total", endpoint="/v1/completions", status="200") == MOST_NOTED + 1
        assert sample(metrics, "http_requests_total", endpoint="/v1/completions", status="400") == 1
        assert sample(metrics, "request_seconds_sum", endpoint="/v1/completions") == 0.25 * (MOST_NOTED + 2)


def test_decisions_are_judged_together_as_they_would_be_one_by_one() -> None:
    registry = CollectorRegistry()
    metrics = ExplainMetrics(registry)
    metrics.judged((0.5, 0.25, 32, 64, 96))
    metrics.judged((-0.125, 0.0, 0, 32, 32))
    metrics.judged((0.0, 0.0, 1, 1, 1))
    for _ in range(2):
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in registry.collect()
            for sample in family.samples
        }
        assert (
            found["pdcluster_ttft_prediction_error_seconds_sum", "later"] == 0.5
            and found["pdcluster_decision_regret_seconds_sum",] == 0.25
        )
        assert found["pdcluster_ttft_prediction_error_seconds_count", "later"] == 2, (
            "one that was exactly right is not early"
        )
        assert found["pdcluster_ttft_prediction_error_seconds_sum", "sooner"] == 0.125
        assert [found["pdcluster_decision_hit_tokens_total", kind] for kind in ("achieved", "reachable", "ideal")] == [
            33,
            97,
            129,
        ]
    for _ in range(MOST_NOTED):
        metrics.judged((0.0, 0.0, 1, 0, 0))
    assert metrics._achieved.value == 33 + MOST_NOTED, "what waits is bounded"


def test_a_thread_may_look_while_another_meets_new_labels() -> None:
    """As a node's health port looks while its loop counts."""
    registry = CollectorRegistry()
    tally = Tally("x", "Help.", ("k",), registry=registry)
    spread = Spread("y", "Help.", ("k",), buckets=BUCKETS, registry=registry)

    def count() -> None:
        for number in range(4000):
            tally.labels(str(number)).inc()
            spread.labels(str(number)).observe(1.0)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    counting = threading.Thread(target=count)
    try:
        counting.start()
        while counting.is_alive():
            for collector in (tally, spread):
                assert len(list(collector.collect())) == 1
    finally:
        sys.setswitchinterval(usual)
        counting.join(10.0)
