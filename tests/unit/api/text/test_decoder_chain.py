"""Streams of every decoder that `tokenizers` knows, alone and in sequences, join to what it decodes of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdcluster.api.text.decoder_chain import DecoderChain
from pdcluster.api.text.model_text import TextModel

WORDS = [
    "[UNK]", "[CLS]", "<pad>", "hello", "##ing", "##s", "do", "not", " n't", "'s", ".", ",", "!", " ", "  ", "▁", "▁▁", "▁a", "x▁y",
    "a</w>", "b</w>", "b", "ab", "a", "aa", "Ġworld", "Ġ", "Ã©", "âĤ", "¬", "é", "€", "|", "||",
    "<0xE2>", "<0x82>", "<0xAC>", "<0x41>", "<0xFF>", "<0xZZ>", "##", "</w>", "-",
]  # fmt: skip
SPECIAL = ("[CLS]", "<pad>")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BYTES, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def strip(content: str, start: int, stop: int) -> dict[str, Any]:
    return {"type": "Strip", "content": content, "start": start, "stop": stop}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


def wordpiece(cleanup: bool) -> dict[str, Any]:
    return {"type": "WordPiece", "prefix": "##", "cleanup": cleanup}


def ctc(cleanup: bool) -> dict[str, Any]:
    return {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": cleanup}


REGEX = {"type": "Replace", "pattern": {"Regex": "^a|l+"}, "content": "Z"}
BPE = {"type": "BPEDecoder", "suffix": "</w>"}
DECODERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "empty": sequence(),
    "ByteLevel": BYTE_LEVEL,
    "WordPiece": wordpiece(False),
    "WordPiece, cleanup": wordpiece(True),
    "Metaspace, always": metaspace("always"),
    "Metaspace, first": metaspace("first"),
    "Metaspace, never": metaspace("never"),
    "BPE": BPE,
    "CTC": ctc(False),
    "CTC, cleanup": ctc(True),
    "ByteFallback": BYTES,
    "Fuse": FUSE,
    "Replace": replace("a", "bb"),
    "Replace by a regex": REGEX,
    "Strip": strip("a", 1, 1),
    "like Llama 2": sequence(SPACE, BYTES, FUSE, strip(" ", 1, 0)),
    "two spaces stripped": sequence(SPACE, BYTES, FUSE, strip(" ", 2, 0)),
    "stripped at both ends": sequence(SPACE, FUSE, strip(" ", 1, 2)),
    "another mark": sequence(replace("Ġ", " "), BYTES, FUSE),
    "replaced behind fuse": sequence(FUSE, replace("aa", "X"), replace("Xb", "")),
    "a regex behind fuse": sequence(FUSE, REGEX),
    "WordPiece behind fuse": sequence(FUSE, wordpiece(True)),
    "Metaspace behind fuse": sequence(FUSE, metaspace("always")),
    "BPE behind fuse": sequence(FUSE, BPE),
    "bytes behind fuse": sequence(FUSE, BYTES),
    "CTC behind fuse": sequence(FUSE, ctc(True)),
    "WordPiece behind CTC": sequence(ctc(False), wordpiece(True)),
    "Metaspace behind bytes": sequence(BYTES, metaspace("always")),
    "BPE behind bytes": sequence(BYTES, BPE),
    "CTC behind BPE": sequence(BPE, ctc(True)),
    "stripped ByteLevel": sequence(BYTE_LEVEL, strip(" ", 1, 1)),
    "nested": sequence(sequence(SPACE, sequence(BYTES)), FUSE),
    "WordPiece, then ByteLevel": sequence(wordpiece(False), BYTE_LEVEL),
    "everything": sequence(
        ctc(False), BYTES, SPACE, REGEX, strip(" ", 1, 1), BPE, FUSE, replace("  ", " "), strip("b", 1, 1)
    ),
}


def tokenizer_json(decoder: dict[str, Any] | None) -> bytes:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    added = [
        {
            "id": vocabulary[word],
            "content": word,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for word in SPECIAL
    ]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
    }
    return json.dumps({**whole, "post_processor": None, "decoder": decoder, "model": model}).encode()


MODELS = {name: TextModel({"tokenizer.json": tokenizer_json(decoder)}) for name, decoder in DECODERS.items()}
ORACLES = {name: Tokenizer.from_buffer(tokenizer_json(decoder)) for name, decoder in DECODERS.items()}
IDS = st.lists(st.integers(0, len(WORDS) + 2), max_size=24)


def ids_of(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


@pytest.mark.parametrize("name", list(DECODERS))
@given(ids=IDS, skip=st.booleans())
@example(ids=ids_of("▁▁", "▁a", "x▁y"), skip=True)
@example(ids=ids_of("a", "a", "a", "<pad>", "a", "aa", "b"), skip=False)
@example(ids=ids_of("<0xE2>", "<0x82>", "<0xAC>", "<0x41>"), skip=False)
@example(ids=ids_of(" ", "  ", "hello", " ", "  "), skip=False)
def test_pieces_join_to_what_tokenizers_decodes(name: str, ids: list[int], skip: bool) -> None:
    stream = MODELS[name].detokenizer(skip_special_tokens=skip)
    pieces = [stream.feed(token_id) for token_id in ids]
    whole = "".join(pieces) + stream.flush()
    try:
        expected = ORACLES[name].decode(ids, skip_special_tokens=skip)
    except BaseException as panic:
        assert "Strip" in name or "everything" in name or "stripped" in name, panic  # a library that fails is no oracle
        return
    if (
        MODELS[name].pieces.chain is None
        and "<0x" in "".join(WORDS[index] for index in ids if index < len(WORDS))
        and "\ufffd" in expected
    ):
        return  # valid characters of a broken run of bytes are kept there: `detokenize` says so
    assert whole == expected
    assert MODELS[name].decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize(
    "name",
    [
        "none",
        "WordPiece",
        "Metaspace, always",
        "BPE",
        "CTC",
        "Replace",
        "replaced behind fuse",
        "stripped at both ends",
    ],
)
def test_text_comes_as_soon_as_it_is_certain(name: str) -> None:
    """At most a token waits, which one more may still change."""
    stream, ids = MODELS[name].detokenizer(), ids_of("hello", "do", "not", "x▁y", "b", "do") * 20
    given = ""
    for count, token_id in enumerate(ids, 1):
        given += stream.feed(token_id)
        whole = ORACLES[name].decode(ids[:count])
        assert len(whole) - len(given) <= 6
    assert given + stream.flush() == ORACLES[name].decode(ids)


@pytest.mark.parametrize("name", ["none", "WordPiece", "Metaspace, always", "stripped at both ends"])
def test_a_continuation_goes_on_where_the_text_before_it_ended(name: str) -> None:
    model, ids = MODELS[name], ids_of("hello", "▁a", "do", "##ing", "hello", ".")
    for cut in range(1, len(ids)):
        rest = model.decode(ids[cut:], at_start=False)
        assert model.decode(ids[:cut]) + rest == model.decode(ids)


def test_bytes_of_tokens_are_those_inside_of_a_text() -> None:
    assert DecoderChain(wordpiece(True)).isolated("##ing") == b"ing"
    assert DecoderChain(wordpiece(True)).isolated("do") == b" do"
    assert DecoderChain(metaspace("always")).isolated("▁a") == b" a"
    assert DecoderChain(BYTES).isolated("<0xE2>") == b"\xe2"
    assert DecoderChain(sequence(wordpiece(False), BYTE_LEVEL)).isolated("Ã©") == "é".encode()
    assert DecoderChain(None).isolated("do") == b" do"


def test_a_long_answer_comes_in_small_pieces_to_its_end() -> None:
    """No stage holds back more the longer an answer is."""
    pushed = []
    stream = MODELS["everything"].detokenizer()
    for token_id in ids_of("hello", "do", "not", "b</w>") * 5000:
        pushed.append(len(stream.feed(token_id)))
    assert sum(pushed[:1000]) > 0 and sum(pushed[-1000:]) > 0
    assert max(pushed) < 40
