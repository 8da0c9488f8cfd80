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
from pdcluster.transfer.paths.choose import auto_names, check_fabric, create_backends, rdma_devices

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


def add_port(sysfs: Path, device: str, state: str, port: int = 1) -> None:
    folder = sysfs / device / "ports" / str(port)
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")


def uverbs(folder: Path) -> Path:
    (folder / "dev").mkdir()
    (folder / "dev" / "uverbs0").touch()
    return folder / "dev"


def test_a_device_counts_where_one_of_its_ports_is_active(tmp_path: Path) -> None:
    verbs = uverbs(tmp_path)
    assert rdma_devices(tmp_path / "none", verbs) == [] == rdma_devices(tmp_path, verbs)
    add_port(tmp_path, "mlx5_2", "4: ACTIVE")
    add_port(tmp_path, "mlx5_0", "1: DOWN")
    add_port(tmp_path, "mlx5_0", "4: ACTIVE", port=2)
    add_port(tmp_path, "mlx5_1", "2: INIT")
    (tmp_path / "mlx5_3").mkdir()
    assert rdma_devices(tmp_path, verbs) == ["mlx5_0", "mlx5_2"]
    assert not rdma_devices(tmp_path, tmp_path / "none"), "a container without access to them"


@pytest.mark.parametrize(
    ("host", "fabric", "has_nixl", "names"),
    [
        ("10.0.0.5", Fabric(), True, ("shm", "nixl", "tcp")),
        ("127.0.0.1", Fabric(("mlx5_0",)), True, ("shm", "nixl", "tcp")),
        ("10.0.0.5", Fabric(), False, ("shm", "tcp")),
        ("127.0.0.1", Fabric(), True, ("shm", "tcp")),
    ],
    ids=["a network", "devices are named", "nothing that could use it", "loopback"],
)
def test_auto_prefers_rdma_where_a_device_is_up(
    host: str, fabric: Fabric, has_nixl: bool, names: tuple[str, ...]
) -> None:
    assert auto_names(host, fabric, has_nixl=has_nixl, has_rdma=True) == names


@pytest.mark.parametrize(
    ("state", "names"), [("4: ACTIVE", ["shm", "nixl", "tcp"]), ("1: DOWN", ["shm", "tcp", "nixl"])]
)
def test_the_sysfs_of_the_host_decides_what_auto_starts_first(
    state: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_port(tmp_path, "mlx5_0", state)
    verbs = uverbs(tmp_path)
    monkeypatch.setattr("pdcluster.transfer.paths.choose.rdma_devices", lambda: rdma_devices(tmp_path, verbs))
    monkeypatch.setattr("pdcluster.transfer.paths.choose._has_nixl", lambda: True)
    monkeypatch.setattr("pdcluster.transfer.paths.choose._create", lambda name, me, settings: name)
    assert list(create_backends("auto", ME, host="10.0.0.5", staging_bytes=1 << 20)) == names


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
