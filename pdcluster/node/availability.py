"""A node's role and whether it takes new work, as operators and controllers set them. Owned by the node loop's thread.

A role is advice to routers: every node can do everything. A change touches nothing that runs, and work that a router
sent before is done. The loop drains a node that ends.
"""

from __future__ import annotations

import logging
from typing import Protocol

from pdcluster.core.messages import Manage, Managed, Role

logger = logging.getLogger(__name__)


class CardPublisher(Protocol):
    """Where the node's card changes, for those without a link to it."""

    def set_role(self, role: Role) -> None: ...

    def set_draining(self, is_draining: bool) -> None: ...


class NodeAvailability:
    """The node's role and cordon.

    is_draining: on the way out; no message takes that back.
    is_switching: on the way to other weights; a switch that fails takes it back.
    is_sleeping: without an engine; no message takes that back, only the next boot.
    has_moved: its work was moved since it was cordoned, so what still comes is refused.
    """

    def __init__(
        self, role: Role, cluster: CardPublisher, *, is_cordoned: bool = False, is_sleeping: bool = False
    ) -> None:
        self.role = role
        self.is_cordoned = is_cordoned
        self.is_switching = False
        self.is_sleeping = is_sleeping
        self.is_draining = False
        self.has_moved = False
        self._cluster = cluster

    @property
    def takes_work(self) -> bool:
        return not (self.is_cordoned or self.is_draining or self.is_switching or self.is_sleeping)

    @property
    def refuses_work(self) -> bool:
        """Whether work that a router sent before it knew better is refused. A cordon alone does not refuse it."""
        return self.is_draining or self.is_switching or self.is_sleeping or self.has_moved

    def apply(self, message: Manage) -> Managed:
        """Apply a change and answer with the new state. Idempotent."""
        if message.role is not None and message.role != self.role:
            logger.info("role %s becomes %s", self.role, message.role)
            self.role = message.role
            self._cluster.set_role(self.role)
        if message.cordoned is not None and message.cordoned != self.is_cordoned:
            logger.info("new work is %s", "refused" if message.cordoned else "welcome again")
            self.is_cordoned = message.cordoned
            self.has_moved = False
            self._cluster.set_draining(not self.takes_work)
        if message.moves:
            self.has_moved = not self.takes_work
        return Managed(message.number, self.role, self.is_cordoned)

    def set_switching(self, is_switching: bool) -> None:
        """Take no new work while the node goes over to other weights."""
        self.is_switching = is_switching
        self._cluster.set_draining(not self.takes_work)

    def drain(self) -> None:
        """Take no new work from now on."""
        self.is_draining = True
        self._cluster.set_draining(True)
