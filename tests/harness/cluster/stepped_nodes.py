"""Whole nodes without wire, threads or loop: each turn is taken by hand, each message is a letter that the test
delivers, loses or repeats."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq
from fake_backend import FakeBackend, FakeNetwork
from local_cluster import LocalNode, oracle_kit
from simulated_cluster import TimedOracle, Watch
from virtual_wire import Context, Wire

from pdcluster.core.messages import AnyMessage, Endpoint, Role
from pdcluster.node.control import NodeControl
from pdcluster.node.native.engine_side import NativeSide
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.layout.spans import CopyRuns
from pdcluster.transfer.paths.measure import MeasureSettings, Paths
from pdcluster.transfer.protocol.ladder import Ladder
from pdcluster.transfer.protocol.session import Settings
from pdcluster.wire.hub import Received
from pdcluster.wire.sockets import WireSettings


@dataclass(frozen=True, slots=True)
class Letter:
    sender: Peer
    to: Peer
    message: AnyMessage


class LetterBox:
    """In the place of a Hub. post: takes what the node sends."""

    def __init__(self, me: Peer, address: str, post: Callable[[Letter], None]) -> None:
        self.me = me
        self.address = address
        self.inbox: list[Received] = []
        self._post = post

    def receive(self) -> list[Received]:
        received, self.inbox = self.inbox, []
        return received

    def send(self, to: Endpoint | Peer, message: AnyMessage) -> bool:
        peer = to if isinstance(to, Peer) else Peer(to.node, to.incarnation)
        self._post(Letter(self.me, peer, message))
        return True

    def flush(self) -> None:
        """Letters do not wait."""

    def events(self) -> list[object]:
        return []

    def last_received(self, peer: Peer) -> int:
        """Letters have no numbers."""
        return 0

    def tick(self) -> None:
        """No leases here."""

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return []

    def close(self, linger_s: float = 0.0) -> None:
        """Nothing is open."""


class SteppedNode(LocalNode):
    cluster: SteppedNodes

    def __init__(self, cluster: SteppedNodes, name: str, role: Role) -> None:
        super().__init__(
            cluster,
            name,
            role,
            oracle_kit(cluster.num_pages, lambda count, tokens: TimedOracle(count, tokens, cluster.clock)),
        )  # type: ignore[arg-type]
        self.loop.close()
        os.close(self.neighbours.wakeup_fd)
        self.neighbours = Watch()
        self.box = LetterBox(self.me, self.parts.links.hub.address, cluster.pending_messages.append)
        links = replace(self.parts.links, hub=self.box, neighbours=self.neighbours)
        self.parts = replace(self.parts, links=links)
        writer = (
            self.parts.writer
        )  # that measures with chunks of any size, so that tickets are written over several media
        writer.paths = Paths(tuple(self.backends), cluster.clock, measure=MeasureSettings(smallest_bytes=0))
        writer.ladder = Ladder(writer.paths, cluster.transfer.trials)
        self.side = NativeSide(self.parts, clock=cluster.clock, looks_ahead=cluster.looks_ahead)
        self.loop = NodeControl(links, self.side, report_s=1e9, drain_s=5.0, clock=cluster.clock)

    def _begin(self) -> None:  # type: ignore[override]
        return None

    def turn(self) -> None:
        self.engine.advance()
        self.loop.turn()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.me.node, self.me.incarnation, self.parts.links.hub.address)

    def end(self) -> None:
        for backend in self.backends.values():
            backend.shutdown()
        self.engine.close()
        self.loop.close()
        os.close(self.neighbours.wakeup_fd)


class SteppedNodes:
    """Stands where a node looks for its LocalCluster. letters: what was sent and not delivered yet. networks: the media
    by name, best first."""

    looks_ahead = True

    def __init__(
        self, roles: dict[str, Role], networks: dict[str, FakeNetwork], *, num_pages: int, group_s: float = 0.0004
    ) -> None:
        self.clock = next(iter(networks.values())).clock
        self.num_pages = num_pages
        self.group_s = group_s
        self.wire = WireSettings()
        self.report_s = 1e9
        self.transfer = Settings(chunk_bytes=128, window_bytes=512, verify_bytes=256)
        self.boots = itertools.count()
        self.networks = networks
        self.pending_messages: list[Letter] = []
        self._sockets = Wire(None)  # type: ignore[arg-type]  # only bound, never used
        self.nodes = {name: SteppedNode(self, name, role) for name, role in roles.items()}

    def context_of(self, process: str) -> Context:
        return self._sockets.context(process)

    def make_backends(self, me: Peer) -> dict[str, FakeBackend]:
        return {name: FakeBackend(network, me, name) for name, network in self.networks.items()}

    def node_of(self, peer: Peer) -> SteppedNode | None:
        node = self.nodes.get(peer.node)
        return node if node is not None and node.me == peer and node.is_alive else None

    def living(self) -> list[SteppedNode]:
        return [node for node in self.nodes.values() if node.is_alive]

    def hand_over(self, letter: Letter, kind: str = "node") -> None:
        node = self.node_of(letter.to)
        if node is not None:
            node.box.inbox.append(Received(letter.sender, kind, letter.message))  # type: ignore[arg-type]

    def end(self) -> None:
        for node in self.nodes.values():
            node.end()


def pages_of(runs: CopyRuns, page_bytes: int, *, source: bool) -> set[int]:
    spans = [(run.source if source else run.target, run.nbytes) for run in runs]
    return {
        page for offset, nbytes in spans for page in range(offset // page_bytes, -(-(offset + nbytes) // page_bytes))
    }
