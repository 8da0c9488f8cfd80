"""The router's view of all caches, as metrics. Read at scrape time, nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdcluster_router.prefix_index.updates import Caches


class IndexCollector(Collector):
    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        caches, index = self._caches, self._caches.index
        expected = index.expected
        yield GaugeMetricFamily("pdcluster_index_entries", "(block, node) pairs that the router knows.", value=index.num_entries)
        yield GaugeMetricFamily("pdcluster_index_holder_sets", "Distinct sets of nodes that hold a block.", value=index.num_sets)
        yield GaugeMetricFamily("pdcluster_index_bytes", "Memory of the prefix index.", value=index.num_bytes)
        yield CounterMetricFamily("pdcluster_index_dropped", "Entries that found no room in the index.", value=index.num_dropped)
        yield CounterMetricFamily("pdcluster_cache_deltas", "Cache deltas taken in.", value=caches.num_deltas)
        yield CounterMetricFamily("pdcluster_cache_snapshots", "Cache snapshots taken in.", value=caches.num_snapshots)
        yield CounterMetricFamily("pdcluster_cache_gaps", "Times when deltas of a node were missing.", value=caches.num_gaps)
        yield GaugeMetricFamily("pdcluster_cache_expected", "Requests whose blocks are expected on a node.", value=len(expected))
        ended = CounterMetricFamily("pdcluster_cache_expectations", "Expectations that ended, by how.", labels=("outcome",))
        ended.add_metric(("hit",), expected.num_hits)
        ended.add_metric(("missed",), expected.num_missed)
        ended.add_metric(("crowded_out",), expected.num_crowded_out)
        yield ended
