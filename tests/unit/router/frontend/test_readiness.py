"""/livez, /readyz and /ready of a router: each reason, and what is only degraded."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from scripted_dispatcher import ScriptedDispatcher, served

from pdcluster.telemetry.health import LATE_S, health_port
from pdcluster_router.core.generation import Readiness
from pdcluster_router.frontend.health import RouterHealth, readiness_of


async def test_no_node_now_is_degraded_once_a_tokenizer_is_known() -> None:
    dispatcher = ScriptedDispatcher()
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        dispatcher.is_up = False
        ready = await client.get("/readyz")
        assert ready.status_code == 503 and "tokenizer" in ready.json()["reasons"][0]
        dispatcher.is_up, dispatcher.blocked = True, "no prefill node takes work"
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"], ready.json()["can_serve"]) == (200, "degraded", False)
        assert "no prefill node takes work" in ready.json()["reasons"][0]
        assert (await client.get("/ready")).status_code == 503, "nothing would be served at once"
        dispatcher.blocked = None
        assert (await client.get("/readyz")).json()["can_serve"] is True
        assert (await client.get("/ready")).status_code == (await client.get("/livez")).status_code == 200


def test_a_refused_model_and_a_drain_are_not_ready() -> None:
    dispatcher = ScriptedDispatcher()
    assert "drains" in readiness_of(dispatcher, is_draining=True).reasons[0]
    dispatcher.readiness = lambda: Readiness(False, "the template is broken")  # type: ignore[method-assign]
    assert readiness_of(dispatcher).reasons == ["the template is broken"]


def test_a_router_that_waits_for_its_first_node_is_ready() -> None:
    dispatcher = ScriptedDispatcher()
    dispatcher.readiness = lambda: Readiness(False, is_awaited=True)  # type: ignore[method-assign]
    verdict = readiness_of(dispatcher)
    assert verdict.is_good and verdict.reasons == ["requests wait for the first node"]


async def test_the_health_port_answers_while_the_loop_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = ScriptedDispatcher()

    async def readiness():
        return readiness_of(dispatcher)

    async def exposition() -> bytes:
        return b"pdcluster_test 1\n"

    health = RouterHealth(readiness, exposition)
    keeping = asyncio.create_task(health.keep())
    with health_port("127.0.0.1:0", health.probes) as address:
        get = httpx.Client(base_url=f"http://{address}", trust_env=False).get
        await asyncio.sleep(0.05)
        assert (await asyncio.to_thread(get, "/readyz")).json()["can_serve"] is True
        assert (await asyncio.to_thread(get, "/metrics")).text == "pdcluster_test 1\n"
        health._pulse._beat_at -= 2 * LATE_S
        assert get("/livez").status_code == get("/readyz").status_code == 503, "in this thread: the loop stands"
        monkeypatch.setattr("pdcluster_router.frontend.health.SCRAPE_S", 0.2)
        assert get("/metrics").status_code == 503
    keeping.cancel()
