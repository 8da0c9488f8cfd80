"""Mooncake's transfer engine under a staged backend: its environment and its calls. Every call to the library is here.

Properties of the library, and the answer to each:

- Its `protocol` argument does not choose the transport, and it reads its environment once. `environment` forces TCP
  before the first engine, unless RDMA devices are named (not run on hardware).
- It picks its rpc port itself. Sessions are named by `get_rpc_port`.
- A negative state does not mean that the write failed. What was sent may still land, so the reader's block is never
  used again. -1 means that it ended at this end. Over TCP the library answers -1 only when the operation that sends
  from the source has ended and its socket is closed (`ClientSession` of its sources; tests/faults/test_paused.py shows
  it of the installed release). At any other state but 1 the library may still read the source. The source stays pinned
  until 1 or -1; no timer frees it.
- Whoever knows the address may write registered memory, so the KV pool is never registered. TCP can send from
  unregistered memory. RDMA cannot, so there everything is gathered in staging.
- Its queues overflow at 1024 entries per peer and then fail for seconds. The limit is raised, and the library gets a
  few pieces at a time (`flying`), with at most one entry per MiB.
- Its progress deadline must end before its transfer deadline. Otherwise it reads from a dead peer's write after that
  was given up.
- Some environment variables select another engine or weaken its answers. They are refused.
- Before release 0.3.13 it opened a connection per write. Older releases are refused.
- Only `transfer_submit_write` and `transfer_check_status` neither block nor spin.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from typing import Any

from pdcluster.core.address import format_address, is_ipv6
from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import set_for_library
from pdcluster.transfer.backends.base import WriteStatus
from pdcluster.transfer.backends.staged.staging import StagedSettings

LOG = logging.getLogger(__name__)

PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
OLDEST_RELEASE = (0, 3, 13)
QUEUE_LIMIT = 65535
# Of `transfer_check_status`. At 1 and -1 the library forgets the write; at any other state it can be asked again.
STATES = {1: WriteStatus.DONE, 0: WriteStatus.PENDING, -1: WriteStatus.LOST}
# Variables that change the meaning of its answers: another engine that retries other media, or writes that count as
# done once they left this end.
ALTERING = ("MC_USE_TENT", "MC_USE_TEV1", "MC_TCP_PROTO")
# The library's own minimum.
LEAST_TRANSFER_TIMEOUT_S = 5


def environment(settings: StagedSettings) -> dict[str, str]:
    """The variables that the library reads. Set them before the first engine of the process starts."""
    transfer_s = max(LEAST_TRANSFER_TIMEOUT_S, round(settings.unknown_s))
    progress_s = min(max(1, round(settings.progress_s)), transfer_s - 1)
    fabric = settings.fabric
    gid = {"MC_GID_INDEX": str(fabric.gid_index)} if fabric.gid_index is not None else {}
    return {
        **(gid if fabric.devices else {"MC_FORCE_TCP": "1"}),
        **({"MC_USE_IPV6": "1"} if is_ipv6(settings.host) else {}),
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_BIND_ADDRESS": settings.host,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(QUEUE_LIMIT),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(progress_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(progress_s),
        "MC_TRANSFER_TIMEOUT": str(transfer_s),
        "MC_LOG_LEVEL": "ERROR",
    }


def installed_release() -> str:
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def check_release(release: str) -> None:
    """Refuse a release that is too old. A library without a release number was built by its user and passes."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    if numbers and numbers < OLDEST_RELEASE:
        raise ConfigError(
            f"transfer backend mooncake needs release {'.'.join(map(str, OLDEST_RELEASE))} or newer of "
            f"{PACKAGES[0]}, {release} is installed; older "
            "ones open a connection per write"
        )


class MooncakeEngine:
    """The library; any thread. Starting and closing take a second or two each, so backends may share one."""

    needs_calls = False

    def __init__(self, settings: StagedSettings) -> None:
        try:
            library = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ConfigError(
                f"transfer backend mooncake needs Mooncake's transfer engine and libibverbs1 ({error}); "
                "install pdcluster[mooncake-cpu], pdcluster[mooncake] beside CUDA 12, or use --transfer tcp"
            ) from error
        check_release(installed_release())
        if altering := set_for_library(ALTERING):
            raise ConfigError(
                f"transfer backend mooncake can not rely on the library's answers when {', '.join(altering)} is set; "
                "unset it"
            )
        self._engine: Any = library.TransferEngine()
        devices = ",".join(settings.fabric.devices)
        code = self._engine.initialize(settings.host, "P2PHANDSHAKE", "rdma" if devices else "tcp", devices)
        if code:
            over = f" over {devices}" if devices else ""
            raise ConfigError(
                f"Mooncake's transfer engine does not start on {settings.host}{over} (code {code}); is the address "
                "one of this host?"
            )
        self.reads_anywhere = not devices
        self.session = format_address(settings.host, self._engine.get_rpc_port())

    def close(self) -> None:
        """Blocks for a second or two."""
        self._engine = None

    def register(self, address: int, nbytes: int) -> None:
        if self._engine.register_memory(address, nbytes):
            raise OSError(f"Mooncake could not register {nbytes} bytes")

    def unregister(self, address: int, nbytes: int) -> None:
        if self._engine.unregister_memory(address):
            LOG.warning("Mooncake could not unregister %d bytes of staging memory", nbytes)

    def grant(self, address: int, nbytes: int) -> bytes:
        return self.session.encode()

    def meet(self, grant: bytes) -> str:
        return grant.decode(errors="replace")

    def part(self, far: str) -> None:
        """Does nothing: the library keeps its connections."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        return int(self._engine.transfer_submit_write(far, source, target, nbytes)) or None

    def check(self, batch: int) -> WriteStatus:
        return STATES.get(int(self._engine.transfer_check_status(batch)), WriteStatus.UNKNOWN)

    def expect(self) -> None:
        """Does nothing: the library has its own threads."""
