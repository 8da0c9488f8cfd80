"""Builds a node from its components. The process (`server`) and tests build the same node around other engines and
media.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import zmq

from pdcluster.core.awake_clock import AwakeClock
from pdcluster.core.messages import Endpoint, Role
from pdcluster.kv.pages import PagePool
from pdcluster.node.acceptance import Acceptance
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.control import Neighbours, NodeLinks
from pdcluster.node.legs import EndedLegs
from pdcluster.node.native.components import NodeComponents, StepEngine
from pdcluster.node.native.context import NodeContext
from pdcluster.node.native.decode import DecodeSide
from pdcluster.node.native.grammar_queue import GrammarQueue, GrammarSource
from pdcluster.node.native.kv_fetch import ExportSide, FetchSide
from pdcluster.node.native.prefill import LayerGroups, PrefillSide
from pdcluster.node.native.sequence_factory import SequenceFactory
from pdcluster.node.native.step_timer import StepTimer, StuckWatch
from pdcluster.node.native.tensor_parallel.endpoint_client import LinkedMemories, RankLink
from pdcluster.node.outbox import Outbox
from pdcluster.node.parking import ParkedKV
from pdcluster.node.reports.leg_records import LegRecorder
from pdcluster.node.reports.load_report import ModelFiles
from pdcluster.node.work_checks import WorkChecks
from pdcluster.scheduler.scheduler import Scheduler, SchedulerLimits
from pdcluster.telemetry.tracing import SpanSink
from pdcluster.transfer.backends.base import Backend, Peer, Region
from pdcluster.transfer.backends.ranked import RankedBackend
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import LocalPages
from pdcluster.transfer.protocol.session import Settings as TransferSettings
from pdcluster.transfer.protocol.writer import Writer
from pdcluster.wire.hub import Hub
from pdcluster.wire.sockets import WireSettings

# Id of rank 0's KV region. Other ranks' ids follow.
KV_REGION = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model and the pools fix.

    regions, memories: rank 0's pool and its bytes.
    links: to the other ranks, in order.
    weights: digest of the model's.
    """

    vocab_size: int
    num_pages: int
    block_tokens: int
    pages: PageShape
    regions: tuple[Region, ...]
    memories: tuple[memoryview, ...]
    links: tuple[RankLink, ...] = ()
    weights: str = ""

    @property
    def local_pages(self) -> LocalPages:
        return LocalPages(KV_REGION, self.pages, self.memories, self.weights)


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the node communicates.

    backends: by name, best first.
    group_s: cost of one more group of layers (`LayerGroups`).
    parking_share: share of the pool for parked KV.
    pull_s: how long a prompt may wait for KV of another node.
    spans: takes those of traced requests; None: none is traced.
    """

    me: Peer
    role: Role
    listen: str
    context: zmq.Context[zmq.Socket[bytes]]
    wire: WireSettings
    backends: Mapping[str, Backend]
    transfer: TransferSettings
    parking_s: float
    group_s: float = 0.0004
    parking_share: float = 0.5
    pull_s: float = 2.0
    spans: SpanSink | None = None
    is_cordoned: bool = False


def assemble(
    wiring: Wiring,
    shape: Shape,
    engine: StepEngine,
    limits: SchedulerLimits,
    files: ModelFiles,
    neighbours: Neighbours,
    clock: Callable[[], float],
    grammars: GrammarSource | None = None,
) -> NodeComponents:
    """Build all that the loop needs. The hub is bound afterwards; nothing was sent.

    grammars: None when the engine has none.
    """
    stopwatch = StepTimer(limits.token_budget, clock)
    progress_s = partial(stopwatch.progress_s, num_layers=shape.pages.num_layers)
    links = links_of(wiring, files, neighbours, clock)
    backends = _media_of_all_ranks(wiring, shape)
    pages = PagePool(shape.num_pages, shape.pages.page_tokens, shape.block_tokens)
    writer, reader = _writer(wiring, shape, backends, clock), _reader(wiring, shape, backends, links.hub, clock)
    shared = NodeContext(
        Scheduler(pages, limits, clock),
        pages,
        writer,
        reader,
        links.outbox,
        links.ended,
        clock,
        LegRecorder(wiring.me.node, wiring.spans),
    )
    shared.scheduler.most_batch_rows = stopwatch.most_batch_rows
    return NodeComponents(
        links=links,
        max_rows=limits.max_rows,
        engine=engine,
        scheduler=shared.scheduler,
        pages=pages,
        sequences=SequenceFactory(WorkChecks(shape.vocab_size, limits.max_len), shape.block_tokens, clock),
        backends=tuple(backends.values()),
        writer=writer,
        reader=reader,
        prefill=_prefill_side(wiring, shape, shared),
        decode=DecodeSide(shared, vocab_size=shape.vocab_size),
        fetch=FetchSide(shared.scheduler, pages, reader, shared.outbox, pull_s=wiring.pull_s, clock=clock),
        export=ExportSide(shared.scheduler, pages, writer, shared.outbox),
        stopwatch=stopwatch,
        stuck=StuckWatch(progress_s, AwakeClock(wiring.wire.heartbeat_s / 2, clock)),
        grammars=GrammarQueue(grammars, shared.outbox, clock),
    )


def links_of(
    wiring: Wiring,
    files: ModelFiles,
    neighbours: Neighbours,
    clock: Callable[[], float],
    *,
    is_sleeping: bool = False,
) -> NodeLinks:
    """The hub is bound; nothing was sent."""
    awake = AwakeClock(wiring.wire.heartbeat_s / 2, clock)
    hub = Hub(wiring.me, listen=wiring.listen, context=wiring.context, settings=wiring.wire, clock=awake)
    standing = NodeAvailability(wiring.role, neighbours, is_cordoned=wiring.is_cordoned, is_sleeping=is_sleeping)
    outbox = Outbox()
    return NodeLinks(
        wiring.me, standing, Acceptance(wiring.me.node, standing, outbox), hub, outbox, EndedLegs(), files, neighbours
    )


def _media_of_all_ranks(wiring: Wiring, shape: Shape) -> dict[str, RankedBackend]:
    """Backends by name, best first, each over the endpoints of every rank. This process's pools are registered."""
    backends = {
        name: RankedBackend((own, *(link.ends[name] for link in shape.links)), KV_REGION)
        for name, own in wiring.backends.items()
    }
    for backend in backends.values():
        for region in shape.regions:
            backend.register(region)
    return backends


def _writer(wiring: Wiring, shape: Shape, backends: Mapping[str, Backend], clock: Callable[[], float]) -> Writer:
    return Writer(
        wiring.me,
        backends,
        tuple(backends),
        local=shape.local_pages,
        clock=clock,
        settings=wiring.transfer,
        block_tokens=shape.block_tokens,
    )


def _reader(
    wiring: Wiring, shape: Shape, backends: Mapping[str, Backend], hub: Hub, clock: Callable[[], float]
) -> Reader:
    return Reader(
        Endpoint(wiring.me.node, wiring.me.incarnation, hub.address, link_key=hub.link_key),
        backends,
        tuple(backends),
        local=shape.local_pages,
        ranks=LinkedMemories(shape.memories[0], shape.links),
        clock=clock,
        settings=wiring.transfer,
    )


def _prefill_side(wiring: Wiring, shape: Shape, shared: NodeContext) -> PrefillSide:
    return PrefillSide(
        shared,
        groups=LayerGroups(shape.pages.num_layers, shape.pages.page_bytes * shape.pages.ranks, group_s=wiring.group_s),
        parking=ParkedKV(max(int(shape.num_pages * wiring.parking_share), 1), shared.clock, wiring.parking_s),
    )
