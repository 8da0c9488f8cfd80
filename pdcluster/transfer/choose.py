"""Which transfer backends a node starts. A backend's module, and its library, is imported only when it is chosen."""

from __future__ import annotations

from pdcluster.config import set_library_environment
from pdcluster.errors import ConfigError
from pdcluster.transfer.base import Backend, Peer
from pdcluster.transfer.staging import StagedSettings

NAMES = ("shm", "tcp", "mooncake", "nixl")
AUTO = ("shm", "tcp")
"""Best first. Both ends go through this order and take the first that works for the pair: shm on one host, else tcp. mooncake runs over TCP here
and is slower than tcp, so it is only taken when it is asked for."""
NOT_YET = {
    "cuda_ipc": "CUDA IPC between GPUs of one host",
    "mooncake-rdma": "Mooncake over RDMA",
}


def create_backends(name: str, me: Peer, *, host: str, staging_bytes: int) -> dict[str, Backend]:
    """The backends behind --transfer NAME by name, best first, started; raises ConfigError by name for what can not be had.

    host: address that sockets listen on and that peers are told. staging_bytes: memory for staging blocks per connection, where a medium needs them.
    """
    names = AUTO if name == "auto" else (name,)
    backends: dict[str, Backend] = {}
    try:
        for each in names:
            backends[each] = _create(each, me, host, staging_bytes)
    except BaseException:
        for backend in backends.values():
            backend.shutdown()
        raise
    return backends


def _create(name: str, me: Peer, host: str, staging_bytes: int) -> Backend:
    if name == "shm":
        from pdcluster.transfer.shm import ShmBackend

        return ShmBackend(me)
    if name == "tcp":
        from pdcluster.transfer.tcp import TcpBackend, TcpSettings

        return TcpBackend(me, TcpSettings(host=host))
    if name == "mooncake":
        return _create_mooncake(me, _staged_settings(host, staging_bytes))
    if name == "nixl":
        return _create_nixl(me, _staged_settings(host, staging_bytes))
    if name in NOT_YET:
        raise ConfigError(f"transfer backend {name} ({NOT_YET[name]}) is not built yet; use auto, {', '.join(NAMES)}")
    raise ConfigError(f"there is no transfer backend {name!r}; use auto, {', '.join(NAMES)}")


def _staged_settings(host: str, staging_bytes: int) -> StagedSettings:
    block_bytes = min(2 << 20, max(1 << 16, staging_bytes // 8 // 4096 * 4096))
    return StagedSettings(host=host, block_bytes=block_bytes, blocks=max(2, min(16, staging_bytes // block_bytes)))


def _create_mooncake(me: Peer, settings: StagedSettings) -> Backend:
    from pdcluster.transfer.mooncake import MooncakeEngine, environment
    from pdcluster.transfer.staged import StagedBackend

    set_library_environment(environment(settings))
    return StagedBackend(me, "mooncake", MooncakeEngine(settings), settings)


def _create_nixl(me: Peer, settings: StagedSettings) -> Backend:
    from pdcluster.transfer.nixl import NixlEngine, environment
    from pdcluster.transfer.staged import StagedBackend

    set_library_environment(environment(settings))
    return StagedBackend(me, "nixl", NixlEngine(me), settings)
