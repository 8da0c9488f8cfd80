"""Which Host headers are answered: a name that somebody made to point to this machine is not."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from scripted_dispatcher import ScriptedDispatcher, served

from pdcluster.settings.config import RouterConfig
from pdcluster_router.frontend.server import http_settings
from pdcluster_router.http.hosts import Forbidden, HostRule

OURS = ("localhost", "localhost:8000", "LocalHost:1", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:8000", "gateway:80")
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "", "[")
ADDRESSES = ("10.0.0.7:8000", "[fd00::7]")


def rule(listens: str = "127.0.0.1") -> HostRule:
    return HostRule(listens, ("Gateway",), what="the API", setting="router.http_hosts")


@pytest.mark.parametrize("host", OURS)
def test_local_hosts_and_given_names_are_ours(host: str) -> None:
    rule().check(host)


@pytest.mark.parametrize("host", [*FOREIGN, *ADDRESSES, "gateway" * 100])
def test_others_are_refused_with_the_setting(host: str) -> None:
    with pytest.raises(Forbidden, match=r"the API is not reached as .* add the name to router\.http_hosts"):
        rule().check(host)


def test_without_a_host_nobody_is_a_browser() -> None:
    rule().check(None)


def test_the_name_that_is_bound_is_ours_and_beyond_loopback_any_address() -> None:
    beyond = rule("node-3.cluster")
    for host in (*OURS, *ADDRESSES, "NODE-3.cluster:8000"):
        beyond.check(host)
    with pytest.raises(Forbidden):
        beyond.check("evil.example")


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/v1/completions", "/nothing"])
async def test_a_page_elsewhere_reads_nothing_of_an_api_on_loopback(path: str) -> None:
    dispatcher = ScriptedDispatcher()
    settings = http_settings(RouterConfig(http_hosts=("llm.internal",)))
    async with served(dispatcher, settings) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for method in ("GET", "POST", "OPTIONS"):
            reply = await client.request(method, path, headers={"host": "evil.example:8000"}, json={})
            assert reply.status_code == 403, (method, path)
            assert "router.http_hosts" in reply.json()["error"]["message"]
        assert (await client.get("/v1/models", headers={"host": "llm.internal"})).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
    assert not dispatcher.started


def test_with_tenants_or_beyond_loopback_there_is_no_rule(tmp_path: Path) -> None:
    assert http_settings(RouterConfig(tenants=tmp_path / "tenants.toml")).hosts is None
    assert http_settings(RouterConfig(http="0.0.0.0:8000")).hosts is None
    assert http_settings(RouterConfig(http="localhost:8000")).hosts is not None
