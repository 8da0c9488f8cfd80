"""The components of a node with the native engine, and what they need of that engine. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdcluster.core.step import StepPlan, StepResult
from pdcluster.kv.pages import PagePool
from pdcluster.node.control import NodeLinks
from pdcluster.node.native.decode import DecodeSide
from pdcluster.node.native.grammar_queue import GrammarQueue
from pdcluster.node.native.kv_fetch import ExportSide, FetchSide
from pdcluster.node.native.prefill import PrefillSide
from pdcluster.node.native.sequence_factory import SequenceFactory
from pdcluster.node.native.step_timer import StepTimer, StuckWatch
from pdcluster.scheduler.scheduler import Scheduler
from pdcluster.transfer.backends.base import Backend
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.writer import Writer


class StepEngine(Protocol):
    """The part of the engine that `NativeSide` drives.

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


@dataclass(frozen=True, slots=True)
class NodeComponents:
    """The components of a node, built by `assembly`."""

    links: NodeLinks
    max_rows: int
    engine: StepEngine
    scheduler: Scheduler
    pages: PagePool
    sequences: SequenceFactory
    backends: tuple[Backend, ...]
    writer: Writer
    reader: Reader
    prefill: PrefillSide
    decode: DecodeSide
    fetch: FetchSide
    export: ExportSide
    stopwatch: StepTimer
    stuck: StuckWatch
    grammars: GrammarQueue
