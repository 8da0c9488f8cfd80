"""Two protocol versions: refused by name at both ends, and served side by side with bootstraps of their own."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from child_cluster import Processes

from pdcluster.core.messages import PROTOCOL_VERSION
from tests.chaos.cluster import ROOT, ChildProcess

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

NEXT = PROTOCOL_VERSION + 1
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This code, as it would be with another protocol."""
    folder = tmp_path_factory.mktemp("next")
    for name in ("pdcluster", "router"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    messages = folder / "pdcluster" / "core" / "messages.py"
    text = messages.read_text()
    messages.write_text(re.sub(r"^PROTOCOL_VERSION = \d+$", f"PROTOCOL_VERSION = {NEXT}", text, flags=re.MULTILINE))
    assert messages.read_text() != text
    return folder


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.kill()


async def said(processes: Processes, name: str, text: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while text not in processes.log_of(name):
            await asyncio.sleep(0.1)


async def readiness(router: ChildProcess) -> dict[str, object]:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
        return (await client.get(f"http://{router.address}/readyz")).json()


async def complete(router: ChildProcess) -> list[int]:
    async with httpx.AsyncClient(trust_env=False, timeout=60.0, base_url=f"http://{router.address}") as client:
        async with asyncio.timeout(LIMIT_S):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.1)
        body = {"model": "pystdlib-3m", "prompt": "def f(", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]


async def test_a_node_of_another_protocol_is_refused_by_name_and_ends(processes: Processes, next_version: Path) -> None:
    bootstrap = await processes.bootstrap("registry")
    await processes.node("old", bootstrap).start()
    node = processes.node("new", bootstrap, next_version)
    with pytest.raises(AssertionError, match="before it was ready"):
        await node.start()
    told = f"node 'new' speaks protocol {NEXT}, and node 'old' of this cluster speaks {PROTOCOL_VERSION}"
    assert told in processes.log_of("new")
    assert "bootstraps of its own" in processes.log_of("new")
    assert told in processes.log_of("registry")


async def test_a_router_of_another_protocol_names_the_nodes_that_it_refuses(
    processes: Processes, next_version: Path
) -> None:
    bootstrap = await processes.bootstrap("registry")
    await processes.node("old", bootstrap).start()
    router = await processes.router("new", bootstrap, next_version)
    told = f"node old speaks protocol {PROTOCOL_VERSION}, this router speaks {NEXT}"
    await said(processes, "new", told)
    found = await readiness(router)
    assert found["status"] == "not ready"
    assert told in str(found["reasons"])
    assert found["protocol"] == NEXT


async def test_two_versions_serve_side_by_side(processes: Processes, next_version: Path) -> None:
    """Blue and green: each with a registry of its own, on one machine. Clients move when the new one answers."""
    blue, green = await asyncio.gather(
        processes.bootstrap("blue-registry"), processes.bootstrap("green-registry", next_version)
    )
    await processes.node("blue", blue).start()
    await processes.node("green", green, next_version).start()
    routers = await asyncio.gather(
        processes.router("blue-router", blue), processes.router("green-router", green, next_version)
    )
    answers = await asyncio.gather(*map(complete, routers))
    assert answers[0] == answers[1]
    assert [(await readiness(router))["protocol"] for router in routers] == [PROTOCOL_VERSION, NEXT]
