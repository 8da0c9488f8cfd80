"""The text of one choice while its tokens come: detokenised, cut at a stop string, without the text of a stop token.

Pure: tokens in, text out. Who generates them, and how the reply looks, is elsewhere.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from pdcluster.api.detokenize import Detokenizer
from pdcluster.api.stop import StopMatcher
from pdcluster.messages import TokenLogprobs


class Token(msgspec.Struct, frozen=True, gc=False):
    """One token as replies report it. offset: characters of text before it; logprobs None where there is nothing before it to predict it."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None = None


class Piece(msgspec.Struct):
    """What one event of a choice adds to its reply. finish is set on the last one.

    tokens: output only; echo: the prompt's, where they are repeated with logprobs; prompt_token_ids, prompt_logprobs: on the first piece, when
    asked for.
    """

    text: str = ""
    tokens: list[Token] = []
    echo: list[Token] = []
    finish: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Token] | None = None


class ChoiceText:
    """`stopped` is set when a stop string matched: the generation may end there, and later tokens are not part of the reply."""

    __slots__ = ("_detokenizer", "_offset", "_silent", "_stops", "num_tokens", "stopped")

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher, silent: Set[int], offset: int = 0) -> None:
        """silent: ids that end a generation, whose text is not part of the answer; offset: characters before the first token (an echo)."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._silent = silent
        self._offset = offset
        self.num_tokens = 0
        self.stopped = False

    def push(self, token_id: int, logprobs: TokenLogprobs | None, piece: Piece) -> None:
        """Adds the token, and the text that became certain, to the piece."""
        piece.tokens.append(Token(token_id, self._offset, logprobs))
        self.num_tokens += 1
        if token_id not in self._silent:
            text = self._detokenizer.feed(token_id)
            if text:
                self._offset += len(text)
                piece.text += self._certain(text)

    def finish(self, piece: Piece) -> None:
        """The generation ended: releases what was held back. An incomplete character may still complete a stop string."""
        if not self.stopped:
            piece.text += self._certain(self._detokenizer.flush())
        if not self.stopped:
            piece.text += self._stops.flush()

    def _certain(self, text: str) -> str:
        certain = self._stops.feed(text)
        self.stopped = self._stops.matched is not None
        return certain
