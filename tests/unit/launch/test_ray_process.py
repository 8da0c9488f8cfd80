"""The process of a Ray replica: what Ray's look at its health finds while it runs, ends and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from pdcluster.core.errors import Unavailable
from pdcluster.launch.ray_process import ServedProcess

BACK_S = 30.0
# Announces itself, and answers every look at its health with the status that it was started with.
CHILD = """
import http.server, json, os, sys

class Probe(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[1]))
        self.end_headers()
        self.wfile.write(b"what it says")

    def log_message(self, *words):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Probe)
health = None if sys.argv[2] == "none" else "127.0.0.1:%d" % server.server_port
facts = {"ready": True, "address": "127.0.0.1:1", "pid": os.getpid(), "health": health}
with open(int(sys.argv[sys.argv.index("--ready-fd") + 1]), "w") as ready:
    ready.write(json.dumps(facts) + "\\n")
server.serve_forever()
"""


def command(status: int, health: str = "own") -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", CHILD, str(status), health)


@pytest.fixture
async def process() -> AsyncIterator[ServedProcess]:
    found = ServedProcess("decode-x", 20.0)
    yield found
    await found.stop()


async def test_a_process_that_ended_is_not_healthy_until_it_runs_again(process: ServedProcess) -> None:
    await process.start(command(200), 1.0)
    await process.probe()
    before = process.facts
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    said = []
    async with asyncio.timeout(BACK_S):
        while process.facts in ({}, before):
            with pytest.raises(Unavailable) as refused:
                await process.probe(back_s=0.0)
            said.append(str(refused.value))
            assert process.last_facts == before or process.facts, "Prometheus goes on to ask it, and finds it down"
            await asyncio.sleep(0.02)
    assert "decode-x ended and is not back; its output says why" in said
    await process.probe()
    assert process.last_facts["pid"] != before["pid"]


async def test_a_look_waits_for_a_process_that_is_being_started_again(process: ServedProcess) -> None:
    await process.start(command(200), 1.0)
    before = process.facts
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    async with asyncio.timeout(BACK_S):
        while process.facts == before:
            await asyncio.sleep(0.01)
        await process.probe()
    assert process.facts["pid"] != before["pid"]


async def test_a_look_ends_with_the_process_that_it_waits_for(process: ServedProcess) -> None:
    await process.start(command(200), 1.0)
    await process.stop()
    with pytest.raises(Unavailable, match="decode-x was stopped"):
        await process.probe()


async def test_a_process_that_says_so_is_not_healthy(process: ServedProcess) -> None:
    await process.start(command(503), 1.0)
    with pytest.raises(Unavailable, match="decode-x is not alive: what it says"):
        await process.probe()


async def test_a_process_that_does_not_answer_is_not_healthy(process: ServedProcess) -> None:
    await process.start(command(200), 1.0)
    health = process.facts["health"]
    pid = int(str(process.facts["pid"]))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable, match=f"decode-x does not answer at {health}, in 0.2 s"):
            await process.probe(0.2)
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_process_without_a_health_port_is_healthy_while_it_runs(process: ServedProcess) -> None:
    await process.start(command(200, "none"), 1.0)
    await process.probe()
