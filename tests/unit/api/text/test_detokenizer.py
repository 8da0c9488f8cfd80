"""Text comes out piece by piece as the whole would, whatever the tokenizer and wherever a character is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_files, sentencepiece_files
from tokenizers import Tokenizer

from pdcluster.api.text.detokenizer import Detokenizer, build_pieces, detokenize
from pdcluster.api.text.model_text import TextModel

BYTE_LEVEL = TextModel(byte_level_files())
SENTENCEPIECE = TextModel(sentencepiece_files())
BYTE_LEVEL_ORACLE = Tokenizer.from_buffer(byte_level_files()["tokenizer.json"])
SENTENCEPIECE_ORACLE = Tokenizer.from_buffer(sentencepiece_files()["tokenizer.json"])


def some_ids(model: TextModel) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, model.vocab_size + 3), max_size=40)


@given(some_ids(BYTE_LEVEL), st.booleans())
@settings(max_examples=400, deadline=None)
def test_deltas_of_byte_level_tokens_join_to_what_tokenizers_decodes(ids: list[int], skip: bool) -> None:
    stream = Detokenizer(BYTE_LEVEL.pieces, skip_special_tokens=skip, at_start=True)
    deltas = [stream.feed(token_id) for token_id in ids]
    assert "".join(deltas) + stream.flush() == BYTE_LEVEL_ORACLE.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("model", [BYTE_LEVEL, SENTENCEPIECE])
@given(data=st.data(), skip=st.booleans(), at_start=st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_is_said_as_json_is_what_is_fed(model: TextModel, data: st.DataObject, skip: bool, at_start: bool) -> None:
    """Whole texts are encoded once for all streams; where a character is cut, both wait for the rest of it."""
    fed, said = (model.detokenizer(skip_special_tokens=skip, at_start=at_start) for _ in range(2))
    for token_id in data.draw(some_ids(model)):
        assert json.loads(said.say(token_id)) == fed.feed(token_id)
    assert said.flush() == fed.flush()


@pytest.mark.parametrize("model", [BYTE_LEVEL, SENTENCEPIECE])
@given(data=st.data(), skip=st.booleans(), at_start=st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_is_known_need_not_be_asked_for(model: TextModel, data: st.DataObject, skip: bool, at_start: bool) -> None:
    asked, known = (model.detokenizer(skip_special_tokens=skip, at_start=at_start) for _ in range(2))
    for token_id in data.draw(some_ids(model)):
        said, text = asked.say(token_id), known.known.get((token_id,))
        assert said == (known.say(token_id) if text is None else text)
    assert asked.flush() == known.flush()


def test_what_was_said_is_known_but_for_special_tokens_and_inside_of_a_character() -> None:
    a, half = (BYTE_LEVEL.encode(text, add_special_tokens=False)[0] for text in ("a", "\u4e16"))
    special = min(BYTE_LEVEL.pieces.special)
    stream = BYTE_LEVEL.detokenizer(skip_special_tokens=False)
    for token_id in (a, special):
        stream.say(token_id)
    assert stream.known[a,] == b'"a"' and (special,) not in stream.known
    stream.say(half)
    assert not stream.known
    stream.say(a)
    assert stream.known[a,] == b'"a"'


def test_nothing_is_known_where_the_model_has_fewer_tokens() -> None:
    (a,) = BYTE_LEVEL.encode("a", add_special_tokens=False)
    BYTE_LEVEL.detokenizer().say(a)
    stream = BYTE_LEVEL.detokenizer()
    stream.ask_for(frozenset(), BYTE_LEVEL.vocab_size - 1)
    assert not stream.known


def test_nothing_is_known_where_a_word_ends_the_text() -> None:
    a, half = (BYTE_LEVEL.encode(text, add_special_tokens=False)[0] for text in ("a", "\u4e16"))
    stream = BYTE_LEVEL.detokenizer()
    stream.ask_for(BYTE_LEVEL.pieces.special, BYTE_LEVEL.vocab_size)
    stream.say(a)
    assert (a,) in stream.known
    stream.ask_for({a}, BYTE_LEVEL.vocab_size)
    for token_id in (a, half, a):
        stream.say(token_id)
        assert not stream.known


def byte_runs_are_valid(ids: list[int]) -> bool:
    """`tokenizers` replaces the whole of a byte-fallback run that is not UTF-8; only there may texts differ."""
    run = b""
    for token_id in [*ids, -1]:
        token = SENTENCEPIECE_ORACLE.id_to_token(token_id) if token_id >= 0 else ""
        if token and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


WORDS, SPECIAL, ASCII_BYTES = (
    st.integers(259, SENTENCEPIECE.vocab_size - 1),
    st.integers(0, 2),
    st.integers(3 + 0x20, 3 + 0x7E),
)


@given(st.lists(st.one_of(WORDS, SPECIAL, ASCII_BYTES), max_size=40), st.booleans())
@settings(max_examples=400, deadline=None)
def test_deltas_of_sentencepiece_tokens_join_to_what_tokenizers_decodes(ids: list[int], skip: bool) -> None:
    assert byte_runs_are_valid(ids)
    stream = Detokenizer(SENTENCEPIECE.pieces, skip_special_tokens=skip, at_start=True)
    assert "".join([stream.feed(token_id) for token_id in ids]) + stream.flush() == SENTENCEPIECE_ORACLE.decode(
        ids, skip_special_tokens=skip
    )


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding_and_streaming(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    if not any(token.content in text for token in BYTE_LEVEL_ORACLE.get_added_tokens_decoder().values()):
        assert detokenize(BYTE_LEVEL.pieces, ids, skip_special_tokens=True) == text
    spaced = SENTENCEPIECE.encode(text, add_special_tokens=False)
    decoded = detokenize(SENTENCEPIECE.pieces, spaced, skip_special_tokens=True)
    assert decoded == SENTENCEPIECE_ORACLE.decode(list(spaced))


@given(some_ids(BYTE_LEVEL))
@settings(max_examples=200, deadline=None)
def test_no_delta_holds_half_a_character(ids: list[int]) -> None:
    whole = detokenize(BYTE_LEVEL.pieces, ids, skip_special_tokens=False)
    stream, seen = Detokenizer(BYTE_LEVEL.pieces, skip_special_tokens=False, at_start=True), ""
    for token_id in ids:
        seen += stream.feed(token_id)
        seen.encode()
        assert whole.startswith(seen)


def test_a_character_of_three_byte_tokens_comes_with_the_last_of_them() -> None:
    ids = [SENTENCEPIECE_ORACLE.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    stream = Detokenizer(SENTENCEPIECE.pieces, skip_special_tokens=True, at_start=True)
    assert [stream.feed(token_id) for token_id in ids] == ["", "", "€"]


def test_an_incomplete_character_at_the_end_becomes_one_replacement_character() -> None:
    ids = [SENTENCEPIECE_ORACLE.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()[:2]]
    assert detokenize(SENTENCEPIECE.pieces, ids, skip_special_tokens=True) == "\ufffd"


def test_a_continuation_keeps_the_leading_space_that_a_start_drops() -> None:
    ids = list(SENTENCEPIECE.encode("dog", add_special_tokens=False))
    assert detokenize(SENTENCEPIECE.pieces, ids, skip_special_tokens=True, at_start=True) == "dog"
    assert detokenize(SENTENCEPIECE.pieces, ids, skip_special_tokens=True, at_start=False) == " dog"


def tokenizer_of(vocabulary: dict[str, int], decoder: dict[str, Any]) -> Tokenizer:
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))


def test_a_decoder_that_gives_one_token_anyway_is_that_of_byte_level() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    fused = {"type": "Sequence", "decoders": [byte_level, {"type": "Fuse"}]}
    assert build_pieces(tokenizer_of({"a": 0, "Ġb": 1}, fused), fused).table == [b"a", b" b"]


@pytest.mark.parametrize("place", range(4))
def test_a_sentencepiece_decoder_with_other_rules_is_no_table(place: int) -> None:
    steps = json.loads(sentencepiece_files()["tokenizer.json"])["decoder"]["decoders"]
    others = {0: {"content": "_"}, 1: {"type": "Fuse"}, 2: {"type": "ByteFallback"}, 3: {"start": 2}}
    changed = [step | others[place] if index == place else step for index, step in enumerate(steps)]
    for known, is_table in ((steps, True), (changed, False)):
        decoder = {"type": "Sequence", "decoders": known}
        assert (build_pieces(tokenizer_of({"a": 0}, decoder), decoder).chain is None) == is_table
