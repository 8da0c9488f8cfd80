"""The input of a custom tool, however its arguments are cut into pieces and whatever a model wrote there."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.api.openai.responses.custom_input import MOST_BEFORE, InputReader


def read(*parts: str) -> str:
    reader = InputReader()
    return "".join([*map(reader.feed, parts), reader.flush()])


TEXTS = st.text(
    st.sampled_from('ab"\\/\n\t\x00é\u2028\U0001f642{}:') | st.characters(exclude_categories=("Cs",)), max_size=30
)


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 80), max_size=8))
def test_any_text_in_any_pieces(text: str, is_ascii: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    ends = sorted({*cuts, 0, len(arguments)})
    assert read(*(arguments[begin:end] for begin, end in zip(ends, [*ends[1:], None], strict=True))) == text


def test_it_comes_as_the_arguments_do() -> None:
    reader = InputReader()
    assert [reader.feed(part) for part in (' {"inp', 'ut" : "a', "b\\", "nc\\u00", 'e9d"', "}")] == [
        "", "a", "b", "\nc", "éd", "",
    ]  # fmt: skip
    assert reader.flush() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut off', "cut off"),
        ('{"input": "cut \\', "cut "),
        ('{"input": "cut \\u00e', "cut "),
        ('{"input": "cut \\ud83d', "cut "),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"input": "half \\ud83d and on"}', "half \ufffd and on"),
        ('{"input": "half \\ude42"}', "half \ufffd"),
        ('{"input": "no \\x escape"}', "no x escape"),
        ('{"input": "no \\uzz code"}', "no \ufffdzz code"),
        ('{"input": "raw\nline"}', "raw\nline"),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"more": {"x": 1}, "input": "a"}', "a"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"patch": "' + "a" * MOST_BEFORE + '"}', '{"patch": "' + "a" * MOST_BEFORE + '"}'),
        ('{"more": "' + "a" * MOST_BEFORE + '", "input": "b"}', "b"),
        ("{broken", "{broken"),
        ("", ""),
        ("[" * 9999, "[" * 9999),
    ],
)
def test_what_models_write_instead(arguments: str, text: str) -> None:
    assert read(arguments) == read(*arguments) == text
