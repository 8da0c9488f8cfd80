"""Faults by name, and the moments of the protocol at which a script lets them happen in a SimulatedCluster. A run's
script follows from its seed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from fake_backend import Fault
from simulated_cluster import SimulatedBackend, SimulatedCluster
from virtual_wire import Connection, Delivery

from pdcluster.core.messages import AnyMessage, Commit, CommitAck, Deliver, Fetch, Reserve, Reserved, Ticket
from pdcluster.transfer.backends.base import Peer, Stamp, WriteStatus
from pdcluster.transfer.layout.spans import CopyRuns
from pdcluster.wire import codec

FAULTS = (
    "delay", "drop", "duplicate", "reorder", "torn", "bit flip", "late", "unknown", "writer dies", "reader dies",
    "half open", "cancel",
)  # fmt: skip
STEPS = ("reserve", "deliver", "first chunk", "middle chunk", "last chunk", "commit", "ack")
PROCESS_FAULTS = {"writer dies", "reader dies", "half open", "cancel"}


@dataclass
class Trigger:
    """`fault` at the moments `step` that follow the first `skip` of them, `times` times."""

    fault: str
    step: str
    skip: int = 0
    times: int = 1
    fired: int = 0


class Script:
    """Wire it to a cluster with `install`. tasks: who waits for a request, so that `cancel` can leave."""

    def __init__(self, cluster: SimulatedCluster, rng: random.Random, triggers: list[Trigger]) -> None:
        self.cluster = cluster
        self.rng = rng
        self.triggers = triggers
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.is_active = True
        self._tickets: dict[int, Ticket] = {}
        self._pending: set[asyncio.Task[None]] = set()

    def install(self) -> None:
        self.cluster.zmq.tap = self._tap
        self.cluster.network.plan_write = self._plan_write

    def heal(self) -> None:
        """From now on nothing bad happens."""
        self.is_active = False
        self.cluster.zmq.muted.clear()

    def _due(self, step: str) -> str | None:
        """The fault for this moment, if there is one."""
        for trigger in self.triggers:
            if trigger.step != step or trigger.fired >= trigger.times:
                continue
            if trigger.skip:
                trigger.skip -= 1
                continue
            trigger.fired += 1
            return trigger.fault
        return None

    # ------------------------------------------------------------ control frames

    def _tap(self, connection: Connection, sender: str, data: bytes) -> list[Delivery]:
        if not self.is_active:
            return [Delivery(data)]
        found: tuple[str, AnyMessage] | None = None
        for message in codec.decode(data).messages:
            if isinstance(message, Reserved | Deliver | Fetch):
                self._tickets[message.ticket.nonce] = message.ticket
            step = control_step(message)
            fault = self._due(step) if step is not None and found is None else None
            found = (fault, message) if fault is not None else found
        if found is None:
            return [Delivery(data)]
        fault, message = found
        receiver = connection.router.owner if sender == connection.dealer.owner else connection.dealer.owner
        if fault in PROCESS_FAULTS:
            self._strike(fault, *self._parties(message, receiver))
            return [Delivery(data)] if self.rng.random() < 0.5 else []
        return self._frame(fault, connection, data)

    def _frame(self, fault: str, connection: Connection, data: bytes) -> list[Delivery]:
        rng = self.rng
        if fault == "delay":
            return [Delivery(data, rng.choice((0.02, 0.3, 3.0)))]
        if fault == "drop":
            return []
        if fault == "duplicate":
            return [Delivery(data), Delivery(data, rng.choice((0.0, 0.01, 1.0)), in_order=False)]
        if fault == "reorder":
            return [Delivery(data, rng.choice((0.001, 0.05, 0.6)), in_order=False)]
        if fault == "torn":
            return [Delivery(data[: rng.randrange(len(data))])]
        if fault == "bit flip":
            position = rng.randrange(len(data))
            return [Delivery(data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :])]
        if fault == "late":
            return [Delivery(data, rng.choice((6.0, 12.0, 35.0)), in_order=False)]
        assert fault == "unknown"  # the connection ends, and the sender cannot know whether the frame went through
        self.cluster.event_loop.call_soon(self.cluster.zmq.cut, connection)
        return [Delivery(data)] if rng.random() < 0.5 else []

    def _parties(self, message: AnyMessage, receiver: str) -> tuple[str, str, str]:
        """(writer, reader, request) of the ticket that a message is about."""
        if isinstance(message, Reserve):
            return message.writer.node, receiver, message.work.request
        assert isinstance(message, Reserved | Deliver | Fetch | Commit | CommitAck)
        ticket = message.ticket if isinstance(message, Reserved | Deliver | Fetch) else self._tickets[message.nonce]
        return ticket.writer.node, ticket.reader.node, ticket.request

    # ------------------------------------------------------------ writes

    def _plan_write(self, backend: SimulatedBackend, peer: Peer, stamp: Stamp, runs: CopyRuns) -> Fault:
        ticket = self._tickets.get(stamp.nonce)
        if {backend.me.node, peer.node} & self.cluster.zmq.muted:
            return Fault(delay_s=15.0, lost_s=5.0)
        fault = self._due(chunk_step(ticket, stamp, runs)) if ticket is not None and self.is_active else None
        if fault is None:
            return Fault(delay_s=0.0003)
        if fault in PROCESS_FAULTS:
            assert ticket is not None
            self._strike(fault, backend.me.node, peer.node, ticket.request)
            return Fault(delay_s=self.rng.choice((0.0, 0.001, 0.01)))
        return self._write_fault(fault, stamp)

    def _write_fault(self, fault: str, stamp: Stamp) -> Fault:
        rng = self.rng
        if fault == "delay":
            return Fault(delay_s=rng.choice((0.01, 0.3, 3.0)), answer_s=rng.choice((0.0, 0.5)))
        if fault == "drop":
            return (
                Fault(arrivals=0)
                if rng.random() < 0.5
                else Fault(status=WriteStatus.FAILED, answer_s=rng.choice((0.0, 0.2)))
            )
        if fault == "duplicate":
            return Fault(arrivals=2, arrival_s=rng.choice((0.0, 0.001, 0.5)))
        if fault == "reorder":
            return Fault(delay_s=rng.choice((0.001, 0.005, 0.02)))
        if fault == "torn":
            return Fault(torn_bytes=rng.randrange(stamp.nbytes))
        if fault == "bit flip":
            return Fault(flip_byte=rng.randrange(stamp.nbytes))
        if fault == "late":
            return Fault(delay_s=rng.choice((1.0, 8.0, 45.0)), lost_s=rng.choice((0.0, 0.2, 5.0)))
        assert fault == "unknown"
        final = rng.choice((WriteStatus.DONE, WriteStatus.FAILED))
        return Fault(delay_s=rng.choice((0.02, 2.0, 20.0, 70.0)), unknown_s=rng.choice((0.0, 0.01, 1.0)), status=final)

    # ------------------------------------------------------------ processes

    def _strike(self, fault: str, writer: str, reader: str, request: str) -> None:
        """After the present call, because it is made from inside the process."""
        loop = self.cluster.event_loop
        if fault == "cancel":
            task = self.tasks.get(request)
            if task is not None:
                loop.call_soon(task.cancel)
        elif fault == "half open":
            loop.call_soon(self._mute, self.rng.choice((writer, reader)))
        else:
            dying = self.cluster.crash(
                writer if fault == "writer dies" else reader, restart_s=self.rng.choice((0.3, 1.0, 3.0))
            )
            task = loop.create_task(dying)
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    def _mute(self, name: str) -> None:
        """Its connections stay up and carry nothing. Perhaps the bootstrap believes that it is dead."""
        loop = self.cluster.event_loop
        self.cluster.zmq.muted.add(name)
        loop.call_later(self.rng.choice((1.0, 4.0, 12.0)), self.cluster.zmq.muted.discard, name)
        if self.rng.random() < 0.5:
            loop.call_later(2.5, self.cluster.declare_gone, self.cluster.nodes[name].me)


def control_step(message: AnyMessage) -> str | None:
    if isinstance(message, Reserve | Reserved):
        return "reserve"
    if isinstance(message, Deliver | Fetch):
        return "deliver"
    if isinstance(message, Commit):
        return "commit"
    return "ack" if isinstance(message, CommitAck) else None


def chunk_step(ticket: Ticket, stamp: Stamp, runs: CopyRuns) -> str:
    """The first chunk of a ticket, the one with the last bytes of its last page, or another one."""
    if stamp.chunk == 0:
        return "first chunk"
    end = (int.from_bytes(ticket.pages[-4:], "little") + 1) * ticket.page_bytes
    return "last chunk" if any(run.target + run.nbytes == end for run in runs) else "middle chunk"
