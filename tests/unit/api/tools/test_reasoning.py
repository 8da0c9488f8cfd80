"""Thoughts told apart from answers, whatever the pieces."""

import itertools

import pytest
from drawn_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.tools.calls import CallRules
from pdcluster.api.tools.parsers import HermesParser
from pdcluster.api.tools.reasoning import ReasoningSplitter, is_left_open, knows_reasoning
from pdcluster.api.tools.speech import Speech


def split(pieces: list[str], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm, 1 < 2\n</think>\n\nYes.", False, ("hm, 1 < 2", "Yes.")),
        ("hm </thin </think> Yes. ", True, ("hm </thin", "Yes. ")),
        ("No thoughts.", False, ("", "No thoughts.")),
        ("  <b>", False, ("", "  <b>")),
        ("<think></think>a</think>", False, ("", "a</think>")),
        ("<think>cut off ", False, ("cut off", "")),
        ("<thi", False, ("", "<thi")),
        ("", True, ("", "")),
    ],
)
def test_a_thought_is_what_stands_between_the_marks(text, is_open, expected):
    assert split([text], is_open=is_open) == expected
    for cut in range(len(text) + 1):
        assert split([text[:cut], text[cut:]], is_open=is_open) == expected


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<thi", False, ("", "")),
        (" \n<", False, ("", "")),
        (" \n", False, ("", " \n")),
        ("<think>hm </thin", False, ("hm", "")),
        ("hm <", True, ("hm", "")),
        ("hm < x", True, ("hm < x", "")),
        ("<think>hm</think> a <", False, ("hm", "a <")),
        ("<b", False, ("", "<b")),
    ],
)
def test_a_mark_that_the_end_of_the_tokens_cut_is_neither(text, is_open, expected):
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [*(splitter.feed(letter) for letter in text), splitter.flush(is_cut=True)]
    assert ("".join(part.reasoning for part in parts), "".join(part.content for part in parts)) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", " ", "\n", "word", "/"]), max_size=15),
    st.data(),
    st.booleans(),
)
@settings(max_examples=examples(100, 3000), deadline=None)
def test_pieces_change_nothing(words, data, is_open):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert split(pieces, is_open=is_open) == split([text], is_open=is_open) == split(list(text), is_open=is_open)


def test_calls_are_looked_for_in_the_answer_only():
    speech = Speech(ReasoningSplitter(is_open=False), HermesParser(CallRules(lambda: "id", lambda _: True)))
    said = [
        speech.feed(piece)
        for piece in '<think>I could <tool_call>{"name": "a"}</tool_call></think>Ok <tool_call>{"name": "f"}</tool_call>'
    ]
    said.append(speech.flush())
    assert "".join(part.reasoning for part in said) == 'I could <tool_call>{"name": "a"}</tool_call>'
    assert "".join(part.text for part in said) == "Ok"
    assert [call.name for part in said for call in part.calls] == ["f"]


def test_templates_tell_whether_there_are_marks_and_prompts_whether_they_are_open():
    assert knows_reasoning("…</think>…") and not knows_reasoning("{{ messages }}")
    assert is_left_open("<|assistant|>\n<think>\n") and not is_left_open("<think>\n\n</think>\n\n")
