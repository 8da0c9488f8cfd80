"""The metrics of all workers as one exposition: families as plain values, and their merging in the supervisor.

Every sample gets a label `worker`, so a restarted worker looks like a counter's reset. What nodes and pools are is the
same from every worker and told once, without that label. A node is up when it is for each worker. `in_flight` is the
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OF_NODES = ("pdcluster_node_", "pdcluster_pool_")
SUMMED = "pdcluster_node_in_flight"
LABEL = "worker"


class SampleRecord(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    help: str
    kind: str
    samples: list[SampleRecord]


def families_of(registry: CollectorRegistry) -> list[Family]:
    return [_family(metric) for metric in registry.collect()]


def _family(metric: Metric) -> Family:
    return Family(
        metric.name,
        metric.documentation,
        metric.type,
        [SampleRecord(s.name, dict(s.labels), float(s.value)) for s in metric.samples],
    )


class MergedFamilies(Collector):
    """Families of the workers that answered.

    restarts: by worker, of all workers.
    """

    def __init__(self, told: Mapping[str, list[Family]], restarts: Mapping[str, int]) -> None:
        self._told = told
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        yield _by_worker(
            GaugeMetricFamily,
            "pdcluster_worker_up",
            "1 for each worker that answers its supervisor.",
            {w: w in self._told for w in self._restarts},
        )
        yield _by_worker(
            CounterMetricFamily,
            "pdcluster_worker_restarts",
            "Times that a worker died and was started again.",
            self._restarts,
        )
        grouped: dict[str, dict[str, Family]] = {}
        for worker, families in self._told.items():
            for family in families:
                grouped.setdefault(family.name, {})[worker] = family
        for name, by_worker in grouped.items():
            first = next(iter(by_worker.values()))
            metric = Metric(name, first.help, first.kind)
            metric.samples = list(self._of_nodes(by_worker) if name.startswith(OF_NODES) else _labelled(by_worker))
            yield metric

    def _of_nodes(self, by_worker: Mapping[str, Family]) -> Iterator[Sample]:
        values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
        for family in by_worker.values():
            for sample in family.samples:
                values.setdefault((sample.name, tuple(sample.labels.items())), []).append(sample.value)
        for (name, labels), found in values.items():
            if len(found) == len(self._told):
                yield Sample(name, dict(labels), sum(found) if name == SUMMED else found[0])


def _labelled(by_worker: Mapping[str, Family]) -> Iterator[Sample]:
    for worker, family in by_worker.items():
        for sample in family.samples:
            yield Sample(sample.name, {**sample.labels, LABEL: worker}, sample.value)


def _by_worker(
    kind: Callable[..., GaugeMetricFamily | CounterMetricFamily], name: str, help_text: str, values: Mapping[str, float]
) -> GaugeMetricFamily | CounterMetricFamily:
    family = kind(name, help_text, labels=(LABEL,))
    for worker, value in values.items():
        family.add_metric((worker,), float(value))
    return family


def exposition(told: Mapping[str, list[Family]], restarts: Mapping[str, int]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MergedFamilies(told, restarts))
    return generate_latest(registry)
