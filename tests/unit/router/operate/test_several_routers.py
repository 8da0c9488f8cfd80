"""pdctl over several routers: each is asked, who does not answer is said, and the exit code follows."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from scripted_admin import ScriptedAdmin, admin_node, administered
from typer.testing import CliRunner, Result

from pdcluster.bootstrap.card import Adapter
from pdcluster_router import pdctl
from pdcluster_router.operate import clients

TOKEN = "0123456789abcdef0123"
# The router that answers does so beside other tests.
CALL_S = 2.0


@pytest.fixture(autouse=True)
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CALL_S", CALL_S)


@asynccontextmanager
async def hung_router() -> AsyncIterator[str]:
    """Takes connections and says nothing."""
    is_over = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        is_over.set()
        server.close()


@pytest.fixture
def dead() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


async def run(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, pdctl.app, list(words))


@pytest.fixture
async def alive() -> AsyncIterator[tuple[ScriptedAdmin, str]]:
    admin = ScriptedAdmin(nodes=[admin_node("p0", "prefill"), admin_node("d0", "decode")])
    async with administered(admin) as address:
        yield admin, address


async def test_wait_is_not_over_while_a_router_is_dead_or_hangs(alive: tuple[ScriptedAdmin, str], dead: str) -> None:
    assert (await run("wait", "--admin", alive[1], "--timeout", "5")).exit_code == 0
    told = await run("wait", "--admin", f"{alive[1]},{dead}", "--timeout", "0.1")
    assert told.exit_code == 3 and dead in told.stderr
    async with hung_router() as hung:
        told = await run("wait", "--admin", f"{alive[1]},{hung}", "--timeout", "0.1")
        assert told.exit_code == 3 and hung in told.stderr


async def test_status_says_who_is_silent(alive: tuple[ScriptedAdmin, str], dead: str) -> None:
    assert "nothing is wrong" in (await run("status", "--admin", alive[1])).stdout
    async with hung_router() as hung:
        for silent in (dead, hung):
            told = await run("status", "--admin", f"{alive[1]},{silent}")
            assert told.exit_code == 4 and silent in told.stdout and "nothing is wrong" not in told.stdout
            data = json.loads((await run("status", "--admin", f"{alive[1]},{silent}", "-o", "json")).stdout)
            assert any(silent in problem for problem in data["problems"])
            assert [(row["router"], row["status"]) for row in data["routers"]] == [
                (alive[1], "ready"),
                (silent, "silent"),
            ]


async def test_a_read_prints_what_is_known_and_fails(alive: tuple[ScriptedAdmin, str], dead: str) -> None:
    async with hung_router() as hung:
        clock = asyncio.get_running_loop().time
        began = clock()
        told = await run("get", "nodes", "--admin", f"{hung},{dead},{alive[1]}", "-o", "name")
        assert told.stdout.split() == ["d0", "p0"] and told.exit_code == 4
        assert hung in told.stderr and dead in told.stderr
        assert clock() - began < 3 * CALL_S, "side by side, within one deadline"


async def test_a_node_is_changed_though_the_first_router_hangs(alive: tuple[ScriptedAdmin, str]) -> None:
    admin, address = alive
    async with hung_router() as hung:
        told = await run("cordon", "d0", "--admin", f"{hung},{address}")
        assert told.exit_code == 0 and admin.changes == [("cordon", "d0", True)] and hung in told.stderr
        told = await run("set-role", "d0", "mixed", "--admin", f"{hung},{address}")
        assert told.exit_code == 0 and admin.changes[-1] == ("role", "d0", "mixed")
        told = await run("drain", "d0", "--admin", f"{hung},{address}", "--timeout", "5s")
        assert told.exit_code == 0 and "empty" in told.stdout


async def test_a_policy_that_not_all_take_is_an_error(alive: tuple[ScriptedAdmin, str], dead: str) -> None:
    told = await run("set", "policy", "--live", "kv-cost", "--admin", f"{alive[1]},{dead}")
    assert told.exit_code != 0 and dead in told.stderr and not alive[0].changes


async def test_a_wrong_token_has_its_own_code_and_text(alive: tuple[ScriptedAdmin, str], tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.write_text("f" * 20)
    right.write_text(TOKEN)
    async with AsyncExitStack() as stack:
        guarded = await stack.enter_async_context(
            administered(ScriptedAdmin(nodes=[admin_node("p0", "mixed")]), token=TOKEN)
        )
        for words in (("get", "nodes"), ("status",), ("wait", "--timeout", "9"), ("drain", "p0"), ("events",)):
            told = await run(*words, "--admin", guarded, "--token-file", str(wrong))
            assert told.exit_code == 5 and "token" in told.stderr and guarded in told.stderr, (words, told.stderr)
        told = await run("status", "--admin", f"{alive[1]},{guarded}", "--token-file", str(wrong))
        assert "locked" in told.stdout and "silent" not in told.stdout
        assert told.exit_code == 5, "of two routers only one takes it"
        assert (await run("get", "nodes", "--admin", guarded, "--token-file", str(right))).exit_code == 0


async def test_adapters_are_loaded_and_unloaded_at_nodes_through_one_router(alive: tuple[ScriptedAdmin, str]) -> None:
    admin, address = alive
    loaded = await run("adapter", "load", "sql", "/adapters/sql", "--node", "p0", "--admin", address)
    assert loaded.exit_code == 0 and "adapter sql is loaded at p0, d0" in loaded.output
    unloaded = await run("adapter", "unload", "sql", "--admin", address)
    assert unloaded.exit_code == 0 and "unloaded" in unloaded.output
    assert admin.changes == [("adapter", "sql", ("/adapters/sql", ("p0",))), ("adapter", "sql", (None, ()))]


async def test_a_node_that_does_not_take_an_adapter_is_named_and_the_exit_code_says_so(
    alive: tuple[ScriptedAdmin, str],
) -> None:
    refused = await run("adapter", "load", "sql", "/bad", "--admin", alive[1])
    assert refused.exit_code == 1 and "p0: it is bad" in refused.output + refused.stderr


async def test_adapters_are_listed_by_node(alive: tuple[ScriptedAdmin, str]) -> None:
    admin, address = alive
    admin.node_list[0] = msgspec.structs.replace(admin.node_list[0], adapters=(Adapter("sql", "d1"),))
    listed = await run("adapter", "list", "-o", "json", "--admin", address)
    (row,) = json.loads(listed.output)
    assert (row["name"], row["node"], row["digest"]) == ("sql", "p0", "d1")
