"""Which backends a node starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.backends.staged.mooncake import environment
from pdcluster.transfer.backends.staged.nixl import environment as nixl_environment
from pdcluster.transfer.backends.staged.staging import Fabric, StagedSettings
from pdcluster.transfer.paths.choose import auto_names, check_fabric, create_backends

ME = Peer("n0", "boot")


def test_auto_is_shared_memory_then_tcp() -> None:
    backends = create_backends("auto", ME, host="127.0.0.1", staging_bytes=1 << 20)
    try:
        assert list(backends) == ["shm", "tcp"]
        assert [backend.name for backend in backends.values()] == ["shm", "tcp"]
    finally:
        for backend in backends.values():
            backend.shutdown()


@pytest.mark.parametrize("name", ["cuda_ipc", "mooncake-rdma", "nvlink"])
def test_what_is_not_built_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .* is not built yet; use auto, shm, tcp, mooncake, nixl"):
        create_backends(name, ME, host="127.0.0.1", staging_bytes=1 << 20)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no transfer backend 'smoke'; use auto, shm, tcp, mooncake, nixl"):
        create_backends("smoke", ME, host="127.0.0.1", staging_bytes=1 << 20)


def test_a_backend_that_cannot_start_leaves_no_other_running() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0.*--transfer-host"):
        create_backends("auto", ME, host="192.0.2.1", staging_bytes=1 << 20)  # no address of this host


@pytest.mark.parametrize(
    ("host", "fabric", "has_nixl", "names"),
    [
        ("127.0.0.1", Fabric(), True, ("shm", "tcp")),
        ("::1", Fabric(), True, ("shm", "tcp")),
        ("fd00::5", Fabric(), True, ("shm", "tcp", "nixl")),
        ("10.0.0.5", Fabric(), True, ("shm", "tcp", "nixl")),
        ("10.0.0.5", Fabric(), False, ("shm", "tcp")),
        ("127.0.0.1", Fabric(("mlx5_0",)), False, ("shm", "tcp", "nixl")),
    ],
    ids=[
        "loopback",
        "loopback of IPv6",
        "a network of IPv6",
        "a network",
        "not installed",
        "devices are named, so it must start",
    ],
)
def test_nixl_joins_auto_where_it_may_find_another_way_than_tcp(
    host: str, fabric: Fabric, has_nixl: bool, names: tuple[str, ...]
) -> None:
    assert auto_names(host, fabric, has_nixl=has_nixl) == names


def test_auto_goes_on_without_a_nixl_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(me: Peer, settings: StagedSettings) -> object:
        raise ConfigError("transfer backend nixl does not start: no device")

    monkeypatch.setattr("pdcluster.transfer.paths.choose.auto_names", lambda *_, **__: ("shm", "tcp", "nixl"))
    monkeypatch.setattr("pdcluster.transfer.paths.choose._create_nixl", broken)
    backends = create_backends("auto", ME, host="127.0.0.1", staging_bytes=1 << 20)
    for backend in backends.values():
        backend.shutdown()
    assert list(backends) == ["shm", "tcp"] and "auto goes on without nixl" in caplog.text
    with pytest.raises(ConfigError, match="does not start"):
        create_backends("nixl", ME, host="127.0.0.1", staging_bytes=1 << 20)


# ---------------------------------------------------------------- RDMA by configuration; not run on hardware


@pytest.mark.parametrize(
    ("fabric", "name", "message"),
    [
        (Fabric(("mlx5_0",)), "tcp", "are for mooncake and nixl, not for tcp"),
        (Fabric(("mlx5_0",)), "shm", "are for mooncake and nixl, not for shm"),
        (Fabric(gid_index=3), "nixl", "need node.transfer.devices"),
        (Fabric(("mlx5_0",), rails=2), "mooncake", "Mooncake uses all of node.transfer.devices"),
        (Fabric(("mlx5_0", "mlx5_7:1")), "nixl", "names mlx5_7:1, but this host has mlx5_0, mlx5_1"),
    ],
)
def test_rdma_settings_that_nothing_would_use_are_refused(
    fabric: Fabric, name: str, message: str, tmp_path: Path
) -> None:
    for device in ("mlx5_1", "mlx5_0"):
        (tmp_path / device).mkdir()
    with pytest.raises(ConfigError, match=message):
        check_fabric(fabric, name, (name,), found_in=tmp_path)
    check_fabric(Fabric(("mlx5_0", "mlx5_1:1"), gid_index=3), "mooncake", ("mooncake",), found_in=tmp_path)


def test_a_device_that_this_host_lacks_is_refused_before_a_library_quietly_takes_another_way() -> None:
    with pytest.raises(ConfigError, match="names no_such_hca, but this host has"):
        create_backends("mooncake", ME, host="127.0.0.1", staging_bytes=1 << 20, fabric=Fabric(("no_such_hca",)))


def test_named_devices_reach_the_libraries() -> None:
    settings = StagedSettings(host="127.0.0.1", fabric=Fabric(("mlx5_0", "mlx5_1:2"), gid_index=3, rails=2))
    ucx = nixl_environment(settings)
    assert (ucx["UCX_NET_DEVICES"], ucx["UCX_IB_GID_INDEX"], ucx["UCX_MAX_RNDV_RAILS"]) == (
        "mlx5_0:1,mlx5_1:2",
        "3",
        "2",
    )
    assert environment(settings)["MC_GID_INDEX"] == "3" and "MC_FORCE_TCP" not in environment(settings)
    assert (
        nixl_environment(StagedSettings())["UCX_NET_DEVICES"] == "lo"
        and environment(StagedSettings())["MC_FORCE_TCP"] == "1"
    )


def test_a_fixed_port_is_listened_on_and_refused_where_nothing_is_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    backends = create_backends("tcp", ME, host="127.0.0.1", staging_bytes=1 << 20, port=port)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0):
            pass
    finally:
        backends["tcp"].shutdown()
    with pytest.raises(ConfigError, match=r"node\.transfer\.port is for tcp"):
        create_backends("shm", ME, host="127.0.0.1", staging_bytes=1 << 20, port=port)
