"""Which requests this router is working on, for operators: who they are, where they run, and how to end one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pdcluster.errors import Cancelled
from pdcluster_router.generation import HangUp, Mode
from pdcluster_router.policy.base import Choice

HANG_UP_S = 0.25
"""A client that is being served when its request is cancelled has so long to read on, and then gets its error; one that does not is hung up on."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One choice of a client's request. started: on the dispatcher's clock. nodes are named once they are chosen; num_output: tokens sent so far."""

    request: str
    model: str
    num_prompt: int
    started: float
    task: asyncio.Task[object]
    attempts: int = 0
    mode: Mode | None = None
    prefill: str | None = None
    decode: str | None = None
    num_output: int = 0
    cancelled_because: str | None = None
    is_done: bool = False
    """Its last word was said: there is nothing to cancel."""
    hang_up: HangUp | None = None
    _is_outside: bool = field(default=False)
    _num_served: int = field(default=0)

    def place(self, choice: Choice) -> None:
        """A new attempt runs where the policy chose."""
        self.attempts += 1
        self.mode = choice.mode
        self.prefill = choice.prefill.name if choice.prefill is not None else None
        self.decode = choice.decode.name

    def outside(self) -> Self:
        """`with entry.outside():` while the client is being served what there is: a cancel waits for the block's end, so that the client gets its
        error. Entered for every token, so it is no generator."""
        return self

    def __enter__(self) -> None:
        self._is_outside = True
        self._num_served += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_outside = False
        if kind is None and self.cancelled_because is not None:
            raise self.cancelled()

    def cancel(self, reason: str) -> None:
        self.cancelled_because = reason
        if not self._is_outside:
            self.task.cancel()
        elif self.hang_up is not None:
            asyncio.get_running_loop().call_later(HANG_UP_S, self._hang_up_if_stuck, self._num_served)

    def _hang_up_if_stuck(self, num_served: int) -> None:
        if self._is_outside and self._num_served == num_served and self.hang_up is not None:
            self.hang_up()

    def cancelled(self) -> Cancelled:
        return Cancelled(f"request {self.request} was cancelled by an operator: {self.cancelled_because}")

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

    @contextmanager
    def entered(self, request: str, model: str, num_prompt: int, started: float, hang_up: HangUp | None = None) -> Iterator[OpenRequest]:
        """Listed while the block runs, in the task that runs it. A cancel by an operator ends the block with Cancelled; hang_up: see Generation."""
        task = asyncio.current_task()
        assert task is not None
        found = OpenRequest(request, model, num_prompt, started, task, hang_up=hang_up)
        cancelling = task.cancelling()
        self._open[request] = found
        try:
            yield found
        except asyncio.CancelledError:
            if found.cancelled_because is None or task.uncancel() > cancelling:
                raise
            raise found.cancelled() from None
        finally:
            del self._open[request]

    def all(self) -> list[OpenRequest]:
        """Oldest first."""
        return list(self._open.values())

    def matching(self, request: str) -> list[OpenRequest]:
        """The one of this id, or all choices of the client's request of this id."""
        return [found for name, found in self._open.items() if name == request or name.rpartition("-")[0] == request]

    def cancel(self, request: str, reason: str) -> int:
        """How many choices were told to end; each answers its client with an error. Idempotent."""
        found = [entry for entry in self.matching(request) if entry.cancelled_because is None and not entry.is_done]
        for entry in found:
            entry.cancel(reason)
        return len(found)
