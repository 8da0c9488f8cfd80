"""Memory of requests that have not arrived whole, over all connections of one server.

A request that comes in one read is whole at once and is not counted.

1. Heads are nobody's yet and have a part of their own. Bodies are their tenants', who share the rest.
2. Where room lacks, the oldest of the same owner makes room once it had GRACE_S. Until then the newcomer is refused. So
   quick senders get through, and those that stand still hold nobody up for longer.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

from pdcluster_router.core.shares import GREED, Shares

HEADS_BYTES = 8 * 2**20
BODIES_BYTES = 64 * 2**20
# Of each, beside its bytes: the connection's objects.
BASE_BYTES = 2048
GRACE_S = 2.0


class Held:
    """What one connection holds.

    owner: the tenant's name; None: nobody yet.
    since: when it began.
    """

    __slots__ = ("owner", "since", "size")

    def __init__(self, owner: str | None, since: float) -> None:
        self.owner, self.since, self.size = owner, since, 0


class UnfinishedRequest(Protocol):
    """Whose memory is counted. `held` is set here."""

    held: Held | None

    def crowd_out(self) -> None:
        """There is no room for it. What it held is given back already."""
        ...


class UnfinishedRequests:
    """Owned by the server's loop.

    is_shared: several tenants share the bodies' part, and none of them can take all of it.
    """

    def __init__(
        self, max_bytes: int = BODIES_BYTES, *, is_shared: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        self._heads = Shares(HEADS_BYTES)
        self._bodies = Shares(max_bytes, GREED if is_shared else None)
        # By owner, the oldest first.
        self._queues: dict[str | None, dict[UnfinishedRequest, None]] = {}
        self._clock = clock

    @property
    def num_bytes(self) -> int:
        return self._heads.used + self._bodies.used

    def hold(self, one: UnfinishedRequest, owner: str | None, size: int) -> bool:
        """Count this many bytes for a request. False: there is no room, and it holds nothing now."""
        held = one.held
        if held is None or held.owner != owner:
            self.release(one)
            one.held = held = Held(owner, self._clock())
            self._queues.setdefault(owner, {})[one] = None
        shares, name, more = self._shares(owner), owner or "", size - held.size
        if more <= 0:
            shares.give_back(name, -more)
        else:
            while not shares.has_room(name, more):
                oldest = next(iter(self._queues[owner]))
                since = held.since if oldest.held is None else oldest.held.since
                if oldest is one or self._clock() - since < GRACE_S:
                    self.release(one)
                    return False
                self.release(oldest)
                oldest.crowd_out()
            shares.take(name, more)
        held.size = size
        return True

    def release(self, one: UnfinishedRequest) -> None:
        """It is whole, or over."""
        held, one.held = one.held, None
        if held is None:
            return
        self._shares(held.owner).give_back(held.owner or "", held.size)
        queue = self._queues[held.owner]
        del queue[one]
        if not queue:
            del self._queues[held.owner]

    def _shares(self, owner: str | None) -> Shares:
        return self._heads if owner is None else self._bodies

    def check_integrity(self) -> None:
        self._heads.check_integrity()
        self._bodies.check_integrity()
