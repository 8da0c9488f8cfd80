"""A request's leg on this node: what the prefill and decode sides keep of it and report.

Plain bookkeeping, no sockets, no engine. A leg's scheduler key is `request#attempt`. So a new attempt can start while
the pages of the one before are still being written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pdcluster.core import errors
from pdcluster.core.messages import (
    Delivered,
    Embedded,
    Failed,
    Finished,
    Refused,
    RefusedLeg,
    TokenLogprobs,
    TokenRow,
    Work,
)
from pdcluster.transfer.backends.base import Peer


@dataclass(slots=True)
class EmittedTokens:
    """Output tokens of one attempt, kept so that a lost frame can be sent again.

    first_position: tokens that earlier attempts emitted.
    """

    request: str
    attempt: int
    first_position: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, work: Work) -> EmittedTokens:
        return cls(work.request, work.attempt, len(work.token_ids) // 4 - work.num_prompt)

    @property
    def num_output(self) -> int:
        """Output tokens of the whole request."""
        return self.first_position + len(self.tokens)

    @property
    def num_numbers(self) -> int:
        """Numbers in the log: tokens, logprobs and alternatives."""
        return len(self.tokens) + sum(
            1 + 2 * len(entry.top_ids) for entries in (self.logprobs, self.prompt_logprobs) for entry in entries
        )

    def append(self, token: int, logprobs: TokenLogprobs | None) -> TokenRow:
        """Record a token and return the row that reports it."""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        return self.since(self.num_output - 1)

    def since(self, position: int) -> TokenRow:
        """Everything from output position `position` on, or from the first one of this attempt."""
        skip = max(position - self.first_position, 0)
        return TokenRow(
            request=self.request,
            attempt=self.attempt,
            position=self.first_position + skip,
            tokens=tuple(self.tokens[skip:]),
            logprobs=tuple(self.logprobs[skip:]),
            prompt_logprobs=tuple(self.prompt_logprobs) if skip == 0 else (),
        )


@dataclass(frozen=True, slots=True)
class EndedLeg:
    """The last message on a leg, with its tokens, for a router that lost it."""

    router: Peer
    output: EmittedTokens
    word: Finished | Embedded | Failed | Delivered

    @property
    def num_numbers(self) -> int:
        return self.output.num_numbers + (len(self.word.vector) // 4 if isinstance(self.word, Embedded) else 0)


class EndedLegs:
    """The newest last messages, bounded in number and in numbers of their outputs."""

    def __init__(self, capacity: int = 1024, max_numbers: int = 1 << 20) -> None:
        self._capacity = capacity
        self._max_numbers = max_numbers
        self._num_numbers = 0
        self._ended: OrderedDict[tuple[str, int], EndedLeg] = OrderedDict()

    def add(self, ended: EndedLeg) -> None:
        key = ended.output.request, ended.output.attempt
        self._drop(self._ended.pop(key, None))
        self._ended[key] = ended
        self._num_numbers += ended.num_numbers
        while len(self._ended) > self._capacity or self._num_numbers > self._max_numbers:
            self._drop(self._ended.popitem(last=False)[1])

    def get(self, request: str, attempt: int) -> EndedLeg | None:
        return self._ended.get((request, attempt))

    def forget_router(self, router: Peer) -> None:
        """Its lease ended: it will not ask."""
        for key in [key for key, ended in self._ended.items() if ended.router == router]:
            self._drop(self._ended.pop(key))

    def __len__(self) -> int:
        return len(self._ended)

    def _drop(self, ended: EndedLeg | None) -> None:
        if ended is not None:
            self._num_numbers -= ended.num_numbers


def key_of(work: Work) -> str:
    return f"{work.request}#{work.attempt}"


class AnyLeg(Protocol):
    @property
    def request(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def router(self) -> Peer: ...


L = TypeVar("L", bound=AnyLeg)


def of_router(legs: Iterable[L], router: Peer) -> list[L]:
    return [leg for leg in legs if leg.router == router]


def unawaited(legs: Iterable[L], router: Peer, awaited: Set[tuple[str, int]]) -> list[L]:
    """Legs of a router that it did not name as awaited."""
    return [leg for leg in of_router(legs, router) if (leg.request, leg.attempt) not in awaited]


def check_newest(work: Work, leg: AnyLeg | None) -> None:
    """Raises ProtocolError for an attempt older than one that is here: nobody waits for it."""
    if leg is not None and leg.attempt > work.attempt:
        raise errors.ProtocolError(
            f"attempt {work.attempt} of {work.request} came after attempt {leg.attempt}, which runs here"
        )


# Errors of work that a router sends. Any other error is a bug of ours.
REFUSALS = (errors.Overloaded, errors.BadRequest, errors.ProtocolError)


def refusal(work: Work, leg: RefusedLeg, error: errors.PdclusterError, param: str = "") -> Refused:
    """The answer to refused work."""
    if isinstance(error, errors.Overloaded):
        return Refused(work.request, work.attempt, leg, str(error), error.retry_after_s)
    return Refused(work.request, work.attempt, leg, str(error), 0.0, retryable=False, param=param)
