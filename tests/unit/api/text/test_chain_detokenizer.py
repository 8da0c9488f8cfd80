"""Streams of decoders that no table serves join to what `tokenizers` decodes of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdcluster.api.text.model_text import TextModel
from pdcluster.core.errors import ModelError

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
    "ByteFallback": BYTES,
    "Fuse": FUSE,
    "Replace": replace("a", "bb"),
    "like Llama 2": sequence(SPACE, BYTES, FUSE, strip(" ", 1, 0)),
    "two spaces stripped": sequence(SPACE, BYTES, FUSE, strip(" ", 2, 0)),
    "another mark": sequence(replace("Ġ", " "), BYTES, FUSE),
    "Metaspace behind bytes": sequence(BYTES, metaspace("always")),
    "BPE behind bytes": sequence(BYTES, BPE),
    "nested": sequence(sequence(SPACE, sequence(BYTES)), FUSE),
    "WordPiece, then ByteLevel": sequence(wordpiece(False), BYTE_LEVEL),
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


def model_of(decoder: dict[str, Any] | None) -> TextModel:
    return TextModel({"tokenizer.json": tokenizer_json(decoder)})


MODELS = {name: model_of(decoder) for name, decoder in DECODERS.items()}
ORACLES = {name: Tokenizer.from_buffer(tokenizer_json(decoder)) for name, decoder in DECODERS.items()}
IDS = st.lists(st.integers(0, len(WORDS) + 2), max_size=24)


def ids_of(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def appears_in(part: str, whole: str) -> bool:
    """In order, whatever stands between."""
    left = iter(whole)
    return all(character in left for character in part)


@pytest.mark.parametrize("name", list(DECODERS))
@given(ids=IDS, skip=st.booleans())
@example(ids=ids_of("▁▁", "▁a", "x▁y"), skip=True)
@example(ids=ids_of("a", "a", "a", "<pad>", "a", "aa", "b"), skip=False)
@example(ids=ids_of("<0xE2>", "<0x82>", "<0xAC>", "<0x41>"), skip=False)
@example(ids=ids_of("<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "a"), skip=False)
@example(ids=ids_of(*["<0xFF>"] * 9, "a", "b"), skip=False)
@example(ids=ids_of(" ", "  ", "hello", " ", "  "), skip=False)
def test_pieces_join_to_what_tokenizers_decodes(name: str, ids: list[int], skip: bool) -> None:
    stream = MODELS[name].detokenizer(skip_special_tokens=skip)
    pieces = [stream.feed(token_id) for token_id in ids]
    whole = "".join(pieces) + stream.flush()
    expected = ORACLES[name].decode(ids, skip_special_tokens=skip)
    assert MODELS[name].decode(ids, skip_special_tokens=skip) == whole
    if "\ufffd" in expected:  # what a stream gave before a run of bytes broke stays
        assert "\ufffd" in whole and appears_in(expected.replace("\ufffd", ""), whole)
    else:
        assert whole == expected


@pytest.mark.parametrize(
    "name", ["none", "WordPiece", "Metaspace, always", "BPE", "CTC", "Replace", "two spaces stripped"]
)
def test_text_comes_as_soon_as_it_is_certain(name: str) -> None:
    stream, ids = MODELS[name].detokenizer(), ids_of("hello", "do", "not", "x▁y", "b", "do") * 20
    given = ""
    for count, token_id in enumerate(ids, 1):
        given += stream.feed(token_id)
        assert given == ORACLES[name].decode(ids[:count])


@pytest.mark.parametrize("name", ["none", "WordPiece", "Metaspace, always", "two spaces stripped"])
def test_a_continuation_goes_on_where_the_text_before_it_ended(name: str) -> None:
    model, ids = MODELS[name], ids_of("hello", "▁a", "do", "##ing", "hello", ".")
    for cut in range(1, len(ids)):
        rest = model.decode(ids[cut:], at_start=False)
        assert model.decode(ids[:cut]) + rest == model.decode(ids)


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("WordPiece", "##ing", b"ing"),
        ("WordPiece", "do", b" do"),
        ("Metaspace, always", "▁a", b" a"),
        ("ByteFallback", "<0xE2>", b"\xe2"),
        ("WordPiece, then ByteLevel", "Ã©", "é".encode()),
        ("none", "do", b" do"),
    ],
)
def test_bytes_of_tokens_are_those_inside_of_a_text(name: str, word: str, expected: bytes) -> None:
    assert MODELS[name].pieces.of(*ids_of(word)) == expected


def test_a_character_waits_for_its_bytes_and_a_broken_one_for_eight() -> None:
    stream = MODELS["ByteFallback"].detokenizer()
    assert [stream.feed(token_id) for token_id in ids_of("<0xE2>", "<0x82>", "<0xAC>")] == ["", "", "€"]
    assert [stream.feed(token_id) for token_id in ids_of("<0xFF>") * 8] == [*[""] * 7, "\ufffd" * 10]
    assert [stream.feed(token_id) for token_id in ids_of("<0xE2>", "<0x82>", "<0xAC>")] == ["", "", "€"]
    assert stream.feed(*ids_of("<0xE2>")) == "" and stream.flush() == "\ufffd" * 3


def test_a_decoder_that_strips_ends_is_refused_before_it_can_panic() -> None:
    with pytest.raises(ModelError, match="strips the ends of tokens"):
        model_of(sequence(SPACE, FUSE, strip(" ", 1, 2)))
