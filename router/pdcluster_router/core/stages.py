"""What an attempt may wait for, and how long each of these may take. Values; who waits is `attempt`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto


@dataclass(frozen=True, slots=True)
class StageDeadlines:
    """Seconds a stage may take. queue: Prefill → Scheduled or a token; liveness: from one row of a decoding request to
    the next; handshake: Reserve → answer; transfer: first token and reservation → the decode node's first frame; hold:
    the least pause before a node that refused is asked again."""

    queue_s: float = 120.0
    liveness_s: float = 30.0
    handshake_s: float = 5.0
    transfer_s: float = 30.0
    hold_s: float = 0.05

    @property
    def local_s(self) -> float:
        """The shortest stage of a request that one node serves."""
        return min(self.queue_s, self.liveness_s)

    @property
    def remote_s(self) -> float:
        """The shortest of one that two nodes serve."""
        return min(self.queue_s, self.liveness_s, self.handshake_s, self.transfer_s)


class Stage(IntEnum):
    """What an attempt may be waiting for; each has a clock of its own."""

    QUEUE = auto()
    ROOM = auto()
    HANDSHAKE = auto()
    TRANSFER = auto()
    LIVENESS = auto()
