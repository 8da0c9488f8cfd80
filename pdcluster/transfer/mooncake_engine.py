"""Mooncake's transfer engine: its settings, its calls, and the staging memory it may touch. Everything we ask of the library is here."""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
from dataclasses import dataclass
from typing import Any

from pdcluster.errors import ConfigError

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """block_bytes, blocks: shape of each ring. unknown_s: engine writes without an answer for so long count as failed."""

    host: str = "127.0.0.1"
    block_bytes: int = 2 << 20
    blocks: int = 8
    connect_s: float = 2.0
    progress_s: float = 5.0
    retry_s: float = 1.0
    unknown_s: float = 10.0


def environment(settings: MooncakeSettings) -> dict[str, str]:
    """What the library reads from its environment, to be set before the first engine of the process starts. TCP is forced because the
    engine's own protocol argument does not choose; its limits are kept above ours, so that its queues never overflow."""
    return {
        "MC_FORCE_TCP": "1",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_BIND_ADDRESS": settings.host,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, round(settings.progress_s))),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(max(1, round(settings.progress_s))),
        "MC_TRANSFER_TIMEOUT": str(max(5, round(settings.unknown_s))),
        "MC_LOG_LEVEL": "ERROR",
    }


class Engine:
    """The library; register and submit from any thread. Starting and closing take it a second or two each, so backends may share one."""

    def __init__(self, settings: MooncakeSettings) -> None:
        try:
            library = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ConfigError(
                f"transfer backend mooncake needs the package mooncake-transfer-engine-non-cuda and libibverbs1 ({error}); "
                "install pdcluster[mooncake] or use --transfer tcp"
            ) from error
        self._engine: Any = library.TransferEngine()
        code = self._engine.initialize(settings.host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise ConfigError(f"Mooncake's transfer engine does not start on {settings.host} (code {code}); is the address one of this host?")
        self.session = f"{settings.host}:{self._engine.get_rpc_port()}"

    def close(self) -> None:
        """End its threads and sockets. Nobody may use it any more; it blocks for a second or two."""
        self._engine = None

    def register(self, address: int, nbytes: int) -> None:
        if self._engine.register_memory(address, nbytes):
            raise OSError(f"Mooncake could not register {nbytes} bytes")

    def unregister(self, address: int) -> None:
        if self._engine.unregister_memory(address):
            LOG.warning("Mooncake could not unregister a staging ring")

    def submit(self, session: str, source: int, target: int, nbytes: int) -> int:
        """An id to check, 0 when it was refused."""
        return int(self._engine.transfer_submit_write(session, source, target, nbytes))

    def check(self, batch: int) -> int:
        """1 done, 0 pending, negative: no more is known."""
        return int(self._engine.transfer_check_status(batch))


class Blocks:
    """Registered staging memory of one connection."""

    _retired: list[mmap.mmap] = []  # noqa: RUF012  mapped for the life of the process, see module

    def __init__(self, engine: Engine, blocks: int, block_bytes: int) -> None:
        self._engine = engine
        self.block_bytes = block_bytes
        self._memory = mmap.mmap(-1, blocks * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        engine.register(self.address, blocks * block_bytes)

    def at(self, block: int) -> int:
        return self.address + block * self.block_bytes

    def retire(self) -> None:
        self._engine.unregister(self.address)
        self._memory.madvise(mmap.MADV_DONTNEED)
        Blocks._retired.append(self._memory)
