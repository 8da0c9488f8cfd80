"""Faults that were reported of other servers' Messages endpoints, each kind a test. A docstring names the report
(repository#number), what went wrong there, and what must hold here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from agent_streams import (
    ERROR_TYPES,
    Json,
    MessageStream,
    check_end,
    check_message,
    check_message_error,
    events_of,
    num_prompt_tokens,
)
from scripted_dispatcher import (
    EOS,
    MODEL,
    ROUTE,
    TEXT,
    SpeakingDispatcher,
    Tokens,
    Wait,
    says,
    served,
    until,
)
from tiny_tokenizers import byte_level_files

from pdcluster.api.text.model_text import TextModel
from pdcluster.core.errors import DeadlineExceeded, Overloaded, Unavailable
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.places import Places

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES, COUNT = "/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.4c0; cc_entrypoint=cli; cch={};"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("get_weather", "add")]
USER = {"role": "user", "content": "weather?"}
MAX_LEN = 4096


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


_DISPATCHER = SpeakingDispatcher(max_len=MAX_LEN)


@pytest.fixture
def dispatcher() -> SpeakingDispatcher:
    vars(_DISPATCHER).update(vars(SpeakingDispatcher(max_len=MAX_LEN)))
    return _DISPATCHER


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with opened(_DISPATCHER) as client:
        yield client


@asynccontextmanager
async def opened(dispatcher: SpeakingDispatcher, places: Places | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        served(dispatcher, None, places) as url,
        httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    length = {} if path == COUNT else {"max_tokens": 512}
    headers = {"anthropic-version": "2023-06-01"}
    return await client.post(path, json={"model": MODEL, "messages": [USER], **length, **fields}, headers=headers)


async def whole(client: httpx.AsyncClient, **fields: Any) -> Json:
    reply = await ask(client, **fields)
    assert reply.status_code == 200, reply.text
    message: Json = reply.json()
    check_message(message)
    check_end(message)
    return message


async def streamed(client: httpx.AsyncClient, **fields: Any) -> Json:
    reply = await ask(client, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    stream = MessageStream(reply.text)
    assert stream.error is None, stream.error
    return stream.message


async def refused(client: httpx.AsyncClient, **fields: Any) -> str:
    """The message of a 400."""
    reply = await ask(client, **fields)
    assert reply.status_code == 400, reply.text
    check_message_error(reply.json())
    assert reply.json()["error"]["type"] == "invalid_request_error"
    message: str = reply.json()["error"]["message"]
    return message


def prompts(dispatcher: SpeakingDispatcher) -> list[str]:
    text = dispatcher.text(MODEL)
    return [text.decode(each.token_ids, skip_special_tokens=False) for each in dispatcher.started]


@pytest.mark.parametrize("as_blocks", [True, False])
async def test_a_billing_line_never_reaches_the_template(client, dispatcher, as_blocks):
    """vllm-project/vllm#36829, sgl-project/sglang#21064, anthropics/claude-code#68900: the first line of system changes
    with every request and ended every prefix hit. Here the prompt is as without it; elsewhere the words stay."""
    billing, system = [BILLING.format(each) for each in ("36ee5", "0aaa9")], "You help. x-anthropic-billing-header: no"
    for line in billing:
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": system}]
        await whole(client, system=blocks if as_blocks else f"{line}\n{system}")
    await whole(client, system=[{"type": "text", "text": system}] if as_blocks else system)
    first, second, without = [each.token_ids for each in dispatcher.started]
    assert first == second == without and system in prompts(dispatcher)[0]
    assert "cch=" not in prompts(dispatcher)[0]


async def test_a_block_that_is_only_a_billing_line_leaves_no_system(client, dispatcher):
    """waybarrios/vllm-mlx#277: of a title request, nothing but the line is left. Here it has no system turn then."""
    await whole(client, system=BILLING.format("1"))
    await whole(client, system=[{"type": "text", "text": BILLING.format("2")}])
    await whole(client)
    assert len({each.token_ids.tobytes() for each in dispatcher.started}) == 1


async def test_tokens_are_counted_as_they_are_used(client, dispatcher):
    """BerriAI/litellm#13252 (404), router-for-me/CLIProxyAPI#679 (48 counted of 728): system, tools and the template
    were left out. Here the count is the usage of the request with the same fields."""
    cases: list[Json] = [
        {},
        {"tools": []},
        {"system": "You help.", "tools": TOOLS},
        {"system": [{"type": "text", "text": BILLING.format(1)}, {"type": "text", "text": "You help."}]},
        {"tools": TOOLS, "tool_choice": {"type": "any"}, "thinking": {"type": "adaptive"}},
        {"messages": [USER, {"role": "assistant", "content": "So far"}]},
    ]
    for fields in cases:
        counted = await ask(client, COUNT, **fields)
        message = await whole(client, **fields)
        assert counted.status_code == 200 and counted.json()["input_tokens"] == num_prompt_tokens(message["usage"])
        assert counted.json()["input_tokens"] == len(dispatcher.started[-1].token_ids)


async def test_a_stream_begins_with_the_length_of_the_prompt(client, dispatcher):
    """sgl-project/sglang#20678, BerriAI/litellm#41406, zai-org/GLM-5#139: message_start said 0, so the agent never
    compacted. sgl-project/sglang#25876, vllm-project/vllm#49456: cached tokens counted twice, or at the end only."""
    dispatcher.route = ROUTE.__class__("remote", "p-1", "d-1", "shm", 3)
    reply = await ask(client, stream=True)
    started, *_, delta, _ = events_of(reply.text)
    num_prompt = len(dispatcher.started[0].token_ids)
    for usage in (started["message"]["usage"], (await whole(client))["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 3, 3)
    assert delta["usage"]["output_tokens"] == len(says("hello world"))


MIXED = (
    "<think>\nhm </think>\nWell. " + call("get_weather", '{"city": "Rome"}') + "\n" + call("add", "{}") + "\nThen. "
    + call("add", '{"a": [1, 2]}')
)  # fmt: skip


async def test_blocks_open_one_after_the_other(client, dispatcher):
    """ollama/ollama#17101, sgl-project/sglang#24294, invergent-ai/surogate#113, QuantumNous/new-api#5482: two open
    blocks, a gap in the indices, text in a block of a tool. Here the events keep the clients' rules, however the answer
    comes in pieces."""
    ids = [*TEXT.encode(MIXED, add_special_tokens=False), EOS]
    wholes = []
    for size in (1, 2, 7, len(ids)):
        dispatcher.script = lambda _, size=size: [Tokens(tuple(ids[i : i + size])) for i in range(0, len(ids), size)]
        wholes.append(await streamed(client, tools=TOOLS, thinking={"type": "adaptive"}))
    kinds = [block["type"] for block in wholes[0]["content"]]
    assert kinds[:3] == ["thinking", "text", "tool_use"] and kinds.count("tool_use") == 3
    said = [[block | {"id": None, "signature": None} for block in each["content"]] for each in wholes]
    assert all(each == said[0] for each in said[1:])


@pytest.mark.parametrize("answer", ["<think>\nhm </think>\n" + call("add", "{}"), call("add", "{}"), "just text"])
async def test_no_block_is_empty(client, dispatcher, answer):
    """BerriAI/litellm#34433, #27962: an empty text block came before thoughts and calls; clients then said "Content
    block is not a thinking block". Here a block opens with what it has to say."""
    dispatcher.script = lambda _: says(answer)
    for message in (await whole(client, tools=TOOLS), await streamed(client, tools=TOOLS)):
        assert message["content"][0]["type"] in ("thinking", "tool_use" if "<tool_call>" in answer else "text")


async def test_parallel_calls_are_blocks_of_their_own(client, dispatcher):
    """sgl-project/sglang#39782: three calls' arguments in one block. vllm-project/vllm#33671: calls that come in one
    chunk were lost. Here each has its block, its id and its arguments."""
    said = "\n".join(call("get_weather", f'{{"city": "{city}"}}') for city in ("Rome", "Oslo", "Köln"))
    scripts = [says(said), [Tokens((*TEXT.encode(said, add_special_tokens=False), EOS))]]
    for script in scripts:
        dispatcher.script = lambda _, script=script: script
        for message in (await whole(client, tools=TOOLS), await streamed(client, tools=TOOLS)):
            assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [
                {"city": "Rome"}, {"city": "Oslo"}, {"city": "Köln"},
            ]  # fmt: skip


async def test_arguments_come_as_deltas(client, dispatcher):
    """BerriAI/litellm#25561, #25390, inflaborg/ccrelay#119: clients read input_json_delta alone, so a call without one
    is a call without arguments, again and again. BerriAI/litellm#29286: text came as such a delta. Here arguments are
    streamed in pieces; a call without arguments has the empty object."""
    dispatcher.script = lambda _: says(call("get_weather", '{"city": "Rome, Italy"}') + call("add", "{}"))
    reply = await ask(client, stream=True, tools=TOOLS)
    pieces: dict[int, list[str]] = {}
    for event in events_of(reply.text):
        if event["type"] == "content_block_delta":
            pieces.setdefault(event["index"], []).append(event["delta"]["partial_json"])
    assert "".join(pieces[0]) == '{"city": "Rome, Italy"}' and len(pieces[0]) > 3
    assert [block["input"] for block in MessageStream(reply.text).message["content"]] == [{"city": "Rome, Italy"}, {}]


@pytest.mark.parametrize("arguments", ['{"city": Rome}', '"Rome"', "[1, 2]", '{"city": "Ro'])
async def test_arguments_that_are_no_object_end_neither_client_nor_answer(client, dispatcher, arguments):
    """anthropics/anthropic-sdk-python parses the arguments at each delta and raises where they are no JSON
    (earendil-works/pi#3175). Here what is no call is text, and a call has an object."""
    dispatcher.script = lambda _: says(call("get_weather", arguments))
    for message in (await whole(client, tools=TOOLS), await streamed(client, tools=TOOLS)):
        assert message["content"], message


@pytest.mark.parametrize("before", ["", "Well. "])
async def test_a_call_ends_its_turn_as_one(client, dispatcher, before):
    """BerriAI/litellm#34692, maximhq/bifrost#3638: end_turn behind a call, so the agent dropped it."""
    dispatcher.script = lambda _: says(before + call("add", "{}"))
    for message in (await whole(client, tools=TOOLS), await streamed(client, tools=TOOLS)):
        assert message["stop_reason"] == "tool_use"


async def test_a_stop_sequence_is_named_and_cut(client, dispatcher):
    """vllm-project/vllm#45807, exo-explore/exo#2122, raullenchai/Rapid-MLX#469: end_turn, no sequence, and the first
    letters of a sequence of several tokens leaked."""
    dispatcher.script = lambda _: says("one two END three", "length")
    fields = {"stop_sequences": ["never", "two END"]}
    for message in (await whole(client, **fields), await streamed(client, **fields)):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two END")
        assert [block["text"] for block in message["content"]] == ["one "]
    dispatcher.script = lambda _: says("one two EN")
    for message in (await whole(client, **fields), await streamed(client, **fields)):
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


async def test_no_stop_sequence_is_named_beside_another_reason(client, dispatcher):
    """Of BerriAI/litellm#34692's kind. A call that a stop sequence follows still ends its turn as a call."""
    dispatcher.script = lambda _: says(call("add", "{}") + " then END more")
    fields = {"tools": TOOLS, "stop_sequences": ["END"]}
    for message in (await whole(client, **fields), await streamed(client, **fields)):
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


class Strict(SpeakingDispatcher):
    """Of a model whose template wants one system turn, at the start."""

    def text(self, model: str) -> TextModel:
        return TEXT


@pytest.mark.parametrize("kind", [SpeakingDispatcher, Strict])
@pytest.mark.parametrize("as_blocks", [False, True])
async def test_system_words_may_stand_inside_messages(kind, as_blocks):
    """vllm-project/vllm#44000, sgl-project/sglang#26773, Blaizzy/mlx-vlm#1264: role system within messages was a 400 on
    every request of Claude Code. Here it is served, also where a template wants system first, and counted alike."""
    reminder: Any = "Mind the time."
    if as_blocks:
        reminder = [{"type": "text", "text": reminder, "cache_control": {"type": "ephemeral"}}]
    messages = [USER, {"role": "system", "content": reminder}, {"role": "assistant", "content": "Ok."}, USER]
    dispatcher = kind(max_len=MAX_LEN)
    async with opened(dispatcher) as client:
        message = await whole(client, system="You help.", messages=messages)
        counted = await ask(client, COUNT, system="You help.", messages=messages)
    prompt = prompts(dispatcher)[0]
    assert prompt.count("Mind the time.") == 1 and prompt.count("You help.") == 1 and "ephemeral" not in prompt
    assert counted.json()["input_tokens"] == num_prompt_tokens(message["usage"])


async def test_thoughts_are_signed_and_taken_back(client, dispatcher):
    """InternLM/lmdeploy#4851, AgnesAI-Labs/AgnesAI-Models#117: no signature, or thoughts in streams only. Here both
    ways have the block, its signature ends it, and the next turn takes the block back as it was, or changed."""
    dispatcher.script = lambda _: says("<think>\nhm </think>\nWell. " + call("add", "{}"))
    fields: Json = {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for message in (await whole(client, **fields), await streamed(client, **fields)):
        thought, *_, called = message["content"]
        assert thought["thinking"] == "hm" and thought["signature"]
        for signature in (thought["signature"], "", "of another model"):
            content = [thought | {"signature": signature}, *message["content"][1:]]
            result = [{"type": "tool_result", "tool_use_id": called["id"], "content": "42"}]
            turns = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": result}]
            await whole(client, messages=turns, **fields)
            assert "42" in prompts(dispatcher)[-1]


async def test_thoughts_that_nobody_can_read_are_dropped(client, dispatcher):
    """vllm-project/vllm#36992: redacted_thinking of a session that began elsewhere was a 400."""
    redacted = {"type": "redacted_thinking", "data": "b3BhcXVl"}
    content = [redacted, {"type": "text", "text": "Ok."}]
    await whole(client, messages=[USER, {"role": "assistant", "content": content}, USER])
    await whole(client, messages=[USER, {"role": "assistant", "content": content[1:]}, USER])
    assert dispatcher.started[0].token_ids == dispatcher.started[1].token_ids


SHOWING = TextModel(
    {
        **byte_level_files(),
        "chat_template.jinja": b"{{ enable_thinking }}|{{ tools | tojson }}|{{ messages | tojson }}{# </think> <tool_call> #}",
    }
)


class Showing(SpeakingDispatcher):
    """Of a model whose template shows what it was told."""

    def text(self, model: str) -> TextModel:
        return SHOWING


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, "False"),
        ({"type": "disabled"}, "False"),
        ({"type": "adaptive"}, "True"),
        ({"type": "adaptive", "display": "omitted"}, "True"),
        ({"type": "enabled", "budget_tokens": 1024}, "True"),
    ],
)
async def test_a_model_thinks_when_it_is_asked_to(thinking, shown):
    """ollama/ollama#15287, vllm-project/vllm#53058: the model thought whatever was asked."""
    dispatcher = Showing(max_len=MAX_LEN)
    fields = {} if thinking is None else {"thinking": thinking}
    async with opened(dispatcher) as client:
        await whole(client, **fields)
    assert prompts(dispatcher)[0].startswith(shown + "|")


async def test_hints_of_caching_never_reach_the_template():
    """Blocks carry cache_control, which moves from turn to turn: in a prompt it would end the prefix hits
    (anthropics/claude-code#68900 of the same kind)."""
    dispatcher, hint = Showing(max_len=MAX_LEN), {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    async with opened(dispatcher) as client:
        for each in ({}, hint):
            text = [{"type": "text", "text": "hi"} | each]
            used = [{"type": "tool_use", "id": "t1", "name": "add", "input": {}} | each]
            result = [{"type": "tool_result", "tool_use_id": "t1", "content": text} | each]
            turns = [
                {"role": "user", "content": text}, {"role": "assistant", "content": used}, {"role": "user", "content": result}
            ]  # fmt: skip
            tools = [TOOLS[0], TOOLS[1] | each]
            await whole(client, messages=turns, system=text, tools=tools, **each)
    assert dispatcher.started[0].token_ids == dispatcher.started[1].token_ids


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


async def test_a_result_is_shown_whole_or_refused(client, dispatcher):
    """ggml-org/llama.cpp#22536, waybarrios/vllm-mlx#776: an image in a result was dropped, and the model answered as if
    it had seen it. aws-samples/sample-apj-sup-sa#124: a failed call looked like a good one. Here an image is refused by
    name, and the model can tell failure from success."""
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]}

    def turns(**result: Any) -> list[Json]:
        return [USER, used, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", **result}]}]

    blocks = [{"type": "text", "text": "4"}, {"type": "text", "text": "2 <-"}]
    for result in (
        {"content": "42 <-"},
        {"content": blocks},
        {"content": "42 <-", "is_error": True},
        {},
        {"content": []},
    ):
        await whole(client, messages=turns(**result), tools=TOOLS)
    good, in_blocks, bad, *empty = prompts(dispatcher)
    assert "42 <-" in good and "4" in in_blocks and "2 <-" in in_blocks
    assert "42 <-" in bad and good != bad and empty[0] == empty[1]
    for content in ([IMAGE], [*blocks, IMAGE]):
        assert "image" in await refused(client, messages=turns(content=content), tools=TOOLS)
    assert "image" in await refused(client, messages=[{"role": "user", "content": [IMAGE]}])


async def test_results_come_before_the_words_beside_them(client, dispatcher):
    """KunAgent/Kun#575 and others: parallel results stand in one user turn, text behind them. Here each result is a turn
    of its tool, in order, and the text is the user's."""
    used = [{"type": "tool_use", "id": f"t{index}", "name": "add", "input": {}} for index in (1, 2)]
    results = [{"type": "tool_result", "tool_use_id": f"t{index}", "content": f"result {index}"} for index in (1, 2)]
    turns = [
        USER, {"role": "assistant", "content": used}, {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
    ]  # fmt: skip
    await whole(client, messages=turns, tools=TOOLS)
    prompt = prompts(dispatcher)[0]
    assert prompt.index("result 1") < prompt.index("result 2") < prompt.index("go on")
    assert prompt.count("<|start|>tool\n") == 2


async def test_a_length_beyond_the_context_is_cut(client, dispatcher):
    """farion1231/cc-switch#1022 (vLLM): "'max_tokens' is too large: 32000", whatever one set. Here it is cut to what is
    left, and an answer that comes to it says so."""
    await whole(client, max_tokens=32_000)
    num_prompt = len(dispatcher.started[0].token_ids)
    assert dispatcher.started[0].sampling.max_tokens == MAX_LEN - num_prompt
    dispatcher.max_len = num_prompt + 4
    dispatcher.script = lambda _: says("one two three four five six", "length")
    for message in (await whole(client, max_tokens=32_000), await streamed(client, max_tokens=32_000)):
        assert message["stop_reason"] == "model_context_window_exceeded"
    for message in (await whole(client, max_tokens=3), await streamed(client, max_tokens=3)):
        assert message["stop_reason"] == "max_tokens" and message["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know(client, dispatcher, stream):
    """musistudio/claude-code-router#1799, sgl-project/sglang#22030, anthropics/claude-code#50011: in other words, or as a
    500, it ended the session instead of compacting it. A prompt that is too long by its size alone says so, too."""
    words = r"prompt is too long: (\d+) tokens > (\d+) maximum"
    for repeated in (MAX_LEN, 1_000_000):
        message = await refused(client, stream=stream, messages=[{"role": "user", "content": "ab " * repeated}])
        found = re.search(words, message)
        assert found and int(found[1]) > int(found[2]) >= MAX_LEN - 1, message
    exact: Json = {"messages": [{"role": "user", "content": "word " * 4000}]}
    counted = await ask(client, COUNT, **exact)
    if counted.status_code == 200:
        assert counted.json()["input_tokens"] > MAX_LEN
    assert dispatcher.started == []


FAILURES = [
    (Unavailable("no node takes the request; all of them drain"), 529),
    (Overloaded("too many requests wait already", retry_after_s=2.0), 429),
    (DeadlineExceeded("the request's deadline has passed"), 504),
    (RuntimeError("a bug, of which nothing is shown"), 500),
]


@pytest.mark.parametrize(("error", "status"), FAILURES)
async def test_errors_are_told_in_one_shape(client, dispatcher, error, status):
    """vllm-project/vllm#57997, BerriAI/litellm#39037: OpenAI's shape, or a repr, on some paths. Here each has Anthropic's,
    its type by its status, and the request's id in body and header, before and behind the first byte."""
    dispatcher.script = lambda _: [error]
    for stream in (False, True):
        reply = await ask(client, stream=stream)
        check_message_error(reply.json())
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, ERROR_TYPES[status]), reply.text
        assert reply.json()["request_id"] == reply.headers["request-id"]
    dispatcher.script = lambda _: [*says("half of", "length"), error]
    reply = await ask(client, stream=True)
    ended = MessageStream(reply.text).error
    assert reply.status_code == 200 and ended is not None and ended["error"]["type"] == ERROR_TYPES[status]
    assert ended["request_id"] == reply.headers["request-id"] and "a bug" not in reply.text


async def test_wrong_requests_are_told_in_the_same_shape(client, dispatcher):
    """vllm-project/vllm#57997: what the body's check found came as a Python repr in OpenAI's shape."""
    used = [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]
    wrong: list[Json] = [
        {"max_tokens": 0}, {"max_tokens": "many"}, {"messages": []}, {"messages": "hi"}, {"temperature": "hot"},
        {"messages": [{"role": "robot", "content": "hi"}]}, {"messages": [{"role": "assistant", "content": used}]}, {"top_p": 2},
        {"tools": [{"name": "a b", "input_schema": {}}]}, {"tool_choice": {"type": "tool", "name": "b"}}, {"system": 3},
        {"stop_sequences": [""]}, {"thinking": {"type": "deep"}}, {"output_config": {"format": {"type": "json_schema"}}},
    ]  # fmt: skip
    for fields in wrong:
        message = await refused(client, **fields)
        assert "Error(" not in message and "{'" not in message, message
    for path in (MESSAGES, COUNT):
        reply = await client.post(path, content=b"{", headers={"content-type": "application/json"})
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
        check_message_error(reply.json())
    reply = await ask(client, model="nobody")
    assert dispatcher.started == []
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


async def test_fields_of_next_month_pass_and_blocks_are_named(client, dispatcher):
    """decolua/9router#1468, BerriAI/litellm#26240, anthropics/claude-code#31033 and #11678, QuantumNous/new-api#2975:
    each month's new field or beta was a 400 on every request. Here unknown fields pass. Unknown blocks and tools would
    change the answer, so they are refused by name."""
    tool = TOOLS[0] | {"defer_loading": True, "input_examples": [{}], "eager_input_streaming": None, "next_month": 1}
    fields = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "next_month": {"a": 1},
        "metadata": {"user_id": "u", "next_month": 1}, "service_tier": "auto", "container": None, "speed": "fast",
        "thinking": {"type": "adaptive", "next_month": 1}, "output_config": {"effort": "high", "next_month": 1},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "next_month": 1}], "next_month": 1}],
        "tools": [tool],
    }  # fmt: skip
    beta = {"anthropic-beta": "claude-code-20250219,next-month-2031-01-01", "anthropic-version": "2023-06-01"}
    reply = await client.post(MESSAGES, json={"model": MODEL, "max_tokens": 9, **fields}, headers=beta)
    assert reply.status_code == 200, reply.text
    assert "next_month" not in prompts(dispatcher)[0]
    block = [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}]
    assert "hologram" in await refused(client, messages=block)
    assert "web_search_20260318" in await refused(client, tools=[{"type": "web_search_20260318", "name": "web_search"}])


async def test_a_probe_of_the_root_is_answered(client):
    """headroomlabs-ai/headroom#2032: Claude Code asks HEAD / first; a 405 read as a server that is down."""
    reply = await client.head("/")
    assert reply.status_code in (200, 404) and reply.content == b""
    assert (await ask(client)).status_code == 200


async def test_a_key_comes_in_either_header(dispatcher):
    """vllm-project/vllm#51572: x-api-key was not looked at, so Anthropic's clients were refused."""
    key = "sk-acme-0001"
    places = Places(10, Tenants({"acme": Entry(keys=[key])}))
    body = {"model": MODEL, "max_tokens": 4, "messages": [USER]}
    async with opened(dispatcher, places) as client:
        for headers, status in (
            ({"x-api-key": key}, 200),
            ({"authorization": f"Bearer {key}"}, 200),
            ({"authorization": f"Bearer {key}", "x-api-key": key}, 200),
            ({"authorization": f"Bearer {key}", "x-api-key": "sk-else-0001"}, 401),
            ({"x-api-key": "sk-else-0001"}, 401),
            ({}, 401),
        ):
            for path in (MESSAGES, COUNT):
                reply = await client.post(path, json=body, headers=headers)
                assert reply.status_code == status, (headers, reply.text)
                if status == 401:
                    check_message_error(reply.json())
                    assert reply.json()["error"]["type"] == "authentication_error" and key not in reply.text


async def test_a_stream_ends_with_its_last_event(client):
    """huggingface/tau#692: `data: [DONE]` behind a stream of Messages is no JSON. anthropics/claude-code#67809: clients
    read on behind message_stop."""
    reply = await ask(client, stream=True)
    assert reply.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n') and "[DONE]" not in reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")


async def test_who_leaves_ends_the_generation(client, dispatcher):
    """A cancelled turn must not run on for the 32,000 tokens that agents ask for."""
    never = asyncio.Event()
    dispatcher.script = lambda _: [*says("half of", "length"), Wait(never)]
    body = {"model": MODEL, "max_tokens": 512, "messages": [USER], "stream": True}
    async with client.stream("POST", MESSAGES, json=body) as reply:
        async for line in reply.aiter_lines():
            if "_text.delta" in line or "text_delta" in line:
                break
    await until(lambda: len(dispatcher.cancelled) == 1)
