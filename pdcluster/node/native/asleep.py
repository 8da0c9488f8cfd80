"""A node that sleeps: it has no engine and no pool, refuses work, and waits for weights."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Iterable, Set
from contextlib import ExitStack
from pathlib import Path

from pdcluster.checkpoint.weight_image import StoredImage, WeightImage
from pdcluster.core.messages import (
    Abort,
    AbortAck,
    AdapterManaged,
    AnyMessage,
    Commit,
    CommitAck,
    Declined,
    Deliver,
    Fetch,
    Load,
    ManageAdapter,
    Prefill,
    RefusedLeg,
    Reserve,
    Work,
)
from pdcluster.node.control import NodeLeg, NodeLinks
from pdcluster.node.reports.health import NodeSnapshot
from pdcluster.transfer.backends.base import Peer

logger = logging.getLogger(__name__)


def give_memory_back() -> None:
    """Have the allocator give what nobody uses back to the system."""
    gc.unfreeze()
    gc.collect()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it, musl gives memory back itself
        trim(0)


class KeptWeights:
    """Weights that are in no file, on their way to the disk. The image is held until they are there."""

    def __init__(self, image: WeightImage, directory: Path) -> None:
        """Takes the room. Raises ModelError."""
        self.stored, self._held = StoredImage(image, directory), ExitStack()
        self._image = image
        if image.hold():
            self._held.callback(image.release)

    def fill(self) -> StoredImage:
        """Raises ModelError where the disk fails: the weights are gone then."""
        with self._held:
            self.stored.fill(self._image)
        return self.stored

    def close(self) -> None:
        self._held.close()
        self.stored.close()


class NothingCached:
    """Implements load_report.CacheSource."""

    def snapshot(self) -> bytes:
        return b""

    def drain_changes(self) -> tuple[bytes, bytes]:
        return b"", b""


class SleepingSide:
    """Implements control.EngineSide. Work that a router sent before it knew better is refused."""

    num_open = 0
    is_idle = is_quiet = True
    is_stuck = False

    def __init__(self, links: NodeLinks) -> None:
        self._links = links
        self.cache = NothingCached()

    def wakeups(self) -> Iterable[int]:
        return ()

    def next_deadline(self) -> float | None:
        return None

    def turn(self) -> None:
        """Nothing happens by itself."""

    def prefill(self, router: Peer, message: Prefill) -> None:
        self._refuse(router, message.work, "prefill")

    def reserve(self, router: Peer, message: Reserve) -> None:
        self._refuse(router, message.work, "reserve")

    def deliver(self, router: Peer, message: Deliver) -> None:
        """Its prompt was refused, and the router knows."""

    def _refuse(self, router: Peer, work: Work, leg: RefusedLeg) -> None:
        is_taken = self._links.acceptance.takes(router, work, leg, is_stuck=False)
        assert not is_taken  # its standing refuses all

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        """Nothing runs."""

    def release(self, request: str) -> None:
        """No KV is kept."""

    def manage_adapter(self, router: Peer, message: ManageAdapter) -> None:
        error = f"node {self._links.me.node} sleeps; wake it with pdctl wake"
        self._links.outbox.message(router, AdapterManaged(message.number, error))

    def node_message(self, peer: Peer, message: AnyMessage) -> bool:
        if isinstance(message, Fetch):
            reason = f"node {self._links.me.node} sleeps"
            self._links.outbox.message(peer, Declined(message.ticket.nonce, reason))
        return isinstance(message, Fetch | Commit | CommitAck | Abort | AbortAck | Declined)

    def node_gone(self, peer: Peer) -> None:
        """It had nothing here."""

    def find(self, request: str, attempt: int) -> NodeLeg | None:
        return None

    def awaits(self, request: str, attempt: int) -> bool:
        return False

    def cancel_router(self, router: Peer) -> None:
        """It had nothing here."""

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        """It has nothing here."""

    def end_all(self, code: str, reason: str) -> int:
        return 0

    def load(self) -> Load:
        return Load(
            waiting=0, running=0, waiting_tokens=0, context_tokens=0, pages_total=0, pages_free=0, pages_cached=0,
            pages_quarantined=0, pages_pinned=0, slots=0, slots_used=0, draining=True, role=self._links.standing.role,
        )  # fmt: skip

    def snapshot(self) -> NodeSnapshot:
        standing = self._links.standing
        return NodeSnapshot(
            self.load(), 0.0, standing.is_draining, standing.is_cordoned, 0, 0, 0, (), is_sleeping=standing.is_sleeping
        )

    def check_integrity(self) -> None:
        """There is nothing that could leak."""
