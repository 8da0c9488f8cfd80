"""The short way of a stream's next token to its client: text in an event whose rest was written once, posted to the connection.

For a choice whose events carry nothing but text, and whose text goes on as it comes; what else an event may need (logprobs, stop strings, calls of
tools, a client that has to read first) takes the general way, `answer`. Both say the same bytes and leave the choice the same.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import msgspec

from pdcluster_router.choices import Choice

_encode = msgspec.json.Encoder().encode


class Through:
    """write: an event's text, as JSON, with what stands around it."""

    __slots__ = ("_clock", "_text", "_vocab_size", "_write")

    def __init__(self, choice: Choice, write: Callable[[bytes], None]) -> None:
        self._text, self._clock, self._vocab_size, self._write = choice.text, choice.clock, choice.vocab_size, write

    def say(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """False: nothing happened, because it is not one token, or wrong. Two came before it."""
        text = self._text
        if len(token_ids) != 1 or text.num_tokens != position or not 0 <= token_ids[0] < self._vocab_size:
            return False
        self._write(_encode(text.more(token_ids[0])))
        self._clock.last = monotonic()
        return True
