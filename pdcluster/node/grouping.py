"""In how many groups of layers the last tokens of a prompt leave their node: as many as pay. Pure arithmetic over measured bandwidth.

What a transfer adds to a prompt's time is the part that cannot start before the last layer is computed: with g equal groups about bytes / (g ×
bandwidth), and every group costs a fixed time of its own. The sum is least at g = √(bytes / (bandwidth × cost of a group)).
"""

from __future__ import annotations

import math

from pdcluster.transfer.protocol.session import TransferStats

FIRST_GUESS_BYTES_S = 2e9
SMALLEST_SAMPLE_BYTES = 1 << 18
WEIGHT = 0.3


class LayerGroups:
    """group_s: fixed cost of one more group (submit, wake-up, stamp), in seconds. Owned by the node loop's thread."""

    def __init__(self, num_layers: int, page_bytes: int, *, group_s: float = 0.0004) -> None:
        self.num_layers = num_layers
        self._page_bytes = page_bytes
        self._group_s = group_s
        self._bandwidth: dict[str, float] = {}

    def observe(self, stats: TransferStats) -> None:
        """Learn a backend's bandwidth from a transfer that ended well; small ones say more about fixed costs."""
        if stats.nbytes < SMALLEST_SAMPLE_BYTES or stats.busy_s <= 0:
            return
        sample = stats.nbytes / stats.busy_s
        known = self._bandwidth.get(stats.backend, sample)
        self._bandwidth[stats.backend] = known + WEIGHT * (sample - known)

    def bandwidth(self, backend: str) -> float:
        """Bytes per second."""
        return self._bandwidth.get(backend, FIRST_GUESS_BYTES_S)

    def bells(self, num_pages: int, backend: str) -> tuple[int, ...]:
        """After which numbers of layers to send what is there of these pages; the rest leaves with the end of the step. Empty for a small prompt."""
        groups = round(math.sqrt(num_pages * self._page_bytes / (self.bandwidth(backend) * self._group_s)))
        groups = min(max(groups, 1), self.num_layers)
        return tuple(self.num_layers * index // groups for index in range(1, groups))
