"""Faults that were reported of other servers' Responses endpoints, each kind a test. A docstring names the report
(repository#number), what went wrong there, and what must hold here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_streams import Json, ResponseStream, check_response, events_of
from scripted_dispatcher import (
    EOS,
    MODEL,
    TEXT,
    SpeakingDispatcher,
    Tokens,
    Wait,
    says,
    served,
    until,
)

from pdcluster.api.text.model_text import TextModel
from pdcluster.core.errors import Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("get_weather", "add")]
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+he said "hi" \\ ü\n*** End Patch\n'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
NAMESPACE = {
    "type": "namespace", "name": "mcp__files", "description": "Files.",
    "tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}],
}  # fmt: skip
HOSTED = [
    {"type": "web_search", "external_web_access": False}, {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "parameters": SCHEMA}, {"type": "local_shell"},
    {"type": "next_month"},
]  # fmt: skip
USER = {"role": "user", "content": "weather?"}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


_DISPATCHER = SpeakingDispatcher(max_len=4096)


@pytest.fixture
def dispatcher() -> SpeakingDispatcher:
    vars(_DISPATCHER).update(vars(SpeakingDispatcher(max_len=4096)))
    return _DISPATCHER


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with opened(_DISPATCHER) as client:
        yield client


@asynccontextmanager
async def opened(dispatcher: SpeakingDispatcher) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        served(dispatcher) as url,
        httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(RESPONSES, json={"model": MODEL, "input": [USER], **fields})


async def whole(client: httpx.AsyncClient, status: str = "completed", **fields: Any) -> Json:
    reply = await ask(client, **fields)
    assert reply.status_code == 200, reply.text
    response: Json = reply.json()
    check_response(response, status)
    return response


async def streamed(client: httpx.AsyncClient, status: str = "completed", **fields: Any) -> Json:
    reply = await ask(client, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    response = ResponseStream(reply.text).response
    assert response["status"] == status, response
    return response


async def both(client: httpx.AsyncClient, status: str = "completed", **fields: Any) -> list[Json]:
    return [await whole(client, status, **fields), await streamed(client, status, **fields)]


async def refused(client: httpx.AsyncClient, **fields: Any) -> str:
    """The message of a 400."""
    reply = await ask(client, **fields)
    assert reply.status_code == 400, reply.text
    message: str = reply.json()["error"]["message"]
    return message


def prompts(dispatcher: SpeakingDispatcher) -> list[str]:
    text = dispatcher.text(MODEL)
    return [text.decode(each.token_ids, skip_special_tokens=False) for each in dispatcher.started]


def offered(dispatcher: SpeakingDispatcher) -> list[Json]:
    """The functions that the model was told of last."""
    tools: list[Json] = json.loads(prompts(dispatcher)[-1].partition("tools:")[2].partition(" say <tool_call>")[0])
    return [tool["function"] for tool in tools]


async def test_tools_in_a_namespace_are_offered_and_called_by_it(client, dispatcher):
    """openai/codex#36942, ollama/ollama#17618, lmstudio-ai/lmstudio-bug-tracker#1810, vllm-project/vllm#49493: the type
    was a 400 or a 500, so Codex was unusable with MCP. Here the call names tool and namespace, and history may."""
    await whole(client, tools=[*TOOLS, NAMESPACE])
    names = [each["name"] for each in offered(dispatcher)]
    assert len(set(names)) == 3 and names[:2] == ["get_weather", "add"] and "read" in names[2]
    dispatcher.script = lambda _: says(call(names[2], '{"city": "a"}'))
    for response in await both(client, tools=[*TOOLS, NAMESPACE]):
        (called,) = response["output"]
        assert (called["type"], called["name"], called["namespace"]) == ("function_call", "read", "mcp__files")
        result = {"type": "function_call_output", "call_id": called["call_id"], "output": "it is 42"}
        await whole(client, input=[USER, called, result], tools=[*TOOLS, NAMESPACE])
        prompt = prompts(dispatcher)[-1]
        assert f'"name": "{names[2]}"' in prompt.partition("say <tool_call>")[2] and "it is 42" in prompt
    choice = {"type": "function", "name": "read", "namespace": "mcp__files"}
    await whole(client, tools=[*TOOLS, NAMESPACE], tool_choice=choice)
    assert dispatcher.started[-1].sampling.grammar is not None


async def test_a_custom_tool_takes_and_gives_bare_text(client, dispatcher):
    """router-for-me/CLIProxyAPI#5753, unslothai/unsloth#9114, openai/codex#16397: apply_patch was dropped, or came as a
    function with JSON, and no file was ever edited. Here its input is the text, to the byte, however it came in pieces."""
    said = call("apply_patch", json.dumps({"input": PATCH}))
    ids = [*TEXT.encode(said, add_special_tokens=False), EOS]
    for size in (1, 3, len(ids)):
        dispatcher.script = lambda _, size=size: [Tokens(tuple(ids[i : i + size])) for i in range(0, len(ids), size)]
        for response in await both(client, tools=[*TOOLS, CUSTOM]):
            (called,) = response["output"]
            assert (called["type"], called["name"], called["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    result = {"type": "custom_tool_call_output", "call_id": called["call_id"], "output": "Done!"}
    await whole(client, input=[USER, called, result], tools=[*TOOLS, CUSTOM])
    assert "Done!" in prompts(dispatcher)[-1] and "Begin Patch" in prompts(dispatcher)[-1]


async def test_tools_that_a_server_would_run_are_left_out(client, dispatcher):
    """CommandCodeAI/command-code#885, ikawrakow/ik_llama.cpp#1964, ggml-org/llama.cpp#20156: one of them in the list
    refused the whole request, and Codex always sends some. Here only a choice of one is refused."""
    await whole(client, tools=[*HOSTED, *TOOLS])
    await whole(client, tools=TOOLS)
    await whole(client, tools=HOSTED)
    await whole(client)
    first, second, third, fourth = [each.token_ids for each in dispatcher.started]
    assert first == second and third == fourth
    assert "web_search" in await refused(client, tools=[*HOSTED, *TOOLS], tool_choice={"type": "web_search_preview"})


CALLS = call("get_weather", '{"city": "Rome"}') + "\n" + call("add", "{}") + "\n" + call("add", '{"a": 1}')


async def test_ids_and_items_are_the_same_in_events_and_in_the_answer(client, dispatcher):
    """vllm-project/vllm#47916 (call_id), EricLBuehler/mistral.rs#1944, vllm-project/vllm#23218, BerriAI/litellm#36375: an
    item had another id in each event. BerriAI/litellm#28899: sequence numbers stood still. can1357/oh-my-pi#1882: events
    of parallel calls ran into each other. Here all are checked as events come, and each item has an id of its own."""
    dispatcher.script = lambda _: says("<think>\nhm </think>\nWell. " + CALLS)
    for response in await both(client, tools=TOOLS):
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call", "function_call"]
        calls = response["output"][2:]
        assert [item["arguments"] for item in calls] == ['{"city": "Rome"}', "{}", '{"a": 1}']
        assert len({item["call_id"] for item in calls}) == 3


async def test_a_stream_ends_with_the_whole_answer(client, dispatcher):
    """decolua/9router#705: response.completed without output or usage; clients read it and failed. Here it is the object
    that comes without a stream."""
    one, other = await both(client, tools=TOOLS, metadata={"a": "b"}, instructions="You help.")
    drawn = ("id", "created_at", "completed_at", "output", "usage")
    assert {k: v for k, v in one.items() if k not in drawn} == {k: v for k, v in other.items() if k not in drawn}
    assert one["metadata"] == {"a": "b"} and one["instructions"] == "You help." and one["store"] is False
    texts = [[part["text"] for item in each["output"] for part in item["content"]] for each in (one, other)]
    assert texts[0] == texts[1] == ["hello world"] and one.keys() == other.keys()
    assert one["usage"]["input_tokens"] == len(dispatcher.started[0].token_ids)
    assert one["usage"]["output_tokens"] == len(says("hello world"))
    reply = await ask(client, stream=True)
    assert "[DONE]" not in reply.text


@pytest.mark.parametrize("kind", [None, "message"])
@pytest.mark.parametrize(
    "extra", [{}, {"id": "msg_1", "status": "completed", "phase": "final_answer", "next_month": 1}]
)
async def test_items_need_neither_id_nor_status_nor_type(client, dispatcher, kind, extra):
    """vllm-project/vllm#41355 and #35508, tidyverse/ellmer#1153 (llama.cpp), openai/codex#8829: items that were given
    back without id, status, type or annotations were a 400."""
    typed: Json = {} if kind is None else {"type": kind}
    items = [
        typed | extra | {"role": "user", "content": [{"type": "input_text", "text": "first"}]},
        typed | extra | {"role": "assistant", "content": [{"type": "output_text", "text": "second"}]},
        typed | extra | {"role": "assistant", "content": "third"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "fourth"},
        typed | extra | {"role": "user", "content": "fifth"},
    ]
    await whole(client, input=items, tools=TOOLS)
    prompt = prompts(dispatcher)[0]
    assert [prompt.count(word) for word in ("first", "second", "third", "fourth", "fifth")] == [1] * 5


async def test_a_turn_of_the_assistant_may_be_empty_or_a_refusal(client, dispatcher):
    """vllm-project/vllm#48237 and #35508: content [] was an IndexError, a refusal an AttributeError: 500 on every later
    turn."""
    called = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    for content in ([], "", None, [{"type": "refusal", "refusal": "No."}], [{"type": "output_text", "text": ""}]):
        message = {"type": "message", "role": "assistant", "content": content}
        await whole(client, input=[USER, message, called, result, USER], tools=TOOLS)
        assert "42" in prompts(dispatcher)[-1]


async def test_reasoning_of_before_is_taken_back(client, dispatcher):
    """ggml-org/llama.cpp#29159, vllm-project/vllm#28248, BerriAI/litellm#13420: an item without summary or content was a
    400. Here it says nothing; what came from here comes back; what another server encrypted is passed over."""
    empty = [
        {"type": "reasoning", "id": "rs_1", "summary": []}, {"type": "reasoning", "summary": [], "content": None},
        {"type": "reasoning", "id": "rs_1", "summary": None, "content": [], "encrypted_content": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo-of-another-server"},
    ]  # fmt: skip
    await whole(client)
    for item in empty:
        await whole(client, input=[item, USER])
    assert len({each.token_ids.tobytes() for each in dispatcher.started}) == 1
    dispatcher.script = lambda _: says("<think>\nhm </think>\nWell.")
    fields = {"include": ["reasoning.encrypted_content"], "store": False}
    for response in await both(client, **fields):
        await whole(client, input=[USER, *response["output"], USER], **fields)
        assert "Well." in prompts(dispatcher)[-1]


async def test_broken_arguments_of_before_break_nothing(client, dispatcher):
    """vllm-project/vllm#48922, local-inference-lab/vllm#684: a call that was cut off once made each later turn a 400."""
    result = {"type": "function_call_output", "call_id": "c1", "output": "its arguments were invalid"}
    for arguments in ('{"city": "Ro', "", "not json", "[]", '{"city": "a"} trailing'):
        broken = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": arguments}
        await whole(client, input=[USER, broken, result, USER], tools=TOOLS)
        assert "its arguments were invalid" in prompts(dispatcher)[-1]


class Strict(SpeakingDispatcher):
    """Of a model whose template wants one system turn, at the start, and knows no developer."""

    def text(self, model: str) -> TextModel:
        return TEXT


async def test_instructions_and_developers_are_one_system_turn():
    """vllm-project/vllm#42407, ggml-org/llama.cpp#20079, raullenchai/Rapid-MLX#549, Blaizzy/mlx-vlm#1716: "Unexpected
    message role", or two system turns: "System message must be at the beginning". Codex sends both."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be terse."}]}
    dispatcher = Strict(max_len=4096)
    async with opened(dispatcher) as client:
        await both(client, instructions="You help.", input=[developer, {"role": "system", "content": "Be kind."}, USER])
    prompt = prompts(dispatcher)[0]
    assert all(prompt.count(words) == 1 for words in ("You help.", "Be terse.", "Be kind."))
    assert prompt.count("<|start|>system") == 1 and "developer" not in prompt


async def test_developers_may_speak_later():
    """gty111/gLLM#267, vllm-project/vllm#43590: after a compaction Codex's developer speaks behind users, and templates
    that want system first refused each later turn. Here the words are shown where they stand."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be terse."}]}
    dispatcher = Strict(max_len=4096)
    async with opened(dispatcher) as client:
        await both(
            client, instructions="You help.", input=[USER, developer, {"role": "assistant", "content": "Ok."}, USER]
        )
    prompt = prompts(dispatcher)[0]
    assert prompt.index("You help.") < prompt.index("weather?") < prompt.index("Be terse.") < prompt.index("Ok.")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("background", True),
        ("prompt", {"id": "pmpt_1"}),
        ("truncation", "auto"),
    ],
)
async def test_what_nobody_keeps_is_refused(client, dispatcher, field, value):
    """Blaizzy/mlx-vlm#1046, openclaw/openclaw#37765: previous_response_id was taken and ignored: the model answered
    without the conversation. Here it is a 400 that names the field and says what to send."""
    message = await refused(client, **{field: value})
    assert field in message and len(message) > 40 and dispatcher.started == []
    await whole(client, **{field: False if field == "background" else "disabled" if field == "truncation" else None})


async def test_an_item_of_a_kept_response_is_refused_by_name(client, dispatcher):
    """vllm-project/vllm#55974: item_reference was a 500 that said 'role'."""
    assert "item_reference" in await refused(client, input=[{"type": "item_reference", "id": "msg_1"}, USER])
    assert "hologram" in await refused(client, input=[{"type": "hologram", "data": "x"}, USER])
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]}
    assert "image" in await refused(client, input=[image])
    assert dispatcher.started == []


async def test_history_of_tools_that_ran_elsewhere_is_passed_over(client, dispatcher):
    """CommandCodeAI/command-code#893: after one tool search each later turn of Codex was a 400. openai/codex#7073: the
    same after a web search."""
    ran = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "other", "query": "x"}},
        {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "files"}},
        {"type": "tool_search_output", "call_id": "c1", "status": "completed", "execution": "client", "tools": [NAMESPACE]},
    ]  # fmt: skip
    await whole(client, input=[USER, *ran, USER], tools=TOOLS)
    assert prompts(dispatcher)[0].count("weather?") == 2


async def test_an_answer_that_was_cut_says_so(client, dispatcher):
    """vllm-project/vllm#24184 and #57998, vllm-project/agentic-api#273, jundot/omlx#2817: completed, or response.completed
    with status incomplete, or an item that says completed. Here answer, event and the item that was cut agree."""
    dispatcher.script = lambda _: says("one two three four five six", "length")
    for response in await both(client, "incomplete", max_output_tokens=3):
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete" and response["usage"]["output_tokens"] == 3
    dispatcher.script = lambda _: says(call("get_weather", '{"city": "Rome"}'), "length")
    cut = len(says(call("get_weather", '{"city": "Rome"}')[:60], "length"))
    for response in await both(client, "incomplete", max_output_tokens=cut, tools=TOOLS):
        assert response["output"][-1]["status"] == "incomplete"
    dispatcher.script = lambda _: says("<think>\none two three four", "length")
    for response in await both(client, "incomplete", max_output_tokens=10):
        assert [item["type"] for item in response["output"]] == ["reasoning"]


async def test_an_output_may_be_a_list_of_texts(client, dispatcher):
    """ggml-org/llama.cpp#23465: "Output of tool call should be 'Input text'", as Codex sends lists."""
    called = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "it is 42"}, {"type": "output_text", "text": "or 43"}]
    await whole(
        client, input=[USER, called, {"type": "function_call_output", "call_id": "c1", "output": parts}], tools=TOOLS
    )
    assert "it is 42" in prompts(dispatcher)[0] and "or 43" in prompts(dispatcher)[0]


@pytest.mark.parametrize("said", ["", "half of", "<think>\nhm", call("get_weather", '{"city": "Ro')[:70]])
async def test_a_failure_is_the_last_event(client, dispatcher, said):
    """ollama/ollama#14600, raullenchai/Rapid-MLX#549: the stream just closed, and clients said "stream closed before
    response.completed". Here an error before the first token is a status, one after it is response.failed, and a bug is
    not shown."""
    for error, status in (
        (Unavailable("no node takes the request; all of them drain"), 503),
        (RuntimeError("a bug"), 500),
    ):
        dispatcher.script = lambda _, error=error: [*(says(said, "length") if said else []), error]
        reply = await ask(client, stream=True, tools=TOOLS)
        if not said:
            assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}
            continue
        failed = ResponseStream(reply.text).response
        assert failed["status"] == "failed" and "bug" not in reply.text
        assert (await ask(client, tools=TOOLS)).status_code == status


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(client, dispatcher):
    """openai/codex#20866 and #8293 of anomalyco/opencode: by the code context_length_exceeded a client knows that it must
    compact. Codex looks for it in response.failed alone; a 400 ends its turn."""
    for repeated in (4096, 1_000_000):
        long = [{"role": "user", "content": "ab " * repeated}]
        reply = await ask(client, input=long)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded"), reply.text
        reply = await ask(client, input=long, stream=True)
        assert reply.status_code == 200, reply.text
        assert ResponseStream(reply.text).response["error"]["code"] == "context_length_exceeded"
    assert dispatcher.started == []


async def test_a_refusal_is_short_however_long_the_request(client):
    """vllm-project/vllm#49239: some kilobytes of a wrong body gave 114 MB of an error, the input once per finding."""
    wrong: list[Any] = [
        [{"role": "user", "content": [{"type": "input_text", "text": ["x" * 1000]} for _ in range(2000)]}],
        [{"type": "x" * 100_000}], [["y" * 100_000]], {"a": "z" * 100_000}, ["w" * 100_000] * 20,
    ]  # fmt: skip
    for items in wrong:
        assert len(await refused(client, input=items)) < 2000


async def test_what_codex_adds_passes(client, dispatcher):
    """decolua/9router#1468 of the same kind: fields that a client adds must not end it."""
    fields = {
        "client_metadata": {"x-codex-turn-metadata": "{}"}, "prompt_cache_key": "01a2", "store": False,
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto", "effort": "medium", "context": "all_turns"},
        "text": {"verbosity": "low"}, "service_tier": "priority", "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    await whole(client, **fields)


async def test_who_leaves_ends_the_generation(client, dispatcher):
    """A turn that was interrupted must not run on."""
    never = asyncio.Event()
    dispatcher.script = lambda _: [*says("half of", "length"), Wait(never)]
    async with client.stream("POST", RESPONSES, json={"model": MODEL, "input": [USER], "stream": True}) as reply:
        async for line in reply.aiter_lines():
            if "_text.delta" in line or "text_delta" in line:
                break
    await until(lambda: len(dispatcher.cancelled) == 1)


async def test_events_are_named_in_the_order_that_clients_read(client, dispatcher):
    """vercel/ai, openai-agents and others open an item at `added` and a part at `content_part.added`: the order for a
    plain answer, word for word."""
    reply = await ask(client, stream=True)
    kinds = [event["type"].removeprefix("response.") for event in events_of(reply.text)]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1 and kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * num_deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
