"""Turns in blocks, as messages for a template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.api.anthropic.blocks import signature_of
from pdcluster.api.anthropic.requests import decode_count, decode_messages
from pdcluster.api.openai.requests import messages_of, with_system_first
from pdcluster.core.errors import BadRequest


def plain(system: Any = None, *messages: dict[str, Any], **fields: Any) -> list[dict[str, object]]:
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": messages,
        **({} if system is None else {"system": system}),
        **fields,
    }
    return messages_of(decode_messages(json.dumps(body).encode()).chat.messages)


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **fields}


BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=%s;"
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "system",
    [
        [text(BILLING % "a1"), text("You code.")],
        [text(BILLING % "b2", **CACHED), text("You code.", **CACHED)],
        BILLING % "c3" + "\nYou code.",
        "You code.",
    ],
)
def test_the_line_that_bills_never_reaches_the_template(system: Any) -> None:
    assert plain(system, user("hi")) == [{"role": "system", "content": "You code."}, {"role": "user", "content": "hi"}]


def test_a_system_text_of_nothing_but_that_line_is_none() -> None:
    assert plain([text(BILLING % "a")], user("hi")) == [{"role": "user", "content": "hi"}]
    assert plain("Say " + BILLING, user("hi"))[0]["content"] == "Say " + BILLING, "only at the start"


def test_consecutive_turns_are_one() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    made = plain(
        None, user("a"), user([text("b")]), assistant("c"), assistant([text("d"), use]), user([result("r"), text("e")])
    )
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "user"]
    assert [message["content"] for message in made] == ["a\nb", "c\nd", "r", "e"]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert made[1]["tool_calls"] == [call] and made[2]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (result("r"), "r"),
        (result([text("r"), text("s")]), "r\ns"),
        (result(None), ""),
        (result([]), ""),
        (result("r", is_error=True), "Error: r"),
        (result(None, is_error=True), "Error"),
        (result("r", is_error=False, **CACHED), "r"),
    ],
)
def test_results_of_tools(block: dict[str, Any], shown: str) -> None:
    assert plain(None, user([block]))[0]["content"] == shown


def test_thinking_is_taken_back_whatever_its_signature() -> None:
    thoughts = [
        {"type": "thinking", "thinking": "one", "signature": "of another server"},
        {"type": "thinking", "thinking": "", "signature": signature_of("two")},
        {"type": "thinking", "thinking": "", "signature": "pdcluster:no base64"},
        {"type": "thinking", "thinking": "", "signature": "pdcluster:é"},
        {"type": "thinking", "thinking": "three"},
        {"type": "redacted_thinking", "data": "xxxx"},
    ]
    made = plain(None, user("q"), assistant([*thoughts, text("a")]), user("q"))
    assert made[1] == {"role": "assistant", "content": "a", "reasoning_content": "one\ntwo\nthree"}


@given(st.text())
def test_a_signature_carries_any_thinking(thought: str) -> None:
    thinking = {"type": "thinking", "thinking": "", "signature": signature_of(thought)}
    made = plain(None, user("q"), assistant([thinking, text("a")]), user("q"))
    assert made[1].get("reasoning_content", "") == thought


def test_system_words_come_in_the_middle_too() -> None:
    said = {"role": "system", "content": [text("s", **CACHED)]}
    bare = {"role": "system", "content": "s"}
    inside = user([text("a"), {"type": "mid_conv_system", "content": [text("s")]}])
    expected = [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    for turns in ([user("a"), said, user("b")], [user("a"), bare, user("b")], [inside, user("b")]):
        assert plain(None, *turns) == expected


def test_for_some_templates_system_words_become_the_users() -> None:
    body = {
        "model": "m",
        "messages": [user("a"), {"role": "system", "content": "s"}, assistant("b"), {"role": "system", "content": "t"}],
        "system": "first",
    }
    chat = decode_count(json.dumps(body).encode()).chat
    moved = with_system_first(chat)
    assert moved is not None
    assert [(message["role"], message["content"]) for message in messages_of(moved.messages)] == [
        ("system", "first"), ("user", "a\ns"), ("assistant", "b"), ("user", "t"),
    ]  # fmt: skip
    assert with_system_first(moved) is None


@pytest.mark.parametrize(
    ("turns", "continues"),
    [
        ([user("q")], None),
        ([user("q"), assistant("The answer is")], True),
        ([user("q"), assistant([text("The"), text(" answer")])], True),
        ([user("q"), assistant("")], None),
        ([user("q"), assistant([])], None),
        ([user("q"), assistant("Hi"), assistant("")], True),
        ([user("q"), assistant([{"type": "thinking", "thinking": "hm"}])], None),
    ],
)
def test_a_last_answer_is_continued(turns: list[Any], continues: bool | None) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": turns}
    chat = decode_messages(json.dumps(body).encode()).chat
    assert chat.continue_final_message is continues
    assert continues or chat.messages[-1].role == "user", "nothing is an empty turn"


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 9}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thinking_is_the_switch_of_the_template(thinking: Any, is_on: bool) -> None:
    fields = {} if thinking is None else {"thinking": thinking}
    body = {"model": "m", "max_tokens": 5, "messages": [user("q")], "output_config": {"effort": "high"}, **fields}
    chat = decode_messages(json.dumps(body).encode()).chat
    assert chat.chat_template_kwargs == {"enable_thinking": is_on, "thinking": is_on}
    assert chat.reasoning_effort == "high"


@pytest.mark.parametrize(
    ("turns", "says_so"),
    [
        ([user([{"type": "image"}])], 'messages[0].content[0].type is "image"'),
        ([user([result([{"type": "image"}])])], 'messages[0].content[0].content[0].type is "image"; only text'),
        ([user("q"), assistant([{"type": "server_tool_use"}])], 'messages[1].content[0].type is "server_tool_use"'),
        ([user("q"), assistant([{"type": "tool_use", "id": "c", "name": "f"}])], "messages ends with a tool_use"),
        ([user("q"), assistant([{"type": "tool_use", "id": "c", "name": "f"}]), assistant("on")], "ends with a tool_use"),
        ([user("q"), assistant([{"type": "tool_use", "name": "f"}]), user("r")], "messages[1].content[0].id is missing"),
        ([user([{"type": "tool_result"}])], "messages[0].content[0].tool_use_id is missing"),
        ([user([result([{"type": "tool_reference", "tool_name": "x"}])])], 'tool_name is "x", which is not among the tools'),
        ([user([{"type": "text"}])], "messages[0].content[0].text is missing"),
        ([{"role": "tool", "content": "x"}], 'messages[0].role is "tool"; it must be one of user, assistant, system'),
    ],
)  # fmt: skip
def test_what_no_template_shows_is_refused_by_name(turns: list[Any], says_so: str) -> None:
    with pytest.raises(BadRequest) as refused:
        plain(None, *turns)
    assert says_so in str(refused.value)
