"""What a worker is told, its share of a router's bounds, and the ports that workers share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import RouterConfig, load
from pdcluster_router.core.ids import worker_of
from pdcluster_router.core.tenants import read_tenants
from pdcluster_router.frontend.server import bind
from pdcluster_router.workers import ports
from pdcluster_router.workers.supervisor import worker_spec
from pdcluster_router.workers.worker import WorkerIdentity, share_of


@given(st.integers(1, 2**31), st.integers(1, 64))
def test_all_shares_together_keep_to_the_bound_unless_it_is_less_than_the_workers(bound: int, count: int) -> None:
    assert share_of(bound, count) >= 1 and share_of(bound, count) * count <= max(bound, count)


def test_a_worker_divides_what_is_held_and_accepted() -> None:
    config = WorkerIdentity(1, 4, Path("/x")).share(RouterConfig(max_requests=100))
    assert (config.max_requests, config.hold.requests, config.hold.memory_bytes) == (25, 256, 64 * 2**20)
    assert config.hold.age_s == RouterConfig().hold.age_s


def test_tenants_share_out_their_bounds(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(
        '[acme]\nkeys = ["sk-acme-0001"]\nmax_requests = 9\n[small]\nkeys = ["sk-small-001"]\nmax_requests = 1\n'
    )
    tenants = read_tenants(file, 4)
    assert [tenants.identify(f"Bearer {key}").max_requests for key in ("sk-acme-0001", "sk-small-001")] == [2, 1]
    assert read_tenants(file).identify("Bearer sk-acme-0001").max_requests == 9


def test_a_worker_is_named_by_its_text_and_by_the_ids_it_gives() -> None:
    worker = WorkerIdentity.parse("2/4@/tmp/a b/control")
    assert worker == WorkerIdentity(2, 4, Path("/tmp/a b/control")) and WorkerIdentity.parse(str(worker)) == worker
    assert worker_of(f"{worker.id_prefix}42474cff8be94e1d52277be5-0") == 2
    assert worker_of(f"chatcmpl-{worker.id_prefix}42474cff8be94e1d52277be5") == 2, "as in the body of its answer"
    assert [worker_of(name) for name in ("cmpl-w1-mine", "w1-job", "0123abcd", "w-1", "xw1-a", "")] == [None] * 6
    for text in ("4/4@/x", "1@/x", "", "a/b@c"):
        with pytest.raises(ConfigError, match="--workers"):
            WorkerIdentity.parse(text)


def test_a_worker_is_told_what_its_supervisor_was_told_but_for_its_own(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[router]\nlease_s = 7\n")
    flags = {
        "router.workers": "2",
        "router.http": "127.0.0.1:0",
        "router.auto_roles": True,
        "router.hold.age_s": "9s",
        "router.ready_fd": "5",
    }
    loaded = load(RouterConfig, flags, file, {})
    specs = [worker_spec(loaded, f"r-{i}", WorkerIdentity(i, 2, Path("/c")), "127.0.0.1:81", None) for i in range(2)]
    found = []
    for spec in specs:
        pairs = dict(spec.argv[i + 1].partition("=")[::2] for i, part in enumerate(spec.argv) if part == "--set")
        found.append(load(RouterConfig, {**pairs, "router.name": spec.name}, file, {}).config)
    assert [config.auto_roles for config in found] == [True, False], "one worker alone moves roles"
    assert [config.worker for config in found] == ["0/2@/c", "1/2@/c"]
    assert {
        (config.http, config.grpc, config.admin, config.hold.age_s, config.lease_s, config.ready_fd) for config in found
    } == {("127.0.0.1:81", None, None, 9.0, 7.0, None)}
    assert {spec.drain_s for spec in specs} == {loaded.config.drain_s + 1.0}


def test_a_port_is_held_for_workers_and_for_nobody_else() -> None:
    held, address = ports.hold("127.0.0.1:0", "--http")
    try:
        first, second = (bind(address, is_port_shared=True) for _ in range(2))
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind(address, is_port_shared=False)
        with pytest.raises(ConfigError, match="choose another address with --grpc"):
            ports.hold(address, "--grpc")
        first.close()
        second.close()
    finally:
        held.close()


def test_a_system_that_cannot_share_ports_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    with pytest.raises(ConfigError, match="use --workers 1"):
        ports.hold("127.0.0.1:0", "--http")
