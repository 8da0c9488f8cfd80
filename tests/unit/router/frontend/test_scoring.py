"""Prompts that are scored without an output (max_tokens 0), and what evaluations ask for besides: the tokenizer's
configuration."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from request_scene import told
from request_scripts import EARLY_END, LOCAL, PROMPT
from scripted_dispatcher import EOS, MODEL, TEXT, VOCAB, ScriptedDispatcher, Tokens, logprobs_of, served
from tiny_tokenizers import CHAT_TEMPLATE, byte_level_files, sentencepiece_files

from pdcluster.api.text.model_text import TextModel
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.places import Places

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
TEXT_PROMPT = "hello world"
IDS = TEXT.encode(TEXT_PROMPT, add_special_tokens=True).tolist()


async def asked(path: str, **fields: object) -> tuple[ScriptedDispatcher, httpx.Response]:
    dispatcher = ScriptedDispatcher(lambda _: [Tokens((EOS,))])
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        reply = await client.post(path, json={"model": MODEL, **fields})
    assert reply.status_code == 200, reply.text
    return dispatcher, reply


@pytest.mark.parametrize("prompt", [TEXT_PROMPT, IDS, [TEXT_PROMPT], [IDS], [TEXT_PROMPT, "a"], [IDS, [5, 6]]])
async def test_a_prompt_is_scored_and_nothing_more_is_told(prompt: Any) -> None:
    dispatcher, reply = await asked(PLAIN, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    answer = reply.json()
    many = (
        prompt if isinstance(prompt[0], list) or (isinstance(prompt, list) and isinstance(prompt[0], str)) else [prompt]
    )
    ids = [TEXT.encode(each, add_special_tokens=True).tolist() if isinstance(each, str) else each for each in many]
    for choice, token_ids in zip(answer["choices"], ids, strict=True):
        logprobs = choice["logprobs"]
        assert choice["finish_reason"] == "length" and choice["text"] == TEXT.decode(token_ids)
        assert logprobs["token_logprobs"] == [None, *[-0.5] * (len(token_ids) - 1)]
        assert (
            len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == len(token_ids)
        )
    num_prompt = sum(map(len, ids))
    assert {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": num_prompt, "completion_tokens": 0, "total_tokens": num_prompt,
    }  # fmt: skip
    assert all(
        generation.sampling.max_tokens == 1 and generation.sampling.prompt_logprobs == 1
        for generation in dispatcher.started
    )


async def test_it_may_be_streamed_have_choices_and_come_without_logprobs() -> None:
    _, reply = await asked(PLAIN, prompt="ab", max_tokens=0, echo=True, n=2, stream=True, return_token_ids=True)
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == "ab" and own[-1]["finish_reason"] == "length"
        assert [token for choice in own for token in choice["token_ids"]] == []


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_prompt_logprobs_alone_are_a_score(path: str) -> None:
    prompt: dict[str, object] = (
        {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a b c"}
    )
    _, reply = await asked(path, max_tokens=0, prompt_logprobs=2, **prompt)
    answer = reply.json()
    choice = answer["choices"][0]
    entries = answer["prompt_logprobs"] if path == CHAT else choice["prompt_logprobs"]
    assert entries[0] is None and len(entries) == answer["usage"]["prompt_tokens"] > 2
    assert (
        choice["finish_reason"] == "length" and (choice["message"]["content"] if path == CHAT else choice["text"]) == ""
    )
    assert logprobs_of(1, 2).top_ids == (1, 2) and VOCAB > 2


@pytest.mark.parametrize(("wanted", "rank"), [(0, 3), (2, 1)])
async def test_a_prompts_own_token_has_its_real_rank(wanted: int, rank: int) -> None:
    _, reply = await asked(PLAIN, max_tokens=0, prompt_logprobs=wanted, prompt=[5, 6])
    (_, entry) = reply.json()["choices"][0]["prompt_logprobs"]
    assert entry["6"]["rank"] == rank and len(entry) == max(wanted, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("nodes", "steps"), [("one node", [*LOCAL[:2], LOCAL[-1]]), ("a pair", EARLY_END)])
def test_a_prompt_is_scored_whatever_its_node_says_first(nodes: str, steps: Any, stream: bool) -> None:
    fields = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "stream": stream}
    assert '"finish_reason":"length"' in "".join(map(str, told(nodes, steps, fields)))


async def test_the_tokenizers_configuration_is_told() -> None:
    places = Places(4, Tenants({"t": Entry(keys=["some-key-1"])}))
    async with (
        served(ScriptedDispatcher(), places=places) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        assert (await client.get("/tokenizer_info")).status_code == 401
        told_of = (await client.get("/tokenizer_info", headers={"authorization": "Bearer some-key-1"})).json()
        assert (await client.post("/tokenizer_info")).status_code == 405
    assert told_of["bos_token"] == "<|bos|>" and told_of["eos_token"] == "<|eos|>"
    assert told_of["chat_template"] == CHAT_TEMPLATE and told_of["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_special_tokens_are_text_and_a_template_may_be_a_file() -> None:
    info = TextModel(sentencepiece_files() | {"chat_template.jinja": b"{{ 1 }}"}).info
    assert (info["bos_token"], info["eos_token"], info["unk_token"], info["chat_template"]) == (
        "<s>",
        "</s>",
        "<unk>",
        "{{ 1 }}",
    )
    bare = TextModel({"tokenizer.json": byte_level_files()["tokenizer.json"]}).info
    assert bare == {"tokenizer_class": None, "chat_template": None}
