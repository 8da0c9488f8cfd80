"""Clients of npm: @anthropic-ai/sdk, openai, and the AI SDK's providers. Programs are in node/."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Served
from interrupted import LONG_ASKED, LONG_TOKENS, OnPiece, Program

NODE = Path(__file__).parent / "node"
PROGRAMS = {
    "anthropic": ("anthropic.mjs",),
    "openai-responses": ("openai_responses.mjs",),
    "ai-sdk-anthropic": ("ai_sdk.mjs", "anthropic"),
    "ai-sdk-openai": ("ai_sdk.mjs", "openai"),
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return PROGRAMS[request.param]


def run(
    served: Served, program: tuple[str, ...], what: str, asked: str, max_tokens: int, on_piece: OnPiece
) -> dict[str, Any]:
    """The last line that the program prints; the lines before are pieces."""
    file, *more = program
    argv = ["node", file, served.url, served.model, what, asked, str(max_tokens), *more]
    last: dict[str, Any] = {}
    with subprocess.Popen(argv, cwd=NODE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            last = json.loads(line)
            if "piece" in last:
                on_piece()
        error = process.stderr.read()
    assert process.returncode == 0, error
    return last


def test_a_tool_is_called_and_its_result_sent_back(served: Served, program: tuple[str, ...]) -> None:
    said = run(served, program, "tools", "What is it like in Rome?", 200, lambda: None)
    assert said["cities"] and set(said["cities"]) <= {"Rome", "Oslo"} and said["reason"]


def test_a_stream_goes_on_over_a_kill(
    served: Served, program: tuple[str, ...], over_a_kill: Callable[[Program], str]
) -> None:
    assert over_a_kill(lambda on_piece: run(served, program, "stream", LONG_ASKED, LONG_TOKENS, on_piece)["text"])
