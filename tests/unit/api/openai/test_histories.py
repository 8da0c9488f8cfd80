"""Histories as clients send them back: what changes nothing passes, what the server said is always taken, what cannot
be shown is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.api.openai import requests
from pdcluster.api.tools.arguments import arguments_of
from pdcluster.core.errors import BadRequest

USER = {"role": "user", "content": "hi"}


def shown(*messages: dict[str, Any]) -> list[dict[str, object]]:
    """As the template gets them."""
    body = {"model": "m", "messages": [USER, *messages]}
    return requests.messages_of(requests.decode_chat(json.dumps(body).encode()).messages)[1:]


def call(arguments: object, **fields: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


IDLE: list[dict[str, Any]] = [
    {"id": "msg_1", "created_at": 1_700_000_000, "timestamp": "2026-11-25T10:00:00Z"},
    {"cache_control": {"type": "ephemeral"}},
    {
        "provider_specific_fields": {"a": 1},
        "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
        "provider": "x",
    },
    {"parsed": {"city": "Rome"}, "refusal": None, "annotations": [], "audio": None, "function_call": None},
    {"reasoning_details": [{"type": "text"}], "tool_calls": None, "name": None, "weight": 0},
    {"tool_calls": [], "prefix": False, "partial": None, "images": []},
]


@pytest.mark.parametrize("fields", IDLE)
def test_fields_that_change_nothing_pass(fields: dict[str, Any]) -> None:
    assert shown({"role": "assistant", "content": "Rome.", **fields}) == [{"role": "assistant", "content": "Rome."}]
    assert shown({"role": "user", "content": [{"type": "text", "text": "a", **fields}]}) == [
        {"role": "user", "content": "a"}
    ]


def test_fields_that_change_nothing_pass_in_calls() -> None:
    said = call('{"a": 1}', index=0, cache_control={"type": "ephemeral"}, extra_content={})
    said["function"]["parsed_arguments"] = {"a": 1}
    assert shown({"role": "assistant", "tool_calls": [said]})[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    bare = {"function": {"name": "f", "arguments": "{}"}, "type": None}
    assert shown({"role": "assistant", "tool_calls": [bare]})[0]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_come_back_under_either_name(field: str) -> None:
    assert shown({"role": "assistant", "content": "4", field: "2 + 2"}) == [
        {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    ]
    assert shown({"role": "assistant", "content": "4", "reasoning": {"effort": "low"}}) == [
        {"role": "assistant", "content": "4"}
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant", "content": []}, ""),
        ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "tool", "tool_call_id": "c1", "content": None}, ""),
        (
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "a\nb",
        ),
    ],
)
def test_what_was_not_said_is_empty(message: dict[str, Any], text: str) -> None:
    assert shown(message)[0]["content"] == text


def test_an_answer_of_a_tool_that_no_call_has_asked_for_is_shown_as_it_is() -> None:
    assert shown({"role": "tool", "tool_call_id": "gone", "content": "5"}) == [
        {"role": "tool", "tool_call_id": "gone", "content": "5"}
    ]


REFUSED = [
    ({"role": "user"}, "messages[1].content", "content is missing"),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "messages[1].content[0].type",
        "only text parts",
    ),
    (
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        "messages[1].content[0].type",
        "only text parts",
    ),
    ({"role": "user", "content": [{"type": "file", "file": {}}]}, "messages[1].content[0].type", "only text parts"),
    ({"role": "user", "content": "x", "images": ["aGk="]}, "messages[1].images", "only text is taken"),
    ({"role": "assistant", "content": "x", "prefix": True}, "messages[1].prefix", "set continue_final_message"),
    ({"role": "assistant", "content": "x", "partial": True}, "messages[1].partial", "set continue_final_message"),
    ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio", "leave it out"),
    (
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        "messages[1].function_call",
        "send tool_calls",
    ),
]


@pytest.mark.parametrize(("message", "param", "words"), REFUSED, ids=[param + words for _, param, words in REFUSED])
def test_what_would_change_the_output_is_refused(message: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        shown(message)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ('{"city": "Ro', {"city": "Ro"}),
        ('{"a": 1, "b": [2, {"c": tr', {"a": 1, "b": [2, {}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": "line\nbreak\tand', {"a": "line\nbreak\tand"}),
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ('{"a": "\\', {"a": ""}),
        ('{"a": "\\ud83d\\ude', {"a": ""}),
        ('{"a": 1 b}', {"a": 1}),
        ('{"a": "x"}}', {"a": "x"}),
        ("{", {}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("no JSON", "no JSON"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_arguments_are_what_was_said_of_them(said: str | None, taken: object) -> None:
    assert arguments_of(said, "path") == taken


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), JSON, max_size=3), st.booleans(), st.data())
def test_arguments_may_be_cut_anywhere(value: dict[str, object], is_ascii: bool, data: st.DataObject) -> None:
    whole = json.dumps(value, ensure_ascii=is_ascii)
    cut = data.draw(st.integers(0, len(whole)))
    taken = arguments_of(whole[:cut], "path")
    assert isinstance(taken, dict) and list(taken) == list(value)[: len(taken)]
    json.dumps(taken).encode()
    if cut == len(whole):
        assert taken == value


@given(st.text(st.sampled_from('{}[]":,\\ \n1tanu'), max_size=30))
def test_whatever_stands_behind_a_bracket_is_an_object(text: str) -> None:
    assert isinstance(arguments_of("{" + text, "path"), dict)
