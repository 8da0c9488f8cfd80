"""Composes a node from its parts, so that the process (`server`) and the tests build the very same thing around different engines and media."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq

from pdcluster.kv.pages import PagePool
from pdcluster.messages import Endpoint, Role
from pdcluster.node.decode import DecodeSide
from pdcluster.node.export import ExportSide
from pdcluster.node.fetch import FetchSide
from pdcluster.node.files import ModelFiles
from pdcluster.node.grouping import LayerGroups
from pdcluster.node.legs import EndedLegs
from pdcluster.node.outbox import Outbox
from pdcluster.node.parking import Parking
from pdcluster.node.parts import Neighbours, NodeParts, StepEngine
from pdcluster.node.prefill import PrefillSide
from pdcluster.node.rank_link import LinkedMemories, RankLink
from pdcluster.node.sequences import SequenceFactory
from pdcluster.node.standing import Standing
from pdcluster.node.stopwatch import Stopwatch
from pdcluster.scheduler.scheduler import Limits, Scheduler
from pdcluster.transfer.base import Backend, Peer, Region
from pdcluster.transfer.geometry import PageShape
from pdcluster.transfer.ranked import RankedBackend
from pdcluster.transfer.reader import Reader
from pdcluster.transfer.session import Settings as TransferSettings
from pdcluster.transfer.writer import Writer
from pdcluster.wire.hub import Hub
from pdcluster.wire.sockets import WireSettings

KV_REGION = 0
"""The id of rank 0's KV pool among a node's regions; the other ranks' follow."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model and the pools fix. regions, memories: the pool of rank 0 and its bytes; links: to the other ranks, in their order."""

    vocab_size: int
    num_pages: int
    block_tokens: int
    pages: PageShape
    regions: tuple[Region, ...]
    memories: tuple[memoryview, ...]
    links: tuple[RankLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the node talks. backends: by name, best first; group_s: what one more group of layers costs (see grouping); parking_share: how much
    of the pool finished KV may park in (see parking); pull_s: how long a prompt may wait for KV from another node (see fetch)."""

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


def assemble(
    wiring: Wiring, shape: Shape, engine: StepEngine, limits: Limits, files: ModelFiles, neighbours: Neighbours, clock: Callable[[], float]
) -> NodeParts:
    """Everything the loop needs. The hub is bound when this returns; nothing was said yet."""
    hub = Hub(wiring.me, listen=wiring.listen, context=wiring.context, settings=wiring.wire, clock=clock)
    backends = {name: RankedBackend((own, *(link.ends[name] for link in shape.links)), KV_REGION) for name, own in wiring.backends.items()}
    for backend in backends.values():
        for region in shape.regions:
            backend.register(region)
    order = tuple(backends)
    pages = PagePool(shape.num_pages, shape.pages.page_tokens, shape.block_tokens)
    scheduler = Scheduler(pages, limits, clock)
    writer = Writer(
        wiring.me,
        backends,
        order,
        region=KV_REGION,
        shape=shape.pages,
        memories=shape.memories,
        clock=clock,
        settings=wiring.transfer,
        block_tokens=shape.block_tokens,
    )
    reader = Reader(
        Endpoint(wiring.me.node, wiring.me.incarnation, hub.address),
        backends,
        order,
        region=KV_REGION,
        shape=shape.pages,
        memories=shape.memories,
        ranks=LinkedMemories(shape.memories[0], shape.links),
        clock=clock,
        settings=wiring.transfer,
    )
    outbox, ended = Outbox(), EndedLegs()
    groups = LayerGroups(shape.pages.num_layers, shape.pages.page_bytes * shape.pages.ranks, group_s=wiring.group_s)
    parking = Parking(max(int(shape.num_pages * wiring.parking_share), 1), clock)
    return NodeParts(
        me=wiring.me,
        standing=Standing(wiring.role, neighbours),
        max_rows=limits.max_rows,
        engine=engine,
        scheduler=scheduler,
        pages=pages,
        sequences=SequenceFactory(shape.vocab_size, shape.block_tokens, limits.max_len, clock),
        hub=hub,
        backends=tuple(backends.values()),
        writer=writer,
        reader=reader,
        outbox=outbox,
        ended=ended,
        prefill=PrefillSide(
            scheduler, pages, writer, outbox, ended, groups=groups, parking=parking, parking_s=wiring.parking_s, clock=clock
        ),
        decode=DecodeSide(scheduler, pages, reader, outbox, ended, vocab_size=shape.vocab_size, clock=clock),
        fetch=FetchSide(scheduler, pages, reader, outbox, pull_s=wiring.pull_s, clock=clock),
        export=ExportSide(scheduler, pages, writer, outbox),
        files=files,
        stopwatch=Stopwatch(limits.token_budget, clock),
        neighbours=neighbours,
    )
