"""Token ids to text, one token at a time. Text never holds half a character, and the joined pieces are the text of all
tokens.

A table gives the bytes of every token id, so a token costs a list lookup and its bytes are exact (logprobs report
them). That works for decoders that map tokens one by one: byte-level BPE, and SentencePiece-like with byte fallback.
`decoder_chain` streams any other decoder (`ChainDetokenizer`); the table then holds a token's text inside a text.

One difference from `tokenizers`: in a run of byte-fallback tokens that is not valid UTF-8, valid characters are kept.
`tokenizers` replaces the whole run, which a stream cannot know in advance.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from pdcluster.api.sse import text_json
from pdcluster.api.text.decoder_chain import BYTE_TOKEN, DecoderChain, Step, byte_level, steps_of

DECODER = codecs.getincrementaldecoder("utf-8")

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
    chain: the decoder, where the table does not tell how tokens join; texts are None then, and names holds the
    vocabulary's text of each id.
    """

    table: Sequence[bytes]
    texts: Sequence[str | None]
    special: frozenset[int]
    strips_lead: bool
    said: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    chain: DecoderChain | None = None
    names: Sequence[str | None] = ()

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


def build_pieces(vocabulary: Mapping[str, int], special: Iterable[int], decoder: Step | None) -> Pieces:
    """From the vocabulary with added tokens and the `decoder` section of tokenizer.json."""
    steps = steps_of(decoder)
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _pieces(_byte_level_table(vocabulary), special, strips_lead=False)
    if _is_sentencepiece(steps):
        return _pieces(_sentencepiece_table(vocabulary), special, strips_lead=kinds[-1] == "Strip")
    return _chained_pieces(vocabulary, special, DecoderChain(decoder))


def _chained_pieces(vocabulary: Mapping[str, int], special: Iterable[int], chain: DecoderChain) -> Pieces:
    names: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        names[token_id] = token
    table = [b"" if name is None else chain.isolated(name) for name in names]
    return Pieces(table, [None] * len(table), frozenset(special), strips_lead=False, chain=chain, names=names)


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


def _byte_level_table(vocabulary: Mapping[str, int]) -> list[bytes]:
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = byte_level(token)
    return table


def _sentencepiece_table(vocabulary: Mapping[str, int]) -> list[bytes]:
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        byte = BYTE_TOKEN.fullmatch(token)
        table[token_id] = bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
    return table


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
    """One stream of tokens, by the decoder's own stages. `known` is empty: a token's text may depend on others."""

    __slots__ = ("_names", "_skip", "_stream", "known")

    def __init__(self, pieces: Pieces, chain: DecoderChain, *, skip_special_tokens: bool, at_start: bool) -> None:
        self._names = pieces.names
        self._skip = pieces.special if skip_special_tokens else frozenset[int]()
        self._stream = chain.stream(at_start=at_start)
        self.known = NONE_KNOWN

    def ask_for(self, token_ids: Set[int], vocab_size: int) -> None:
        """See Detokenizer."""

    def show(self, token_ids: frozenset[int]) -> None:
        self._skip -= token_ids

    def feed(self, token_id: int) -> str:
        name = self._names[token_id] if 0 <= token_id < len(self._names) and token_id not in self._skip else None
        return "" if name is None else self._stream.push(name)

    def say(self, token_id: int) -> bytes:
        return text_json(self.feed(token_id))

    def flush(self) -> str:
        return self._stream.end()


def detokenize(pieces: Pieces, token_ids: Iterable[int], *, skip_special_tokens: bool, at_start: bool = True) -> str:
    stream = pieces.stream(skip_special_tokens=skip_special_tokens, at_start=at_start)
    return "".join([stream.feed(token_id) for token_id in token_ids]) + stream.flush()
