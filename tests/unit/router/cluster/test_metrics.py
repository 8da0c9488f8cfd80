"""What nodes report of their transfers is readable at the router's /metrics."""

from __future__ import annotations

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from scripted_cluster import EMPTY_LOAD, FakeCluster, make_node

from pdcluster.core.messages import PathLoad
from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.metrics import NodeCollector


def test_bandwidth_choice_and_breaker_of_every_path_and_what_failed_by_reason() -> None:
    load = replace(
        EMPTY_LOAD,
        paths=(PathLoad("d0", "shm", 3.1e9, "open", False), PathLoad("d0", "tcp", 1.2e9, "half_open", True)),
        failed_writes=(("lost", 4),),
        pulls=(("ok", 3), ("expired", 1)),
        resent_chunks=(("other_path", 2),),
    )
    registry = CollectorRegistry()
    registry.register(NodeCollector(FakeCluster([make_node("p0", "prefill", load), make_node("d0", "decode", None)])))  # type: ignore[arg-type]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"pdcluster_node_transfer_{name}", labels)

    shm, tcp = {"node": "p0", "peer": "d0", "backend": "shm"}, {"node": "p0", "peer": "d0", "backend": "tcp"}
    assert (value("bandwidth_bytes_per_second", **shm), value("bandwidth_bytes_per_second", **tcp)) == (3.1e9, 1.2e9)
    assert (value("breaker_state", **shm), value("breaker_state", **tcp)) == (2, 1)
    assert (value("path_chosen", **shm), value("path_chosen", **tcp)) == (0, 1)
    assert value("failed_writes_total", node="p0", role="prefill", reason="lost") == 4
    assert value("pulls_total", node="p0", role="prefill", reason="expired") == 1
    assert value("resent_chunks_total", node="p0", role="prefill", reason="other_path") == 2


def test_fitted_costs_and_their_error_bars_are_told_of_each_half() -> None:
    prefill = PrefillCost(0.01, 1e-4, 0.0, 512, 90, CostError(0.25, 0.05, (0.0, 0.0, 1e-5, 0.0, 0.0, 0.0)))
    node = replace(make_node("p0", "prefill", EMPTY_LOAD), cost=NodeCost(prefill, DecodeCost(0.02, 1e-3, 0.0, 7)))
    registry = CollectorRegistry()
    registry.register(NodeCollector(FakeCluster([node, make_node("d0", "decode", EMPTY_LOAD)])))  # type: ignore[arg-type]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"pdcluster_node_{name}", {"node": "p0", "role": "prefill", **labels})

    assert (value("cost_samples", half="prefill"), value("cost_samples", half="decode")) == (90, 7)
    assert (value("cost_spread_ratio", half="prefill"), value("cost_doubt_ratio", half="prefill")) == (0.25, 0.05)
    seconds, error = (
        value("predicted_seconds", half="prefill", figure="value"),
        value("predicted_seconds", half="prefill", figure="error"),
    )
    assert (seconds, error) == (prefill.seconds(512), prefill.error_s(512))
    assert (
        registry.get_sample_value("pdcluster_node_cost_samples", {"node": "d0", "role": "decode", "half": "prefill"})
        is None
    )
