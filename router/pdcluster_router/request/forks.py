"""Forks: the choices of a prompt after the first, which share its KV (`Prefill.fork_of`).

The first choice is the parent. Its forks wait until its decode node is known, and go there. So a prompt is computed and
sent once. In all else a fork is a request of its own. When its parent has no node to share, or sharing fails, it is
placed like any other. Owned by the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable

# Receives the boot that decodes the parent; None: there is none to share.
Heard = Callable[[str | None], None]


class ForkGroups:
    def __init__(self) -> None:
        self._waiting: dict[str, list[Heard]] = {}

    def __len__(self) -> int:
        """Parents without a decode node."""
        return len(self._waiting)

    def enter(self, request: str) -> None:
        """A parent starts. `settle` must follow, at the latest at its end."""
        self._waiting[request] = []

    def follow(self, request: str, heard: Heard) -> bool:
        """Whether there is a parent to wait for; `heard` is then called once."""
        forks = self._waiting.get(request)
        if forks is not None:
            forks.append(heard)
        return forks is not None

    def settle(self, request: str, incarnation: str | None) -> None:
        """The parent's decode node is known. Idempotent."""
        for heard in self._waiting.pop(request, ()):
            heard(incarnation)
