"""How full pools are, for scrapes and for whoever scales them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdcluster.bootstrap.demand import RouterDemand
from pdcluster.core.messages import Role
from pdcluster_router.cluster.view import ClusterView
from pdcluster_router.queueing.demand import PoolLevels, PoolSignal, pool_signals


class PoolCollector(Collector):
    """Signals as of now. Owned by the router's event loop.

    demands: of all routers.
    """

    def __init__(
        self, view: Callable[[], ClusterView], demands: Callable[[], Sequence[RouterDemand]], levels: PoolLevels
    ) -> None:
        self._view, self._demands, self._levels = view, demands, levels

    def signals(self) -> dict[Role, PoolSignal]:
        return pool_signals(self._view(), self._demands(), self._levels)

    def collect(self) -> Iterator[Metric]:
        saturation = GaugeMetricFamily(
            "pdcluster_pool_saturation",
            "Predicted work of all nodes of a role, in what they can do within the service level; 1 is full.",
            labels=("role",),
        )
        wanted = GaugeMetricFamily(
            "pdcluster_pool_wanted_nodes", "Nodes of a role that its predicted work needs.", labels=("role",)
        )
        for role, signal in self.signals().items():
            saturation.add_metric((role,), signal.saturation)
            wanted.add_metric((role,), signal.wanted)
        yield saturation
        yield wanted
