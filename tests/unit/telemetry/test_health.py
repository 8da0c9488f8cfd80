"""The health port: it answers from threads of its own, says why, and is bounded."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from pdcluster.core.errors import ConfigError, Unavailable
from pdcluster.core.version import VERSION
from pdcluster.telemetry.health import LATE_S, MAX_CLIENTS, Probes, Pulse, Verdict, alive, exposition_of, health_port


class Said:
    """What the process says, as a test sets it."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.ready = Verdict(True, "ready", facts={"nodes": 2})
        registry = CollectorRegistry()
        Gauge("pdcluster_test", "A value.", registry=registry).set(7)
        self.metrics = exposition_of(registry)
        self.probes = Probes(lambda: alive(self.problems), lambda: self.ready, lambda: self.metrics())


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def address(said: Said) -> Iterator[str]:
    with health_port("127.0.0.1:0", said.probes) as found:
        assert found is not None
        yield found


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=10.0) as client:
        yield client


def test_probes_say_what_is_and_why(client: httpx.Client, said: Said) -> None:
    live = client.get("/livez")
    assert (live.status_code, live.json()["status"], live.json()["version"]) == (200, "alive", VERSION)
    said.problems = ["the main loop made no turn for 12.0 s"]
    live = client.get("/livez")
    assert live.status_code == 503 and live.json()["reasons"] == said.problems
    assert client.get("/readyz").json()["nodes"] == 2
    said.ready = Verdict(False, "not ready", ["draining"])
    assert client.get("/readyz?verbose").status_code == 503
    head = client.head("/readyz")
    assert (head.status_code, head.content) == (503, b"")


def test_metrics_are_text_and_their_failure_is_an_answer(client: httpx.Client, said: Said) -> None:
    assert "pdcluster_test 7.0" in client.get("/metrics").text

    def fail() -> bytes:
        raise Unavailable("the loop made no metrics")

    said.metrics = fail
    failed = client.get("/metrics")
    assert (failed.status_code, failed.text) == (503, "the loop made no metrics\n")


def test_other_paths_and_methods_are_refused_with_what_there_is(client: httpx.Client) -> None:
    assert "/readyz" in client.get("/").text and client.get("/").status_code == 404
    assert client.post("/livez", content=b"x").status_code == 501


def test_clients_beyond_the_bound_are_closed_and_places_come_back(address: str, client: httpx.Client) -> None:
    host, port = address.split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(MAX_CLIENTS)]
    time.sleep(0.3)  # until each has its thread
    with socket.create_connection((host, int(port)), timeout=10.0) as late:
        assert late.recv(1) == b"", "closed without an answer"
    for each in idle:
        each.close()
    deadline = time.monotonic() + 10.0
    while True:
        try:
            assert client.get("/livez").status_code == 200
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline


def test_places_come_back_when_the_machine_had_no_thread_for_a_client(address: str, client: httpx.Client) -> None:
    host, port = address.split(":")
    usual = threading.stack_size(1 << 47)  # more than there are addresses, so that no thread begins
    try:
        for _ in range(MAX_CLIENTS + 1):
            with socket.create_connection((host, int(port)), timeout=10.0) as refused:
                assert refused.recv(1) == b"", "closed without an answer"
    finally:
        threading.stack_size(usual)
    assert client.get("/livez").status_code == 200


def test_a_taken_port_is_an_error_with_the_way_out(address: str, said: Said) -> None:
    with pytest.raises(ConfigError, match="--health"), health_port(address, said.probes):
        pass
    with health_port(None, said.probes) as nothing:
        assert nothing is None


def test_a_process_that_starts_again_takes_its_port_at_once(said: Said) -> None:
    with health_port("127.0.0.1:0", said.probes) as address:
        assert httpx.get(f"http://{address}/livez", trust_env=False).status_code == 200, "the server closes first"
    with health_port(address, said.probes):
        assert httpx.get(f"http://{address}/livez", trust_env=False).status_code == 200


def test_a_loop_that_stands_is_no_longer_alive() -> None:
    now = 0.0
    pulse = Pulse(lambda: now)
    now = LATE_S
    assert pulse.problems() == []
    now = LATE_S + 1.0
    assert pulse.problems() == ["the main loop made no turn for 11.0 s"]
    pulse.beat()
    assert pulse.age_s == 0.0
