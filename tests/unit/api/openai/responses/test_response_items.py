"""Input items as messages: turns of the assistant, outputs, items that other servers made, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster.api.openai.requests import messages_of
from pdcluster.api.openai.responses.items import encrypted, messages_from, own_reasoning, tools_within
from pdcluster.api.openai.responses.tools import Toolbox
from pdcluster.core.errors import BadRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
USER = {"role": "user", "content": "hi"}


def plain(*items: dict[str, Any], instructions: str | None = None, tools: list[dict[str, Any]] | None = None) -> Any:
    return messages_of(messages_from(list(items), instructions, Toolbox(tools or [])))


def call_of(name: str, arguments: object, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize(
    "content",
    [
        "hi",
        [{"type": "input_text", "text": "hi"}],
        [{"type": "output_text", "text": "hi", "annotations": [{"new": 1}], "logprobs": None}],
        [{"type": "text", "text": "hi"}],
        [{"type": "refusal", "refusal": "hi"}],
    ],
)
@pytest.mark.parametrize("more", [{}, {"type": "message", "id": "msg_1", "status": "completed", "phase": "x"}])
def test_a_message_of_any_role_and_form(role: str, content: object, more: dict[str, Any]) -> None:
    assert plain({"role": role, "content": content, **more}) == [{"role": role, "content": "hi"}]


@pytest.mark.parametrize("content", ["", [], None])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_empty_content_is_an_empty_text(role: str, content: object) -> None:
    assert plain({"role": role, "content": content}) == [{"role": role, "content": ""}]
    assert plain({"role": role}) == [{"role": role, "content": ""}]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    other = {**CALL, "call_id": "c2", "arguments": "{}"}
    items = (USER, thought("hm"), said("So."), CALL, other, OUTPUT, {**OUTPUT, "call_id": "c2"}, said("Two."))
    assert plain(*items) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant", "content": "So.", "reasoning_content": "hm",
            "tool_calls": [call_of("add", {"a": 1}), call_of("add", {}, "c2")],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Two."},
    ]  # fmt: skip


def test_texts_before_and_behind_a_call_stay_in_its_turn() -> None:
    assert plain(said("a"), CALL, said("b"), OUTPUT) == [
        {"role": "assistant", "content": "a\nb", "tool_calls": [call_of("add", {"a": 1})]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


def test_answers_that_follow_each_other_stay_two() -> None:
    assert [each["content"] for each in plain(said("a"), said("b"))] == ["a", "b"]
    turns = plain(thought("x"), said("a"), thought("y"), said("b"))
    assert [(each["reasoning_content"], each["content"]) for each in turns] == [("x", "a"), ("y", "b")]


def test_reasoning_between_calls_joins_that_of_the_turn() -> None:
    turn = plain(thought("x"), CALL, thought("y"), {**CALL, "call_id": "c2"}, OUTPUT)[0]
    assert turn["reasoning_content"] == "x\ny" and len(turn["tool_calls"]) == 2


def test_reasoning_that_led_to_nothing_stands_alone() -> None:
    assert plain(USER, thought("hm"), USER)[1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "c"}], "encrypted_content": encrypted("e")}, "c"),
        (
            {
                "content": None,
                "encrypted_content": encrypted("é\n"),
                "summary": [{"type": "summary_text", "text": "s"}],
            },
            "é\n",
        ),
        ({"summary": [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]}, "s\nt"),
        ({"encrypted_content": "gAAAA-of-another-server", "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"encrypted_content": "gAAAA-of-another-server", "summary": []}, None),
        ({"summary": None, "content": []}, None),
        ({}, None),
    ],
)
def test_reasoning_is_read_from_wherever_it_stands(item: dict[str, Any], text: str | None) -> None:
    turn = plain(USER, {"type": "reasoning", "id": "rs_1", **item}, said("So."))[1]
    assert turn.get("reasoning_content") == text and turn["content"] == "So."


def test_encrypted_reasoning_that_was_changed_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"input\[0\].encrypted_content was changed"):
        plain({"type": "reasoning", "encrypted_content": encrypted("hm")[:-1] + "!"})
    assert own_reasoning(encrypted("hm"), "") == "hm" and encrypted("hm").endswith("aG0="), "it hides nothing"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("{}", {}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"cmd": "exit 3', {"cmd": "exit 3"}),
        ("no json", "no json"),
    ],
)
def test_arguments_are_read_as_far_as_they_were_written(arguments: object, read: object) -> None:
    assert plain({**CALL, "arguments": arguments})[0]["tool_calls"] == [call_of("add", read)]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("2", "2"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "input_text", "text": "2"}, {"type": "output_text", "text": "3"}], "2\n3"),
    ],
)
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_an_output_is_a_text_or_a_list(kind: str, output: object, text: str) -> None:
    item = {"type": kind, "call_id": "c1", "output": output, "name": "add", "status": "completed"}
    assert plain(CALL, item)[1] == {"role": "tool", "content": text, "tool_call_id": "c1"}


def test_a_custom_call_and_one_in_a_namespace_get_their_functions_names() -> None:
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "mcp__db", "tools": [{"type": "function", "name": "query"}]},
    ]
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": '"quoted"\n'}
    spaced = {**CALL, "name": "query", "namespace": "mcp__db"}
    turn = plain(custom, spaced, tools=tools)[0]
    assert turn["tool_calls"] == [call_of("patch", {"input": '"quoted"\n'}), call_of("mcp__db__query", {"a": 1})]
    assert plain(spaced)[0]["tool_calls"] == [call_of("mcp__db__query", {"a": 1})], "also when it is offered no more"


def test_what_comes_before_all_others_is_one_message() -> None:
    developer = {
        "role": "developer",
        "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}],
    }
    assert plain(developer, developer, USER, developer, instructions="a") == [
        {"role": "system", "content": "a\n\nb\nc\n\nb\nc"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "b\nc"},
    ]
    assert plain(developer, developer)[0]["role"] == "developer"


LEFT_OUT = [
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
    "apply_patch_call", "apply_patch_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response", "tool_search_call", "tool_search_output", "additional_tools", "program",
    "program_output", "configuration_update",
]  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_items_of_tools_that_a_server_runs_are_left_out(kind: str) -> None:
    item = {"type": kind, "id": "x", "status": 3, "action": [], "name": 4, "output": {"a": 1}, "arguments": 5}
    assert plain(USER, item, said("So.")) == plain(USER, said("So."))


def test_tools_that_items_bring_are_offered() -> None:
    tool = {"type": "function", "name": "late"}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [tool]},
        {"type": "tool_search_output", "tools": 3},
    ]
    assert tools_within([*items, {"type": "other", "tools": [tool]}]) == [tool] and tools_within("text") == []


@pytest.mark.parametrize(
    ("item", "param", "what"),
    [
        ({"type": "item_reference", "id": "msg_1"}, ".type", "send the item itself"),
        ({"id": "msg_1"}, ".type", "send the item itself"),
        ({"id": "msg_1", "type": None}, ".type", "send the item itself"),
        ({"type": "compaction", "encrypted_content": "x"}, ".type", "a summary as a message"),
        ({"type": "compaction_trigger"}, ".type", "ask for a summary"),
        ({"type": "configuration_update", "text": {"format": {"type": "text"}}}, ".text", "send text of the request"),
        ({"type": "telepathy"}, ".type", '"telepathy", which is not taken here: known are message, function_call'),
        ({"type": 3}, ".type", "known are message"),
        ({}, ".type", "known are message"),
        ({"role": "tool", "content": "x"}, ".role", "must be one of system, developer, user, assistant"),
        ({"role": "user", "content": 3}, ".content", "must be a string"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, ".content[0].type", "only texts"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, ".content[0].type", "no images, audio or files"),
        ({"role": "user", "content": [{"type": "input_text"}]}, ".content[0].text", "a text part needs it"),
        ({"role": "user", "content": [{"text": "x"}]}, ".content[0].type", "is missing"),
        ({**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}, ".output[0].type", "only texts"),
        ({**OUTPUT, "output": {"a": 1}}, ".output", "must be a string"),
        ({"type": "function_call", "call_id": "c"}, ".name", "is missing"),
    ],
)  # fmt: skip
def test_a_refused_item_names_its_place_and_the_way_out(item: dict[str, Any], param: str, what: str) -> None:
    with pytest.raises(BadRequest) as refused:
        plain(USER, item)
    assert refused.value.param == f"input[1]{param}" and what in str(refused.value), str(refused.value)


def test_many_items_take_no_longer_than_their_number() -> None:
    """Twice ten thousand of what is joined to one text."""
    items = [thought("x" * 300), CALL] * 10_000
    turn = plain(*items)[0]
    assert len(turn["tool_calls"]) == 10_000 and len(turn["reasoning_content"]) == 301 * 10_000 - 1
    leading = [{"role": "developer", "content": "y" * 300}] * 20_000
    assert len(plain(*leading)[0]["content"]) == 302 * 20_000 - 2
