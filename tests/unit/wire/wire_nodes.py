"""A node's loop around a hub, in miniature: real sockets on loopback, short leases.
Both ends run in one thread by one clock, so a slow machine slows them together, and a stall is no time that passes."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from patient_loop import PatientClock

from pdcluster.core.errors import ConfigError
from pdcluster.core.messages import AnyMessage, Endpoint
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Event, Hub, Received
from pdcluster.wire.sockets import WireSettings

TURN_S = 0.002
CLOCK = PatientClock()
SETTINGS = WireSettings(heartbeat_s=0.05, lease_s=0.4, rewelcome_s=0.2, hello_interval_s=0.02)


def clock_of_test() -> Callable[[], float]:
    """The event loop's, where the test has one; else one that passes as the nodes take their turns."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return CLOCK.time


class Node:
    """A hub with everything it ever received, as a node loop would see it."""

    def __init__(self, hub: Hub, me: Peer) -> None:
        self.hub, self.me = hub, me
        self.received: list[Received] = []
        self.events: list[Event] = []

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.me.node, self.me.incarnation, self.hub.address, link_key=self.hub.link_key)

    def turn(self) -> None:
        CLOCK.pass_phase(TURN_S)
        self.received += self.hub.receive()
        self.hub.tick()
        self.events += self.hub.events()

    def messages(self, kind: type[Any]) -> list[AnyMessage]:
        return [item.message for item in self.received if isinstance(item.message, kind)]


def start_again(make_node: Callable[..., Node], old: Node, incarnation: str) -> Node:
    """A new boot of a closed node at its address. ZMQ gives a closed socket's port back a moment later, from a thread
    of its own."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            return make_node(old.me.node, incarnation, listen=old.hub.address)
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def pump(until: Callable[[], object], *nodes: Node, limit_s: float = 20.0) -> None:
    """Run the nodes' loops until the condition holds."""
    deadline = time.monotonic() + limit_s
    while True:
        for node in nodes:
            node.turn()
        if until():
            return
        assert time.monotonic() < deadline, (
            f"never happened; {[(node.received, node.events, node.hub.dropped) for node in nodes]}"
        )
        time.sleep(TURN_S)
