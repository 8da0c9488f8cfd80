"""The components of a node's loop, and what it needs of an engine and of the bootstrap. Declarations only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pdcluster.core.messages import Role
from pdcluster.core.step import StepPlan, StepResult
from pdcluster.kv.pages import PagePool
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.decode import DecodeSide
from pdcluster.node.grammar_queue import GrammarQueue
from pdcluster.node.kv_fetch import ExportSide, FetchSide
from pdcluster.node.legs import EndedLegs, SequenceFactory
from pdcluster.node.outbox import Outbox
from pdcluster.node.prefill import PrefillSide
from pdcluster.node.reports.load_report import ModelFiles
from pdcluster.node.reports.step_timer import StepTimer, StuckWatch
from pdcluster.scheduler.scheduler import Scheduler
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.writer import Writer
from pdcluster.wire.hub import Hub


class StepEngine(Protocol):
    """The part of the engine that the loop drives.

    done_fd: readable when a launched step can be collected.
    layer_fd: readable when a milestone of its plan was reached. One more step may be launched behind the running one.
    It is computed once that is done, collected or not.
    progress: differs whenever a running step got on.
    """

    @property
    def done_fd(self) -> int: ...

    @property
    def layer_fd(self) -> int: ...

    @property
    def layers_done(self) -> int: ...

    @property
    def progress(self) -> int: ...

    @property
    def is_compiling(self) -> bool: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self, timeout: float | None = None) -> StepResult: ...

    def close(self) -> None: ...


class Neighbours(Protocol):
    """Nodes that left the cluster, from the bootstrap.

    wakeup_fd: readable when there is news.
    """

    wakeup_fd: int

    def gone(self) -> Iterable[Peer]: ...

    def set_draining(self, is_draining: bool) -> None: ...

    def set_role(self, role: Role) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeComponents:
    """The components of a node, built by `assembly`."""

    me: Peer
    standing: NodeAvailability
    max_rows: int
    engine: StepEngine
    scheduler: Scheduler
    pages: PagePool
    sequences: SequenceFactory
    hub: Hub
    backends: tuple[Backend, ...]
    writer: Writer
    reader: Reader
    outbox: Outbox
    ended: EndedLegs
    prefill: PrefillSide
    decode: DecodeSide
    fetch: FetchSide
    export: ExportSide
    files: ModelFiles
    stopwatch: StepTimer
    stuck: StuckWatch
    neighbours: Neighbours
    grammars: GrammarQueue
