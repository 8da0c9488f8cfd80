"""Any decoder of `tokenizers` as a stream: tokens go in one by one, and text comes out once nothing can change it.

A decoder is a list of stages, each of which maps tokens to tokens. The result is the last stage's tokens joined. Each
stage is a small machine with the library's semantics (`tokenizers/src/decoders`, 0.23). Stages that look at one token
ask the library and cache its answers:

- Replace, Strip: each token alone.
- WordPiece, Metaspace: each token alone; the first one of a text differs.
- BPEDecoder: a word's end is a space, except for the text's last.
- CTC: repeated tokens are one.
- ByteFallback: a run of bytes is known when it ends.
- Fuse, ByteLevel: all tokens become one, whose text comes in pieces.

Behind one of the last two a stage has a single token. Strip and Replace of a literal then hold back as many characters
as they may still change. Any other stage there waits for the whole text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

Step = Mapping[str, Any]
Render = Callable[[str, bool], str]

UTF8 = codecs.getincrementaldecoder("utf-8")
BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
REPLACEMENT = "\ufffd"
EMPTY_TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
# A token that no position-dependent stage changes.
BEFORE = "a"


class DecoderStage(Protocol):
    def push(self, tokens: Sequence[str]) -> list[str]:
        """What these tokens make certain."""

    def end(self) -> list[str]:
        """What was held back. Called once."""


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


def steps_of(decoder: Step | None) -> list[Step]:
    """The stages of tokenizer.json's `decoder`, nested sequences included."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in steps_of(part)]


class DecoderChain:
    """What streams of one decoder share: stages, and the library's cached answers. One event loop or several threads
    may use it, because entries are only added.
    """

    def __init__(self, decoder: Step | None) -> None:
        self._joins_by_spaces = decoder is None
        self._steps = steps_of(decoder)
        self._renders = [_render_of(step) for step in self._steps]

    @property
    def kinds(self) -> list[str]:
        return [str(step["type"]) for step in self._steps]

    def stream(self, *, at_start: bool) -> TokenStream:
        """at_start: the text starts with its first token; otherwise it continues another."""
        if self._joins_by_spaces:
            return TokenStream([_Each(_spaced, at_start)])
        stages: list[DecoderStage] = []
        is_one = False
        for step, render in zip(self._steps, self._renders, strict=True):
            stages.append(_text_stage(step, render, at_start) if is_one else _token_stage(step, render, at_start))
            is_one = is_one or step["type"] in ("Fuse", "ByteLevel")
        return TokenStream(stages)

    def isolated(self, token: str) -> bytes:
        """The text of a token inside a text."""
        kinds = self.kinds
        if "ByteLevel" in kinds:
            return byte_level(token)
        if "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        stream = self.stream(at_start=False)
        return (stream.push(token) + stream.end()).encode()


class TokenStream:
    """One text."""

    __slots__ = ("_stages",)

    def __init__(self, stages: Sequence[DecoderStage]) -> None:
        self._stages = stages

    def push(self, token: str) -> str:
        tokens = [token]
        for stage in self._stages:
            tokens = stage.push(tokens)
        return "".join(tokens)

    def end(self) -> str:
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.push(tokens) + stage.end()
        return "".join(tokens)


def _render_of(step: Step) -> Render:
    """What the library makes of a token, first or not; cached. Strip is done here, because the library panics where
    both ends meet.
    """
    if step["type"] == "Strip":
        return lambda token, _: _stripped(token, step["content"], step["start"], step["stop"])
    decoder = Tokenizer.from_str(json.dumps(EMPTY_TOKENIZER | {"decoder": step})).decoder
    kept: dict[tuple[str, bool], str] = {}
    knows_positions = step["type"] in ("WordPiece", "Metaspace")

    def render(token: str, is_first: bool) -> str:
        found = kept.get((token, is_first))
        if found is None:
            alone = is_first or not knows_positions
            found = decoder.decode([token]) if alone else decoder.decode([BEFORE, token])[len(BEFORE) :]
            kept[token, is_first] = found
        return found

    return render


def _stripped(token: str, content: str, start: int, stop: int) -> str:
    first = next(
        (index for index, character in enumerate(token[:start]) if character != content), min(start, len(token))
    )
    last = len(token)
    while last > first and len(token) - last < stop and token[last - 1] == content:
        last -= 1
    return token[first:last]


def _spaced(token: str, is_first: bool) -> str:
    return token if is_first else f" {token}"


def _token_stage(step: Step, render: Render, at_start: bool) -> DecoderStage:
    match step["type"]:
        case "Fuse":
            return _Joined()
        case "ByteLevel":
            return _Bytes()
        case "ByteFallback":
            return _ByteRuns()
        case "BPEDecoder":
            return _WordEnds(step.get("suffix", "</w>"))
        case "CTC":
            return _Distinct(render)
        case _:
            return _Each(render, at_start)


def _text_stage(step: Step, render: Render, at_start: bool) -> DecoderStage:
    match step["type"]:
        case "Fuse":
            return _Joined()
        case "Strip":
            return _StrippedText(step["content"], step["start"] if at_start else 0, step["stop"])
        case "Replace" if step["pattern"].get("String"):
            return _ReplacedText(step["pattern"]["String"], step["content"])
        case _:
            return _WholeText(lambda text: render(text, True))


class _Each:
    def __init__(self, render: Render, at_start: bool) -> None:
        self._render, self._is_first = render, at_start

    def push(self, tokens: Sequence[str]) -> list[str]:
        found = []
        for token in tokens:
            found.append(self._render(token, self._is_first))
            self._is_first = False
        return found

    def end(self) -> list[str]:
        return []


class _Distinct:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._last: str | None = None

    def push(self, tokens: Sequence[str]) -> list[str]:
        found = []
        for token in tokens:
            if token != self._last:
                found.append(self._render(token, True))
            self._last = token
        return [token for token in found if token]

    def end(self) -> list[str]:
        return []


class _WordEnds:
    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def push(self, tokens: Sequence[str]) -> list[str]:
        found = []
        for token in tokens:
            if self._last is not None:
                found.append(self._last.replace(self._suffix, " "))
            self._last = token
        return found

    def end(self) -> list[str]:
        return [] if self._last is None else [self._last.replace(self._suffix, "")]


class _ByteRuns:
    """The library replaces every byte of a run that is not UTF-8 as a whole, so a run is held until it ends."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, tokens: Sequence[str]) -> list[str]:
        found = []
        for token in tokens:
            if byte := BYTE_TOKEN.fullmatch(token):
                self._run.append(int(byte[1], 16))
            else:
                found += [*self.end(), token]
        return found

    def end(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(run)


class _Joined:
    """Pieces of one token from here on."""

    def push(self, tokens: Sequence[str]) -> list[str]:
        return ["".join(tokens)]

    def end(self) -> list[str]:
        return []


class _Bytes:
    def __init__(self) -> None:
        self._decoder = UTF8("replace")

    def push(self, tokens: Sequence[str]) -> list[str]:
        return [self._decoder.decode(b"".join(map(byte_level, tokens)))]

    def end(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


class _StrippedText:
    """start, stop: most characters removed at each end. Those at the end wait."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = ""

    def push(self, tokens: Sequence[str]) -> list[str]:
        text = self._held + "".join(tokens)
        while self._start and text:
            self._start = self._start - 1 if text[0] == self._content else 0
            text = text[1:] if text[0] == self._content else text
        kept = len(text)
        while kept and len(text) - kept < self._stop and text[kept - 1] == self._content:
            kept -= 1
        self._held = text[kept:]
        return [text[:kept]]

    def end(self) -> list[str]:
        return []


class _ReplacedText:
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    def push(self, tokens: Sequence[str]) -> list[str]:
        text = self._held + "".join(tokens)
        *replaced, rest = text.split(self._pattern)
        certain = max(len(rest) - len(self._pattern) + 1, 0)
        self._held = rest[certain:]
        return [self._content.join([*replaced, rest[:certain]])]

    def end(self) -> list[str]:
        return [self._held]


class _WholeText:
    def __init__(self, finish: Callable[[str], str]) -> None:
        self._finish = finish
        self._parts: list[str] = []

    def push(self, tokens: Sequence[str]) -> list[str]:
        self._parts += tokens
        return []

    def end(self) -> list[str]:
        return [self._finish("".join(self._parts))]
