"""Mooncake's transfer engine under a staged backend: its environment and its calls. Everything we ask of the library is
here.

What it does to its users, and what answers that:
 - its `protocol` argument does not choose the transport, and its environment is read once: `environment` forces TCP
   before the first engine, unless RDMA devices are named (which was not run on hardware).
 - it picks its rpc port itself, whatever it is asked for: sessions are named by `get_rpc_port`.
 - a negative state does not mean that the write failed: what was sent may still land, so the reader's block is never
   used again. -1 says that it ended at this end: over TCP the library says so only when the operation that sends from
   the source has ended and its socket is closed (`ClientSession` of its sources; tests/faults/test_paused.py shows it
   of the release that is installed). At any other state but 1 the library may still read the source, which stays pinned
   until it says 1 or -1: no timer frees it.
 - who is registered may be written by whoever knows the address: the KV pool never is. Over TCP it need not be in order
   to be sent from; over RDMA it would, so there everything is gathered in staging.
 - its queues overflow at 1024 entries per peer and then fail for seconds: their limit is raised, and it has a few
   pieces at a time (`flying`), of at most an entry per MiB.
 - its progress deadline must end before its transfer deadline, or a dead peer's write is read from after it was given
   up.
 - variables of its environment make another engine of it, or its answers mean less: they are refused.
 - before release 0.3.13 it made a connection per write: older ones are refused.
 - `transfer_submit_write` and `transfer_check_status` are the only calls that neither block nor spin.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from typing import Any

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import set_for_library
from pdcluster.transfer.backends.base import WriteStatus
from pdcluster.transfer.backends.staging import StagedSettings

LOG = logging.getLogger(__name__)

PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
OLDEST_RELEASE = (0, 3, 13)
QUEUE_LIMIT = 65535
# Of `transfer_check_status`. With 1 and -1 the library forgets the write; at any other state it may be asked again.
STATES = {1: WriteStatus.DONE, 0: WriteStatus.PENDING, -1: WriteStatus.LOST}
# Variables under which its answers mean something else: another engine, which tries other media when one failed, and
# writes that are done once they left this end.
ALTERING = ("MC_USE_TENT", "MC_USE_TEV1", "MC_TCP_PROTO")
# The library takes no less.
LEAST_TRANSFER_TIMEOUT_S = 5


def environment(settings: StagedSettings) -> dict[str, str]:
    """What the library reads from its environment, to be set before the first engine of the process starts."""
    transfer_s = max(LEAST_TRANSFER_TIMEOUT_S, round(settings.unknown_s))
    progress_s = min(max(1, round(settings.progress_s)), transfer_s - 1)
    fabric = settings.fabric
    gid = {"MC_GID_INDEX": str(fabric.gid_index)} if fabric.gid_index is not None else {}
    return {
        **(gid if fabric.devices else {"MC_FORCE_TCP": "1"}),
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
    """Refuse one that is too old; one that says nothing of itself was built by its user."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    if numbers and numbers < OLDEST_RELEASE:
        raise ConfigError(
            f"transfer backend mooncake needs release {'.'.join(map(str, OLDEST_RELEASE))} or newer of "
            f"{PACKAGES[0]}, {release} is installed; older "
            "ones open a connection per write"
        )


class MooncakeEngine:
    """The library; any thread. Starting and closing take it a second or two each, so backends may share one."""

    needs_calls = False

    def __init__(self, settings: StagedSettings) -> None:
        try:
            library = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ConfigError(
                "transfer backend mooncake needs the package mooncake-transfer-engine-non-cuda and libibverbs1 "
                f"({error}); "
                "install pdcluster[mooncake] or use --transfer tcp"
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
        self.session = f"{settings.host}:{self._engine.get_rpc_port()}"

    def close(self) -> None:
        """It blocks for a second or two."""
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
        """It keeps its connections for itself."""

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        return int(self._engine.transfer_submit_write(far, source, target, nbytes)) or None

    def check(self, batch: int) -> WriteStatus:
        return STATES.get(int(self._engine.transfer_check_status(batch)), WriteStatus.UNKNOWN)

    def expect(self) -> None:
        """It has threads of its own."""
