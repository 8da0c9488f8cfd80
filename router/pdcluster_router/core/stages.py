"""What an attempt may wait for, and how long each may take. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto


@dataclass(frozen=True, slots=True)
class StageDeadlines:
    """Seconds that a stage may take.

    queue: from Prefill to Scheduled or a token.
    liveness: from one row of a decoding request to the next.
    handshake: from Reserve to its answer.
    transfer: from token 1 and the reservation to the decode node's first frame.
    hold: the shortest pause before a node that refused is asked again.
    """

    queue_s: float = 120.0
    liveness_s: float = 30.0
    handshake_s: float = 5.0
    transfer_s: float = 30.0
    hold_s: float = 0.05

    @property
    def local_s(self) -> float:
        """The shortest stage of a request on one node."""
        return min(self.queue_s, self.liveness_s)

    @property
    def remote_s(self) -> float:
        """The shortest stage of a request on two nodes."""
        return min(self.queue_s, self.liveness_s, self.handshake_s, self.transfer_s)


class Stage(IntEnum):
    """What an attempt may wait for. Each stage has its own clock."""

    QUEUE = auto()
    ROOM = auto()
    HANDSHAKE = auto()
    TRANSFER = auto()
    LIVENESS = auto()
