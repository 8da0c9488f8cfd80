"""What a bootstrap's health port says: probes, and how many nodes are registered."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdcluster.bootstrap.store import NodeStore
from pdcluster.telemetry.health import Probes, Pulse, Verdict, alive, exposition_of, process_registry


class BootstrapHealth(Collector):
    """Probes of one bootstrap.

    store: None while it does not serve.
    """

    def __init__(self) -> None:
        self.pulse = Pulse(time.monotonic)
        self.store: NodeStore | None = None
        registry = process_registry()
        registry.register(self)
        self.probes = Probes(self.live, self.ready, exposition_of(registry))

    def live(self) -> Verdict:
        return alive(self.pulse.problems() if self.store is not None else [], loop_age_s=round(self.pulse.age_s, 3))

    def ready(self) -> Verdict:
        store = self.store
        if store is None:
            return Verdict(False, "not ready", ["it starts or ends"])
        reasons = self.pulse.problems()
        return Verdict(not reasons, "not ready" if reasons else "ready", reasons, {"nodes": len(store)})

    def collect(self) -> Iterator[Metric]:
        store = self.store
        if store is None:
            return
        yield GaugeMetricFamily("pdcluster_bootstrap_nodes", "Registered nodes.", value=len(store))
        yield CounterMetricFamily(
            "pdcluster_bootstrap_changes", "Changes of the registered nodes.", value=store.version
        )
