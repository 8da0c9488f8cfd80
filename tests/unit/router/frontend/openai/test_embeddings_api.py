"""POST /v1/embeddings as clients see it: shapes of input and reply, errors by name, and one answer whatever nodes do."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from embedding_nodes import (
    EMBEDS,
    GENERATES,
    SIZE,
    EmbeddingNodes,
    embedded,
    embeds,
    stays_silent,
    vector_of,
)
from openai import AsyncOpenAI
from scripted_cluster import settle
from scripted_dispatcher import TEXT, VOCAB, until

from pdcluster.core import messages as m
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.app import HttpSettings
from pdcluster_router.frontend.places import Places

URL = "/v1/embeddings"


@pytest.fixture
def nodes() -> EmbeddingNodes:
    return EmbeddingNodes("e0", "e1")


@pytest.fixture
async def client(nodes: EmbeddingNodes) -> AsyncIterator[httpx.AsyncClient]:
    async with nodes.served() as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        yield client


def ids_of(text: str) -> list[int]:
    return list(TEXT.encode(text, add_special_tokens=True))


def body(given: Any = "hi", **changes: object) -> dict[str, object]:
    return {"model": EMBEDS.id, "input": given, **changes}


async def embed(client: httpx.AsyncClient, given: Any, **changes: object) -> dict[str, Any]:
    reply = await client.post(URL, json=body(given, **changes))
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hello", [ids_of("hello")]),
        (["hello", "world there"], [ids_of("hello"), ids_of("world there")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
async def test_every_shape_of_input_gives_a_vector_each_in_their_order(
    client: httpx.AsyncClient, given: object, prompts: list[list[int]]
) -> None:
    reply = await embed(client, given)
    num_tokens = sum(map(len, prompts))
    assert reply == {
        "object": "list",
        "model": EMBEDS.id,
        "data": [
            {"object": "embedding", "index": index, "embedding": vector_of(prompt)}
            for index, prompt in enumerate(prompts)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


async def test_base64_is_the_same_numbers_as_little_endian_float32(client: httpx.AsyncClient) -> None:
    plain = await embed(client, ["a", "b c"], encoding_format="float")
    packed = await embed(client, ["a", "b c"], encoding_format="base64")
    decoded = [list(struct.unpack(f"<{SIZE}f", base64.b64decode(each["embedding"]))) for each in packed["data"]]
    assert decoded == [each["embedding"] for each in plain["data"]]
    assert packed["usage"] == plain["usage"]


@pytest.mark.parametrize("encoding", [None, "float"])
async def test_the_openai_client_works_with_its_own_default_and_without(nodes: EmbeddingNodes, encoding: Any) -> None:
    async with nodes.served() as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        more = {} if encoding is None else {"encoding_format": encoding}
        reply = await client.embeddings.create(model=EMBEDS.id, input=["hello", "world"], user="me", **more)
        assert [each.embedding for each in reply.data] == [vector_of(ids_of("hello")), vector_of(ids_of("world"))]
        assert [each.index for each in reply.data] == [0, 1] and reply.usage.total_tokens == reply.usage.prompt_tokens
        cut = await client.embeddings.create(model=EMBEDS.id, input="hello", dimensions=3, **more)
        assert len(cut.data[0].embedding) == 3


async def test_an_input_is_cached_by_its_tenant_and_salt_and_the_reply_says_where_it_was_made(
    client: httpx.AsyncClient, nodes: EmbeddingNodes
) -> None:
    reply = await client.post(URL, json=body([5, 6, 7, 8]))
    assert reply.headers["x-pdcluster-mode"] == "local" and reply.headers["x-pdcluster-decode"] in ("e0", "e1")
    assert "x-pdcluster-prefill" not in reply.headers
    await embed(client, [5, 6, 7, 8], cache_salt="mine")
    plain, salted = (message.work for _, message in nodes.asked)
    assert plain.hashes and plain.hashes != salted.hashes


BAD: dict[str, tuple[dict[str, object], int, str]] = {
    "no input": ({"model": EMBEDS.id}, 400, "input"),
    "an empty text": (body(""), 400, "input is empty"),
    "an empty text among others": (body(["a", "", "b"]), 400, "input[1] is empty"),
    "an empty list": (body([]), 400, "input is an empty list"),
    "an empty list of tokens": (body([[1], []]), 400, "input[1] has no tokens"),
    "a mixed list": (body(["a", 1]), 400, "input[1] is of another kind than input[0]"),
    "no number": (body(1.5), 400, "input"),
    "too many": (body(["a"] * 2049), 400, "input has 2049 entries, at most 2048 are allowed"),
    "an id of no token": (body([1, VOCAB]), 400, f"input[1] is {VOCAB}, which is no token id of this model"),
    "a negative id": (body([[3], [-1]]), 400, "input[1][0] is -1"),
    "too long": (body([7] * 65), 400, "input has 65 tokens"),
    "too long a text": (body("word " * 4000), 400, "input has"),
    "another encoding": (body("a", encoding_format="hex"), 400, "encoding_format"),
    "no dimensions": (body("a", dimensions=0), 400, "dimensions"),
    "more dimensions than any": (body("a", dimensions=65537), 400, "dimensions"),
    "an unknown field": (body("a", dimension=4), 400, "did you mean dimensions?"),
    "a field of chats": (body("a", temperature=1.0), 400, "temperature"),
    "no model": ({"input": "a"}, 400, "model"),
    "an unknown model": (body("a", model="embeder"), 404, "did you mean embedder?"),
    "a model that generates": (
        body("a", model=GENERATES.id),
        400,
        "model 'writer' generates and embeds nothing: the native engine has no embeddings; nodes with --engine vllm and "
        "a pooling model do",
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_wrong_request_is_told_what_to_change(
    client: httpx.AsyncClient, nodes: EmbeddingNodes, what: str
) -> None:
    given, status, message = BAD[what]
    reply = await client.post(URL, json=given)
    assert reply.status_code == status and message in reply.json()["error"]["message"], reply.text
    assert not nodes.asked
    nodes.check_books()


async def test_an_input_may_fill_the_whole_context(client: httpx.AsyncClient) -> None:
    assert (await embed(client, [7] * 64))["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
async def test_a_model_that_embeds_is_not_asked_for_text(
    client: httpx.AsyncClient, nodes: EmbeddingNodes, path: str, given: dict[str, object]
) -> None:
    reply = await client.post(path, json={"model": EMBEDS.id, **given})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "model"
    assert "model 'embedder' embeds and generates nothing; send the text to /v1/embeddings" in reply.text
    assert not nodes.asked


async def test_both_kinds_of_models_are_listed_and_tokenize_alike(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()["data"]
    assert [each["id"] for each in models] == [EMBEDS.id, GENERATES.id]
    reply = await client.post("/tokenize", json={"model": EMBEDS.id, "prompt": "hello"})
    assert reply.json()["tokens"] == ids_of("hello")


async def test_a_mode_of_two_nodes_is_refused(client: httpx.AsyncClient) -> None:
    reply = await client.post(URL, json=body(), headers={"x-pdcluster-mode": "remote"})
    assert reply.status_code == 400 and "one node makes an embedding" in reply.text
    assert (await client.post(URL, json=body(), headers={"x-pdcluster-mode": "local"})).status_code == 200


async def test_as_many_inputs_run_at_a_time_as_a_request_may_have_choices(nodes: EmbeddingNodes) -> None:
    nodes.acts = dict.fromkeys(("e0", "e1"), stays_silent)
    async with (
        nodes.served(HttpSettings(max_choices=4)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        reply = asyncio.create_task(embed(client, [[number] for number in range(1, 11)]))
        for number in range(10):
            await until(lambda number=number: len(nodes.asked) >= min(number + 4, 10))
            await settle()
            assert len(nodes.asked) == min(number + 4, 10), "one more for each that ended"
            name, message = nodes.asked[number]
            nodes.tell(name, embedded(message))
        assert [each["embedding"] for each in (await reply)["data"]] == [vector_of([n]) for n in range(1, 11)]
    nodes.check_books()


async def test_vectors_that_come_in_any_order_stand_in_the_order_of_their_inputs(nodes: EmbeddingNodes) -> None:
    nodes.acts = dict.fromkeys(("e0", "e1"), stays_silent)
    async with nodes.served() as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        reply = asyncio.create_task(embed(client, [[1], [2], [3]]))
        await until(lambda: len(nodes.asked) == 3)
        for name, message in reversed(nodes.asked):
            nodes.tell(name, embedded(message))
        assert [each["embedding"] for each in (await reply)["data"]] == [vector_of([n]) for n in (1, 2, 3)]


async def test_the_most_inputs_of_one_request_get_their_vectors(client: httpx.AsyncClient) -> None:
    given = [[1 + number % 50] * (1 + number % 7) for number in range(2048)]
    reply = await embed(client, given, encoding_format="base64")
    assert len(reply["data"]) == 2048 and [each["index"] for each in reply["data"]] == list(range(2048))
    last = struct.unpack(f"<{SIZE}f", base64.b64decode(reply["data"][-1]["embedding"]))
    assert list(last) == vector_of(given[-1])


async def test_inputs_of_a_lost_node_go_to_another_and_the_client_notices_nothing(
    client: httpx.AsyncClient, nodes: EmbeddingNodes
) -> None:
    nodes.acts = dict.fromkeys(("e0", "e1"), stays_silent)
    reply = asyncio.create_task(embed(client, [[number] for number in range(1, 9)]))
    await until(lambda: len(nodes.asked) == 8)
    nodes.acts.clear()
    for name, message in nodes.asked[:3]:
        nodes.tell(name, embedded(message))
    for name in {name for name, _ in nodes.asked[3:]}:
        nodes.kill(name)
        nodes.cluster.dead.clear()
    assert [each["embedding"] for each in (await reply)["data"]] == [vector_of([n]) for n in range(1, 9)]
    nodes.check_books()


async def test_when_one_input_fails_the_others_are_cancelled_and_one_error_answers(
    client: httpx.AsyncClient, nodes: EmbeddingNodes
) -> None:
    nodes.acts = dict.fromkeys(("e0", "e1"), stays_silent)
    reply = asyncio.create_task(client.post(URL, json=body([[1], [2], [3]], dimensions=5)))
    await until(lambda: len(nodes.asked) == 3)
    name, message = nodes.asked[1]
    work = message.work
    nodes.tell(name, m.Failed(work.request, work.attempt, "invalid_request", "leave it out", False, "dimensions"))
    found = await reply
    assert found.status_code == 400 and found.json()["error"]["param"] == "dimensions"
    cancelled = nodes.cancelled("e0") + nodes.cancelled("e1")
    assert sorted(cancelled) == sorted(message.work.request for _, message in nodes.asked)
    nodes.check_books()


async def test_an_input_that_fails_at_once_starts_no_more(nodes: EmbeddingNodes) -> None:
    def refuse(message: m.Prefill, answer: Any) -> None:
        answer(m.Refused(message.work.request, message.work.attempt, "prefill", "not here", 0.0, retryable=False))

    nodes.acts = dict.fromkeys(("e0", "e1"), refuse)
    async with nodes.served() as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        reply = await client.post(URL, json=body([[number] for number in range(1, 30)]))
    assert reply.status_code == 400 and "not here" in reply.text and len(nodes.asked) == 1
    nodes.check_books()


async def test_a_client_that_leaves_cancels_what_runs_and_starts_nothing_more(nodes: EmbeddingNodes) -> None:
    nodes.acts = dict.fromkeys(("e0", "e1"), stays_silent)
    async with nodes.served(HttpSettings(max_choices=2)) as url, httpx.AsyncClient(base_url=url) as client:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        data = json.dumps(body([[1], [2], [3]])).encode()
        head = (
            f"POST {URL} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await until(lambda: len(nodes.asked) == 2)
        writer.close()
        await until(lambda: len(nodes.cancelled("e0") + nodes.cancelled("e1")) == 2)
        for name, message in nodes.asked:
            nodes.tell(name, embedded(message))
        metrics = (await client.get("/metrics")).text
    assert len(nodes.asked) == 2 and "pdcluster_client_disconnects_total 1.0" in metrics
    assert "pdcluster_embeddings_total 0.0" in metrics
    nodes.check_books()


async def test_the_deadline_is_the_whole_request_s(nodes: EmbeddingNodes) -> None:
    """Also of inputs that begin late."""
    nodes.acts = dict.fromkeys(("e0", "e1"), stays_silent)
    async with (
        nodes.served(HttpSettings(max_choices=1)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        began = asyncio.get_running_loop().time()
        headers = {"x-request-deadline-s": "2"}
        reply = asyncio.create_task(client.post(URL, json=body([[1], [2]]), headers=headers))
        await until(lambda: len(nodes.asked) == 1)
        await asyncio.sleep(1.2)
        nodes.tell(nodes.asked[0][0], embedded(nodes.asked[0][1]))
        found = await reply
    assert found.status_code == 504 and asyncio.get_running_loop().time() - began < 2.9
    nodes.check_books()


async def test_a_key_is_needed_where_tenants_have_keys_and_bounds_how_urgent_it_may_be(nodes: EmbeddingNodes) -> None:
    places = Places(10, Tenants({"acme": Entry(keys=["sk-acme-1"], priority=2, max_requests=1)}))
    async with nodes.served(places=places) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        assert (await client.post(URL, json=body())).status_code == 401
        key = {"authorization": "Bearer sk-acme-1"}
        assert (await client.post(URL, json=body(), headers=key)).status_code == 200
        urgent = await client.post(URL, json=body(priority=1), headers=key)
        assert urgent.status_code == 400 and urgent.json()["error"]["param"] == "priority"
        nodes.acts = dict.fromkeys(("e0", "e1"), stays_silent)
        reply = asyncio.create_task(client.post(URL, json=body([5]), headers=key))
        await until(lambda: len(nodes.asked) == 2)
        assert (await client.post(URL, json=body(), headers=key)).status_code == 429
        nodes.tell(nodes.asked[1][0], embedded(nodes.asked[1][1]))
        assert (await reply).status_code == 200 and places.num_taken == 0


async def test_what_was_embedded_is_counted(client: httpx.AsyncClient) -> None:
    await embed(client, [[1, 2, 3], [4]])
    metrics = (await client.get("/metrics")).text
    for line in (
        "pdcluster_embeddings_total 2.0",
        "pdcluster_prompt_tokens_total 4.0",
        "pdcluster_cached_prompt_tokens_total 3.0",
        'pdcluster_http_requests_total{endpoint="/v1/embeddings",status="200"} 1.0',
        "pdcluster_output_tokens_total 0.0",
        "pdcluster_output_length_tokens_count 0.0",
    ):
        assert line in metrics, line


async def test_many_texts_are_tokenized_in_a_thread_and_come_out_alike(client: httpx.AsyncClient) -> None:
    texts = [f"text number {number}" for number in range(400)]
    reply = await embed(client, texts)
    assert [each["embedding"] for each in reply["data"]] == [vector_of(ids_of(text)) for text in texts]
    without = await embed(client, texts[:2], add_special_tokens=False)
    plain = [list(TEXT.encode(text, add_special_tokens=False)) for text in texts[:2]]
    assert [each["embedding"] for each in without["data"]] == [vector_of(ids) for ids in plain]


async def test_a_node_that_comes_back_embeds_again(client: httpx.AsyncClient, nodes: EmbeddingNodes) -> None:
    """Nodes that have no room are asked again while the hold time lasts."""
    refusals = iter(range(3))

    def refuse(message: m.Prefill, answer: Any) -> None:
        if next(refusals, None) is None:
            embeds(message, answer)
        else:
            answer(m.Refused(message.work.request, message.work.attempt, "prefill", "full", 0.01))

    nodes.acts = dict.fromkeys(("e0", "e1"), refuse)
    assert (await embed(client, [5, 6]))["data"][0]["embedding"] == vector_of([5, 6])


async def test_a_reply_that_would_be_too_large_is_refused_with_the_way_out(
    client: httpx.AsyncClient, nodes: EmbeddingNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdcluster_router.frontend.embeddings.MAX_REPLY_BYTES", 1000)
    assert (await embed(client, ["a"] * 4))["data"]
    refused = await client.post(URL, json=body(["a"] * 40))
    assert refused.status_code == 400 and "fewer inputs" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "input"
