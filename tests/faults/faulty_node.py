"""A node in a process of its own, over a real medium, that can be held at a chosen step of the protocol so that
something can happen to it there.

    python faulty_node.py NAME ROLE BACKEND BOOT    speaks JSON lines on stdin and stdout Real here: the node's loop,
links, protocol, medium and process. The engine is the oracle, whose tokens depend on every byte of KV.

It is told: arm STEP (say so and wait for "go" when that step comes next), disarm, gone NODE BOOT (as a bootstrap would
say), proxy PORT (what its adverts name from now on), status, cut (shut every connection of shm), twice (connect to that
reader a second time, by shm), blind (take any bytes for the right ones).
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import queue
import signal
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
from fault_script import chunk_step, control_step
from local_cluster import EngineKit, LocalCluster, LocalNode, oracle_kit
from oracle import OracleEngine

from pdcluster.core.messages import Commit, CommitAck, Deliver, Reserve, Ticket
from pdcluster.core.step import StepPlan
from pdcluster.settings.config import set_library_environment
from pdcluster.transfer.backends.base import Backend, Handle, Peer, Stamp
from pdcluster.transfer.backends.staged.staging import StagedSettings
from pdcluster.transfer.backends.tcp_links import TcpAdvert
from pdcluster.transfer.layout.spans import CopyRuns
from pdcluster.transfer.protocol.session import Settings
from pdcluster.wire.hub import Received
from pdcluster.wire.sockets import WireSettings

WIDTH, NUM_PAGES = 128, 160
# The medium tcp between nodes that have a cluster key.
SEALED = "tcp-sealed"
WIRE = WireSettings(heartbeat_s=0.1, lease_s=1.2, rewelcome_s=0.2)
TRANSFER = Settings(
    chunk_bytes=24 << 10, window_bytes=256 << 10, repeat_s=0.05, commit_s=2.0, arrival_s=0.3, proof_s=0.05
)
PROGRESS_S = 1.0
HELD_AT_MOST_S = 10.0
STAGED = StagedSettings(
    block_bytes=64 << 10, blocks=4, connect_s=1.0, progress_s=PROGRESS_S, retry_s=0.3, unknown_s=5.0
)


def kit() -> EngineKit:
    return oracle_kit(NUM_PAGES, BusyOracle)


def say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class BusyOracle(OracleEngine):
    """Signals the milestones of a step from a thread of its own, as an engine does."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        super().__init__(num_pages, page_tokens, WIDTH)

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        if plan.milestones:
            threading.Thread(target=self._ring, args=(len(plan.milestones),), daemon=True).start()

    def _ring(self, milestones: int) -> None:
        for _ in range(milestones + 1):
            self.tick()


def make_backend(name: str, me: Peer) -> Backend:
    """As the product makes it, with shorter clocks."""
    if name == "shm":
        from pdcluster.transfer.backends.shm import ShmBackend, ShmSettings

        return ShmBackend(me, ShmSettings(connect_s=1.0, progress_s=PROGRESS_S, retry_s=0.3))
    if name in ("tcp", SEALED):
        from pdcluster.transfer.backends.tcp import TcpBackend, TcpSettings

        clocks = {"connect_s": 1.0, "progress_s": PROGRESS_S, "retry_s": 0.3}
        return TcpBackend(me, TcpSettings(is_sealed=name == SEALED, **clocks))
    from pdcluster.transfer.backends.staged import mooncake, nixl
    from pdcluster.transfer.backends.staged.backend import StagedBackend

    set_library_environment((mooncake if name == "mooncake" else nixl).environment(STAGED))
    return StagedBackend(
        me, name, mooncake.MooncakeEngine(STAGED) if name == "mooncake" else nixl.NixlEngine(me), STAGED
    )


class Tapped:
    """A backend whose writes pass `on_write` first, and whose adverts name the proxy."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.on_write: Callable[[Peer, Stamp, CopyRuns], None] = lambda *_: None
        self.proxy_port: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def advert(self) -> bytes:
        advert = self._backend.advert()
        if self.proxy_port is None:
            return advert
        return msgspec.msgpack.encode(
            msgspec.structs.replace(msgspec.msgpack.decode(advert, type=TcpAdvert), port=self.proxy_port)
        )

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, *rest: bool
    ) -> Handle:
        self.on_write(peer, stamp, runs)
        return self._backend.write(peer, source_region, target_region, stamp, runs, *rest)


class Orders:
    """What the loop sees as its neighbours: news of deaths, and calls to make in its thread."""

    def __init__(self) -> None:
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.news: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def ring(self) -> None:
        os.eventfd_write(self.wakeup_fd, 1)

    def gone(self) -> list[Peer]:
        try:
            os.eventfd_read(self.wakeup_fd)
        except BlockingIOError:
            return []
        while not self.calls.empty():
            self.calls.get()()
        return [self.news.get() for _ in range(self.news.qsize())]

    def set_draining(self) -> None:
        """Nobody asks."""


class FaultyNode(LocalNode):
    def _begin(self) -> Any:
        """Its loop runs in this process's own thread."""
        self.orders = Orders()
        os.close(self.neighbours.wakeup_fd)
        object.__setattr__(self.parts.links, "neighbours", self.orders)
        self._armed: str | None = None
        self._go = threading.Event()
        self._tickets: dict[int, Ticket] = {}
        self._adverts: dict[Peer, bytes] = {}
        (tapped,) = self.backends.values()
        assert isinstance(tapped, Tapped)
        self.tapped = tapped
        self.tapped.on_write = self._on_write
        receive = self.parts.links.hub.receive
        self.parts.links.hub.receive = lambda: self._watch(receive())  # type: ignore[method-assign]

    # ------------------------------------------------------------ steps

    def _watch(self, received: list[Received]) -> list[Received]:
        for each in received:
            message = each.message
            if isinstance(message, Deliver):
                self._tickets[message.ticket.nonce] = message.ticket
                self._adverts[Peer(message.ticket.reader.node, message.ticket.reader.incarnation)] = (
                    message.ticket.reader.adverts[0][1]
                )
                self._pass(control_step(message), self.me.node, message.ticket.reader.node)
            elif isinstance(message, Reserve):
                self._pass(control_step(message), message.writer.node, self.me.node)
            elif isinstance(message, Commit):
                self._pass(control_step(message), each.peer.node, self.me.node)
            elif isinstance(message, CommitAck):
                self._pass(control_step(message), self.me.node, each.peer.node)
        return received

    def _on_write(self, peer: Peer, stamp: Stamp, runs: CopyRuns) -> None:
        ticket = self._tickets.get(stamp.nonce)
        if ticket is not None:
            self._pass(chunk_step(ticket, stamp, runs), self.me.node, peer.node)

    def _pass(self, step: str | None, writer: str, reader: str) -> None:
        if step is None or step != self._armed:
            return
        self._armed = None
        self._go.clear()
        say(at=step, writer=writer, reader=reader)
        self._go.wait(HELD_AT_MOST_S)

    # ------------------------------------------------------------ orders, on a thread of their own

    def obey(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "arm":
                self._armed = order["step"]
            case "disarm":
                self._armed = None
                self._go.set()
            case "go":
                self._go.set()
            case "gone":
                self.orders.news.put(Peer(order["node"], order["boot"]))
            case "proxy":
                self.tapped.proxy_port = order["port"]
            case "status":
                self.orders.calls.put(self._tell_status)
            case "cut":
                shut_all(socket.SOCK_SEQPACKET)
            case "blind":
                self.parts.reader._is_intact = lambda *_: True  # type: ignore[method-assign]
            case "twice":
                self._connect_twice(order["node"])
        self.orders.ring()

    def _tell_status(self) -> None:
        parts = self.parts
        slots, writer_idle = parts.scheduler.load().slots_used, parts.writer.is_idle()
        held = {
            "used": parts.pages.num_used,
            "quarantined": parts.pages.num_quarantined,
            "pinned": parts.prefill.num_pinned,
            "slots": slots,
        }
        held |= {"tickets": parts.reader.open_tickets, "writing": int(not writer_idle)}
        problems = []
        if not any(held.values()):
            for books in (parts.scheduler, parts.pages, parts.reader, parts.writer):
                try:
                    books.check_integrity()
                except Exception as error:  # told to the test, which fails
                    problems.append(f"{self.me.node}: {error!r}")
        say(status=held, problems=problems)

    def _connect_twice(self, node: str) -> None:
        """Say hello to a reader of shm a second time, and repeat the first notice of each of its tickets there."""
        from pdcluster.transfer.backends import shm_frames
        from pdcluster.transfer.layout.runs import span_table

        for peer, data in list(self._adverts.items()):
            if peer.node != node:
                continue
            advert = shm_frames.decode_advert(data)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(1.0)
                try:
                    sock.connect(b"\0" + advert.socket)
                    sock.send(
                        shm_frames.encode(
                            shm_frames.ShmHello(advert.token, advert.epoch, self.me.node, self.me.incarnation)
                        )
                    )
                    for fd in socket.recv_fds(sock, 65536, 64)[1]:
                        os.close(fd)
                    for nonce, ticket in list(self._tickets.items()):
                        sock.send(
                            shm_frames.pack_notice(
                                shm_frames.CopyNotice(Stamp(nonce, 0, 1, 4096), ticket.region, span_table(()))
                            )
                        )
                except OSError:
                    continue  # an older boot of the reader


def shut_all(kind: int) -> None:
    """Shut down every connected unix socket of this kind that the process has."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            own = os.dup(int(entry))
        except OSError:
            continue  # another thread closed it meanwhile
        if not stat.S_ISSOCK(os.fstat(own).st_mode):
            os.close(own)
            continue
        with socket.socket(fileno=own) as sock:
            if sock.family == socket.AF_UNIX and sock.type == kind:
                try:
                    sock.getpeername()
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it listens


def main(name: str, role: str, backend: str, boot: str) -> None:
    faulthandler.enable()
    cluster = LocalCluster({}, make_backend=lambda me: Tapped(make_backend(backend, me)), group_s=1e-12)  # type: ignore[arg-type,return-value]
    cluster.boots, cluster.wire, cluster.transfer = itertools.count(int(boot)), WIRE, TRANSFER
    node = FaultyNode(cluster, name, role, kit())  # type: ignore[arg-type]
    port = None if backend == "shm" else msgspec.msgpack.decode(node.parts.backends[0].advert(), type=TcpAdvert).port
    say(ready=True, boot=node.me.incarnation, address=node.parts.links.hub.address, port=port)
    threading.Thread(target=listen, args=(node,), daemon=True).start()
    node.loop.run()


def listen(node: FaultyNode) -> None:
    try:
        for line in sys.stdin:
            node.obey(json.loads(line))
    except Exception:
        say(broken=traceback.format_exc())  # without this thread the node would only look as if it hung
    os.kill(os.getpid(), signal.SIGKILL)  # or the test is gone


if __name__ == "__main__":
    main(*sys.argv[1:5])
