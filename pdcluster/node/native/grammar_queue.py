"""Work that waits for its grammar, in front of the rest of the node. Work without one, or with a compiled one, passes.

A prompt waits as long as its request lives. A reservation is answered soon: its router asks again while the compile
goes on. Owned by the node loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from pdcluster.core import errors
from pdcluster.core.grammar import PARAM, Grammar
from pdcluster.core.messages import Deliver, Failed, Prefill, Refused, RefusedLeg, Reserve
from pdcluster.node.legs import refusal
from pdcluster.node.outbox import Outbox
from pdcluster.transfer.backends.base import Peer

# Less than any router waits for the answer to a Reserve.
RESERVE_S = 1.5
RETRY_S = 0.2
# How often slow compiles are looked for.
LOOK_S = 0.5
MAX_WAITING = 1024


class GrammarSource(Protocol):
    """Implemented by engine.sampling.grammar."""

    news_fd: int

    @property
    def is_full(self) -> bool:
        """Whether it must be told which grammars are in use."""
        ...

    def trim(self, used: Set[Grammar]) -> None: ...

    def want(self, grammar: Grammar) -> bool:
        """Whether the grammar can be used now. Raises BadRequest or Overloaded."""
        ...

    def take_news(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AwaitingGrammar:
    router: Peer
    message: Prefill | Reserve
    grammar: Grammar
    deadline: float

    @property
    def leg(self) -> RefusedLeg:
        return "prefill" if isinstance(self.message, Prefill) else "reserve"


class GrammarQueue:
    def __init__(self, source: GrammarSource | None, outbox: Outbox, clock: Callable[[], float]) -> None:
        """source: None for an engine without grammars."""
        self._source = source
        self._outbox = outbox
        self._clock = clock
        self._waiting: list[AwaitingGrammar] = []
        # Tickets of waiting prompts, whose decode node had the grammar sooner.
        self._tickets: dict[str, Deliver] = {}
        self._look_at = 0.0

    @property
    def news_fd(self) -> int | None:
        return None if self._source is None else self._source.news_fd

    def admit(self, router: Peer, message: Prefill | Reserve) -> bool:
        """Whether the work may go on now. Otherwise it comes back from `ready`, or its router was answered."""
        work = message.work
        grammar = work.sampling.grammar
        if grammar is None:
            return True
        self.cancel(work.request, work.attempt)
        limit_s = min(work.deadline_s, RESERVE_S) if isinstance(message, Reserve) else work.deadline_s
        waiting = AwaitingGrammar(router, message, grammar, self._clock() + limit_s)
        answer = self._ask(waiting)
        if answer is False:
            self._waiting.append(waiting)
            self._look_at = self._clock() + LOOK_S
        return answer is True

    def keep_ticket(self, router: Peer, message: Deliver) -> bool:
        """Keep a ticket for a prompt that waits here. It comes back behind the prompt."""
        request = message.ticket.request
        if any(
            each.router == router and each.leg == "prefill" and each.message.work.request == request
            for each in self._waiting
        ):
            self._tickets[request] = message
            return True
        return False

    def ready(self) -> Iterator[tuple[Peer, Prefill | Reserve | Deliver]]:
        """Work whose grammar is here, in the order in which it came. Work that waited too long is answered."""
        if self._source is None:
            return
        self._source.take_news()  # also when nothing waits any more, or the loop would never sleep again
        if not self._waiting:
            return
        now = self._clock()
        self._look_at = now + LOOK_S
        before, self._waiting = self._waiting, []
        for waiting in before:
            answer = self._ask(waiting)
            if answer:
                yield waiting.router, waiting.message
                if (
                    waiting.leg == "prefill"
                    and (ticket := self._tickets.pop(waiting.message.work.request, None)) is not None
                ):
                    yield waiting.router, ticket
            elif answer is False and now >= waiting.deadline:
                self._give_up(waiting)
            elif answer is False:
                self._waiting.append(waiting)
        self._drop_tickets()

    @property
    def is_full(self) -> bool:
        """Whether `trim` is due."""
        return self._source is not None and self._source.is_full

    def trim(self, used: Set[Grammar]) -> None:
        """Drop unused grammars.

        used: those of work behind this queue. Work in the queue counts by itself.
        """
        if self._source is not None:
            self._source.trim(used | {each.grammar for each in self._waiting})

    def cancel(self, request: str, attempt: int) -> None:
        self._keep(lambda each: each.message.work.request != request or each.message.work.attempt > attempt)

    def cancel_router(self, router: Peer) -> None:
        self._keep(lambda each: each.router != router)

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        """The router (re)connected. Drop work that it does not name."""
        self._keep(
            lambda each: each.router != router or (each.message.work.request, each.message.work.attempt) in awaited
        )

    def has(self, request: str, attempt: int) -> bool:
        return any(
            (each.message.work.request, each.message.work.attempt) == (request, attempt) for each in self._waiting
        )

    def next_deadline(self) -> float | None:
        return min((min(each.deadline, self._look_at) for each in self._waiting), default=None)

    def __len__(self) -> int:
        return len(self._waiting)

    def _keep(self, wanted: Callable[[AwaitingGrammar], bool]) -> None:
        if self._waiting:
            self._waiting = [each for each in self._waiting if wanted(each)]
            self._drop_tickets()

    def _drop_tickets(self) -> None:
        if self._tickets:
            prompts = {each.message.work.request for each in self._waiting if each.leg == "prefill"}
            self._tickets = {request: ticket for request, ticket in self._tickets.items() if request in prompts}

    def _ask(self, waiting: AwaitingGrammar) -> bool | None:
        """Ask for a grammar. None when its router was told that it cannot be."""
        work = waiting.message.work
        try:
            if self._source is None:
                raise errors.BadRequest("structured output is not supported by this node's engine")
            if len(self._waiting) >= MAX_WAITING:
                raise errors.Overloaded(f"{MAX_WAITING} requests wait for their grammars here; retry later", RETRY_S)
            return self._source.want(waiting.grammar)
        except (errors.BadRequest, errors.Overloaded) as error:
            self._outbox.message(waiting.router, refusal(work, waiting.leg, error, PARAM))
            return None

    def _give_up(self, waiting: AwaitingGrammar) -> None:
        work = waiting.message.work
        if isinstance(waiting.message, Reserve):
            reason = "the request's grammar is being compiled here"
            self._outbox.message(waiting.router, Refused(work.request, work.attempt, "reserve", reason, RETRY_S))
            return
        reason = "the request's deadline passed while its grammar was compiled"
        self._outbox.message(
            waiting.router, Failed(work.request, work.attempt, errors.DeadlineExceeded.code, reason, retryable=False)
        )
