"""Tools and thoughts over HTTP, read by the official client: whole and streamed alike."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import openai
import pytest
import pytest_asyncio
from grammar_walk import allows, begins, walkable
from openai import AsyncOpenAI
from scripted_dispatcher import MODEL, SPEAKING, SpeakingDispatcher, says, served

from pdcluster.api.openai.requests import ChatMessage, messages_of
from pdcluster.core.errors import BadRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

_DISPATCHER = SpeakingDispatcher(max_len=4096)


@pytest.fixture
def dispatcher() -> SpeakingDispatcher:
    vars(_DISPATCHER).update(vars(SpeakingDispatcher(max_len=4096)))
    return _DISPATCHER


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[AsyncOpenAI]:
    async with served(_DISPATCHER) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


USER = [{"role": "user", "content": "weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_weather", "add")]
CALLS = (
    'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


async def test_calls_come_whole_with_the_text_before_them(client, dispatcher):
    dispatcher.script = lambda _: says(CALLS)
    reply = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
    message = reply.choices[0].message
    assert (message.content, reply.choices[0].finish_reason) == ("Well.", "tool_calls")
    assert [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("function", "get_weather", '{"city": "Rome"}'),
        ("function", "add", "{}"),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    prompt = SPEAKING.decode(dispatcher.started[0].token_ids, skip_special_tokens=False)
    assert '"name": "get_weather"' in prompt and dispatcher.started[0].sampling.grammar is None


async def test_calls_stream_name_first_then_arguments_in_pieces(client, dispatcher):
    dispatcher.script = lambda _: says(CALLS)
    stream = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or ()]
    assert [(delta.index, delta.function.name) for delta in deltas if delta.id] == [(0, "get_weather"), (1, "add")]
    assert "".join(delta.function.arguments for delta in deltas if delta.index == 0) == '{"city": "Rome"}'
    assert len([delta for delta in deltas if delta.index == 0]) > 3, "not kept until the end"
    assert "".join(choice.delta.content or "" for choice in choices) == "Well."
    assert choices[-1].finish_reason == "tool_calls" and {choice.finish_reason for choice in choices[:-1]} == {None}


async def test_no_delta_is_empty_while_marks_or_stop_strings_are_held(client, dispatcher):
    dispatcher.script = lambda _: says("<think>\nhm </think>\nOk ST. " + CALLS)
    stream = await client.chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, stream=True, stop=["STOP"], stream_options={"include_usage": True}
    )
    opening, *deltas, last, _ = [chunk.choices[0] if chunk.choices else None async for chunk in stream]
    assert (opening.delta.role, opening.delta.content) == ("assistant", "")
    for choice in deltas:
        delta = choice.delta
        assert delta.content or delta.tool_calls or delta.model_extra.get("reasoning_content"), choice
    assert "".join(choice.delta.content or "" for choice in deltas) == "Ok ST. Well."
    assert last.finish_reason == "tool_calls" and last.delta.content is None


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": True}, {"return_token_ids": True}, {"stream_options": {"continuous_usage_stats": True}}],
)
async def test_chunks_of_held_text_come_where_they_carry_something_else(client, dispatcher, fields):
    dispatcher.script = lambda _: says(CALLS)
    stream = await client.chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, stream=True, extra_body=fields
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) >= len(says(CALLS)), "one for each token"


async def test_a_call_that_max_tokens_cuts_off_ends_by_length(client, dispatcher):
    dispatcher.script = lambda _: says(CALLS, "length")
    cut = len(says(CALLS[: CALLS.index("Rome")], "length"))
    reply = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, max_tokens=cut)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls[0].function.arguments.startswith('{"city": "')


@pytest.mark.parametrize("tool_choice", ["none", None])
async def test_without_tools_to_call_marks_are_text(client, dispatcher, tool_choice):
    dispatcher.script = lambda _: says(CALLS)
    fields = {"tools": TOOLS, "tool_choice": "none"} if tool_choice else {}
    reply = await client.chat.completions.create(model=MODEL, messages=USER, **fields)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (CALLS, "stop")
    assert "get_weather" not in SPEAKING.decode(dispatcher.started[0].token_ids)


@pytest.mark.parametrize(
    ("tool_choice", "names", "once"),
    [("required", ["get_weather", "add"], False), ({"type": "function", "function": {"name": "add"}}, ["add"], True)],
)
async def test_a_call_that_must_come_is_asked_for_by_a_grammar(client, dispatcher, tool_choice, names, once):
    await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, tool_choice=tool_choice)
    grammar = walkable(dispatcher.started[0].sampling.grammar.source)
    calls = {
        name: f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>'
        for name in ("get_weather", "add")
    }
    assert [name for name, call in calls.items() if allows(grammar, call)] == names
    assert allows(grammar, f"<think>hm</think>\n{calls[names[0]]}"), "a model that thinks may do so first"
    assert allows(grammar, "\n".join([calls[names[0]]] * 2)) is not once and not allows(grammar, "text")


def strict(names: set[str], parameters: dict = PARAMETERS) -> list[dict]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "parameters": parameters,
                "strict": tool["function"]["name"] in names,
            },
        }
        for tool in TOOLS
    ]


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_a_strict_tool_that_may_be_called_has_a_grammar_and_text_stays_free(client, dispatcher, choice):
    dispatcher.script = lambda _: says(CALLS)
    chosen = {} if choice is None else {"tool_choice": choice}
    reply = await client.chat.completions.create(
        model=MODEL, messages=USER, tools=strict({"add"}), parallel_tool_calls=False, **chosen
    )
    grammar = walkable(dispatcher.started[0].sampling.grammar.source)
    assert allows(grammar, "any text") and not begins(grammar, '<tool_call>\n{"name": "add", "arguments": {"x')
    assert begins(grammar, 'so <tool_call>\n{"name": "get_weather", "arguments": {"x')
    assert reply.choices[0].message.content == "Well."
    assert "strict" not in SPEAKING.decode(dispatcher.started[0].token_ids)


async def test_without_a_strict_tool_nothing_is_enforced_of_what_may_be_called(client, dispatcher):
    await client.chat.completions.create(model=MODEL, messages=USER, tools=strict(set(), {"type": "object", "not": {}}))
    assert dispatcher.started[0].sampling.grammar is None


async def test_a_strict_schema_that_can_not_be_kept_names_its_tool(client, dispatcher):
    with pytest.raises(openai.BadRequestError, match=r"tools\.add\.parameters\.properties\.a uses contains"):
        schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 3}}}}
        await client.chat.completions.create(model=MODEL, messages=USER, tools=strict({"add"}, schema))
    assert dispatcher.started == []


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": JSON_SCHEMA}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ],
)
async def test_a_grammar_that_a_node_refuses_is_named_by_the_clients_field(client, dispatcher, fields, param, stream):
    dispatcher.script = lambda _: [BadRequest("the grammar does not compile: why", "grammar")]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=USER, stream=stream, **fields)
    assert (refused.value.param, refused.value.body["message"]) == (param, "the grammar does not compile: why")


async def test_a_completions_grammar_is_named_by_its_field_and_what_is_no_grammars_fault_by_none(client, dispatcher):
    dispatcher.script = lambda _: [BadRequest("the grammar does not compile: why", "grammar")]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt="a", extra_body={"response_format": JSON_SCHEMA})
    assert refused.value.param == "response_format"
    dispatcher.script = lambda _: [BadRequest("the request is too long for any node")]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=USER, response_format=JSON_SCHEMA)
    assert refused.value.param is None


async def test_thoughts_are_told_apart_whole_and_streamed(client, dispatcher):
    dispatcher.script = lambda _: says("<think>\nhm hm\n</think>\n\nhello")
    whole = await client.chat.completions.create(model=MODEL, messages=USER)
    assert (whole.choices[0].message.content, whole.choices[0].message.reasoning_content) == ("hello", "hm hm")
    stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm hm"
    assert "".join(delta.content or "" for delta in deltas) == "hello"


async def test_a_prompt_that_opens_the_thought_is_gone_on_with(client, dispatcher):
    dispatcher.script = lambda _: says("hm</think>hello")
    asked = {"model": MODEL, "messages": USER, "extra_body": {"chat_template_kwargs": {"open": True}}}
    reply = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert (reply.choices[0].message.content, reply.choices[0].message.reasoning_content) == ("hello", "hm")
    grammar = walkable(dispatcher.started[0].sampling.grammar.source)
    assert allows(grammar, "hm</think>{}") and not allows(grammar, "{}")


async def test_every_choice_is_taken_apart_by_itself(client, dispatcher):
    dispatcher.script = lambda generation: says(CALLS if generation.sampling.choice else "plain")
    reply = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, n=2)
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "tool_calls"]
    assert reply.choices[0].message.tool_calls is None and len(reply.choices[1].message.tool_calls) == 2


THOUGHTFUL = f"<think>I stop now</think>Well now, {CALLS}"


async def said(client: AsyncOpenAI, *, stream: bool, **fields: object) -> tuple[str, str, list[str], str]:
    """Thoughts, text, what the calls are of, and how it ended."""
    asked = {"model": MODEL, "messages": USER, "tools": TOOLS, **fields}
    if not stream:
        choice = (await client.chat.completions.create(**asked)).choices[0]
        thoughts = choice.message.model_extra.get("reasoning_content", "")
        return (
            thoughts,
            choice.message.content or "",
            [call.function.name for call in choice.message.tool_calls or ()],
            choice.finish_reason,
        )
    deltas = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, stream=True)]
    thoughts = "".join(delta.delta.model_extra.get("reasoning_content", "") for delta in deltas)
    names = [call.function.name for delta in deltas for call in delta.delta.tool_calls or () if call.id]
    return thoughts, "".join(delta.delta.content or "" for delta in deltas), names, deltas[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "stop", "expected"),
    [
        (
            CALLS,
            ["</tool_call>\n<", "_call", "name", "Rome", "{", "weather"],
            ("", "Well.", ["get_weather", "add"], "tool_calls"),
        ),
        (CALLS, ["ell"], ("", "W", [], "stop")),
        (CALLS + " So now.", ["now"], ("", "Well. So ", ["get_weather", "add"], "tool_calls")),
        (CALLS + " Some", ["So now"], ("", "Well. Some", ["get_weather", "add"], "tool_calls")),
        (THOUGHTFUL, ["now", "</think>", "stop"], ("I stop now", "Well ", [], "stop")),
        (THOUGHTFUL, ["stop now", "<think>"], ("I stop now", "Well now, Well.", ["get_weather", "add"], "tool_calls")),
        ("a <tool_call> now", ["<tool_call> n"], ("", "a ", [], "stop")),
    ],
)
async def test_a_stop_string_is_looked_for_in_the_answers_text_only(client, dispatcher, stream, script, stop, expected):
    dispatcher.script = lambda _: says(script)
    assert await said(client, stream=stream, stop=stop) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_stop_string_ends_no_call_that_must_come(client, dispatcher, stream, choice):
    dispatcher.script = lambda _: says(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "now"}}\n</tool_call>'
    )
    found = await said(client, stream=stream, stop=["now", "tool"], tool_choice=choice)
    assert found == ("", "", ["get_weather"], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "reason", "expected"),
    [
        ("<tool_cal", "length", ("", "", [], "length")),
        ("Well. \n<tool_cal", "length", ("", "Well.", [], "length")),
        ('Well. <tool_call>\n{"name": "get_', "length", ("", "Well.", [], "length")),
        ("Well. <tool_cal", "eos", ("", "Well. <tool_cal", [], "stop")),
        ("<thi", "length", ("", "", [], "length")),
        ("<think>hm </thi", "length", ("hm", "", [], "length")),
        ("<think>hm</think>", "length", ("hm", "", [], "length")),
        ("Well <b> i", "length", ("", "Well <b> i", [], "length")),
        ("It says no", "length", ("", "It says no", [], "length")),
    ],
)
async def test_markup_that_the_end_of_the_tokens_cut_is_no_text(client, dispatcher, stream, script, reason, expected):
    """But the beginning of a stop string is."""
    dispatcher.script = lambda _: says(script, reason)
    assert await said(client, stream=stream, stop=["now"], max_tokens=1000) == expected


async def test_a_history_of_calls_is_shown_to_the_template(client, dispatcher):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    prompt = SPEAKING.decode(dispatcher.started[0].token_ids, skip_special_tokens=False)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in prompt and "tool\n2" in prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "contradict"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"tools": strict({"add"}), "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "an object",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {"required": ["a"]}}}}],
                "tool_choice": "required",
            },
            "cannot enforce",
        ),
    ],
)
async def test_what_can_not_be_forced_is_refused(client, dispatcher, fields, words):
    with pytest.raises(openai.BadRequestError, match=words):
        await client.chat.completions.create(model=MODEL, messages=USER, **{"tools": TOOLS, **fields})
    assert dispatcher.started == []


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
async def test_an_assistant_that_only_called_has_an_empty_text_and_not_none(content: dict[str, object]) -> None:
    """Templates that know no tools take the content of every message for text."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = msgspec.convert({"role": "assistant", "tool_calls": [call], **content}, ChatMessage)
    assert messages_of([said])[0]["content"] == ""
