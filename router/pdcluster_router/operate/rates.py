"""Rates and quantiles from two scrapes of routers. Pure.

Counters are compared router by router, and worker by worker, before they are added up: a router that leaves takes its
counters along, and one that comes brings years of them. A histogram's quantile is interpolated within its bucket, as
Prometheus does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
# (name, sorted labels) → value, of one router.
Samples = dict[tuple[str, Labels], float]
# By router.
Scrapes = Mapping[str, Samples]

BEGAN = "process_start_time_seconds"


def samples_of(text: str) -> Samples:
    """The samples of one router's scrape."""
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def added(scrapes: Scrapes) -> Samples:
    """The samples of all routers, added up."""
    found: Samples = {}
    for samples in scrapes.values():
        _add(found, samples.items())
    return found


def since(now: Scrapes, before: Scrapes) -> Samples:
    """What came to the counters between two looks, added up over the routers that answered both."""
    found: Samples = {}
    for router, samples in now.items():
        if router in before:
            _add(found, _fresh(samples, before[router]))
    return found


def _fresh(now: Samples, before: Samples) -> Iterator[tuple[tuple[str, Labels], float]]:
    """A counter began anew where its process started again, or where it fell. A worker that was silent is left out."""
    known = {_worker(labels) for _, labels in before}
    running = {(labels, value) for (name, labels), value in before.items() if name == BEGAN}
    anew = {
        _worker(labels) for (name, labels), value in now.items() if name == BEGAN and (labels, value) not in running
    }
    for key, value in now.items():
        worker = _worker(key[1])
        if worker not in known:
            continue
        earlier = 0.0 if worker in anew else before.get(key, 0.0)
        yield key, value - earlier if earlier <= value else value


def _worker(labels: Labels) -> str:
    """The router process that counted; "" for the only one, and for what all workers report alike."""
    return next((value for name, value in labels if name == "worker"), "")


def _add(found: Samples, samples: Iterable[tuple[tuple[str, Labels], float]]) -> None:
    for key, value in samples:
        found[key] = found.get(key, 0.0) + value


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


def highest(scrapes: Scrapes, name: str, label: str, **labels: str) -> dict[str, float]:
    """As `by_label`, of the router that says most: for what several routers report of the same thing."""
    found: dict[str, float] = {}
    for samples in scrapes.values():
        for value, figure in by_label(samples, name, label, **labels).items():
            found[value] = max(found.get(value, -inf), figure)
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
