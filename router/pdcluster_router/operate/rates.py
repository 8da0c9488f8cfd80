"""Rates and quantiles from two scrapes of routers. Pure.

A histogram's quantile is interpolated within its bucket, as Prometheus does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from prometheus_client.parser import text_string_to_metric_families

# (name, sorted labels) → value.
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(texts: Iterable[str]) -> Samples:
    """The samples of several routers, added up."""
    found: Samples = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                found[key] = found.get(key, 0.0) + sample.value
    return found


def since(now: Samples, before: Samples) -> Samples:
    """What came to the counters between two scrapes. A counter that fell began anew."""
    return {key: value - before[key] if before.get(key, inf) <= value else value for key, value in now.items()}


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of all series that have these labels."""
    wanted = labels.items()
    return sum(value for (found, given), value in samples.items() if found == name and wanted <= dict(given).items())


def by_label(samples: Samples, name: str, label: str, **labels: str) -> dict[str, float]:
    """The sum of the series that have these labels, by the value of another one."""
    wanted, found = labels.items(), dict[str, float]()
    for (each, given), value in samples.items():
        if each == name and wanted <= (known := dict(given)).items() and label in known:
            found[known[label]] = found.get(known[label], 0.0) + value
    return found


def quantile(samples: Samples, name: str, share: float) -> float | None:
    """The quantile of a histogram over all its series. None when nothing was observed."""
    buckets = sorted((float(bound), count) for bound, count in by_label(samples, f"{name}_bucket", "le").items())
    if not buckets or buckets[-1][1] <= 0.0:
        return None
    wanted, lower, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            if bound == inf:
                return lower
            return lower + (bound - lower) * ((wanted - below) / (count - below) if count > below else 1.0)
        lower, below = bound, count
    return lower


def slowest(figures: Mapping[str, float], *, times: float = 1.5) -> set[str]:
    """Names whose figure is that many times the median of the others."""
    found = set()
    for name, figure in figures.items():
        others = sorted(value for other, value in figures.items() if other != name and value > 0.0)
        if others and figure > times * others[(len(others) - 1) // 2]:
            found.add(name)
    return found
