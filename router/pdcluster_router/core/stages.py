"""What an attempt may wait for, and how long each may take. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageDeadlines:
    """Seconds that a stage may take."""

    # From Prefill to Scheduled, Computed or a token.
    queue_s: float = 120.0
    # From one row of a decoding request to the next.
    liveness_s: float = 30.0
    # From Reserve to its answer.
    handshake_s: float = 5.0
    # From the prompt's end and the reservation to the decode node's first frame.
    transfer_s: float = 30.0
    # The shortest pause before the router retries a node that refused.
    hold_s: float = 0.05

    @property
    def local_s(self) -> float:
        """The shortest stage of a request on one node."""
        return min(self.queue_s, self.liveness_s)

    @property
    def remote_s(self) -> float:
        """The shortest stage of a request on two nodes."""
        return min(self.queue_s, self.liveness_s, self.handshake_s, self.transfer_s)
