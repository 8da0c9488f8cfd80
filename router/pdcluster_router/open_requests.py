"""Which requests this router is working on, for operators: who they are, where they run, and how to end one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster.errors import Cancelled
from pdcluster_router.generation import Mode
from pdcluster_router.policy.base import Choice

HANG_UP_S = 0.25
"""A client that is being served when its request is cancelled has so long to read on, and then gets its error; one that does not is hung up on."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One choice of a client's request. started: on the dispatcher's clock; end: gives the request this error as its answer. nodes are named once
    they are chosen; emitted: the request's own list of its tokens so far."""

    request: str
    model: str
    num_prompt: int
    started: float
    end: Callable[[Cancelled], None]
    emitted: Sequence[int] = ()
    attempts: int = 0
    mode: Mode | None = None
    prefill: str | None = None
    decode: str | None = None

    @property
    def num_output(self) -> int:
        return len(self.emitted)

    def place(self, choice: Choice) -> None:
        """A new attempt runs where the policy chose."""
        self.attempts += 1
        self.mode = choice.mode
        self.prefill = choice.prefill.name if choice.prefill is not None else None
        self.decode = choice.decode.name

    @property
    def state(self) -> str:
        if self.mode is None:
            return "held"
        return "prefill" if not self.num_output else "decode"


class OpenRequests:
    """Owned by the router's event loop. Bounded by the places of the front doors."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, entry: OpenRequest) -> None:
        self._open[entry.request] = entry

    def leave(self, request: str) -> None:
        """It has its answer. Idempotent."""
        self._open.pop(request, None)

    def all(self) -> list[OpenRequest]:
        """Oldest first."""
        return list(self._open.values())

    def matching(self, request: str) -> list[OpenRequest]:
        """The one of this id, or all choices of the client's request of this id."""
        return [found for name, found in self._open.items() if name == request or name.rpartition("-")[0] == request]

    def cancel(self, request: str, reason: str) -> int:
        """How many choices were ended; each answers its client with an error."""
        found = self.matching(request)
        for entry in found:
            entry.end(Cancelled(f"request {entry.request} was cancelled by an operator: {reason}"))
        return len(found)
