"""What nodes report of their transfers is readable at the router's /metrics."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from scripted_cluster import EMPTY_LOAD, FakeCluster, make_node

from pdcluster.bootstrap.card import NodeCard
from pdcluster.core import messages as m
from pdcluster.core.messages import PathLoad
from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster_router.cluster.metrics import MAX_PATHS, NodeCollector
from pdcluster_router.cluster.view import NodeView


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


def test_each_node_says_its_weights_and_whether_it_sleeps() -> None:
    layout = KVLayout(1, 1, 1, 32, "bfloat16")
    fingerprint = Fingerprint("m", "A", m.PROTOCOL_VERSION, 32, layout)
    card = NodeCard("p0", "p0-1", "prefill", "p0:1", "m", fingerprint, 1, 1, 1, weights_label="tuned", weights_epoch=3)
    asleep = dataclasses.replace(card, node="d0", role="decode", sleeping=True)
    registry = CollectorRegistry()
    registry.register(NodeCollector(FakeCluster([], known=[card, asleep])))  # type: ignore[arg-type]
    labels = {"label": "tuned", "epoch": "3"}
    assert registry.get_sample_value("pdcluster_node_weights", {"node": "p0", "role": "prefill", **labels}) == 1
    assert registry.get_sample_value("pdcluster_node_weights", {"node": "d0", "role": "decode", **labels}) == 0


def paths_of(name: str, bytes_s: float) -> tuple[PathLoad, ...]:
    """To each other node of a hundred."""
    others = [f"n{number:02d}" for number in range(100) if f"n{number:02d}" != name]
    return tuple(
        PathLoad(peer, backend, bytes_s, "closed", backend == "tcp") for peer in others for backend in ("shm", "tcp")
    )


def series_of_paths(nodes: list[NodeView]) -> tuple[dict[str, set[tuple[str, ...]]], float]:
    """(node, peer, backend) by family, and how many were left out."""
    found: dict[str, set[tuple[str, ...]]] = {}
    left_out = -1.0
    for family in NodeCollector(FakeCluster(nodes)).collect():  # type: ignore[arg-type]
        if family.name == "pdcluster_node_transfer_paths_left_out":
            left_out = family.samples[0].value
        for sample in family.samples:
            if "peer" in sample.labels:
                found.setdefault(family.name, set()).add(
                    tuple(sample.labels[name] for name in ("node", "peer", "backend"))
                )
    return found, left_out


def test_a_path_has_series_once_it_was_measured_or_failed() -> None:
    told = (PathLoad("d0", "shm", 0.0, "closed", True), PathLoad("d1", "shm", 2e9), PathLoad("d2", "shm", 0.0, "open"))
    found, left_out = series_of_paths([make_node("p0", "prefill", replace(EMPTY_LOAD, paths=told))])
    assert set(map(frozenset, found.values())) == {frozenset({("p0", "d1", "shm"), ("p0", "d2", "shm")})}
    assert left_out == 0


def test_paths_of_a_hundred_nodes_are_bounded_and_those_in_trouble_come_first() -> None:
    idle = [make_node(f"n{n:02d}", "mixed", replace(EMPTY_LOAD, paths=paths_of(f"n{n:02d}", 0.0))) for n in range(100)]
    assert series_of_paths(idle) == ({}, 0)
    busy = [make_node(f"n{n:02d}", "mixed", replace(EMPTY_LOAD, paths=paths_of(f"n{n:02d}", 1e9))) for n in range(99)]
    last = (*paths_of("n99", 1e9)[:-1], PathLoad("n98", "tcp", 0.0, "open"))
    found, left_out = series_of_paths([*busy, make_node("n99", "mixed", replace(EMPTY_LOAD, paths=last))])
    assert [len(series) for series in found.values()] == [MAX_PATHS] * 3
    assert ("n99", "n98", "tcp") in found["pdcluster_node_transfer_breaker_state"]
    assert left_out == 100 * 99 * 2 - MAX_PATHS


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
