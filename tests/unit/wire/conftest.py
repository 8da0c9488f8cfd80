"""Contexts and nodes that talk over real sockets on loopback."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import zmq
from patient_loop import PatientLoop
from wire_nodes import SETTINGS, Node, clock_of_test

from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Hub
from pdcluster.wire.sockets import WireSettings

Context = zmq.Context[zmq.Socket[bytes]]
Loop = Callable[[], asyncio.AbstractEventLoop]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Loop]:
    return {"patient": PatientLoop}


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def other_context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def make_node(context: Context, other_context: Context) -> Iterator[Callable[..., Node]]:
    hubs: list[Hub] = []

    def make(
        name: str,
        incarnation: str = "boot-1",
        *,
        listen: str = "127.0.0.1:0",
        settings: WireSettings = SETTINGS,
        own: Context | None = None,
    ) -> Node:
        me = Peer(name, incarnation)
        hub = Hub(me, listen=listen, context=own or context, settings=settings, clock=clock_of_test())
        hubs.append(hub)
        return Node(hub, me)

    yield make
    for hub in hubs:
        hub.close()
