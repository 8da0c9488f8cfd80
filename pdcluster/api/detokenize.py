"""Token ids to text, one token at a time: text never holds half a character, and the pieces joined are the text of all tokens.

Works on bytes, through a table of what every token id stands for, so a token costs a list lookup and every token's bytes are known exactly
(logprobs report them). That is possible for decoders that map tokens one by one: byte-level BPE, and SentencePiece-like with byte fallback.
Any other decoder is refused when the model is loaded.

Where this differs from `tokenizers`: in a run of byte-fallback tokens that is not valid UTF-8, the valid characters are kept here, while
`tokenizers` replaces the whole run, which a stream cannot know in advance.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pdcluster.api.sse import text_json
from pdcluster.errors import ModelError

DECODER = codecs.getincrementaldecoder("utf-8")

SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space."""

BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")


def _byte_alphabet() -> dict[int, str]:
    """Byte-level BPE writes each byte as one printable character: itself where it prints, otherwise one from U+0100 on. Character → latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {0x100 + index: chr(byte) for index, byte in enumerate(hidden)}
    # Characters that no byte is written as must not pass for the byte of the same number.
    return alphabet | dict.fromkeys(hidden, "\uffff")


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each token id stands for. `special` ids vanish from text unless asked for; `strips_lead`: one leading space is not part of the text.

    texts: the same as text, where a token's bytes are whole characters; most are, and need no decoder. said: those texts as JSON, of ids that were
    said and are not special, each as the tuple in which a step's only token of a row comes; at most the vocabulary.
    """

    table: Sequence[bytes]
    texts: Sequence[str | None]
    special: frozenset[int]
    strips_lead: bool
    said: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    def of(self, token_id: int) -> bytes:
        """b"" for ids the tokenizer does not know: models have padded vocabularies."""
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""


def build_pieces(vocabulary: Mapping[str, int], special: Iterable[int], decoder: Mapping[str, Any] | None) -> Pieces:
    """From the vocabulary with added tokens and the `decoder` section of tokenizer.json; raises ModelError for decoders we cannot follow."""
    steps = _decoder_steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _pieces(_byte_level_table(vocabulary), special, strips_lead=False)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        _check_sentencepiece(steps)
        return _pieces(_sentencepiece_table(vocabulary), special, strips_lead=kinds[-1] == "Strip")
    raise ModelError(
        f"tokenizer.json has the decoder {'+'.join(kinds) or 'none'}, which is not supported; "
        "supported are ByteLevel and Replace+ByteFallback+Fuse(+Strip)"
    )


def _pieces(table: Sequence[bytes], special: Iterable[int], *, strips_lead: bool) -> Pieces:
    return Pieces(table, [_whole_text(piece) for piece in table], frozenset(special), strips_lead)


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _check_sentencepiece(steps: Sequence[Mapping[str, Any]]) -> None:
    replace = steps[0]
    if replace.get("pattern") != {"String": SPACE_MARK} or replace.get("content") != " ":
        raise ModelError(
            f"tokenizer.json's decoder replaces {replace.get('pattern')} by {replace.get('content')!r}; only {SPACE_MARK!r} by a space is supported"
        )
    if len(steps) == 4 and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) != (" ", 1, 0):
        raise ModelError("tokenizer.json's decoder strips something else than one leading space, which is not supported")


def _byte_level_table(vocabulary: Mapping[str, int]) -> list[bytes]:
    alphabet = _byte_alphabet()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:  # an added token, written as plain text
            table[token_id] = token.encode()
    return table


def _sentencepiece_table(vocabulary: Mapping[str, int]) -> list[bytes]:
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        byte = BYTE_TOKEN.fullmatch(token)
        table[token_id] = bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
    return table


NONE_KNOWN: Mapping[tuple[int, ...], bytes] = {}


class Detokenizer:
    """One stream of tokens. at_start: the text starts here, so a leading space that only marks a word is dropped; a continuation keeps it.

    known: what `say` would give for these tokens now, and be the same after it; where one is not in it, it has to be asked."""

    __slots__ = ("_decoder", "_is_whole", "_knows", "_pieces", "_said", "_skip", "_strip", "_texts", "known")

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool, at_start: bool) -> None:
        self._pieces = pieces
        self._texts, self._said = pieces.texts, pieces.said
        self._skip = pieces.special if skip_special_tokens else frozenset[int]()
        self._strip = at_start and pieces.strips_lead
        self._decoder: codecs.IncrementalDecoder | None = None
        """Made for the first piece that is no whole text."""
        self._is_whole = not self._strip
        """No incomplete character is pending, and no leading space to look for."""
        self._knows = True
        self.known = self._said if self._is_whole else NONE_KNOWN

    def ask_for(self, token_ids: Set[int], vocab_size: int) -> None:
        """These, and those beyond the vocabulary, are never among the known, since they are no text to who asks. Special ones are not anyway; with
        others nothing is known."""
        if vocab_size < len(self._texts) or not self._pieces.special.issuperset(token_ids):
            self._knows, self.known = False, NONE_KNOWN

    def show(self, token_ids: frozenset[int]) -> None:
        """These are text, though they are special."""
        self._skip -= token_ids

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""
        if token_id in self._skip:
            return ""
        if self._is_whole and 0 <= token_id < len(self._texts) and (text := self._texts[token_id]) is not None:
            return text
        return self._feed_bytes(self._pieces.of(token_id))

    def say(self, token_id: int) -> bytes:
        """The same as JSON, for a line of an event stream."""
        if not self._is_whole or token_id in self._skip:
            return text_json(self.feed(token_id))
        said = self._said.get((token_id,))
        if said is None:
            said = text_json(self.feed(token_id))
            if 0 <= token_id < len(self._texts) and self._texts[token_id] is not None and token_id not in self._pieces.special:
                self._said[token_id,] = said
        return said

    def _feed_bytes(self, piece: bytes) -> str:
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(b" ")
        if self._decoder is None:
            self._decoder = DECODER("replace")
        text = self._decoder.decode(piece)
        self._is_whole = not self._strip and not self._decoder.getstate()[0]
        self.known = self._said if self._is_whole and self._knows else NONE_KNOWN
        return text

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        return "" if self._decoder is None else self._decoder.decode(b"", final=True)


def detokenize(pieces: Pieces, token_ids: Iterable[int], *, skip_special_tokens: bool, at_start: bool = True) -> str:
    stream = Detokenizer(pieces, skip_special_tokens=skip_special_tokens, at_start=at_start)
    return "".join([stream.feed(token_id) for token_id in token_ids]) + stream.flush()
