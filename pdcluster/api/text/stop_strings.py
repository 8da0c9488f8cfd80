"""Stop strings over a text that arrives in pieces. Nothing after the match is released, and only what may become a
match is held back.

The match that completes first wins; of several that complete at the same character, the longest. So the result does not
depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    __slots__ = ("_held", "_stops", "is_idle", "matched", "num_uncertain")

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty."""
        self._stops = tuple(stops)
        # There is nothing to match, so `feed` is not needed and changes nothing.
        self.is_idle = not self._stops
        self._held = ""
        self.matched: str | None = None
        # Characters at the end of the text that are not released: held back, or from the match on.
        self.num_uncertain = 0

    def feed(self, text: str, *, is_waiting: bool = False) -> str:
        """The text that is now certain. Once `matched` is set, it is the text before the match, and nothing more is
        released. is_waiting: no match may end in this text; one that ends behind it may begin in it.
        """
        if not self._stops:
            return text
        buffer = self._held + text
        found = None if is_waiting else self._find(buffer, len(self._held))
        if found is not None:
            end, self.matched = found
            self._held = ""
            self.num_uncertain = len(buffer) - end + len(self.matched)
            return buffer[: end - len(self.matched)]
        keep = self.num_uncertain = self._holdback(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text held back, when the stream ended without a match."""
        held, self._held, self.num_uncertain = self._held, "", 0
        return held

    def _find(self, buffer: str, num_held: int) -> tuple[int, str] | None:
        """A match that ends within the held text was passed over when that text waited."""
        ends = [
            (start + len(stop), stop)
            for stop in self._stops
            if (start := buffer.find(stop, max(num_held - len(stop) + 1, 0))) >= 0
        ]
        return min(ends, key=lambda match: (match[0], -len(match[1])), default=None)

    def _holdback(self, buffer: str) -> int:
        """Length of the longest suffix of buffer that begins some stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


# For all texts without stop strings.
NO_STOPS = StopMatcher(())
