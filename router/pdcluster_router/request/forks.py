"""Choices of one prompt: the first one leads, the others wait until it is known where it decodes, and go there to share
its KV (`Prefill.fork_of`).

So a prompt is computed and sent once, however many choices it has. A follower is a request of its own in all else: when
its leader has no node to share, or sharing fails, it is placed like any other. Owned by the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable

# Hears of the boot of the node that decodes the leader; None: there is none to follow.
Heard = Callable[[str | None], None]


class ForkGroups:
    def __init__(self) -> None:
        self._waiting: dict[str, list[Heard]] = {}

    def __len__(self) -> int:
        """Leaders that are not settled."""
        return len(self._waiting)

    def enter(self, request: str) -> None:
        """It leads; `settle` must come, at the latest with its end."""
        self._waiting[request] = []

    def follow(self, request: str, heard: Heard) -> bool:
        """Whether there is something to wait for: `heard` is called once then."""
        forks = self._waiting.get(request)
        if forks is not None:
            forks.append(heard)
        return forks is not None

    def settle(self, request: str, incarnation: str | None) -> None:
        """Idempotent."""
        for heard in self._waiting.pop(request, ()):
            heard(incarnation)
