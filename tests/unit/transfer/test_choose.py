"""Which backends a node starts."""

from __future__ import annotations

import pytest

from pdcluster.errors import ConfigError
from pdcluster.transfer.base import Peer
from pdcluster.transfer.choose import create_backends

ME = Peer("n0", "boot")


def test_auto_is_shared_memory_then_tcp() -> None:
    backends = create_backends("auto", ME, host="127.0.0.1", staging_bytes=1 << 20)
    try:
        assert list(backends) == ["shm", "tcp"]
        assert [backend.name for backend in backends.values()] == ["shm", "tcp"]
    finally:
        for backend in backends.values():
            backend.shutdown()


@pytest.mark.parametrize("name", ["cuda_ipc", "mooncake-rdma"])
def test_what_is_not_built_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .* is not built yet; use auto, shm, tcp, mooncake, nixl"):
        create_backends(name, ME, host="127.0.0.1", staging_bytes=1 << 20)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no transfer backend 'smoke'; use auto, shm, tcp, mooncake, nixl"):
        create_backends("smoke", ME, host="127.0.0.1", staging_bytes=1 << 20)


def test_a_backend_that_cannot_start_leaves_no_other_running() -> None:
    with pytest.raises(OSError):
        create_backends("auto", ME, host="192.0.2.1", staging_bytes=1 << 20)  # no address of this host
