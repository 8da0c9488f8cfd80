"""Fields that clients send by themselves: hints go to the template, what changes nothing passes, on both front
paths."""

from __future__ import annotations

import httpx
import pytest
from scripted_dispatcher import MODEL, ScriptedDispatcher, served
from tiny_tokenizers import byte_level_files

from pdcluster.api.text.model_text import TextModel

SHOWING = TextModel(
    {
        **byte_level_files(),
        "chat_template.jinja": (
            b"{{ reasoning_effort }}|{{ verbosity }}|{{ enable_thinking }}|{% for m in messages %}{{ m.content }}{% "
            b"endfor %}"
        ),
    }
)


class Showing(ScriptedDispatcher):
    """Of a model whose template shows what it was told."""

    def text(self, model: str) -> TextModel:
        return SHOWING


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "||"),
        ({"reasoning_effort": "high"}, "high||"),
        ({"reasoning_effort": "minimal", "verbosity": "low"}, "minimal|low|"),
        ({"reasoning_effort": "none"}, "||False"),
        ({"reasoning_effort": None, "verbosity": None}, "||"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "mine", "enable_thinking": True}},
            "mine||True",
        ),
    ],
)
async def test_hints_are_the_templates(fields: dict[str, object], shown: str) -> None:
    dispatcher = Showing()
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        reply = await client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
        )
    assert reply.status_code == 200, reply.text
    assert SHOWING.decode(dispatcher.started[0].token_ids) == shown + "|x"


IDLE = {
    "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "request_id": "r-1", "cache_prompt": True, "best_of": 1, "n": 1,
    "use_beam_search": False, "length_penalty": 1.0,
    "include_stop_str_in_output": False, "truncate_prompt_tokens": None, "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
    "allowed_token_ids": [], "logit_bias": {}, "bad_words": [], "stop": None, "stop_token_ids": [],
    "response_format": {"type": "text"},
}  # fmt: skip
CHAT_IDLE = {
    "prediction": None, "functions": [], "function_call": "auto", "modalities": ["text"], "audio": None, "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True, "top_logprobs": 0, "logprobs": False, "documents": [], "echo": False,
    "include_reasoning": True,
    "separate_reasoning": True, "web_search_options": None, "verbosity": "medium", "reasoning_effort": "medium",
}  # fmt: skip


async def test_what_changes_nothing_passes() -> None:
    async with served(ScriptedDispatcher()) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        plain = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "suffix": "", "echo": False, **IDLE}
        )
        chat = await client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "x"}], **IDLE, **CHAT_IDLE},
        )
    assert (plain.status_code, chat.status_code) == (200, 200), (plain.text, chat.text)
