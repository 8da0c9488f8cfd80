"""Rates and quantiles from scrapes, beside numbers worked out by hand."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pdcluster_router.operate import rates

NAME = "pdcluster_time_to_first_token_seconds"


def scrape(values: list[float], tokens: int = 0) -> str:
    registry = CollectorRegistry()
    spread = Histogram(NAME, "x", ("mode",), buckets=(0.1, 0.2, 0.4), registry=registry)
    for number, value in enumerate(values):
        spread.labels("remote" if number % 2 else "local").observe(value)
    Counter("pdcluster_output_tokens", "x", registry=registry).inc(tokens)
    return generate_latest(registry).decode()


def test_quantiles_are_interpolated_over_all_series_and_routers() -> None:
    samples = rates.added({"a": rates.samples_of(scrape([0.05] * 4)), "b": rates.samples_of(scrape([0.15] * 4))})
    assert rates.quantile(samples, NAME, 0.5) == 0.1
    assert abs((rates.quantile(samples, NAME, 0.75) or 0.0) - 0.15) < 1e-9
    beyond = rates.samples_of(scrape([9.0]))
    assert rates.quantile(beyond, NAME, 0.5) == 0.4, "the last bound, as Prometheus says"
    assert rates.quantile(rates.samples_of(scrape([])), NAME, 0.5) is None
    assert rates.quantile({}, NAME, 0.5) is None


def test_what_came_since_survives_a_router_that_began_anew() -> None:
    before = {"a": rates.samples_of(scrape([0.05], tokens=100))}
    now = {"a": rates.samples_of(scrape([0.05, 0.3], tokens=130))}
    fresh = rates.since(now, before)
    assert rates.total(fresh, "pdcluster_output_tokens_total") == 30
    assert rates.total(fresh, f"{NAME}_count", mode="remote") == 1
    again = rates.since({"a": rates.samples_of(scrape([], tokens=7))}, before)
    assert rates.total(again, "pdcluster_output_tokens_total") == 7


def test_the_slowest_are_those_far_beyond_the_median_of_the_others() -> None:
    assert rates.slowest({"a": 1.0, "b": 1.1, "c": 2.0}) == {"c"}
    assert rates.slowest({"a": 1.0, "b": 1.4}) == set()
    assert rates.slowest({"a": 1.0, "b": 1.6}) == {"b"}
    assert rates.slowest({"a": 1.0}) == set()
