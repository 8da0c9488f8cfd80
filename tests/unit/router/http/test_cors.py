"""Pages in browsers: which may use the API, what they are told before and with every answer, and what other clients see
of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from scripted_dispatcher import MODEL, ScriptedDispatcher, says, served

from pdcluster.core.errors import Overloaded
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.app import HttpSettings
from pdcluster_router.frontend.places import Places
from pdcluster_router.http.cors import Cors

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
PAGE, STRANGER = "https://app.example.com", "https://other.example"
BODY = {"model": MODEL, "prompt": "hi"}
KEY = {"authorization": "Bearer some-key-1"}
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    places = Places(64, Tenants({"t": Entry(keys=["some-key-1"])}))
    async with (
        served(ScriptedDispatcher(), HttpSettings(cors_origins=(PAGE, "http://localhost:3000")), places) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        yield client


@pytest.mark.parametrize("path", [CHAT, PLAIN, "/tokenize", "/v1/models", "/v1/models/x", "/health"])
async def test_a_page_may_ask_first_without_a_key(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.options(path, headers=PREFLIGHT)
    methods = "POST, OPTIONS" if path in (CHAT, PLAIN, "/tokenize") else "GET, HEAD, OPTIONS"
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-methods"] == reply.headers["allow"] == methods
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert reply.headers["access-control-max-age"] == "600" and reply.headers["vary"] == "Origin"


async def test_another_page_is_not_told_that_it_may(client: httpx.AsyncClient) -> None:
    reply = await client.options(CHAT, headers=PREFLIGHT | {"origin": STRANGER})
    assert (
        not [name for name in reply.headers if name.startswith("access-control")] and reply.headers["vary"] == "Origin"
    )
    assert (
        "access-control-allow-headers"
        not in (await client.options(CHAT, headers=PREFLIGHT | {"access-control-request-headers": "x" * 3000})).headers
    )
    assert (await client.options("/nowhere", headers=PREFLIGHT)).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", PLAIN, BODY, KEY, 200),
        ("POST", PLAIN, BODY | {"stream": True}, KEY, 200),
        ("POST", CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "stream": True}, KEY, 200),
        ("GET", "/v1/models", None, KEY, 200),
        ("GET", "/v1/models", None, {}, 401),
        ("POST", PLAIN, BODY, {}, 401),
        ("POST", PLAIN, {"model": MODEL}, KEY, 400),
        ("POST", PLAIN, BODY, KEY | {"content-type": "text/plain"}, 415),
        ("GET", PLAIN, None, KEY, 405),
        ("GET", "/nowhere", None, KEY, 404),
    ],
)
async def test_every_answer_says_whose_page_may_read_it(
    client: httpx.AsyncClient, method: str, path: str, body: object, headers: dict[str, str], status: int
) -> None:
    for _ in range(3):  # a head that comes again is known
        reply = await client.request(method, path, json=body, headers={"origin": PAGE, **headers})
        assert (reply.status_code, reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (
            status,
            PAGE,
            "Origin",
        )
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
    bare = await client.request(method, path, json=body, headers=headers)
    assert bare.headers["vary"] == "Origin" and "access-control-allow-origin" not in bare.headers


async def test_errors_of_the_cluster_carry_it_too() -> None:
    def refuse(_: object) -> list[object]:
        return [*says("a", "length"), Overloaded("busy")]

    async with (
        served(ScriptedDispatcher(refuse), HttpSettings(cors_origins=("*",))) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):  # type: ignore[arg-type]
        for stream, status in ((False, 429), (True, 200)):
            reply = await client.post(PLAIN, json=BODY | {"stream": stream}, headers={"origin": STRANGER})
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, "*")
            assert "vary" not in reply.headers


async def test_no_page_may_use_it_unless_said_so() -> None:
    async with served(ScriptedDispatcher()) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        for reply in (
            await client.post(PLAIN, json=BODY, headers={"origin": PAGE}),
            await client.options(CHAT, headers=PREFLIGHT),
        ):
            assert reply.status_code == 200
            assert not [name for name in reply.headers if name.startswith("access-control") or name == "vary"]
    assert Cors(()).lines(b"https://a") == b""


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST, OPTIONS"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"),
        ("PUT", "/tokenize", "POST, OPTIONS"),
        ("GET", "/v1/embeddings", "POST, OPTIONS"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    reply = await client.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path",
    ["/v1/moderations", "/v1/responses/resp_1", "/v1/conversations", "/v1/audio/speech", "/v1/rerank"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_other_endpoints_of_such_servers_are_said_not_to_be_served(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    reply = await client.request(method, path)
    assert reply.status_code == 404
    if method != "OPTIONS":
        error = reply.json()["error"]
        assert (
            error["code"] == "not_found"
            and f"{path} is not served here; of OpenAI's and Anthropic's APIs there are /v1/chat/completions"
            in error["message"]
        )


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/b_1/cancel"])
async def test_files_and_batches_are_said_to_be_pdctls(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.request("POST", path)
    assert reply.status_code == 404
    assert "routers keep nothing; run pdctl batch run IN.jsonl -o OUT.jsonl" in reply.json()["error"]["message"]
