"""A request's leg on this node: what the prefill side and the decode side keep of it, and what they report.

Plain bookkeeping; no sockets, no engine. A leg's scheduler key is `request#attempt`, so that a new attempt of a request can start while the
pages of its predecessor are still on their way out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from pdcluster.errors import ProtocolError
from pdcluster.messages import Failed, Finished, TokenLogprobs, TokenRow, Work
from pdcluster.transfer.base import Peer


@dataclass(slots=True)
class Output:
    """Output tokens of one attempt, kept so that a lost frame can be sent again. first_position: tokens that earlier attempts emitted."""

    request: str
    attempt: int
    first_position: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, work: Work) -> Output:
        return cls(work.request, work.attempt, len(work.token_ids) // 4 - work.num_prompt)

    @property
    def num_output(self) -> int:
        """Output tokens of the whole request."""
        return self.first_position + len(self.tokens)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> TokenRow:
        """Record a token and give the row that reports it."""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        return self.since(self.num_output - 1)

    def since(self, position: int) -> TokenRow:
        """Everything from output position `position` on (or from the first one this attempt produced)."""
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
class Ended:
    """The last word on a leg, with its tokens, for a router that lost the frame that said so."""

    router: Peer
    output: Output
    word: Finished | Failed


class EndedLegs:
    """The most recent last words, bounded in number."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._ended: OrderedDict[tuple[str, int], Ended] = OrderedDict()

    def add(self, ended: Ended) -> None:
        self._ended[ended.output.request, ended.output.attempt] = ended
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def get(self, request: str, attempt: int) -> Ended | None:
        return self._ended.get((request, attempt))


def key_of(work: Work) -> str:
    return f"{work.request}#{work.attempt}"


class AnyLeg(Protocol):
    attempt: int


def check_newest(work: Work, leg: AnyLeg | None) -> None:
    """Raises ProtocolError for an attempt that comes after a later one of its request: nobody waits for it any more."""
    if leg is not None and leg.attempt > work.attempt:
        raise ProtocolError(f"attempt {work.attempt} of {work.request} came after attempt {leg.attempt}, which runs here")
