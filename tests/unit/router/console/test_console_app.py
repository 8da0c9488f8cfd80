"""The console without a cluster: who is answered, what a page may do, and how chats are relayed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from scripted_admin import ScriptedAdmin, admin_node, administered

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import RouterConfig
from pdcluster_router.console import app as console_app
from pdcluster_router.console.access import ConsoleAccess
from pdcluster_router.console.app import ConsoleApp
from pdcluster_router.console.child import reached
from pdcluster_router.console.feed import ClusterFeed
from pdcluster_router.console.serve import ConsoleOptions, run
from pdcluster_router.frontend.server import listening, router_metrics
from pdcluster_router.http.hosts import HostRule
from pdcluster_router.operate.clients import AdminClients

TOKEN = "t" * 32
NOBODY = "127.0.0.1:9"
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def console(
    *,
    token: str | None = TOKEN,
    is_open: bool = True,
    api: str = NOBODY,
    hosts: tuple[str, ...] = (),
    admin: str = NOBODY,
) -> AsyncIterator[httpx.AsyncClient]:
    """A console whose routers do not answer."""
    feed = ClusterFeed(lambda warn: AdminClients(NOBODY, None, warn))
    rule = HostRule("127.0.0.1", hosts, what="the console", setting="router.console_hosts")
    access = ConsoleAccess(rule, token, is_open=is_open)
    app = ConsoleApp(access, lambda warn: AdminClients(admin, None, warn), feed, api, router_metrics())
    async with (
        feed.running(),
        listening(app, "127.0.0.1:0", drain_s=0.1) as address,
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=30.0) as client,
    ):
        yield client
    app.close()


async def test_the_page_is_whole_and_may_load_nothing_from_elsewhere() -> None:
    async with console() as client:
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "access-control-allow-origin" not in page.headers
        assert page.headers["x-content-type-options"] == "nosniff"
        for part in ("console.css", "console.js", "icon.svg"):
            assert f'"{part}"' in page.text
            assert (await client.get(f"/{part}")).status_code == 200
        assert "http" not in page.text.replace("http-equiv", "")
        assert (await client.get("/console.js")).headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:9999"}, 200),  # a forwarded port
        ({"host": "[::1]:80"}, 200),
        ({"host": "192.168.1.7"}, 403),
        ({"host": "gateway.example:8001"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "["}, 400),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, 200),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, 403),
        ({"host": "localhost:1", "origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/session"])
async def test_only_its_own_page_is_answered(path: str, headers: dict[str, str], status: int) -> None:
    async with console(hosts=("gateway.example",)) as client:
        assert (await client.get(path, headers=headers)).status_code == status


CHANGES = ("cordon", "drain", "role", "cancel", "policy")


@pytest.mark.parametrize("what", CHANGES)
async def test_changes_want_the_admin_token(what: str) -> None:
    async with console() as client:
        for token, status in ((None, 401), ("wrong", 401), (TOKEN, 400)):
            headers = JSON if token is None else {**JSON, "x-admin-token": token}
            reply = await client.post(f"/api/{what}", content=b"{]", headers=headers)
            assert reply.status_code == status, reply.text


@pytest.mark.parametrize("what", CHANGES)
async def test_without_a_configured_token_nothing_can_be_changed(what: str) -> None:
    async with console(token=None) as client:
        reply = await client.post(f"/api/{what}", json={"node": "decode-0", "cordoned": True})
        assert reply.status_code == 403
        assert "router.admin_token_file" in reply.text


@pytest.mark.parametrize("timeout_s", ["-1", "1e300", '"60"'])
async def test_a_drain_without_a_sensible_deadline_is_refused(timeout_s: str) -> None:
    async with console() as client:
        body, headers = f'{{"node": "n", "timeout_s": {timeout_s}}}', {**JSON, "x-admin-token": TOKEN}
        reply = await client.post("/api/drain", content=body, headers=headers)
        assert reply.status_code == 400
        assert "timeout_s" in reply.text


async def test_a_form_of_another_page_changes_nothing() -> None:
    """It can send no JSON content type without being asked about first."""
    async with console() as client:
        body, headers = b'{"node": "n", "cordoned": true}', {"x-admin-token": TOKEN, "content-type": "text/plain"}
        assert (await client.post("/api/cordon", content=body, headers=headers)).status_code == 400
        assert (await client.options("/api/cordon", headers={"origin": "http://evil.example"})).status_code == 403


async def test_beyond_loopback_reading_wants_the_token_too() -> None:
    async with console(is_open=False) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/api/session")).json() == {
            "may_change": False, "has_token": True, "wants_token": True,
        }  # fmt: skip
        for path in ("/api/live", "/api/explain/x", "/api/node/x"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/api/chat", json={})).status_code == 401
        session = await client.get("/api/session", headers={"x-admin-token": TOKEN})
        assert session.json() == {"may_change": True, "has_token": True}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/cordon", 405),
        ("POST", "/", 405),
        ("PUT", "/api/session", 405),
        ("GET", "/api", 404),
        ("GET", "/../pdctl.py", 404),
        ("GET", "/api/explain/", 404),
    ],
)
async def test_other_paths_and_methods_are_refused(method: str, path: str, status: int) -> None:
    async with console() as client:
        assert (await client.request(method, path)).status_code == status


async def test_routers_that_do_not_answer_are_said_and_asked_again() -> None:
    async with console() as client:
        assert "no router answers" in (await client.get("/api/node/decode-0")).text
        async with client.stream("GET", "/api/live") as reply:
            looks = [line async for line in _first(reply.aiter_lines(), 2)]
    assert all("no router answers at 127.0.0.1:9" in look for look in looks)


async def _first(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    async for line in lines:
        if line.startswith("data: "):
            yield line
            count -= 1
            if not count:
                return


async def test_pages_that_watch_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_app, "MAX_STREAMS", 1)
    async with console() as client:
        async with client.stream("GET", "/api/live") as reply:
            assert reply.status_code == 200
            assert (await client.get("/api/live")).status_code == 429
        while (await client.send(client.build_request("GET", "/api/live"), stream=True)).status_code != 200:
            await asyncio.sleep(0.05)  # the server sees a moment later that its client left


# ---------------------------------------------------------------- chats

EVENTS = [b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n"]


class Api:
    """A router's API that answers every chat the same. It keeps what it was sent."""

    def __init__(self, answer: bytes, *, is_endless: bool = False, is_silent: bool = False) -> None:
        self.answer, self.is_endless, self.is_silent = answer, is_endless, is_silent
        self.heads: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.splitlines() if line.lower().startswith("content-length"))
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(int(length.split(":")[1]))))
        writer.write(self.answer)
        if self.is_silent and not await reader.read(1):
            self.left.set()
        while self.is_endless and not self.left.is_set():
            try:
                writer.write(b"data: {}\n\n")
                await writer.drain()
                await asyncio.sleep(0.01)
            except OSError:
                self.left.set()
        writer.close()


@asynccontextmanager
async def served(api: Api) -> AsyncIterator[str]:
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()


OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


async def test_a_chat_is_passed_on_and_its_stream_back() -> None:
    api = Api(OK + b"".join(EVENTS))
    async with served(api) as address, console(api=address) as client:
        reply = await client.post("/api/chat", json={"messages": [1], "stream": False}, headers={"x-api-key": "sk-1"})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.content.startswith(b"".join(EVENTS))
    assert api.bodies == [{"messages": [1], "stream": True, "stream_options": {"include_usage": True}}]
    assert "authorization: Bearer sk-1" in api.heads[0]


async def test_a_refused_chat_has_the_routers_own_answer() -> None:
    body = b'{"error":{"message":"no such model"}}'
    api = Api(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    async with served(api) as address, console(api=address) as client:
        reply = await client.post("/api/chat", json={})
    assert (reply.status_code, reply.content) == (404, body)


async def test_a_router_that_is_not_there_is_said() -> None:
    async with console() as client:
        reply = await client.post("/api/chat", json={})
    assert reply.status_code == 503
    assert "127.0.0.1:9" in reply.text


async def test_a_page_that_leaves_ends_its_chat_while_the_router_is_silent() -> None:
    """As through a long prompt: nothing comes that could show that the page left."""
    api = Api(OK + EVENTS[0], is_silent=True)
    async with served(api) as address, console(api=address) as client:
        async with client.stream("POST", "/api/chat", json={}) as reply:
            await anext(reply.aiter_lines())
        async with asyncio.timeout(30.0):
            await api.left.wait()
        assert len(api.bodies) == 1


async def test_a_page_that_leaves_ends_its_chat_at_the_router() -> None:
    api = Api(OK, is_endless=True)
    async with served(api) as address, console(api=address) as client:
        async with client.stream("POST", "/api/chat", json={}) as reply:
            await anext(reply.aiter_lines())
        async with asyncio.timeout(30.0):
            await api.left.wait()
        assert len(api.bodies) == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"nothing", b"[" * 100_000])
async def test_a_chat_that_is_no_object_is_refused(body: bytes) -> None:
    async with console() as client:
        assert (await client.post("/api/chat", content=body, headers=JSON)).status_code == 400


# ---------------------------------------------------------------- settings


def test_a_console_for_other_machines_needs_a_token() -> None:
    with pytest.raises(ConfigError, match=r"console at 0\.0\.0\.0:8001 \(router\.console\) can be reached"):
        RouterConfig(console="0.0.0.0:8001")
    with pytest.raises(ConfigError, match=r"pass --token-file FILE .* --insecure console"):
        run(ConsoleOptions("0.0.0.0:8001", NOBODY, None, NOBODY))


def test_a_console_needs_the_admin_service() -> None:
    with pytest.raises(ConfigError, match=r"router\.admin is none"):
        RouterConfig(console="127.0.0.1:8001", admin=None)


def test_an_address_of_all_is_reached_on_this_machine() -> None:
    assert reached("0.0.0.0:8000") == "127.0.0.1:8000"
    assert reached("[::]:8000") == "[::1]:8000"
    assert reached("10.0.0.7:8000") == "10.0.0.7:8000"


async def test_events_go_on_after_a_router_was_started_again_on_its_address() -> None:
    """It counts its events anew. However many it has by the next look, each is shown once."""
    first = ScriptedAdmin(nodes=[admin_node("p0", "mixed")])
    for number in range(3):
        first.log.add("role", "p0", f"first {number}")
    feed = ClusterFeed(lambda warn: AdminClients(address, None, warn))
    looks: asyncio.Queue[bytes] = asyncio.Queue()

    async def messages(wanted: int) -> list[str]:
        async with asyncio.timeout(30.0):
            while True:
                look = json.loads(await looks.get())
                if len(found := [event["message"] for event in look.get("events", ())]) >= wanted:
                    return found

    async with feed.running():
        async with administered(first) as address:
            feed.watch(looks.put_nowait)
            assert await messages(3) == ["first 0", "first 1", "first 2"]
            first.log.add("role", "p0", "first 3")
            assert await messages(4) == [f"first {number}" for number in range(4)]
        second = ScriptedAdmin(nodes=[admin_node("p0", "mixed")])
        for number in range(6):  # more than the one before had
            second.log.add("role", "p0", f"second {number}")
        async with administered(second, address):
            told = await messages(10)
    assert told == [f"first {number}" for number in range(4)] + [f"second {number}" for number in range(6)]


async def test_the_feed_offers_every_name_of_a_model() -> None:
    node = msgspec.structs.replace(admin_node("p0", "mixed"), models=("bundled", "also"))
    looks: asyncio.Queue[bytes] = asyncio.Queue()
    async with administered(ScriptedAdmin(nodes=[node])) as address:
        feed = ClusterFeed(lambda warn: AdminClients(address, None, warn))
        async with feed.running():
            feed.watch(looks.put_nowait)
            look = json.loads(await asyncio.wait_for(looks.get(), 20.0))
    assert look["figures"]["nodes"][0]["models"] == ["bundled", "also"]


async def test_an_unknown_request_or_node_is_not_found() -> None:
    async with administered(ScriptedAdmin()) as admin, console(admin=admin) as client:
        for path in ("/api/explain/unknown", "/api/explain/%ff%00", "/api/node/unknown"):
            assert (await client.get(path)).status_code == 404, path


async def test_questions_to_the_routers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def look(clients: AdminClients, request: str) -> list[object]:
        assert gate.wait(20.0)
        return []

    monkeypatch.setattr(console_app.reading, "explanations", look)
    async with console() as client:
        asked = [asyncio.create_task(client.get("/api/explain/x")) for _ in range(console_app.MAX_QUESTIONS + 4)]
        async with asyncio.timeout(20.0):
            while sum(each.done() for each in asked) < 4:
                await asyncio.sleep(0.01)
        gate.set()
        told = [(await each).status_code for each in asked]
    assert sorted(told) == [200] * console_app.MAX_QUESTIONS + [429] * 4
