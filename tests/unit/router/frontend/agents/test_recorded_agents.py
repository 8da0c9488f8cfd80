"""What Claude Code 2.1.332 and Codex 0.171.0 send in two turns, as recorded; longer texts stand as digests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_dispatcher import MODEL, SPEAKING, SpeakingDispatcher, served

RECORDED = Path(__file__).parent / "recorded"
PATHS = {"claude": "/v1/messages?beta=true", "codex": "/v1/responses"}
LEAST_SHARED = 0.95


def turn(agent: str, number: int) -> dict[str, Any]:
    body = json.loads(gzip.decompress((RECORDED / f"{agent}-{number}.json.gz").read_bytes()))
    return {**body, "model": MODEL}


async def prompts_of(agent: str, *bodies: dict[str, Any]) -> list[list[int]]:
    dispatcher = SpeakingDispatcher(max_len=200_000)
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url) as client:
        for body in bodies:
            reply = await client.post(PATHS[agent], json=body)
            assert reply.status_code == 200, reply.text
            assert '"response.failed"' not in reply.text, reply.text
    return [list(generation.token_ids) for generation in dispatcher.started]


def num_shared(first: list[int], second: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("agent", PATHS)
async def test_the_next_turn_begins_with_the_one_before(agent: str) -> None:
    first, second = await prompts_of(agent, turn(agent, 1), turn(agent, 2))
    assert num_shared(first, second) >= LEAST_SHARED * len(first), SPEAKING.decode(first[num_shared(first, second) :])


async def test_a_line_that_bills_differs_and_the_prompt_does_not() -> None:
    body = turn("claude", 1)
    assert body["system"][0]["text"].startswith("x-anthropic-billing-header")
    other = json.loads(json.dumps(body))
    other["system"][0]["text"] = "x-anthropic-billing-header: cc_version=9; cch=ffff;"
    first, second = await prompts_of("claude", body, other)
    assert first == second
