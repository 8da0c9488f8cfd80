"""What the sides of a node share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdcluster.kv.pages import PagePool
from pdcluster.node.legs import EndedLegs
from pdcluster.node.outbox import Outbox
from pdcluster.node.reports.leg_records import LegRecorder
from pdcluster.scheduler.scheduler import Scheduler
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.writer import Writer


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What the four sides of a node share."""

    scheduler: Scheduler
    pages: PagePool
    writer: Writer
    reader: Reader
    outbox: Outbox
    ended: EndedLegs
    clock: Callable[[], float]
    records: LegRecorder
