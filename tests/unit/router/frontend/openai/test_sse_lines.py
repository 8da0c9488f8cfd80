"""An event of a stream is one line to whoever reads lines, whatever the text has in it, on every way that text
takes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from request_scene import told
from request_scripts import PROMPT, REMOTE, TALK
from scripted_dispatcher import MODEL, TEXT, ScriptedDispatcher, SpeakingDispatcher, says, served

from pdcluster.api import sse
from pdcluster.core.errors import Overloaded

BREAKS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n"
SAID = f"one{BREAKS}two\u2019 \u00e9{BREAKS}"
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


async def events_of(dispatcher: ScriptedDispatcher, path: str, **fields: object) -> list[Any]:
    """As a reader of lines sees them."""
    prompt: dict[str, object] = {"messages": TALK} if path == CHAT else {"prompt": "hi"}
    body = {"model": MODEL, "stream": True, **({} if path == CHAT else {"max_tokens": 200}), **prompt, **fields}
    async with (
        served(dispatcher) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
        client.stream("POST", path, json=body) as reply,
    ):
        lines = [line async for line in reply.aiter_lines() if line]
    assert all(line.startswith(("data: ", "event: ")) for line in lines), lines
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": ["never"]}, {"return_token_ids": True}, {"n": 2}, {"stream_options": {"include_usage": True}}],
)
@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_text_with_line_breaks_comes_whole(path: str, fields: dict[str, object]) -> None:
    events = await events_of(ScriptedDispatcher(lambda _: says(SAID)), path, **fields)
    own = [event["choices"][0] for event in events if event["choices"] and event["choices"][0]["index"] == 0]
    assert "".join(choice["text"] if path == PLAIN else choice["delta"].get("content", "") for choice in own) == SAID


async def test_logprobs_with_line_breaks_come_whole() -> None:
    events = await events_of(ScriptedDispatcher(lambda _: says(SAID)), PLAIN, logprobs=3)
    assert "".join(
        token
        for event in events
        for token in event["choices"][0]["logprobs"]["tokens"]
        if not token.startswith(("bytes:", "<|"))
    )


async def test_arguments_of_calls_and_thoughts_with_line_breaks_come_whole() -> None:
    arguments = json.dumps({f"k{BREAKS}": BREAKS}, ensure_ascii=False)
    text = f'<think>hm{BREAKS}so</think><tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    deltas = [
        event["choices"][0]["delta"]
        for event in await events_of(SpeakingDispatcher(lambda _: says(text)), CHAT, tools=tools)
    ]
    assert (
        "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])) == arguments
    )
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == f"hm{BREAKS}so"


async def test_an_error_in_a_stream_is_one_line() -> None:
    events = await events_of(
        ScriptedDispatcher(lambda _: [*says("a", "length"), Overloaded(f"busy{BREAKS}now")]), PLAIN
    )
    assert events[-1]["error"]["message"] == f"busy{BREAKS}now"


@pytest.mark.parametrize("prompt", [{"prompt": PROMPT}, {"messages": TALK}])
def test_an_answer_escapes_them(prompt: dict[str, object]) -> None:
    """From the third token on they take the short way."""
    ids = TEXT.encode(f"ab c{BREAKS}{BREAKS}", add_special_tokens=False)
    steps = [
        *REMOTE[:2],
        ("token", 0, (ids[0],)),
        ("delivered", 2, ()),
        *[("row", 0, (token_id,)) for token_id in ids[1:]],
        ("finished", 0, ()),
    ]
    answers = "".join(map(str, told("a pair", steps, {**prompt, "stream": True, "max_tokens": 100})))  # type: ignore[arg-type]
    for character in "\u2028\u2029\x85":
        assert character not in answers and repr(character.encode())[2:-1] not in answers
    assert answers.count("\\u2028") >= 2


def test_only_what_breaks_lines_is_escaped() -> None:
    assert sse.text_json("\u2019\u00e9\u2028") == '"\u2019\u00e9\\u2028"'.encode()
    assert json.loads(sse.text_json(BREAKS)) == BREAKS and len(sse.text_json(BREAKS).decode().splitlines()) == 1
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'
