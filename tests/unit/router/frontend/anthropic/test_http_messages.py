"""Messages over HTTP: whole and streamed alike, with the tokens of a chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_streams import MessageStream, check_message, check_message_error, events_of
from grammar_walk import begins, walkable
from msgspec import structs
from scripted_dispatcher import MODEL, ROUTE, SPEAKING, SpeakingDispatcher, Tokens, Wait, says, served, until

from pdcluster.api.anthropic.requests import decode_messages
from pdcluster.core.errors import DeadlineExceeded, Overloaded, Unavailable
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend import response
from pdcluster_router.frontend.places import Places

pytestmark = pytest.mark.asyncio(loop_scope="module")

CACHED = 5
ROUTED = structs.replace(ROUTE, cached_tokens=CACHED)


def fresh() -> SpeakingDispatcher:
    return SpeakingDispatcher(max_len=4096, route=ROUTED, cached_tokens=CACHED)


_DISPATCHER = fresh()


@pytest.fixture
def dispatcher() -> SpeakingDispatcher:
    vars(_DISPATCHER).update(vars(fresh()))
    return _DISPATCHER


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with served(_DISPATCHER) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


USER = [{"role": "user", "content": "weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("get_weather", "add")]
CALLS = (
    'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 4000, "messages": USER, **fields}


def prompt_of(dispatcher: SpeakingDispatcher, number: int = -1) -> str:
    return SPEAKING.decode(dispatcher.started[number].token_ids, skip_special_tokens=False)


async def both(client: httpx.AsyncClient, dispatcher: SpeakingDispatcher, **fields: Any) -> dict[str, Any]:
    """The message, the same whole and streamed."""
    whole = await client.post("/v1/messages", json=body(**fields))
    assert whole.status_code == 200, whole.text
    stream = await client.post("/v1/messages?beta=true", json=body(**fields, stream=True))
    assert stream.headers["content-type"].startswith("text/event-stream"), stream.text
    message, streamed = whole.json(), MessageStream(stream.text).message
    check_message(message)
    num_prompt = len(dispatcher.started[-1].token_ids)
    for usage in (message["usage"], streamed["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - CACHED, CACHED)
    assert plain(message) == plain(streamed)
    return message


def plain(message: dict[str, Any]) -> Any:
    blocks = [
        {name: value for name, value in block.items() if name not in ("id", "citations")}
        for block in message["content"]
    ]
    return blocks, message["stop_reason"], message["stop_sequence"], message["usage"]["output_tokens"]


# ---------------------------------------------------------------- answers


async def test_text_ends_a_turn(client, dispatcher) -> None:
    message = await both(client, dispatcher)
    assert [(block["type"], block["text"]) for block in message["content"]] == [("text", "hello world")]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["id"].startswith("msg_") and message["model"] == MODEL


async def test_calls_of_tools_are_blocks_in_their_order(client, dispatcher) -> None:
    dispatcher.script = lambda _: says(CALLS)
    message = await both(client, dispatcher, tools=TOOLS)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    assert [block.get("input") for block in message["content"][1:]] == [{"city": "Rome"}, {}]
    assert message["stop_reason"] == "tool_use"
    assert len({block["id"] for block in message["content"][1:]}) == 2


async def test_thinking_ends_with_its_signature(client, dispatcher) -> None:
    dispatcher.script = lambda _: says("<think>\nhm\n</think>\nYes.")
    message = await both(client, dispatcher, thinking={"type": "adaptive"})
    thinking, text = message["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "Yes.") and thinking["signature"]


async def test_omitted_thinking_comes_back_from_its_signature(client, dispatcher) -> None:
    dispatcher.script = lambda _: says("<think>\nhm\n</think>\nYes.")
    message = await both(client, dispatcher, thinking={"type": "adaptive", "display": "omitted"})
    assert message["content"][0]["thinking"] == "" and "hm" not in json.dumps(message["content"])
    again = body(messages=[*USER, {"role": "assistant", "content": message["content"]}, *USER])
    assert decode_messages(json.dumps(again).encode()).chat.messages[1].reasoning_content == "hm"


async def test_stop_sequences_are_named(client, dispatcher) -> None:
    message = await both(client, dispatcher, stop_sequences=["wor", "never"])
    assert (message["content"][0]["text"], message["stop_reason"], message["stop_sequence"]) == (
        "hello ", "stop_sequence", "wor",
    )  # fmt: skip


async def test_an_answer_that_is_cut_says_by_what(client, dispatcher) -> None:
    message = await both(client, dispatcher, max_tokens=3)
    assert message["stop_reason"] == "max_tokens" and message["usage"]["output_tokens"] == 3
    dispatcher.max_len = 24
    asked = body(max_tokens=32_000)
    used = (await client.post("/v1/messages/count_tokens", json=body())).json()["input_tokens"]
    dispatcher.max_len = used + 4
    reply = (await client.post("/v1/messages", json=asked)).json()
    assert reply["stop_reason"] == "model_context_window_exceeded" and reply["usage"]["output_tokens"] == 4


async def test_an_answer_of_nothing_has_no_block(client, dispatcher) -> None:
    dispatcher.script = lambda _: says("")
    message = await both(client, dispatcher)
    assert message["content"] == [] and message["stop_reason"] == "end_turn"


async def test_line_breaks_in_arguments_are_json(client, dispatcher) -> None:
    dispatcher.script = lambda _: says('<tool_call>{"name": "add", "arguments": {"city": "a\nb\\"\t"}}</tool_call>')
    message = await both(client, dispatcher, tools=TOOLS)
    assert message["content"][0]["input"] == {"city": 'a\nb"\t'}


async def test_the_tokens_are_those_of_a_chat(client, dispatcher) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    function = {"name": "add", "description": "d", "parameters": SCHEMA}
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "be\nkind"}, *USER, {"role": "assistant", "content": "x", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"open": True},
    }  # fmt: skip
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]}
    messages = body(
        system=[{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("be", "kind")],
        messages=[
            *USER,
            {"role": "assistant", "content": [{"type": "text", "text": "x"}, use]},
            {"role": "user", "content": [result]},
        ],
        tools=TOOLS[1:],
        chat_template_kwargs={"open": True},
    )
    await client.post("/v1/chat/completions", json=chat)
    await client.post("/v1/messages", json=messages)
    first, second = dispatcher.started
    assert list(first.token_ids) == list(second.token_ids)
    counted = await client.post("/v1/messages/count_tokens?beta=true", json=messages)
    assert counted.json() == {"input_tokens": len(first.token_ids)}


async def test_a_last_turn_of_the_assistant_is_continued(client, dispatcher) -> None:
    await client.post("/v1/messages", json=body(messages=[*USER, {"role": "assistant", "content": "Sun"}]))
    assert prompt_of(dispatcher).endswith("Sun")


# ---------------------------------------------------------------- what is asked


async def test_a_tool_that_must_be_called_is(client, dispatcher) -> None:
    await client.post("/v1/messages", json=body(tools=TOOLS, tool_choice={"type": "tool", "name": "add"}))
    grammar = walkable(dispatcher.started[-1].sampling.grammar.source)
    call = '<tool_call>\n{"name": "%s", "arguments": {"city": "x"}}\n</tool_call>'
    assert begins(grammar, call % "add") and not begins(grammar, call % "get_weather") and not begins(grammar, "text")
    await client.post("/v1/messages", json=body(tools=TOOLS, tool_choice={"type": "none"}))
    assert "tools:" not in prompt_of(dispatcher)


async def test_deferred_tools_are_shown_where_they_were_loaded(client, dispatcher) -> None:
    late = {**TOOLS[1], "defer_loading": True}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}]}
    loads = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "add"}]}
    await client.post("/v1/messages", json=body(tools=[TOOLS[0], late]))
    before = prompt_of(dispatcher)
    dispatcher.script = lambda _: says('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    asked = body(tools=[TOOLS[0], late], messages=[*USER, use, {"role": "user", "content": [loads]}])
    reply = (await client.post("/v1/messages", json=asked)).json()
    after = prompt_of(dispatcher)
    assert '"add"' not in before and after.count('"add"') == 1, "shown once, and not before"
    assert after.startswith(before.removesuffix("<|start|>assistant\n")), "the prefix stays"
    assert reply["content"][0]["name"] == "add"


async def test_the_schema_of_an_output_is_kept(client, dispatcher) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        reply = await client.post("/v1/messages", json=body(**fields))
        assert reply.status_code == 200 and dispatcher.started[-1].sampling.grammar is not None, reply.text


async def test_unknown_fields_are_ignored_and_counted(client, dispatcher) -> None:
    reply = await client.post("/v1/messages", json=body(new_field={"a": 1}, metadata={}, container=None))
    assert reply.status_code == 200
    metrics = (await client.get("/metrics")).text
    assert 'pdcluster_ignored_fields_total{field="new_field"} 1.0' in metrics and 'field="metadata"' not in metrics


# ---------------------------------------------------------------- errors


REFUSED = [
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"messages": []}, "messages must have at least 1"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is \"web_search_20250305\""),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type is \"image\""),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "\"document\"; only text, tool_result is taken"),
    ({"stop_sequences": [""]}, "stop_sequences has an empty string"),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name is missing"),
    ({"thinking": {"type": "off"}}, "thinking.type is \"off\"; it must be one of enabled, adaptive, disabled"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"name": "two words", "input_schema": SCHEMA}]}, "tools[0].name is"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "says_so"), REFUSED)
async def test_what_cannot_be_served_is_refused_by_name(client, dispatcher, fields, says_so) -> None:
    reply = await client.post("/v1/messages", json=body(**fields))
    check_message_error(reply.json())
    assert reply.status_code == 400 and says_so in reply.json()["error"]["message"]
    assert reply.json()["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("all nodes are busy"), 429, "rate_limit_error"),
        (Unavailable("no node is known"), 529, "overloaded_error"),
        (DeadlineExceeded("it came too late"), 504, "timeout_error"),
        (RuntimeError("bug"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
async def test_errors_have_the_types_of_their_status(client, dispatcher, error, status, kind, is_late) -> None:
    dispatcher.script = lambda _: [*(says("he", "length") if is_late else []), error]
    reply = await client.post("/v1/messages", json=body(stream=True), headers={"x-request-id": "mine"})
    if is_late:
        stream = MessageStream(reply.text)
        assert stream.error is not None and stream.error["error"]["type"] == kind
        assert stream.error["request_id"] == "mine"
    else:
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
        assert ("retry-after" in reply.headers) == (status in (429, 529))


async def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_know(client, dispatcher) -> None:
    dispatcher.max_len = 16
    long = await client.post("/v1/messages", json=body(messages=[{"role": "user", "content": "word " * 2000}]))
    mid = await client.post("/v1/messages", json=body(system="a b c d e f g h"))
    for reply in (long, mid):
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.json()["error"]["message"].startswith("prompt is too long: ")
        assert " tokens > 15 maximum" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages"])
async def test_other_paths_and_models_are_not_found(client, dispatcher, path) -> None:
    reply = await client.post(path, json=body(model="gone"))
    check_message_error(reply.json())
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"


# ---------------------------------------------------------------- streams


async def test_a_ping_comes_between_events_of_a_silent_stream(client, dispatcher, monkeypatch) -> None:
    monkeypatch.setattr(response, "PING_S", 0.02)
    go_on = asyncio.Event()
    dispatcher.script = lambda _: [*says("he", "length"), Wait(go_on), *says("llo")]
    async with client.stream("POST", "/v1/messages", json=body(stream=True)) as reply:
        seen = ""
        async for text in reply.aiter_text():
            seen += text
            if seen.count("event: ping") > 3:
                go_on.set()
    assert MessageStream(seen).message["content"][0]["text"] == "hello"


async def test_a_client_that_leaves_ends_its_generation(client, dispatcher) -> None:
    dispatcher.script = lambda _: [*says("he", "length"), Wait(asyncio.Event())]
    async with client.stream("POST", "/v1/messages", json=body(stream=True)) as reply:
        await anext(reply.aiter_text())
        assert dispatcher.cancelled == []
    await until(lambda: bool(dispatcher.cancelled))
    assert len(dispatcher.cancelled) == len(dispatcher.started) == 1


async def test_the_start_waits_for_the_first_token(client, dispatcher) -> None:
    go_on = asyncio.Event()
    dispatcher.script = lambda _: [Wait(go_on), Tokens((65,))]
    asked = asyncio.create_task(client.post("/v1/messages", json=body(stream=True)))
    await until(lambda: bool(dispatcher.started))
    await asyncio.sleep(0.02)
    assert not asked.done()
    go_on.set()
    first = events_of((await asked).text)[0]
    assert first["message"]["usage"]["cache_read_input_tokens"] == CACHED


# ---------------------------------------------------------------- models and keys


async def test_models_are_listed_in_the_form_of_the_caller(client, dispatcher) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await client.get("/v1/models", headers=headers)).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
    one = (await client.get(f"/v1/models/{MODEL}", headers=headers)).json()
    assert one == listed["data"][0] and one["type"] == "model" and one["created_at"] == "2023-11-14T22:13:20Z"
    assert (await client.get("/v1/models")).json()["object"] == "list"
    assert (await client.get("/v1/models/none", headers=headers)).json()["error"]["type"] == "not_found_error"


KEY, OTHER = "sk-acme-0001", "sk-other-001"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": f"Bearer {OTHER}"}, 401),
        ({"x-api-key": KEY, "authorization": f"bearer  {KEY}"}, 200),
        ({"x-api-key": "", "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": "sk-nobody-01"}, 401),
        ({}, 401),
    ],
)
async def test_a_key_comes_in_either_header(dispatcher, headers, status) -> None:
    places = Places(4, Tenants({"acme": Entry(keys=[KEY]), "other": Entry(keys=[OTHER])}))
    async with served(dispatcher, places=places) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        for reply in (
            await client.post("/v1/messages", json=body()),
            await client.post("/v1/messages/count_tokens", json=body()),
            await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}),
        ):
            assert reply.status_code == status
            if status == 401:
                check_message_error(reply.json())
                assert reply.json()["error"]["type"] == "authentication_error"
