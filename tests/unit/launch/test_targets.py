"""Health ports as Prometheus discovers them."""

from __future__ import annotations

import pytest

from pdcluster.launch.targets import reachable, target_of


def test_a_process_is_a_group_of_one_with_its_labels() -> None:
    facts = {"address": "10.0.0.7:8080", "health": "10.0.0.7:9100"}
    found = target_of(facts, "blue", "router-x", "router", {"__meta_pdcluster_http": "10.0.0.7:8080"})
    assert found == {
        "targets": ["10.0.0.7:9100"],
        "labels": {
            "cluster": "blue", "process": "router-x", "component": "router", "__meta_pdcluster_http": "10.0.0.7:8080",
        },
    }  # fmt: skip


@pytest.mark.parametrize("facts", [{}, {"address": "10.0.0.7:8080"}, {"health": None}])
def test_a_process_without_a_health_port_is_none(facts: dict[str, object]) -> None:
    assert target_of(facts, "blue", "router-x", "router") is None


@pytest.mark.parametrize(("own", "host"), [("10.0.0.7:0", "10.0.0.7"), ("[fd00::7]:0", "[fd00::7]")])
def test_an_address_that_is_none_is_that_of_the_machine(own: str, host: str) -> None:
    facts = {"health": "0.0.0.0:9100", "admin": "[::]:1", "address": "10.9.9.9:80", "pid": 7, "grpc": None}
    found = {"health": f"{host}:9100", "admin": f"{host}:1", "address": "10.9.9.9:80", "pid": 7, "grpc": None}
    assert reachable(facts, own) == found
