"""The short way of a stream's next tokens to its client: text in an event whose rest was written once, posted to the connection.

For a choice whose events carry nothing but text, and whose text goes on as it comes; what else an event may need (logprobs, stop strings, calls of
tools, a client that has to read first) takes the general way, `answer`. Both say the same bytes and leave the choice the same, but for offsets of
tokens in the text, which only logprobs tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from pdcluster_router.choices import Choice
from pdcluster_router.http_exchange import Line


class Through:
    """before, after: what stands around an event's text, as JSON, the former by the text's size; line: where it goes."""

    __slots__ = ("_after", "_before", "_clock", "_detokenizer", "_line", "_post", "_text", "_vocab_size")

    def __init__(self, choice: Choice, line: Line, before: Mapping[int, bytes], after: bytes) -> None:
        self._text, self._clock, self._vocab_size = choice.text, choice.clock, choice.vocab_size
        self._detokenizer = choice.text.known()
        self._line, self._post, self._before, self._after = line, line.post, before, after

    def take(self, position: int, token_ids: tuple[int, ...]) -> bool:
        """Implements generation.Take: False where the client has to read first, or a token is wrong. Two came before."""
        text = self._text
        if self._line.is_paused or text.num_tokens != position:
            return False
        said = self._detokenizer.known.get(token_ids)
        if said is not None:
            text.num_tokens = position + 1
        elif len(token_ids) == 1 and 0 <= token_ids[0] < self._vocab_size:
            said = text.say(token_ids[0])
        else:
            return False
        self._post(self._before[len(said)] + said + self._after)
        self._clock.last = monotonic()
        return True
