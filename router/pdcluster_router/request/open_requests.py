"""Open requests, for operators: what they are, where they run, and how to end one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdcluster.core.errors import Cancelled
from pdcluster_router.core.generation import Mode

# A client whose request is cancelled has so long to read its error, and is then hung up on.
HANG_UP_S = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest:
    """One choice of a request, as it is now.

    started: on the dispatcher's clock.
    end: answers the request with this error, unless it has an answer. abort: answers it with the tokens it has.
    num_output: tokens sent so far. Nodes are named once chosen.
    placed_at, first_token_at: when its nodes were chosen last, and its first token; None until then.
    hold: takes it off its nodes; it goes on when the gate lets it. pass_over: it waited through a
    pause of so many seconds.
    """

    request: str
    model: str
    num_prompt: int
    started: float
    end: Callable[[Cancelled], None]
    abort: Callable[[], None] = lambda: None
    hold: Callable[[str], None] = lambda reason: None
    pass_over: Callable[[float], None] = lambda seconds: None
    is_running: bool = False
    attempts: int = 0
    mode: Mode | None = None
    prefill: str | None = None
    decode: str | None = None
    num_output: int = 0
    placed_at: float | None = None
    first_token_at: float | None = None

    @property
    def state(self) -> str:
        if self.mode is None:
            return "held"
        return "prefill" if not self.num_output else "decode"


class OpenRequests(dict[str, Callable[[], OpenRequest]]):
    """What returns the state of each open request, for the few who ask.

    Owned by the router's event loop. Bounded by the places of the front doors.
    """

    def all(self) -> list[OpenRequest]:
        """All requests, oldest first."""
        return [listed() for listed in self.values()]

    def matching(self, request: str) -> list[OpenRequest]:
        """The request of this id, or all choices of the client's request."""
        return [listed() for name, listed in self.items() if name == request or name.rpartition("-")[0] == request]

    def cancel(self, request: str, reason: str) -> int:
        """End choices with an error. Returns how many."""
        found = self.matching(request)
        for entry in found:
            entry.end(Cancelled(f"request {entry.request} was cancelled by an operator: {reason}"))
        return len(found)
