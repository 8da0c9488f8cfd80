"""The text of one choice while its tokens arrive: detokenized, without stop tokens, split into parts, and cut at a stop
string.

Stop strings apply to the answer's text, not to reasoning, marks and arguments of calls.

Pure: tokens in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from pdcluster.api.text.detokenizer import ChainDetokenizer, Detokenizer
from pdcluster.api.text.stop_strings import StopMatcher
from pdcluster.api.tools.calls import Part, ToolCallDelta
from pdcluster.api.tools.speech import Said, Speech
from pdcluster.core.messages import TokenLogprobs

# An empty text as JSON.
NOTHING = b'""'
# Of memory: an event with nothing in it, and one token or logprob.
PIECE_BYTES, ENTRY_BYTES = 256, 80


class Token(msgspec.Struct, frozen=True, gc=False):
    """One token as replies report it.
    offset: characters of text before it.
    logprobs: None where nothing precedes it.
    """

    id: int
    offset: int
    logprobs: TokenLogprobs | None = None


class TextPiece(msgspec.Struct):
    """What one event of a choice adds to its reply. The last one sets finish.

    reasoning: what the model thought before its answer.
    calls: of tools. Where a choice has a Speech, text excludes reasoning and calls.
    parts: text and calls in their order; empty where there are no calls.
    stop_string: that ended the answer. On the last piece.
    tokens: output only.
    num_reasoning: tokens, also earlier ones, that are now known to be of the reasoning and its marks.
    scored_text: tokens of `text`, where they have logprobs.
    listed: tokens, also earlier ones, whose logprobs this event reports; None for all of `tokens`. A stop string may
    remove text and its tokens.
    echo: the prompt's tokens, where they are repeated with logprobs.
    prompt_token_ids, prompt_logprobs: on the first piece, when requested.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = []
    parts: list[Part] = []
    stop_string: str | None = None
    tokens: list[Token] = []
    num_reasoning: int = 0
    scored_text: list[Token] = []
    listed: list[Token] | None = None
    echo: list[Token] = []
    finish: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Token] | None = None

    @property
    def num_bytes(self) -> int:
        """About what it takes of memory."""
        texts = len(self.text) + len(self.reasoning) + sum(len(call.arguments) + ENTRY_BYTES for call in self.calls)
        tokens = (*self.tokens, *(self.listed or ()), *self.echo, *(self.prompt_logprobs or ()))
        listed = sum(1 if token.logprobs is None else 2 + len(token.logprobs.top_ids) for token in tokens)
        return PIECE_BYTES + texts + (listed + len(self.prompt_token_ids or ())) * ENTRY_BYTES

    @property
    def scored(self) -> list[Token]:
        """Tokens whose logprobs this event reports."""
        return self.tokens if self.listed is None else self.listed


class ChoiceText:
    """`stopped` is set when a stop string matched. The generation may end there, and later tokens are not part of the
    reply.
    """

    __slots__ = (
        "_detokenizer", "_min_tokens", "_num_reasoning", "_offset", "_silent", "_speech", "_stops", "_unlisted",
        "_untold", "is_plain", "num_calls", "num_tokens", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer | ChainDetokenizer,
        stops: StopMatcher,
        silent: Set[int],
        offset: int = 0,
        speech: Speech | None = None,
        min_tokens: int = 0,
    ) -> None:
        """silent: ids that end a generation and whose text is not part of the answer.
        offset: characters before the first token (an echo).
        speech: splits the text; None for no split.
        min_tokens: no stop string ends in the text of these first tokens.
        """
        self._detokenizer = detokenizer
        self._stops = stops
        self._silent = silent
        self._offset = offset
        self._speech = speech
        self._min_tokens = min_tokens
        # Text passes unchanged.
        self.is_plain = speech is None and stops.is_idle
        self._unlisted: list[Token] = []
        # Tokens with logprobs whose text, if they have one, is still held back.
        self._untold: list[Token] = []
        self.num_tokens = 0
        self._num_reasoning = 0
        # Calls of tools that were emitted.
        self.num_calls = 0
        self.stopped = False

    def push(self, token_id: int, logprobs: TokenLogprobs | None, piece: TextPiece) -> None:
        """Add the token, and the text that became certain, to the piece."""
        token = Token(token_id, self._offset, logprobs)
        num_characters, num_parts = len(piece.text), len(piece.calls)
        piece.tokens.append(token)
        self.num_tokens += 1
        if token_id not in self._silent:
            text = self._detokenizer.feed(token_id)
            if text:
                self._offset += len(text)
                if self.is_plain:
                    piece.text += text
                else:
                    self._release(text, piece)
            if self._speech is not None and self._speech.is_thinking:
                piece.num_reasoning += self.num_tokens - self._num_reasoning
                self._num_reasoning = self.num_tokens
        if logprobs is None:
            return
        if token_id not in self._silent:
            self._untold.append(token)
        if len(piece.text) > num_characters:
            piece.scored_text += self._untold
            self._untold = []
        elif len(piece.calls) > num_parts or self._num_reasoning == self.num_tokens:
            self._untold = []
        if not self._stops.is_idle:
            self._unlisted.append(token)
            self._list(piece, self._offset - self._stops.num_uncertain)

    def _list(self, piece: TextPiece, end: int) -> None:
        """List the tokens of the answer: those that begin before this character."""
        listed = [token for token in self._unlisted if token.offset < end]
        del self._unlisted[: len(listed)]
        piece.listed = [*(piece.listed or ()), *listed]

    def say(self, token_id: int) -> bytes:
        """The same for plain text without tokens and offsets: the certain text, as JSON."""
        self.num_tokens += 1
        return NOTHING if token_id in self._silent else self._detokenizer.say(token_id)

    def whole(self, token_ids: Sequence[int]) -> str:
        """The certain text of plain tokens that were counted already."""
        feed, silent = self._detokenizer.feed, self._silent
        return "".join([feed(token_id) for token_id in token_ids if token_id not in silent])

    def known(self, vocab_size: int) -> Detokenizer | ChainDetokenizer:
        """The cached texts that are also those of the choice. They exclude tokens that end it and ids beyond its
        model.
        """
        self._detokenizer.ask_for(self._silent, vocab_size)
        return self._detokenizer

    def finish(self, piece: TextPiece, *, is_cut: bool = False) -> None:
        """The generation ended: release what was held back. An incomplete character may still complete a stop string.
        is_cut: the tokens ran out.
        """
        num_characters = len(piece.text)
        self._flush(piece, is_cut=is_cut)
        if len(piece.text) > num_characters:
            piece.scored_text += self._untold

    def _flush(self, piece: TextPiece, *, is_cut: bool) -> None:
        if self.is_plain:
            piece.text += self._detokenizer.flush()
            return
        if not self.stopped:
            rest = self._detokenizer.flush()
            self._release(rest, piece)
            if self._speech is not None and not self.stopped:
                self._put(self._speech.flush(is_cut=is_cut), piece)
            if self._unlisted:
                end = self._offset + len(rest)
                self._list(piece, end - self._stops.num_uncertain if self.stopped else end + 1)
        if not self.stopped:
            self._add(self._stops.flush(), piece)
        piece.stop_string = self._stops.matched

    def _release(self, text: str, piece: TextPiece) -> None:
        if self._speech is None:
            piece.text += self._certain(text)
        elif text:
            self._put(self._speech.feed(text), piece)

    def _put(self, said: Said, piece: TextPiece) -> None:
        """Nothing behind a stop string is part of the reply."""
        piece.reasoning += said.reasoning
        for part in said.parts:
            if isinstance(part, str):
                self._add(self._certain(part), piece)
            else:
                piece.parts = [*(piece.parts or ([piece.text] if piece.text else [])), part]
                piece.calls = [*piece.calls, part]
                self.num_calls += part.id is not None
            if self.stopped:
                return

    def _add(self, text: str, piece: TextPiece) -> None:
        piece.text += text
        if text and piece.parts:
            piece.parts = [*piece.parts, text]

    def _certain(self, text: str) -> str:
        """The certain part of the answer's text."""
        certain = self._stops.feed(text, is_waiting=self.num_tokens <= self._min_tokens)
        self.stopped = self._stops.matched is not None
        return certain
