"""A stranger at every port, for a minute; `STRANGER_S=600` for ten: tenants notice next to nothing, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from shared_network import SharedNetwork

SECONDS = float(os.environ.get("STRANGER_S", "60"))
CALM_S = 10.0
CONNECTIONS = 12
MEMORY_BYTES = 100 << 20
PAUSE_S = 0.05

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
GREETINGS = (
    b"",  # says nothing
    b"\x00" * 64,
    HTTP2,
    HTTP2 + bytes.fromhex("00000401000000000182868441") * 50,
    bytes.fromhex("16030100c8010000c40303") + b"\x11" * 200,  # the begin of a TLS hello
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + bytes(48),  # ZMTP without a mechanism
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01CURVE" + bytes(47) + b"\x04\xc8" + b"\x05HELLO" + bytes(194),
    b"pdclKV2\n" + b"\x07" * 34 + b"\x02\x02p0p0",  # the begin of a lane of KV
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n" + b"[" * 60_000,
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 4000,
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 20,
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-nobody\r\ncontent-length: 2\r\n\r\n{}",
)


async def bother(port: int, chance: random.Random, until: float, said: Counter[str]) -> None:
    """Connections one after the other: each says something, waits or not, and leaves or is thrown out."""
    while time.monotonic() < until:
        data = chance.choice((*GREETINGS, chance.randbytes(chance.randrange(1, 5000))))
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 5.0)
        except (OSError, TimeoutError):
            said["refused"] += 1
            await asyncio.sleep(PAUSE_S)
            continue
        try:
            for _ in range(chance.randrange(1, 4)):
                writer.write(data)
                await asyncio.wait_for(writer.drain(), 2.0)
                said["bytes"] += len(data)
            await asyncio.wait_for(reader.read(65536), chance.choice((0.0, 0.1, 2.0)))
        except (OSError, TimeoutError):
            said["cut"] += 1
        finally:
            writer.transport.abort()
        said["connections"] += 1
        await asyncio.sleep(PAUSE_S)


async def latencies(network: SharedNetwork, seconds: float) -> list[float]:
    """Of a tenant's requests, one after the other; each must be right."""
    found: list[float] = []
    until = time.monotonic() + seconds
    async with network.client() as client:
        expected = (await network.complete(client))["choices"][0]["text"]
        while time.monotonic() < until:
            begin = time.monotonic()
            answer = await network.complete(client)
            found.append(time.monotonic() - begin)
            assert answer["choices"][0]["text"] == expected
            assert answer["usage"]["pdcluster"]["mode"] == "remote"
    return found


@pytest.mark.timeout(int(SECONDS) + 300)
async def test_a_stranger_at_every_port_harms_no_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with SharedNetwork(tmp_path) as network:
        before = statistics.median(await latencies(network, CALM_S))
        memory, descriptors = network.memory_bytes(), network.descriptors()
        until, said = time.monotonic() + SECONDS, Counter[str]()
        strangers = [
            asyncio.create_task(bother(port, random.Random(f"{name} {number}"), until, said))
            for name, port in network.ports.items()
            for number in range(CONNECTIONS)
        ]
        beside = await latencies(network, SECONDS)
        await asyncio.gather(*strangers)
        grown = {name: now - memory[name] for name, now in network.memory_bytes().items()}
        left = network.settled_descriptors(descriptors, 10.0)
        with capsys.disabled():
            print(
                f"\n{len(network.ports)} ports, {dict(said)}; {len(beside)} requests, p50 {statistics.median(beside):.3f} s "
                f"beside {before:.3f} s; memory {max(grown.values()) >> 20} MiB more"
            )
        assert said["connections"] > len(network.ports) * CONNECTIONS
        assert max(grown.values()) <= MEMORY_BYTES, grown
        assert all(now <= descriptors[name] for name, now in left.items()), (descriptors, left)


BAD_BODIES: tuple[dict[str, object], ...] = (
    *({"temperature": value} for value in (-1, "hot", None, [], 1e9)),
    *({"max_tokens": value} for value in (-1, "many", 2**40, 1.5, {})),
    *({"top_p": value} for value in (-0.1, 2, "x")),
    *({"n": value} for value in (-1, 10**6, "two")),
    *({"stop": value} for value in ([1], [["a"]], {}, ["x"] * 5000, 7)),
    *({"prompt": value} for value in (None, {}, [[]], [-1], [2**40], ["a", 1], [[1], "a"], True)),
    *({"model": value} for value in (None, 1, "nobody's", "x" * 100_000)),
    *({"logit_bias": value} for value in ([], {"a": 1}, {"1": 1e9}, {"1": "x"})),
    *({"seed": value} for value in ("x", 2**70, 1.5)),
    *({"response_format": value} for value in ({"type": "json_schema"}, {"type": "x"}, 3, {"type": "regex"})),
    *({"stream": value} for value in ("yes", 3)),
    *({"deadline_s": value} for value in (-1, "soon")),
    {"cache_salt": 3},
    {"nobody_knows": 1},
)


@pytest.mark.timeout(600)
async def test_bad_requests_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 of 50 kinds, after as many that warm everything up."""
    assert len(BAD_BODIES) >= 50
    async with SharedNetwork(tmp_path) as network, network.client() as client:
        await network.complete(client)
        statuses: Counter[int] = Counter()

        async def ask(count: int) -> None:
            for number in range(count):
                body = {
                    "model": "pystdlib-3m",
                    "prompt": "def f(",
                    "max_tokens": 1,
                    **BAD_BODIES[number % len(BAD_BODIES)],
                }
                statuses[(await client.post("/v1/completions", json=body)).status_code] += 1

        await ask(2000)
        memory, descriptors = network.memory_bytes(), network.descriptors()
        statuses.clear()
        await ask(2000)
        grown = {name: now - memory[name] for name, now in network.memory_bytes().items()}
        with capsys.disabled():
            print(
                f"\nbad requests: {dict(statuses)}, grown { ({name: size >> 10 for name, size in grown.items()}) } KiB"
            )
        assert statuses[500] == statuses[503] == 0 and sum(statuses.values()) == 2000
        assert statuses[400] + statuses[404] + statuses[422] > 1500
        assert max(map(abs, grown.values())) <= 20 << 20, grown
        assert network.settled_descriptors(descriptors, 10.0) == descriptors
        assert (await network.complete(client))["choices"][0]["text"]


async def test_each_port_takes_only_who_it_knows(tmp_path: Path) -> None:
    """Without a key: no answer of the API, and nothing of the bootstrap, of links, of lanes."""
    async with SharedNetwork(tmp_path) as network, network.client(None) as stranger:
        reply = await stranger.post("/v1/completions", json={"model": "pystdlib-3m", "prompt": "x"})
        assert reply.status_code == 401 and "key" in reply.text
        for name in ("bootstrap", "p0 link", "d0 link", "p0 kv", "d0 kv"):
            with pytest.raises((httpx.HTTPError, OSError)):
                await stranger.get(f"http://127.0.0.1:{network.ports[name]}/", timeout=3.0)
