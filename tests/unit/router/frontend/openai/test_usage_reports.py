"""What replies say of their cost while they stream, and of cached tokens however they end."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from request_scene import told
from request_scripts import LETTERS, LOCAL, PROMPT, REMOTE, TALK
from scripted_dispatcher import MODEL, TEXT, ScriptedDispatcher, says, served

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SAID = "hello world"
IDS = TEXT.encode(SAID, add_special_tokens=False).tolist()


async def chunks_of(path: str, **fields: object) -> list[dict[str, Any]]:
    prompt: dict[str, object] = {"messages": TALK} if path == CHAT else {"prompt": "hi"}
    async with (
        served(ScriptedDispatcher(lambda _: says(SAID, "length"))) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        reply = await client.post(path, json={"model": MODEL, "stream": True, **prompt, **fields})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("others", [{}, {"return_token_ids": True}, {"stop": ["never"]}, {"logprobs": True}])
async def test_every_chunk_says_the_usage_so_far(path: str, others: dict[str, Any]) -> None:
    if path == PLAIN and "logprobs" in others:
        others = {"logprobs": 1}
    chunks = await chunks_of(
        path, stream_options={"include_usage": True, "continuous_usage_stats": True}, max_tokens=len(IDS), **others
    )
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == [*([0] if path == CHAT else []), *range(1, len(IDS) + 1), len(IDS), len(IDS)]
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]} and "pdcluster" in usages[-1]
    assert chunks[-1]["choices"] == []


async def test_it_counts_all_prompts_and_choices_and_needs_no_last_chunk() -> None:
    chunks = await chunks_of(
        PLAIN, prompt=["a", "b c"], n=2, max_tokens=2, stream_options={"continuous_usage_stats": True}
    )
    prompt = sum(len(TEXT.encode(text, add_special_tokens=True)) for text in ("a", "b c"))
    assert all(chunk["choices"] and chunk["usage"]["prompt_tokens"] == prompt for chunk in chunks)
    assert chunks[-1]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8}


@pytest.mark.parametrize("wanted", [None, False])
async def test_without_it_chunks_say_no_usage(wanted: bool | None) -> None:
    with_last = await chunks_of(PLAIN, stream_options={"include_usage": True, "continuous_usage_stats": wanted})
    assert [chunk["usage"] for chunk in with_last[:-1]] == [None] * (len(with_last) - 1)
    assert not any(
        "usage" in chunk for chunk in await chunks_of(PLAIN, stream_options={"continuous_usage_stats": wanted})
    )


# Comes with the third token.
STOP = TEXT.decode(LETTERS[1:3])
ANNOUNCED = {"one node": LOCAL[:4], "a pair": [*REMOTE[:5], *REMOTE[5:7]]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(("nodes", "steps"), ANNOUNCED.items())
@pytest.mark.parametrize("says_so", [True, False])
def test_a_stop_string_leaves_what_was_cached(
    nodes: str, steps: Any, is_chat: bool, stream: bool, says_so: bool
) -> None:
    prompt: dict[str, object] = {"messages": TALK} if is_chat else {"prompt": PROMPT}
    fields = {
        **prompt,
        "stop": [STOP],
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    kept = [step for step in steps if says_so or step[0] != "scheduled"]
    answers = "".join(map(str, told(nodes, kept, fields)))
    assert '"finish_reason":"stop"' in answers
    assert f'"prompt_tokens_details":{{"cached_tokens":{2 if says_so else 0}}}' in answers


@pytest.mark.parametrize(("header", "num_timed"), [({}, 1.0), ({"x-pdcluster-class": "batch"}, 0.0)])
async def test_times_to_tokens_are_of_requests_that_somebody_waits_for(
    header: dict[str, str], num_timed: float
) -> None:
    async with (
        served(ScriptedDispatcher(lambda _: says(SAID, "length"))) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        reply = await client.post(PLAIN, json={"model": MODEL, "prompt": "hi"}, headers=header)
        wrong = await client.post(PLAIN, json={"model": MODEL, "prompt": "hi"}, headers={"x-pdcluster-class": "x"})
        metrics = (await client.get("/metrics")).text
    assert reply.status_code == 200
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "x-pdcluster-class"
    counts = [line for line in metrics.splitlines() if line.startswith("pdcluster_time_to_first_token_seconds_count")]
    assert sum(float(line.rpartition(" ")[2]) for line in counts) == num_timed
    assert 'pdcluster_choices_total{finish="length",mode="remote"} 1.0' in metrics
