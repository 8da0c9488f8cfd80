"""Who keeps a view of the cluster for later, and how much of that there may be. For explanations of requests that wait: there may be thousands, each
was scored against another view, and a view has some 400 bytes of its own for each node. Knows neither requests nor views.
"""

from __future__ import annotations

from typing import Protocol

MOST_ROWS = 1 << 15
"""Nodes of all views together that are kept: 13 MiB."""


class Keeper(Protocol):
    def let_go(self) -> None:
        """Keep what is told of the view, and not the view."""
        ...


class KeptViews:
    """Those that were scored last keep theirs: they are likely to be scored again before anybody asks, and to let go costs as much as to be told."""

    def __init__(self) -> None:
        self._sizes: dict[Keeper, int] = {}
        self._num_rows = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def keep(self, keeper: Keeper, size: int) -> None:
        """It keeps another view than before, of so many nodes."""
        self.drop(keeper)
        self._sizes[keeper] = size
        self._num_rows += size
        while self._num_rows > MOST_ROWS and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.drop(oldest)
            oldest.let_go()

    def drop(self, keeper: Keeper) -> None:
        """It keeps none. Idempotent."""
        self._num_rows -= self._sizes.pop(keeper, 0)
