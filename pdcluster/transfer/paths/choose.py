"""Which transfer backends a node starts. A backend's module and library are imported only when it is chosen."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

from pdcluster.core.address import is_loopback
from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import set_library_environment
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.backends.staged.staging import Fabric, StagedSettings

LOG = logging.getLogger(__name__)

NAMES = ("shm", "tcp", "mooncake", "nixl")
# Best first, as long as a pair is not measured; `auto_names` adds nixl. mooncake without RDMA devices uses TCP and is
# slower than tcp, so the user must name it.
AUTO = ("shm", "tcp")
AUTO_RDMA = ("shm", "nixl", "tcp")
NOT_YET = {
    "cuda_ipc": "CUDA IPC between GPUs of one host",
    "nvlink": "NVLink between GPUs, which needs KV in device memory",
    "mooncake-rdma": "Mooncake over RDMA by a name of its own: use mooncake with node.transfer.devices",
}
INFINIBAND = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
# Staging blocks of 4 MiB each. They stay in the last-level cache, and a link needs no more in flight. Half that size
# costs a tenth more of the writer's core, because Python's work per piece runs with cold caches.
MOST_BLOCKS = 5


def create_backends(
    name: str,
    me: Peer,
    *,
    host: str,
    staging_bytes: int,
    fabric: Fabric | None = None,
    port: int | None = None,
    is_sealed: bool = False,
) -> dict[str, Backend]:
    """The started backends behind --transfer NAME, by name, best first.

    host: address that sockets listen on and that peers connect to.
    staging_bytes: memory for staging blocks per connection, where a medium needs them.
    fabric: RDMA devices for the backends that use them.
    port: that tcp listens on; None: a free one.
    is_sealed: what goes over our own sockets is encrypted.
    Raises ConfigError when a named backend cannot start.
    """
    fabric = fabric if fabric is not None else Fabric()
    names: tuple[str, ...] = (name,)
    if name == "auto":
        has_nixl = _has_nixl()
        names = auto_names(host, fabric, has_nixl=has_nixl, has_rdma=has_nixl and bool(rdma_devices()))
    check_fabric(fabric, name, names)
    if port is not None and "tcp" not in names:
        raise ConfigError(f"node.transfer.port is for tcp, not for {name}; leave it out")
    settings = replace(_staged_settings(host, staging_bytes, fabric, port), is_sealed=is_sealed)
    backends: dict[str, Backend] = {}
    try:
        for each in names:
            is_optional = name == "auto" and each == "nixl" and not fabric.devices
            started = _start_if_it_can(each, me, settings) if is_optional else _create(each, me, settings)
            backends |= {each: started} if started is not None else {}
    except BaseException:
        for backend in backends.values():
            backend.shutdown()
        raise
    return backends


def auto_names(host: str, fabric: Fabric, *, has_nixl: bool, has_rdma: bool = False) -> tuple[str, ...]:
    """The backends of `auto`. nixl joins where it is installed and may find a path other than tcp's sockets; measuring
    decides. On loopback there is no such path, and nixl would only cost start time, memory and measuring.

    has_rdma: an RDMA device of this host is up, so nixl comes before tcp as long as a pair is not measured.
    """
    if not fabric.devices and (not has_nixl or is_loopback(host)):
        return AUTO
    return AUTO_RDMA if has_rdma else (*AUTO, "nixl")


def rdma_devices(found_in: Path = INFINIBAND, verbs: Path = VERBS) -> list[str]:
    """The RDMA devices with an active port, as the kernel lists them for ibverbs; none without access to any."""
    if not any(verbs.glob("uverbs*")):
        return []  # a container sees the host's devices, and may have none
    return sorted({state.parts[-4] for state in found_in.glob("*/ports/*/state") if _is_active(state)})


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text()
    except OSError:
        return False  # the device is gone


def check_fabric(fabric: Fabric, name: str, names: tuple[str, ...], found_in: Path = INFINIBAND) -> None:
    """Refuse RDMA settings that no backend uses, and devices that this host lacks. The library would silently go on
    without them.
    """
    if fabric == Fabric():
        return
    if not {"mooncake", "nixl"} & set(names):
        raise ConfigError(
            f"node.transfer.devices, gid_index and rails are for mooncake and nixl, not for {name}; leave them out"
        )
    if not fabric.devices:
        raise ConfigError("node.transfer.gid_index and rails need node.transfer.devices, such as mlx5_0,mlx5_1")
    if fabric.rails is not None and "mooncake" in names:
        raise ConfigError(
            "node.transfer.rails is for nixl: Mooncake uses all of node.transfer.devices; name as many as there "
            "shall be rails"
        )
    found = sorted(entry.name for entry in found_in.iterdir()) if found_in.is_dir() else []
    missing = [device for device in fabric.devices if device.split(":")[0] not in found]
    if missing:
        raise ConfigError(
            f"node.transfer.devices names {', '.join(missing)}, but this host has "
            f"{', '.join(found) or 'no RDMA devices'}"
        )


def _has_nixl() -> bool:
    from pdcluster.transfer.backends.staged.nixl import PACKAGES

    return any(importlib.util.find_spec(package) for package in PACKAGES)


def _start_if_it_can(name: str, me: Peer, settings: StagedSettings) -> Backend | None:
    """Start a backend that the user did not name; None when it cannot start."""
    try:
        return _create(name, me, settings)
    except ConfigError as error:
        LOG.warning("auto goes on without %s: %s", name, error)
        return None


def _create(name: str, me: Peer, settings: StagedSettings) -> Backend:
    if name == "shm":
        from pdcluster.transfer.backends.shm import ShmBackend

        return ShmBackend(me)
    if name == "tcp":
        from pdcluster.transfer.backends.tcp import TcpBackend, TcpSettings

        return TcpBackend(me, TcpSettings(host=settings.host, port=settings.port or 0, is_sealed=settings.is_sealed))
    if name == "mooncake":
        return _create_mooncake(me, settings)
    if name == "nixl":
        return _create_nixl(me, settings)
    if name in NOT_YET:
        raise ConfigError(f"transfer backend {name} ({NOT_YET[name]}) is not built yet; use auto, {', '.join(NAMES)}")
    raise ConfigError(f"there is no transfer backend {name!r}; use auto, {', '.join(NAMES)}")


def _staged_settings(host: str, staging_bytes: int, fabric: Fabric, port: int | None) -> StagedSettings:
    block_bytes = min(4 << 20, max(1 << 16, staging_bytes // 8 // 4096 * 4096))
    return StagedSettings(
        host=host,
        block_bytes=block_bytes,
        blocks=max(2, min(MOST_BLOCKS, staging_bytes // block_bytes)),
        fabric=fabric,
        port=port,
    )


def _create_mooncake(me: Peer, settings: StagedSettings) -> Backend:
    from pdcluster.transfer.backends.staged.backend import StagedBackend
    from pdcluster.transfer.backends.staged.mooncake import MooncakeEngine, environment

    set_library_environment(environment(settings))
    return StagedBackend(me, "mooncake", MooncakeEngine(settings), settings)


def _create_nixl(me: Peer, settings: StagedSettings) -> Backend:
    from pdcluster.transfer.backends.staged.backend import StagedBackend
    from pdcluster.transfer.backends.staged.nixl import NixlEngine, environment

    set_library_environment(environment(settings))
    return StagedBackend(me, "nixl", NixlEngine(me), settings)
