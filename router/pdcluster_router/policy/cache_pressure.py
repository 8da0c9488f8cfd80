"""Cache pressure: how much of what prompts could have had cached no node had kept. Pure.

A full cache is not a scarce one. Most of what an old cache holds is never asked for again, and a copy in its place
costs nothing. Earlier prompts are those that came through this router (`prefix_index.ideal_cache`).
"""

from __future__ import annotations

# Weight of the newest prompt.
NEWEST = 1 / 128

# Usual prompts that count as kept at the start, so that one lost prefix says little.
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
