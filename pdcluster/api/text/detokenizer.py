"""Token ids to text, one token at a time. Text never holds half a character, and the joined pieces are the text of all
tokens.

A table gives the bytes of every token id, so a token costs a list lookup and its bytes are exact (logprobs report
them). That works for decoders that map tokens one by one: byte-level BPE, and SentencePiece-like with byte fallback.
`ChainDetokenizer` asks `tokenizers` for any other decoder; the table then holds a token's text inside a text.

One difference from `tokenizers`: in a run of byte-fallback tokens that is not valid UTF-8, valid characters are kept.
`tokenizers` replaces the whole run, which a stream cannot know in advance.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tokenizers import Tokenizer

from pdcluster.api.sse import text_json

Step = Mapping[str, Any]

DECODER = codecs.getincrementaldecoder("utf-8")
BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
REPLACEMENT = "\ufffd"

# Tokens that may wait for the rest of a character. A character has at most four bytes.
MOST_HELD = 8

# SentencePiece's character for a space.
SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class Pieces:
    """The text of each token id.
    special: ids that vanish from text unless requested.
    strips_lead: one leading space is not part of the text.
    texts: as text, where a token's bytes are whole characters; most are and need no decoder.
    said: texts as JSON, of ids that were emitted and are not special, each in the tuple of a step's only token of a
    row; at most the vocabulary.
    chain: who decodes, where the table does not tell how tokens join; texts are None then.
    context: a token of letters, if there is one; `chain` decodes those of a continuation behind it.
    """

    table: Sequence[bytes]
    texts: Sequence[str | None]
    special: frozenset[int]
    strips_lead: bool
    said: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    chain: Tokenizer | None = None
    context: Sequence[int] = ()

    def stream(self, *, skip_special_tokens: bool, at_start: bool) -> Detokenizer | ChainDetokenizer:
        """at_start: the text starts here, so a leading space that only marks a word is dropped. A continuation keeps
        it.
        """
        if self.chain is None:
            return Detokenizer(self, skip_special_tokens=skip_special_tokens, at_start=at_start)
        return ChainDetokenizer(self, self.chain, skip_special_tokens=skip_special_tokens, at_start=at_start)

    def of(self, token_id: int) -> bytes:
        """b"" for ids that the tokenizer does not know, because models have padded vocabularies."""
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""


def build_pieces(tokenizer: Tokenizer, decoder: Step | None) -> Pieces:
    """decoder: the section of tokenizer.json. Raises ValueError where `tokenizers` would panic amid a text."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    steps = steps_of(decoder)
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _pieces(_table(vocabulary, byte_level), special, strips_lead=False)
    if _is_sentencepiece(steps):
        return _pieces(_table(vocabulary, _sentencepiece), special, strips_lead=kinds[-1] == "Strip")
    if any(step["type"] == "Strip" and step["stop"] for step in steps):
        raise ValueError("its decoder strips the ends of tokens, which `tokenizers` cannot do to short ones")
    return _chained_pieces(tokenizer, vocabulary, special, kinds)


def steps_of(decoder: Step | None) -> list[Step]:
    """The stages of tokenizer.json's `decoder`, nested sequences included."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in steps_of(part)]


def byte_alphabet() -> dict[int, str]:
    """Character → latin-1. Byte-level BPE writes each byte as one printable character: itself where it prints,
    otherwise one from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {0x100 + index: chr(byte) for index, byte in enumerate(hidden)}
    # Characters that stand for no byte must not pass for the byte of the same number.
    return alphabet | dict.fromkeys(hidden, "\uffff")


ALPHABET = byte_alphabet()


def byte_level(token: str) -> bytes:
    """The bytes of a byte-level BPE token. An added token is plain text."""
    try:
        return token.translate(ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()


def _table(vocabulary: Mapping[str, int], to_bytes: Callable[[str], bytes]) -> list[bytes]:
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    return table


def _chained_pieces(
    tokenizer: Tokenizer, vocabulary: Mapping[str, int], special: Sequence[int], kinds: Sequence[str]
) -> Pieces:
    words = (token_id for token_id in sorted(vocabulary.values()) if tokenizer.decode([token_id]).isalnum())
    context = list(islice(words, 1))
    start = len(tokenizer.decode(context, skip_special_tokens=False))

    def to_bytes(token: str) -> bytes:
        if "ByteLevel" in kinds:
            return byte_level(token)
        if "ByteFallback" in kinds and BYTE_TOKEN.fullmatch(token):
            return _sentencepiece(token)
        return tokenizer.decode([*context, vocabulary[token]], skip_special_tokens=False)[start:].encode()

    table = _table(vocabulary, to_bytes)
    texts = [None] * len(table)
    return Pieces(table, texts, frozenset(special), strips_lead=False, chain=tokenizer, context=context)


def _pieces(table: Sequence[bytes], special: Iterable[int], *, strips_lead: bool) -> Pieces:
    return Pieces(table, [_whole_text(piece) for piece in table], frozenset(special), strips_lead)


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _is_sentencepiece(steps: Sequence[Step]) -> bool:
    """Whether space marks become spaces, byte tokens bytes, and at most one leading space is removed."""
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    known: list[Step] = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return list(steps) in (known, [*known, {"type": "Strip", "content": " ", "start": 1, "stop": 0}])


NONE_KNOWN: Mapping[tuple[int, ...], bytes] = {}


class Detokenizer:
    """One stream of tokens, by the table. at_start: see `Pieces.stream`.

    known: what `say` returns for these tokens without a change of state. A token outside it needs a call of `say`.
    """

    __slots__ = ("_decoder", "_is_whole", "_knows", "_pieces", "_said", "_skip", "_strip", "_texts", "known")

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool, at_start: bool) -> None:
        self._pieces = pieces
        self._texts, self._said = pieces.texts, pieces.said
        self._skip = pieces.special if skip_special_tokens else frozenset[int]()
        self._strip = at_start and pieces.strips_lead
        # Created for the first piece that is not whole characters.
        self._decoder: codecs.IncrementalDecoder | None = None
        # No incomplete character is pending, and no leading space to remove.
        self._is_whole = not self._strip
        self._knows = True
        self.known = self._said if self._is_whole else NONE_KNOWN

    def ask_for(self, token_ids: Set[int], vocab_size: int) -> None:
        """Exclude these ids and those beyond the vocabulary from `known`, since they are not text to the caller.
        Special ids are never in it. Other ids here empty it.
        """
        if vocab_size < len(self._texts) or not self._pieces.special.issuperset(token_ids):
            self._knows, self.known = False, NONE_KNOWN

    def show(self, token_ids: frozenset[int]) -> None:
        """Treat these special ids as text."""
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
            if (
                0 <= token_id < len(self._texts)
                and self._texts[token_id] is not None
                and token_id not in self._pieces.special
            ):
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


class ChainDetokenizer:
    """One stream of tokens, decoded by `tokenizers` behind those that gave the text before it. `known` is empty, since
    a token's text may depend on others. As `tokenizers.decoders.DecodeStream`, and beside that:

    - `flush` gives what waits.
    - A character that `MOST_HELD` tokens do not complete is replaced.
    - A run of byte tokens may turn out broken behind a valid character; the stream goes on with the rest.
    """

    __slots__ = ("_chain", "_context", "_context_text", "_ids", "_num_context", "_num_tokens", "_skip", "known")

    def __init__(self, pieces: Pieces, chain: Tokenizer, *, skip_special_tokens: bool, at_start: bool) -> None:
        self._chain, self._context, self._num_tokens = chain, pieces.context, len(pieces.table)
        self._skip = pieces.special if skip_special_tokens else frozenset[int]()
        self.known = NONE_KNOWN
        self._follow([] if at_start else [*pieces.context])

    def _follow(self, context: list[int]) -> None:
        self._ids, self._num_context, self._context_text = context, len(context), self._decode(context)

    def _decode(self, token_ids: list[int]) -> str:
        return self._chain.decode(token_ids, skip_special_tokens=False)

    def ask_for(self, token_ids: Set[int], vocab_size: int) -> None:
        """See Detokenizer."""

    def show(self, token_ids: frozenset[int]) -> None:
        self._skip -= token_ids

    def feed(self, token_id: int) -> str:
        if token_id in self._skip or not 0 <= token_id < self._num_tokens:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        waits = text.endswith(REPLACEMENT) or len(text) <= len(self._context_text)
        return "" if waits and len(self._ids) - self._num_context < MOST_HELD else self._emit(text)

    def say(self, token_id: int) -> bytes:
        return text_json(self.feed(token_id))

    def flush(self) -> str:
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        # Nothing joins a broken character any more.
        before = [] if text.endswith(REPLACEMENT) else self._ids[self._num_context :]
        self._follow([*self._context, *before])
        return piece


def detokenize(pieces: Pieces, token_ids: Iterable[int], *, skip_special_tokens: bool, at_start: bool = True) -> str:
    stream = pieces.stream(skip_special_tokens=skip_special_tokens, at_start=at_start)
    return "".join([stream.feed(token_id) for token_id in token_ids]) + stream.flush()
