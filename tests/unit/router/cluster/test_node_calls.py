"""Calls of single nodes end with an answer of that node, with their time, or with the node."""

from __future__ import annotations

import asyncio

import pytest

from pdcluster.core.errors import NodeLost
from pdcluster.core.messages import AnyMessage, FetchFile, FileChunk, Manage, Managed
from pdcluster_router.cluster.node_calls import NodeCalls

LONG_S = 30.0


class Nodes:
    """Keeps what is sent to nodes."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, AnyMessage]] = []
        self.calls = NodeCalls(lambda incarnation, message: self.sent.append((incarnation, message)))

    def numbers(self) -> list[int]:
        return [message.number for _, message in self.sent if isinstance(message, Manage)]


async def test_a_call_ends_with_its_nodes_answer_alone() -> None:
    nodes = Nodes()
    asked = asyncio.create_task(nodes.calls.manage("boot-a", cordoned=True, timeout_s=LONG_S))
    await asyncio.sleep(0)
    [number] = nodes.numbers()
    nodes.calls.on_answer("boot-b", Managed(number, "mixed", True))
    nodes.calls.on_answer("boot-a", Managed(number + 1, "mixed", True))
    await asyncio.sleep(0)
    assert not asked.done()
    nodes.calls.on_answer("boot-a", Managed(number, "decode", True))
    assert (await asked).role == "decode"


async def test_the_calls_of_a_lost_node_end_at_once() -> None:
    nodes = Nodes()
    lost = [
        asyncio.create_task(nodes.calls.manage_adapter("boot-a", "ada", "/ada", LONG_S)),
        asyncio.create_task(nodes.calls.fetch_file("boot-a", "config.json", 0, LONG_S)),
    ]
    other = asyncio.create_task(nodes.calls.fetch_file("boot-b", "config.json", 0, LONG_S))
    await asyncio.sleep(0)
    nodes.calls.lose_node("boot-a", "it died")
    for each in lost:
        with pytest.raises(NodeLost, match="it died"):
            await each
    assert nodes.sent[-1] == ("boot-b", FetchFile("config.json", 0))
    nodes.calls.on_answer("boot-b", FileChunk("config.json", 0, 0, b""))
    assert (await other).name == "config.json"


async def test_a_silent_node_costs_the_time_that_was_given() -> None:
    nodes = Nodes()
    with pytest.raises(TimeoutError):
        await nodes.calls.manage("boot-a", timeout_s=0.01)
    nodes.calls.on_answer("boot-a", Managed(1, "mixed", False))
    nodes.calls.lose_node("boot-a", "late")
