"""/v1/responses over HTTP: streams as clients hold them to their rules, whole responses that are the same, and chats
that have the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from agent_streams import ResponseStream, check_response, events_of
from grammar_walk import allows, walkable
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted_dispatcher import MODEL, SPEAKING, SpeakingDispatcher, Wait, says, served, until

from pdcluster.core.errors import DeadlineExceeded, Overloaded, Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")

_DISPATCHER = SpeakingDispatcher(max_len=8192)
PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "w", "parameters": PARAMETERS, "strict": None}
ADD = {**WEATHER, "name": "add", "strict": False}
SPACE = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [{**ADD, "name": "spawn"}]}
PATCH = {"type": "custom", "name": "patch", "description": "p", "format": {"type": "text"}}
TOOLS: list[dict[str, Any]] = [WEATHER, ADD, SPACE, PATCH, {"type": "web_search"}]


def call(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


PATCHED = '*** Begin "Patch"\n+é🙂\\n\n'
CALLS = "\n".join(
    [
        call("get_weather", {"city": "Rome"}),
        call("add", {}),
        call("agents__spawn", {"a": 1}),
        call("patch", {"input": PATCHED}),
    ]
)


@pytest.fixture
def dispatcher() -> SpeakingDispatcher:
    vars(_DISPATCHER).update(vars(SpeakingDispatcher(max_len=8192)))
    return _DISPATCHER


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url() -> AsyncIterator[str]:
    async with served(_DISPATCHER) as address:
        yield address


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def whole(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post(PATH, json={"model": MODEL, "input": "hi", **fields})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    check_response(found, found["status"])
    Response.model_validate(found, strict=True)
    return found


async def streamed(http: httpx.AsyncClient, **fields: Any) -> ResponseStream:
    reply = await http.post(PATH, json={"model": MODEL, "input": "hi", "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8" and "[DONE]" not in reply.text
    for event in events_of(reply.text):
        if event["type"] != "response.failed":  # its codes are more than those of the client's list
            EVENT.validate_python(event)
    return ResponseStream(reply.text)


def without_moments(response: dict[str, Any]) -> dict[str, Any]:
    """What two requests for the same answer share."""
    names = response.keys() - {"id", "created_at", "completed_at", "usage"}
    kept = {name: response[name] for name in names}
    kept["output"] = [{name: each[name] for name in each.keys() - {"id", "call_id"}} for each in kept["output"]]
    return kept


def kinds(stream: ResponseStream) -> list[str]:
    return [item["type"] for item in stream.items]


ANSWERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "text": ("hello", {}, ["message"]),
    "empty": ("", {}, ["message"]),
    "reasoning": ("<think>\nhm hm\n</think>\n\nhello", {}, ["reasoning", "message"]),
    "summary": ("<think>hm</think>hello", {"reasoning": {"summary": "auto"}}, ["reasoning", "message"]),
    "encrypted": ("<think>hm</think>hello", {"include": ["reasoning.encrypted_content"]}, ["reasoning", "message"]),
    "only reasoning": ("<think>hm hm", {}, ["reasoning"]),
    "call": ("Well.\n" + call("add", {"a": [1]}), {"tools": TOOLS}, ["message", "function_call"]),
    "calls": (CALLS, {"tools": TOOLS}, ["function_call"] * 3 + ["custom_tool_call"]),
    "all": (
        "<think>hm</think>Well. " + CALLS, {"tools": TOOLS},
        ["reasoning", "message", "function_call", "function_call", "function_call", "custom_tool_call"],
    ),
    "text behind a call": (
        call("add", {}) + "so" + call("add", {}), {"tools": TOOLS}, ["function_call", "message", "function_call"],
    ),
    "logprobs": ("<think>hm</think>hello", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, ["reasoning", "message"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_keeps_the_clients_rules_and_is_the_whole_response(http, dispatcher, name) -> None:
    text, fields, expected = ANSWERS[name]
    dispatcher.script = lambda _: says(text)
    stream = await streamed(http, **fields)
    assert kinds(stream) == expected and stream.response["status"] == "completed"
    reply = await whole(http, **fields)
    assert without_moments(reply) == without_moments(stream.response)
    usages = [each["usage"] for each in (reply, stream.response)]
    assert {name: usages[0][name] for name in usages[0] if name != "pdcluster"} == {
        name: usages[1][name] for name in usages[1] if name != "pdcluster"
    }


async def test_a_response_repeats_its_request(http, dispatcher) -> None:
    sent = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "tools": TOOLS,
        "prompt_cache_key": "k", "max_output_tokens": 77, "temperature": 0.5, "top_p": 0.25, "tool_choice": "auto",
        "parallel_tool_calls": False, "text": {"format": {"type": "text"}, "verbosity": "low"}, "top_logprobs": 1,
        "reasoning": {"effort": "low", "summary": "auto"}, "max_tool_calls": 3, "presence_penalty": 1.0,
    }  # fmt: skip
    reply = await whole(http, store=True, service_tier="flex", **sent)
    assert {name: reply[name] for name in sent} == sent
    assert (reply["store"], reply["service_tier"], reply["background"]) == (False, "default", False)
    assert (reply["truncation"], reply["previous_response_id"], reply["conversation"]) == ("disabled", None, None)
    assert reply["completed_at"] >= reply["created_at"] and reply["model"] == MODEL


async def test_without_options_a_response_says_what_holds(http, dispatcher) -> None:
    reply = await whole(http)
    assert (reply["tools"], reply["tool_choice"], reply["parallel_tool_calls"]) == ([], "auto", True)
    assert (reply["temperature"], reply["top_p"], reply["metadata"]) == (1.0, 1.0, {})
    assert reply["text"] == {"format": {"type": "text"}} and reply["reasoning"] == {"effort": None, "summary": None}


async def test_the_same_conversation_has_the_tokens_of_a_chat(http, dispatcher) -> None:
    arguments = '{"city": "Rome"}'
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant", "content": "So.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    function = {"name": "get_weather", "description": "w", "parameters": PARAMETERS}
    chat = {"model": MODEL, "messages": messages, "tools": [{"type": "function", "function": function}], "seed": 1}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    await whole(http, input=items, instructions="Be brief.", tools=[WEATHER, {"type": "web_search"}], seed=1)
    first, second = dispatcher.started
    assert first.token_ids == second.token_ids and first.sampling == second.sampling


async def test_items_of_a_response_are_its_next_request(http, dispatcher) -> None:
    """As agents do: the output goes back as it came, with the results."""
    dispatcher.script = lambda _: says("<think>hm</think>Well. " + CALLS)
    fields = {"tools": TOOLS, "include": ["reasoning.encrypted_content"]}
    first = (await streamed(http, **fields)).response
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"}
        for item in first["output"]
        if "call_id" in item
    ]
    dispatcher.script = lambda _: says("bye")
    await whole(http, input=[{"role": "user", "content": "hi"}, *first["output"], *outputs], **fields)
    prompt = SPEAKING.decode(dispatcher.started[-1].token_ids, skip_special_tokens=False)
    assert '"name": "agents__spawn"' in prompt and json.dumps({"input": PATCHED}, ensure_ascii=False) in prompt
    assert prompt.count("done") == 4 and "web_search" not in prompt


async def test_calls_name_their_tools_as_they_were_sent(http, dispatcher) -> None:
    dispatcher.script = lambda _: says(CALLS)
    weather, add, spawn, patch = (await whole(http, tools=TOOLS))["output"]
    assert (weather["name"], json.loads(weather["arguments"])) == ("get_weather", {"city": "Rome"})
    assert (add["name"], add["arguments"]) == ("add", "{}") and "namespace" not in add
    assert (spawn["name"], spawn["namespace"], spawn["arguments"]) == ("spawn", "agents", '{"a": 1}')
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", PATCHED)
    assert len({item["call_id"] for item in (weather, add, spawn, patch)}) == 4


async def test_arguments_and_input_come_in_pieces(http, dispatcher) -> None:
    dispatcher.script = lambda _: says(CALLS)
    reply = await http.post(PATH, json={"model": MODEL, "input": "hi", "stream": True, "tools": TOOLS})
    events = events_of(reply.text)
    for kind in ("function_call_arguments", "custom_tool_call_input"):
        assert sum(event["type"] == f"response.{kind}.delta" for event in events) > 3, "not kept until the end"


async def test_reasoning_is_counted_and_stands_where_it_was_asked_for(http, dispatcher) -> None:
    dispatcher.script = lambda _: says("<think>\nhm hm\n</think>\n\nhello")
    plain = await whole(http)
    reasoning, message = plain["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm hm"}] and reasoning["summary"] == []
    assert reasoning["encrypted_content"] is None and message["content"][0]["text"] == "hello"
    num_all, num_answer = plain["usage"]["output_tokens"], len(says("hello"))
    assert plain["usage"]["output_tokens_details"] == {"reasoning_tokens": num_all - num_answer}
    fields = {"reasoning": {"summary": "detailed"}, "include": ["reasoning.encrypted_content"]}
    summed = (await whole(http, **fields))["output"][0]
    assert summed["summary"] == [{"type": "summary_text", "text": "hm hm"}] and summed["content"] == []
    dispatcher.script = lambda _: says("x")
    await whole(http, input=[summed, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "on"}])
    assert (await whole(http))["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_that_the_prompt_opens_is_counted(http, dispatcher) -> None:
    dispatcher.script = lambda _: says("hm</think>hello")
    reply = await whole(http, chat_template_kwargs={"open": True})
    details = reply["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == reply["usage"]["output_tokens"] - len(says("hello"))


async def test_logprobs_are_those_of_the_text(http, dispatcher) -> None:
    dispatcher.script = lambda _: says("<think>hm</think>hello")
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = (await whole(http, **fields))["output"][1]["content"][0]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"] == "hello"
    assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {2}
    assert (await whole(http))["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("text", "cut", "kind"),
    [("hello world", "hello", "message"), ("<think>hm hm</think>", "<think>hm", "reasoning"), (CALLS, CALLS[:60], "function_call"),
     (call("patch", {"input": PATCHED}), call("patch", {"input": PATCHED})[:70], "custom_tool_call")],
)  # fmt: skip
async def test_a_response_that_its_length_cuts_is_incomplete(http, dispatcher, text, cut, kind) -> None:
    dispatcher.script = lambda _: says(text, "length")
    most = len(says(cut, "length"))
    stream = await streamed(http, tools=TOOLS, max_output_tokens=most)
    for reply in (stream.response, await whole(http, tools=TOOLS, max_output_tokens=most)):
        assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}
        assert (reply["output"][-1]["type"], reply["output"][-1]["status"]) == (kind, "incomplete")
        assert reply["completed_at"] is None


async def test_more_tokens_than_the_context_has_left_are_all_of_them(http, dispatcher) -> None:
    await whole(http, max_output_tokens=1_000_000)
    generation = dispatcher.started[0]
    assert generation.sampling.max_tokens == 8192 - len(generation.token_ids)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("busy; try again", 2.0), "rate_limit_exceeded"),
        (Unavailable("no node"), "server_is_overloaded"),
        (DeadlineExceeded("late"), "server_error"),
        (RuntimeError("a bug"), "server_error"),
    ],
)
@pytest.mark.parametrize("begun", ["hel", "<think>h", call("add", {"a": 1})[:-20]])
async def test_a_stream_that_fails_ends_with_its_error(http, dispatcher, error, code, begun) -> None:
    dispatcher.script = lambda _: [*says(begun, "length"), error]
    stream = await streamed(http, tools=TOOLS)
    assert stream.response["status"] == "failed" and stream.response["error"]["code"] == code
    assert "a bug" not in stream.response["error"]["message"]
    assert [item["status"] for item in stream.response["output"]] == ["incomplete"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(http, dispatcher, stream) -> None:
    dispatcher.script = lambda _: [Overloaded("busy", 2.0)]
    reply = await http.post(PATH, json={"model": MODEL, "input": "hi", "stream": stream})
    assert reply.status_code == 429 and reply.headers["retry-after"] == "2"
    assert reply.json()["error"]["code"] == "overloaded"
    unknown = await http.post(PATH, json={"model": "other", "input": "hi", "stream": stream})
    assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "model"


@pytest.mark.parametrize("size", [9000, 40_000])
async def test_a_prompt_that_is_too_long_is_said_as_agents_read_it(http, dispatcher, size) -> None:
    """In a stream as its last event, as agents shorten their prompt only then. Both sizes: at once, and in a thread."""
    body = {"model": MODEL, "input": "ab " * size}
    refused = await http.post(PATH, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert "However, input has" in error["message"]
    stream = await streamed(http, input=body["input"])
    assert stream.response["status"] == "failed" and stream.items == []
    assert stream.response["error"] == {"code": "context_length_exceeded", "message": error["message"]}


async def test_an_answer_that_the_cluster_cuts_short_failed(http, dispatcher) -> None:
    class Aborts(SpeakingDispatcher):
        def _done(self, reason: Any, stop_token: int | None, num_output: int) -> Any:
            return super()._done("abort", None, num_output)

    async with served(Aborts(max_len=8192)) as address, httpx.AsyncClient(base_url=address) as other:
        assert (await whole(other))["status"] == (await streamed(other)).response["status"] == "failed"


async def test_a_client_that_leaves_ends_its_generation(http, dispatcher) -> None:
    import asyncio

    never = asyncio.Event()
    dispatcher.script = lambda _: [*says("hel", "length"), Wait(never)]
    async with http.stream("POST", PATH, json={"model": MODEL, "input": "hi", "stream": True}) as reply:
        async for line in reply.aiter_lines():
            if "output_text.delta" in line:
                break
    async with asyncio.timeout(10):
        await until(lambda: bool(dispatcher.cancelled))


async def test_a_call_that_must_come_follows_a_grammar(http, dispatcher) -> None:
    regex = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": '[a-z]+\n"x"'}}
    await whole(http, tools=[WEATHER, SPACE, regex], tool_choice={"type": "custom", "name": "patch"})
    grammar = walkable(dispatcher.started[-1].sampling.grammar.source)
    assert allows(grammar, call("patch", {"input": 'ab\n"x"'})) and not allows(grammar, call("patch", {"input": "AB"}))
    await whole(http, tools=[WEATHER, SPACE], tool_choice={"type": "function", "name": "spawn", "namespace": "agents"})
    grammar = walkable(dispatcher.started[-1].sampling.grammar.source)
    assert allows(grammar, call("agents__spawn", {"city": "Rome"})) and not allows(grammar, "text")


async def test_tools_that_are_shown_but_not_allowed_are_not_called(http, dispatcher) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    await whole(http, tools=[WEATHER, ADD], tool_choice=allowed)
    grammar = walkable(dispatcher.started[-1].sampling.grammar.source)
    assert allows(grammar, "any text") and allows(grammar, call("add", {}))
    assert not allows(grammar, call("get_weather", {"city": "Rome"}))
    assert '"name": "get_weather"' in SPEAKING.decode(dispatcher.started[-1].token_ids, skip_special_tokens=False)


async def test_a_chats_allowed_tools_mean_the_same(client, dispatcher) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_weather", "add")
    ]
    named = {"type": "function", "function": {"name": "add"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice=choice
    )
    grammar = walkable(dispatcher.started[-1].sampling.grammar.source)
    assert allows(grammar, call("add", {"city": "x"})) and not allows(grammar, call("get_weather", {"city": "x"}))
    with pytest.raises(openai.BadRequestError, match="did you mean allowed_tools"):
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice={"allowed_tool": 1}
        )


async def test_a_schema_is_kept_and_its_faults_are_named(http, client, dispatcher) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}}
    dispatcher.script = lambda _: says('{"city": "Rome"}')
    assert (await whole(http, text=text))["text"] == text
    grammar = walkable(dispatcher.started[-1].sampling.grammar.source)
    assert allows(grammar, '{"city": "Rome"}') and not allows(grammar, "{}")
    for wrong, param in (
        ({"type": "json_schema", "name": "n"}, "text.format.schema"),
        ({"type": "json_schema", "schema": {}}, "text.format.name"),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "array", "contains": {"const": 3}}},
            "text.format.schema",
        ),
    ):
        reply = await http.post(PATH, json={"model": MODEL, "input": "hi", "text": {"format": wrong}})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param and error["message"].startswith(param), error


@pytest.mark.parametrize("stream", [False, True])
async def test_nesting_that_is_read_can_be_repeated(http, dispatcher, stream) -> None:
    """At any depth: an answer or a 400, as where an answer is written fewer levels may be left."""
    refused = 0
    for depth in range(20, 1400, 20):
        nested = "[" * depth + "]" * depth
        body = f'{{"model": "{MODEL}", "input": "hi", "stream": {str(stream).lower()}, "metadata": {{"a": {nested}}}}}'
        reply = await http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400) and "internal error" not in reply.text, (depth, reply.text[:300])
        refused += reply.status_code == 400
    assert refused, "no depth was too large"


async def test_the_official_client_reads_all_of_it(client, dispatcher) -> None:
    dispatcher.script = lambda _: says("<think>hm</think>Well. " + CALLS)
    async with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as stream:
        names = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    assert final.output_text == "Well." and final.usage.output_tokens_details.reasoning_tokens > 0
    assert [item.type for item in final.output][-1] == "custom_tool_call"
    reply = await client.responses.create(model=MODEL, input="hi", tools=TOOLS)
    assert reply.output_text == "Well." and reply.output[-1].input == PATCHED
    with pytest.raises(openai.BadRequestError, match="send the whole conversation in input") as refused:
        await client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await client.responses.retrieve("resp_1")
