"""Token ids to text, one token at a time: text never holds half a character, and the pieces joined are the text of all
tokens.

Works on bytes, through a table of what every token id stands for, so a token costs a list lookup and every token's
bytes are known exactly (logprobs report them). That is possible for decoders that map tokens one by one: byte-level
BPE, and SentencePiece-like with byte fallback. Streams of any other decoder are `decoder_chain`'s (`ChainDetokenizer`);
the table then holds what a token stands for inside of a text.

Where the table's way differs from `tokenizers`: in a run of byte-fallback tokens that is not valid UTF-8, the valid
characters are kept here, while `tokenizers` replaces the whole run, which a stream cannot know in advance.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from pdcluster.api.sse import text_json
from pdcluster.api.text.decoder_chain import BYTE_TOKEN, DecoderChain, Step, byte_level, steps_of

DECODER = codecs.getincrementaldecoder("utf-8")

# What SentencePiece writes for a space.
SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each token id stands for. `special` ids vanish from text unless asked for; `strips_lead`: one leading space
    is not part of the text.

    texts: the same as text, where a token's bytes are whole characters; most are, and need no decoder. said: those
    texts as JSON, of ids that were said and are not special, each as the tuple in which a step's only token of a row
    comes; at most the vocabulary. chain: the decoder, where the table does not say how tokens join; names: the
    vocabulary's text of each id then. texts are None there.
    """

    table: Sequence[bytes]
    texts: Sequence[str | None]
    special: frozenset[int]
    strips_lead: bool
    said: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    chain: DecoderChain | None = None
    names: Sequence[str | None] = ()

    def stream(self, *, skip_special_tokens: bool, at_start: bool) -> Detokenizer | ChainDetokenizer:
        """at_start: the text starts here, so a leading space that only marks a word is dropped; a continuation keeps
        it."""
        if self.chain is None:
            return Detokenizer(self, skip_special_tokens=skip_special_tokens, at_start=at_start)
        return ChainDetokenizer(self, self.chain, skip_special_tokens=skip_special_tokens, at_start=at_start)

    def of(self, token_id: int) -> bytes:
        """b"" for ids the tokenizer does not know: models have padded vocabularies."""
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
    """Marks of spaces become spaces, bytes characters; at most one leading space goes."""
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

    known: what `say` would give for these tokens now, and be the same after it; where one is not in it, it has to be
    asked."""

    __slots__ = ("_decoder", "_is_whole", "_knows", "_pieces", "_said", "_skip", "_strip", "_texts", "known")

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool, at_start: bool) -> None:
        self._pieces = pieces
        self._texts, self._said = pieces.texts, pieces.said
        self._skip = pieces.special if skip_special_tokens else frozenset[int]()
        self._strip = at_start and pieces.strips_lead
        # Made for the first piece that is no whole text.
        self._decoder: codecs.IncrementalDecoder | None = None
        # No incomplete character is pending, and no leading space to look for.
        self._is_whole = not self._strip
        self._knows = True
        self.known = self._said if self._is_whole else NONE_KNOWN

    def ask_for(self, token_ids: Set[int], vocab_size: int) -> None:
        """These, and those beyond the vocabulary, are never among the known, since they are no text to who asks.
        Special ones are not anyway; with others nothing is known."""
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
    """One stream of tokens, by the decoder's own stages. Nothing is known before it is asked: what a token adds may
    depend on others."""

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
