"""NIXL (UCX) under a staged backend: its environment and its calls. Every call to the library is here. RDMA was not run
on hardware.

The library's own progress thread would keep a core busy for ever, so it is off. A writer makes progress when it asks
for the states of its writes. This engine's thread makes progress for incoming writes, as long as their writers report
that there are some. UCX has no authentication. It only sees staging blocks, and on loopback it stays off the network.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import threading
import time
from collections import Counter
from typing import Any

from pdcluster.core.address import is_loopback
from pdcluster.core.errors import ConfigError
from pdcluster.transfer.backends.base import Peer, WriteStatus
from pdcluster.transfer.backends.staged.staging import StagedSettings

LOG = logging.getLogger(__name__)

# One library under several names. Without a GPU it does not matter which.
PACKAGES = ("nixl_cu12", "nixl_cu13")
# How long one message of a writer keeps this end awake. Writers repeat it more often.
EXPECT_S = 0.05
CALL_EVERY_S = 0.0001


def environment(settings: StagedSettings) -> dict[str, str]:
    """The variables that the library reads. Set them before it is loaded. Its crash handler would hide ours."""
    values = {
        "NIXL_LOG_LEVEL": "WARN",
        "UCX_LOG_LEVEL": "error",
        "UCX_HANDLE_ERRORS": "none",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    fabric = settings.fabric
    if fabric.devices:
        values["UCX_NET_DEVICES"] = ",".join(device if ":" in device else f"{device}:1" for device in fabric.devices)
    elif is_loopback(settings.host):
        values["UCX_NET_DEVICES"] = "lo"
    if fabric.gid_index is not None:
        values["UCX_IB_GID_INDEX"] = str(fabric.gid_index)
    if fabric.rails is not None:
        values["UCX_MAX_RNDV_RAILS"] = str(fabric.rails)
    return values


def load_library() -> Any:
    """The library's Python module. Raises ConfigError when it is not installed."""
    keeps = logging.raiseExceptions  # the library switches it off for the whole process
    reasons = []
    try:
        for package in PACKAGES:
            try:
                return importlib.import_module(f"{package}._api")
            except ImportError as error:
                reasons.append(str(error))
    finally:
        logging.raiseExceptions = keeps
    raise ConfigError(
        f"transfer backend nixl needs the package nixl-cu12 ({'; '.join(reasons)}); install pdcluster[nixl] or use "
        "--transfer tcp"
    )


class NixlEngine:
    """One NIXL agent; any thread. Starting takes a second."""

    needs_calls = True
    reads_anywhere = False

    def __init__(self, me: Peer) -> None:
        library = load_library()
        bindings = library.nixlBind
        found = [each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception)]
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *found)
        settings = library.nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"], sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._dram = bindings.DRAM_SEG
        self._descriptors: Any = bindings.nixlXferDList
        try:
            self._agent: Any = library.nixl_agent(f"{me.node}:{me.incarnation}:{secrets.token_hex(4)}", settings)
        except self._errors as error:
            raise ConfigError(f"transfer backend nixl does not start: {error}") from error
        self._lock = threading.Lock()
        self._registered: dict[int, Any] = {}
        # Writes that have not ended: peer, source address, the library's handle.
        self._flying: dict[int, tuple[str, int, Any]] = {}
        self._met: Counter[str] = Counter()
        self._next = 1
        self._expected_until = 0.0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._progress, name="kv-nixl-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(2.0)
        with self._lock:
            for far in [far for far, count in self._met.items() if count]:
                self._disconnect(far)
            if not self._flying:
                self._agent = None
                return
        LOG.warning("%d writes by nixl never ended; their memory stays registered", len(self._flying))

    # ------------------------------------------------------------ memory

    def register(self, address: int, nbytes: int) -> None:
        try:
            with self._lock:
                self._registered[address] = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        except self._errors as error:
            raise OSError(f"nixl could not register {nbytes} bytes: {error}") from error

    def unregister(self, address: int, nbytes: int) -> None:
        """Memory that a write still reads stays registered, because the library would crash otherwise."""
        with self._lock:
            self._sweep()
            if any(address <= source < address + nbytes for _, source, _ in self._flying.values()):
                return
            try:
                self._agent.deregister_memory(self._registered.pop(address))
            except self._errors as error:
                LOG.warning("nixl could not unregister %d bytes of staging memory: %s", nbytes, error)

    def grant(self, address: int, nbytes: int) -> bytes:
        with self._lock:
            return bytes(
                self._agent.get_partial_agent_metadata(self._registered[address], inc_conn_info=True, backends=["UCX"])
            )

    # ------------------------------------------------------------ peers

    def meet(self, grant: bytes) -> str:
        try:
            with self._lock:
                name = self._agent.add_remote_agent(grant)
                far = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
                self._met[far] += 1
                return far
        except self._errors as error:
            raise OSError(f"nixl does not take the peer's grant: {error}") from error

    def part(self, far: str) -> None:
        with self._lock:
            self._met[far] -= 1
            self._sweep()
            if not self._met[far] and not any(each == far for each, _, _ in self._flying.values()):
                del self._met[far]
                self._disconnect(far)

    def _disconnect(self, far: str) -> None:
        try:
            self._agent.remove_remote_agent(far)
        except self._errors as error:
            LOG.debug("nixl had no connection to %s any more: %s", far, error)

    # ------------------------------------------------------------ writes

    def submit(self, far: str, source: int, target: int, nbytes: int) -> int | None:
        near, there = (
            self._descriptors(self._dram, [(source, nbytes, 0)]),
            self._descriptors(self._dram, [(target, nbytes, 0)]),
        )
        with self._lock:
            try:
                handle = self._agent.initialize_xfer("WRITE", near, there, far, backends=["UCX"])
            except self._errors as error:
                LOG.debug("nixl refused a write to %s: %s", far, error)
                return None
            batch, self._next = self._next, self._next + 1
            self._flying[batch] = (far, source, handle)
            try:
                self._agent.transfer(handle)
            except self._errors as error:
                LOG.debug(
                    "nixl failed a write to %s: %s", far, error
                )  # part of it may have left, so its state is polled
            return batch

    def check(self, batch: int) -> WriteStatus:
        with self._lock:
            if batch not in self._flying:
                return WriteStatus.UNKNOWN
            state = self._state(batch)
            if state == "PROC":
                return WriteStatus.PENDING
            self._release(batch)
            return WriteStatus.DONE if state == "DONE" else WriteStatus.UNKNOWN

    def _state(self, batch: int) -> str:
        try:
            return str(self._agent.check_xfer_state(self._flying[batch][2]))
        except self._errors as error:
            LOG.debug("nixl failed a write: %s", error)
            return "ERR"

    def _release(self, batch: int) -> None:
        """Forget a write and cancel it if possible. A write that cannot be cancelled stays in the books."""
        try:
            self._flying[batch][2].release()
        except self._errors as error:
            LOG.debug("nixl could not cancel a write: %s", error)
            return
        del self._flying[batch]

    def _sweep(self) -> None:
        """Forget writes that ended after their backend gave them up."""
        for batch in list(self._flying):
            if self._state(batch) != "PROC":
                self._release(batch)

    # ------------------------------------------------------------ progress for what comes in

    def expect(self) -> None:
        self._expected_until = time.monotonic() + EXPECT_S
        self._wake.set()

    def _progress(self) -> None:
        try:
            while not self._closing:
                if time.monotonic() < self._expected_until:
                    with self._lock:
                        self._agent.get_new_notifs()  # all calls make progress; this one does nothing else
                    time.sleep(CALL_EVERY_S)
                else:
                    self._wake.clear()
                    if time.monotonic() >= self._expected_until and not self._closing:
                        self._wake.wait()
        except Exception:
            LOG.exception("the progress thread of nixl failed: writes to this process will time out")
