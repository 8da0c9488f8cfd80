"""Arguments that come in pieces: clients read them after each piece, so what comes can always be read."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.api.tools.arguments import ArgumentStream, arguments_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def streamed(text: str, sizes: list[int]) -> str:
    """All that comes. After each piece it is read as Anthropic's client for Python does."""
    stream, come, number = ArgumentStream(), "", 0
    while text:
        size = sizes[number % len(sizes)]
        come += stream.feed(text[:size])
        text, number = text[size:], number + 1
        if come:
            jiter.from_json(come.encode(), partial_mode=True)
    return come


@given(OBJECTS, SIZES, st.booleans(), st.sampled_from([None, 2]))
def test_an_object_comes_as_it_was_written(
    value: dict[str, Any], sizes: list[int], is_ascii: bool, indent: int | None
) -> None:
    said = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert streamed(said, sizes) == said


@given(OBJECTS, SIZES, st.integers(0, 60), st.text(alphabet='{}[]",:\\\n axu0-1et', max_size=4))
def test_what_is_broken_ends_before_its_fault(value: dict[str, Any], sizes: list[int], at: int, wrong: str) -> None:
    said = json.dumps(value, ensure_ascii=False)
    come = streamed(said[:at] + wrong + said[at:], sizes)
    read = jiter.from_json(come.encode(), partial_mode=True) if come.strip() else {}
    assert isinstance(read, dict)


@pytest.mark.parametrize(
    ("said", "come"),
    [
        ('{"city": Rome}', '{"city": '),
        ('{"a": 1,}', '{"a": 1,'),
        ("[1, 2]", ""),
        ('"Rome"', ""),
        (' \n{"a": "\\x"}', '{"a": "'),
        ('{"a": "\\u12G4"}', '{"a": "'),
        ('{"a": "one\ntwo"}', '{"a": "one\\ntwo"}'),
        ('{"a": "Ro', '{"a": "Ro'),
        ('{"a": tru', '{"a": tru'),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_fault_and_all_behind_it_are_left_out(said: str, come: str, size: int) -> None:
    assert streamed(said, [size]) == come


@given(OBJECTS, st.integers(1, 60))
def test_a_cut_object_is_read_as_in_a_whole_answer(value: dict[str, Any], cut: int) -> None:
    said = json.dumps(value, ensure_ascii=False)[:cut]
    read = jiter.from_json(streamed(said, [1]).encode(), partial_mode="trailing-strings")
    assert read == arguments_of(said, "path")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("\\ud83d\\ude00", "😀"),
        ("\\ud800 x", "\ufffd x"),
        ("\\ud800", "\ufffd"),
        ("\\udc00\\ud800\\ud83d\\ude00", "\ufffd\ufffd😀"),
        ("\\ud800\\n", "\ufffd\n"),
        ("\\ud800\n", "\ufffd\n"),
        ("\\\\ud800", "\\ud800"),
        ("\\u00e9", "é"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_half_a_pair_is_one_unknown_character(said: str, text: str, size: int) -> None:
    said = '{"a": "' + said + '"}'
    assert json.loads(streamed(said, [size])) == {"a": text}
    assert arguments_of(said, "path") == {"a": text}
