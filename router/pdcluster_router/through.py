"""The short way of a stream's next tokens to its client: text in an event whose rest was written once, posted to the connection.

For a choice whose events carry nothing but text, and whose text goes on as it comes; what else an event may need (logprobs, stop strings, calls of
tools, a client that has to read first) takes the general way, `answer`. Both say the same bytes and leave the choice the same, but for offsets of
tokens in the text, which only logprobs tell.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from pdcluster_router.choices import Choice
from pdcluster_router.http_exchange import Line


class Through:
    """write: an event's text, as JSON, with what stands around it; line: where it goes."""

    __slots__ = ("_clock", "_line", "_text", "_vocab_size", "_write")

    def __init__(self, choice: Choice, line: Line, write: Callable[[bytes], None]) -> None:
        self._text, self._clock, self._vocab_size, self._line, self._write = choice.text, choice.clock, choice.vocab_size, line, write

    def take(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """Implements generation.Take: False where the client has to read first, or a token is wrong. Two came before."""
        text = self._text
        if self._line.is_paused or text.num_tokens != position or len(token_ids) != 1 or not 0 <= token_ids[0] < self._vocab_size:
            return False
        self._write(text.say(token_ids[0]))
        self._clock.last = monotonic()
        return True
