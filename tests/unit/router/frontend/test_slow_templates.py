"""A chat template that loops on some messages holds up nobody else, and is ended. What tenants use is counted."""

from __future__ import annotations

import asyncio

import httpx
from scripted_dispatcher import MODEL, ScriptedDispatcher, says, served
from tiny_tokenizers import byte_level_files

from pdcluster.api.text.model_text import TextModel
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.places import Places

LOOPING = b"""{% for m in messages %}{{ m.content }}{% if m.content == 'loop' %}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"""
ALICE, BOB = "sk-alice-0001", "sk-bob-0001"


class LoopingDispatcher(ScriptedDispatcher):
    def __init__(self) -> None:
        super().__init__(lambda _: says("yes"))
        self._text = TextModel({**byte_level_files(), "chat_template.jinja": LOOPING})

    def text(self, model: str) -> TextModel:
        return self._text


LOOP = {"model": MODEL, "messages": [{"role": "user", "content": "loop"}]}


def chat(content: str) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


async def test_a_looping_template_is_ended_while_others_are_answered() -> None:
    dispatcher = LoopingDispatcher()
    places = Places(64, Tenants({"alice": Entry(keys=[ALICE]), "bob": Entry(keys=[BOB])}))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
    async with (
        served(dispatcher, places=places) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        path = "/v1/chat/completions"
        looped = [asyncio.create_task(client.post(path, json=chat("loop"), headers=alice)) for _ in range(2)]
        tokenized = asyncio.create_task(client.post("/tokenize", json=LOOP, headers=alice))
        await asyncio.sleep(0.2)
        assert (await client.get("/livez")).status_code == 200
        answer = await client.post(path, json=chat("hello"), headers=bob)
        assert answer.status_code == 200, answer.text
        assert not any(task.done() for task in (*looped, tokenized))  # all of that took less than 5 s
        for reply in await asyncio.gather(*looped, tokenized):
            assert reply.status_code == 400
            assert "template was ended on these messages: it took longer than 5 s" in reply.json()["error"]["message"]
        metrics = (await client.get("/metrics")).text
    usage = answer.json()["usage"]
    assert 'pdcluster_tenant_requests_total{tenant="bob"} 1.0' in metrics
    for kind, tokens in (("prompt", usage["prompt_tokens"]), ("completion", usage["completion_tokens"])):
        assert f'pdcluster_tenant_tokens_total{{kind="{kind}",tenant="bob"}} {tokens:.1f}' in metrics
    assert 'tenant="alice"' not in metrics
