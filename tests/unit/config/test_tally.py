"""Counters and histograms show what prometheus_client's own would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdcluster.tally import Level, Spread, Tally

BUCKETS = (0.001, 0.5, 1.0, 10.0)


def shown(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0.0, 0.001, 0.002, 0.5, 1.0, 7.0, 10.0, 11.0])), max_size=20))
def test_exposition_is_the_same(values: list[tuple[str, float]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter, histogram = Counter("x_total", "Help.", ("k",), registry=theirs), Histogram("y", "Help.", ("k",), buckets=BUCKETS, registry=theirs)
    tally, spread = Tally("x", "Help.", ("k",), registry=ours), Spread("y", "Help.", ("k",), buckets=BUCKETS, registry=ours)
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
