"""Whether room in the caches of nodes is scarce: of what prompts of late had in common with earlier ones, how much no
node kept. Pure.

Full caches are not scarce ones: most of what lies in a cache that has run for a while is never asked for again, and a
copy in its place costs nobody anything. What earlier prompts had is told by `seen_blocks`, and so only of prompts that
came through this router.
"""

from __future__ import annotations

# Weight of the prompt that came last.
NEWEST = 1 / 128

# Usual prompts that count as kept beside those that were, so that a prefix that was lost says little while few are
# asked for again.
PRIOR = 16 * NEWEST


class CachePressure:
    """Means over prompts, in tokens. Owned by one thread."""

    __slots__ = ("_kept", "_lost")

    def __init__(self) -> None:
        self._kept = self._lost = 0.0

    def note(self, seen_tokens: int, kept_tokens: int) -> None:
        """Note a prompt: leading tokens that an earlier one had, and that some node holds or soon will."""
        lost = seen_tokens - kept_tokens
        self._lost += NEWEST * ((lost if lost > 0 else 0) - self._lost)
        self._kept += NEWEST * (kept_tokens - self._kept)

    def share(self, usual_tokens: float) -> float:
        """Share of what could have been cached that was not, from 0 to 1.

        usual_tokens: of a prompt; 0: unknown, and so is the share.
        """
        lost = self._lost
        return lost / (lost + self._kept + PRIOR * usual_tokens) if lost > 0.0 and usual_tokens > 0.0 else 0.0
