"""Tenants: who has which key, what it may ask for, and which prefix cache its requests share; in the file, and over
HTTP and gRPC metadata."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_dispatcher import MODEL, ScriptedDispatcher, Wait, says, served, until

from pdcluster.core.errors import BadRequest, ConfigError, Overloaded, Unauthorized
from pdcluster.telemetry.metrics import HoldMetrics
from pdcluster_router.core.tenants import ANYBODY, Tenants, read_tenants
from pdcluster_router.frontend.places import Places

ACME, OTHER = "sk-acme-0001", "sk-other-0001"
FILE = f"""
[acme]
keys = ["{ACME}"]
weight = 2.0
priority = -2
max_requests = 2

[other]
key_hashes = ["sha256:{hashlib.sha256(OTHER.encode()).hexdigest()}"]
"""


def write(tmp_path: Path, text: str, name: str = "tenants.toml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return read_tenants(write(tmp_path, FILE))


def test_without_a_file_everyone_is_one_tenant() -> None:
    tenants = read_tenants(None)
    assert tenants.identify(None) is ANYBODY and tenants.identify("Bearer whatever") is ANYBODY


def test_a_key_or_its_hash_names_a_tenant(tenants: Tenants) -> None:
    assert tenants.identify(f"Bearer {ACME}").name == "acme"
    assert tenants.identify(f"bearer  {OTHER} ").name == "other"


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", f"Basic {ACME}", "Bearer sk-acme-0002", f"Bearer {ACME}x", "Bearer é" * 1000],
)
def test_no_key_and_an_unknown_key_are_refused_without_repeating_it(tenants: Tenants, header: str | None) -> None:
    with pytest.raises(Unauthorized) as refused:
        tenants.identify(header)
    assert "sk-" not in str(refused.value)


def test_json_is_read_too(tmp_path: Path) -> None:
    file = write(tmp_path, '{"acme": {"keys": ["sk-acme-0001"], "weight": 3}}', "tenants.json")
    assert read_tenants(file).identify(f"Bearer {ACME}").weight == 3.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no tenant"),
        ("[acme]\n", "no keys and no key_hashes"),
        ("[acme]\nkeys = ['sk-acme-0001']\nwait = 2\n", "unknown field `wait`"),
        ("[acme]\nkeys = ['short']\n", "length >= 8"),
        ("[acme]\nkeys = ['sk-acme-0001']\nweight = 0\n", ">= 0.001"),
        ("[acme]\nkeys = ['sk-acme-0001']\npriority = -11\n", ">= -10"),
        ("[acme]\nkey_hashes = ['sha256:12']\n", "64 hex digits"),
        ("['a b']\nkeys = ['sk-acme-0001']\n", "is no name"),
        ("[a]\nkeys = ['sk-acme-0001']\n[b]\nkeys = ['sk-acme-0001']\n", "a and b have a key in common"),
        ("[acme\n", "not a table of tenants"),
    ],
)
def test_a_file_that_is_wrong_is_said_to_be_without_showing_keys(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        read_tenants(write(tmp_path, text))
    assert words in str(wrong.value) and "sk-" not in str(wrong.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nobody\.toml cannot be read"):
        read_tenants(tmp_path / "nobody.toml")


def test_a_request_may_ask_for_what_its_tenant_may(tenants: Tenants) -> None:
    acme, other = tenants.identify(f"Bearer {ACME}"), tenants.identify(f"Bearer {OTHER}")
    assert (acme.standing(None).priority, acme.standing(-2).priority, acme.standing(7).priority) == (0, -2, 7)
    assert acme.standing(None).weight == 2.0
    with pytest.raises(BadRequest, match="more urgent than 0"):
        other.standing(-1)


def test_tenants_share_cached_prefixes_only_where_the_file_says_so(tmp_path: Path) -> None:
    text = """
[a]
keys = ["key-of-a"]
[b]
keys = ["key-of-b"]
[team1]
keys = ["key-of-1"]
cache_salt = "a"
[team2]
keys = ["key-of-2"]
cache_salt = "a"
[public]
keys = ["key-of-p"]
cache_salt = ""
"""
    tenants = read_tenants(write(tmp_path, text))
    a, b, team1, team2, public = (tenants.identify(f"Bearer key-of-{name}") for name in "ab12p")
    assert team1.cache_salt(None) == team2.cache_salt(None) and team1.cache_salt("x") == team2.cache_salt("x")
    assert public.cache_salt(None) == ANYBODY.cache_salt(None) == b""
    every = [tenant.cache_salt(salt) for tenant in (a, b, team1, public) for salt in (None, "a", "x")]
    assert len(set(every)) == len(every)


def test_a_request_cannot_name_the_cache_of_a_tenant(tenants: Tenants) -> None:
    """Salts of tenants begin with a byte that no text has."""
    salt = tenants.identify(f"Bearer {ACME}").cache_salt(None)
    with pytest.raises(UnicodeDecodeError):
        salt.decode()


def test_places_are_bounded_per_tenant_and_none_takes_them_all(tenants: Tenants) -> None:
    registry = CollectorRegistry()
    places = Places(10, tenants, HoldMetrics(registry))
    acme, other = (places.identify(f"Bearer {key}") for key in (ACME, OTHER))
    held = [places.taken(other) for _ in range(9)]
    for place in held[:8]:
        place.__enter__()
    with pytest.raises(Overloaded, match="8 requests are being worked on"):
        held[8].__enter__()
    with places.taken(acme):
        assert places.num_taken == 9
    for place in held[:8]:
        place.__exit__(None, None, None)
    with places.taken(acme), places.taken(acme), pytest.raises(Overloaded, match="2 requests of tenant acme"):
        places.taken(acme).__enter__()
    assert places.num_taken == 0
    assert (
        registry.get_sample_value("pdcluster_rejected_requests_total", {"reason": "tenant_requests", "tenant": "acme"})
        == 1
    )


async def test_over_http_a_key_is_asked_for_and_decides_in_whose_name_a_request_runs(tenants: Tenants) -> None:
    dispatcher = ScriptedDispatcher()
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    async with (
        served(dispatcher, places=Places(10, tenants)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            assert (await client.get(path)).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            reply = await client.post(path, json=body)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert (await client.get("/health")).status_code == (await client.get("/metrics")).status_code == 200
        assert dispatcher.started == []
        headers = {"authorization": f"Bearer {ACME}", "x-request-deadline-s": "2.5"}
        assert (
            await client.post("/v1/completions", json=body | {"priority": -1, "cache_salt": "x"}, headers=headers)
        ).status_code == 200
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        (generation,) = dispatcher.started
        assert (generation.standing.tenant, generation.standing.weight, generation.standing.priority) == (
            "acme",
            2.0,
            -1,
        )
        assert 0 < generation.deadline_s <= 2.5
        assert generation.salt == tenants.identify(f"Bearer {ACME}").cache_salt("x")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
async def test_a_deadline_that_is_none_is_the_callers_mistake(value: str) -> None:
    async with served(ScriptedDispatcher()) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        reply = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "hi"}, headers={"x-request-deadline-s": value}
        )
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "x-request-deadline-s"


async def test_a_deadline_is_at_most_what_the_server_allows() -> None:
    dispatcher = ScriptedDispatcher()
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "hi"}, headers={"x-request-deadline-s": "1e9"}
        )
    assert 2.5 < dispatcher.started[0].deadline_s <= 600.0


async def test_a_refusal_over_http_says_how_long_the_wait_would_be() -> None:
    refuses = ScriptedDispatcher(
        lambda _: [Overloaded("the queue is full; predicted wait 3.20 s, retry then", 3.2, "hold_count")]
    )
    async with served(refuses) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        reply = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "4" and reply.headers["x-pdcluster-predicted-wait-s"] == "3.200"


async def test_one_tenants_open_requests_do_not_keep_another_out(tenants: Tenants) -> None:
    gate = asyncio.Event()
    dispatcher = ScriptedDispatcher(lambda _: [Wait(gate), *says("x")])
    body = {"model": MODEL, "prompt": "hi"}
    async with (
        served(dispatcher, places=Places(5, tenants)) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):
        flood = [
            asyncio.create_task(client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {OTHER}"}))
            for _ in range(8)
        ]
        await until(lambda: len(dispatcher.started) == 4)
        acme = asyncio.create_task(
            client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {ACME}"})
        )
        await until(lambda: len(dispatcher.started) == 5)
        gate.set()
        assert (await acme).status_code == 200
        assert sorted([(await task).status_code for task in flood]) == [200] * 4 + [429] * 4


def test_salts_are_keyed_with_the_first_cluster_key(tmp_path: Path) -> None:
    file = write(tmp_path, FILE)

    def salt(*keys: bytes) -> bytes:
        return read_tenants(file, 1, keys).identify(f"Bearer {ACME}").salt

    assert salt(b"first" * 8) == salt(b"first" * 8, b"other" * 8)
    assert len({salt(), salt(b"first" * 8), salt(b"other" * 8)}) == 3
    assert salt(b"first" * 8).startswith(salt()[:1])
