"""guidellm's requests and how it reads the answers (0.8.1, backends/openai/request_handlers.py), without its
dependencies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from conftest import Served

STREAM = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None,
    "ignore_eos": True,
}
CHAT = {
    "max_completion_tokens": 12,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is pdcluster?"}]}],
}
PLAIN = {"max_tokens": 12, "prompt": "import os import sys"}


@pytest.mark.parametrize(("path", "asked"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)])
def test_a_streaming_benchmark_request(served: Served, path: str, asked: dict[str, Any]) -> None:
    texts, usage, ends = [], None, False
    with httpx.stream("POST", served.url + path, json={"model": served.model, **STREAM, **asked}, timeout=60) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                ends = True
                break
            event = json.loads(data)
            choice = event["choices"][0] if event.get("choices") else {}
            texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            usage = event.get("usage") or usage
            assert event["usage"]["completion_tokens"] <= 12
    assert ends and "".join(texts) and usage is not None
    assert (
        usage["completion_tokens"] == 12 and (usage.get("prompt_tokens_details") or {}).get("cached_tokens") is not None
    )


def test_its_checks_before_a_run(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert served.model in [model["id"] for model in httpx.get(f"{served.url}/v1/models").json()["data"]]
