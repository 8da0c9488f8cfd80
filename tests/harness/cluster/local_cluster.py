"""A whole cluster in one thread: real node loops, real links, the real router cluster and dispatch; oracle engines, and
a scripted or real medium."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import zmq
from fake_backend import FakeBackend, FakeNetwork
from oracle import NUM_LAYERS, VOCAB, OracleEngine
from version_choice import FirstVersion

from pdcluster.bootstrap.card import Adapter, ClusterSnapshot, NodeCard
from pdcluster.core.errors import UnknownModel
from pdcluster.core.messages import PROTOCOL_VERSION, Role, Sampling
from pdcluster.kv.hashing import chain_root
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.node.control import NodeControl
from pdcluster.node.native.assembly import Shape, Wiring, assemble
from pdcluster.node.native.components import StepEngine
from pdcluster.node.native.engine_side import NativeSide
from pdcluster.node.native.grammar_queue import GrammarSource
from pdcluster.scheduler.scheduler import SchedulerLimits
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.protocol.session import Settings
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.core.generation import Done, Generation
from pdcluster_router.core.job import HashChain
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.policy.base import Force
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

BLOCK = 4
WIRE = WireSettings(heartbeat_s=0.05, lease_s=0.5, rewelcome_s=0.1)


PAIR = {"p0": "prefill", "d0": "decode"}


class NoNeighbours:
    def __init__(self) -> None:
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def gone(self):
        return ()

    def set_draining(self, is_draining: bool) -> None:
        self.is_draining = is_draining

    def set_role(self, role: Role) -> None:
        """Routers hear of it by the load reports."""

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """These nodes have none."""

    def set_weights_share(self, share: float) -> None:
        self.share = share


class NoFiles:
    def chunk(self, message):
        raise AssertionError("nobody asks for files here")


class OneModel(FirstVersion):
    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    def models(self):
        return ()

    def text(self, model):
        raise UnknownModel(model)

    def chain(self, model, salt, weights=None):
        return HashChain(chain_root(block_tokens=self.block_tokens, salt=salt), self.block_tokens)


@dataclass(frozen=True)
class EngineKit:
    """An engine and what a node has to know of it. token_budget: small, so that prompts are computed in several
    chunks."""

    engine: StepEngine
    shape: Shape
    fingerprint: Fingerprint
    max_len: int = 512
    token_budget: int = 24
    reserve_tokens: int = 16
    grammars: GrammarSource | None = None


def oracle_kit(num_pages: int, make_engine: Callable[[int, int], OracleEngine] = OracleEngine) -> EngineKit:
    engine = make_engine(num_pages, BLOCK)
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_tokens=BLOCK, dtype="float32")
    pages = PageShape.plain(BLOCK, engine.page_bytes, NUM_LAYERS)
    shape = Shape(VOCAB, num_pages, BLOCK, pages, (engine.region,), (memoryview(engine.memory),))
    return EngineKit(engine, shape, Fingerprint("model", "weights", PROTOCOL_VERSION, BLOCK, layout))


class LocalNode:
    def __init__(self, cluster: LocalCluster, name: str, role: Role, kit: EngineKit, me: Peer | None = None) -> None:
        """me: the boot as which its ranks were started."""
        self.cluster = cluster
        self.kit = kit
        self.me = me if me is not None else Peer(name, f"{name}-{next(cluster.boots)}")
        self.role = role
        self.engine = kit.engine
        self.neighbours = NoNeighbours()
        self.backends: dict[str, Backend] = cluster.make_backends(self.me)
        wiring = Wiring(
            self.me,
            role,
            "127.0.0.1:0",
            cluster.context_of(name),
            cluster.wire,
            self.backends,
            cluster.transfer,
            parking_s=5.0,
            group_s=cluster.group_s,
        )
        limits = SchedulerLimits(
            token_budget=kit.token_budget,
            max_rows=8,
            max_waiting=64,
            max_len=kit.max_len,
            reserve_tokens=kit.reserve_tokens,
        )
        self.parts = assemble(
            wiring, kit.shape, self.engine, limits, NoFiles(), self.neighbours, cluster.clock, kit.grammars
        )
        self.side = NativeSide(self.parts, clock=cluster.clock, looks_ahead=cluster.looks_ahead)
        self.loop = NodeControl(
            self.parts.links, self.side, report_s=cluster.report_s, drain_s=5.0, clock=cluster.clock
        )
        self.is_alive = True
        self.is_paused = False
        self.task = self._begin()

    def _begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run())

    def card(self) -> NodeCard:
        shape, address = self.kit.shape, self.parts.links.hub.address
        return NodeCard(
            self.me.node,
            self.me.incarnation,
            self.role,
            address,
            "model",
            self.kit.fingerprint,
            self.kit.max_len,
            shape.vocab_size,
            shape.num_pages,
            backends=tuple(self.backends),
        )

    async def _run(self) -> None:
        while self.is_alive:
            if not self.is_paused:
                self.loop.turn()
            if isinstance(self.engine, OracleEngine):
                self.engine.tick()
            await asyncio.sleep(0.0002)

    async def kill(self) -> None:
        """SIGKILL, as far as others can see: sockets close, writes stop, nothing is said."""
        self.is_alive = False
        await self.task
        for backend in self.backends.values():
            if isinstance(backend, FakeBackend):
                backend.network.kill(self.me)
        self.parts.links.hub.close()

    def is_idle(self) -> bool:
        pages = self.parts.pages
        pinned = self.parts.prefill.num_pinned + self.parts.export.num_pinned + self.parts.fetch.num_open
        return pages.num_used == 0 and pages.num_quarantined == 0 and pinned == 0 and self.parts.reader.is_idle()

    async def close(self) -> None:
        if self.is_alive:
            self.is_alive = False
            await self.task
            self.parts.links.hub.close()
        for backend in self.parts.backends:
            backend.shutdown()
        self.engine.close()
        os.close(self.neighbours.wakeup_fd)
        self.loop.close()


def clock_of_loop() -> Callable[[], float]:
    """What timers of the running loop run by; outside of one, the machine's."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return time.monotonic


class LocalCluster:
    """Use as `async with`. force: the mode of every request; auto may find that prefill beside decode is cheaper.
    group_s: next to nothing makes one group of each layer. make_backend: the medium of every node; default: scripted
    ones by these names, whose faults are `networks[name].plan`."""

    # Whether nodes plan a step before the tokens of the one before are known.
    looks_ahead = True

    def __init__(
        self,
        roles: dict[str, Role],
        *,
        num_pages: int = 256,
        make_kit: Callable[[int], EngineKit] = oracle_kit,
        make_backend: Callable[[Peer], Backend] | None = None,
        media: tuple[str, ...] = ("fake",),
        group_s: float = 0.0004,
        force: Force = "auto",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.force: Force = force
        self.group_s = group_s
        self.clock = clock = clock or clock_of_loop()
        self.wire = WIRE
        self.report_s = 0.005
        self.stages = StageDeadlines(handshake_s=2.0, transfer_s=2.0, hold_s=0.01)
        self.roles = roles
        self.num_pages = num_pages
        self.make_kit = make_kit
        self.boots = itertools.count()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.networks = {name: FakeNetwork(clock) for name in media}
        self.network = self.networks[media[0]]
        self.make_backend = make_backend
        self.transfer = Settings(repeat_s=0.02, commit_s=1.0, arrival_s=0.1, proof_s=0.02)
        self.nodes: dict[str, LocalNode] = {}
        self.versions = itertools.count(1)

    async def __aenter__(self) -> LocalCluster:
        try:
            await self._start_all()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start_all(self) -> None:
        self.router = NodeTable(Peer("router", "router-1"), context=self.context_of("router"), settings=self.wire)
        for name, role in self.roles.items():
            self.start(name, role)
        block_tokens = next(iter(self.nodes.values())).kit.shape.block_tokens
        self.selector = PolicySelector(
            PolicyHolder(make_policy(DEFAULT)), self.router.view, self.router.cached, force=self.force
        )
        self.dispatch = Dispatch(
            self.router,
            OneModel(block_tokens),
            self.selector,
            DispatchSettings(stages=self.stages, hold_s=20.0),
            self.clock,
        )
        await self.until(lambda: len(self.router.view().nodes) == len(self.roles))

    def make_backends(self, me: Peer) -> dict[str, Backend]:
        """The media of a node by name, best first."""
        if self.make_backend is not None:
            backend = self.make_backend(me)
            return {backend.name: backend}
        return {name: FakeBackend(network, me, name) for name, network in self.networks.items()}

    def context_of(self, process: str) -> zmq.Context[zmq.Socket[bytes]]:
        """All processes share one here; a simulated wire tells them apart."""
        return self.context

    def make_node(self, name: str, role: Role) -> LocalNode:
        return LocalNode(self, name, role, self.make_kit(self.num_pages))

    async def __aexit__(self, *exc) -> None:
        self.router.close()
        for node in self.nodes.values():
            await node.close()
        self.context.destroy(0)

    def start(self, name: str, role: Role) -> LocalNode:
        self.nodes[name] = self.make_node(name, role)
        self.announce()
        return self.nodes[name]

    def announce(self) -> None:
        """What the bootstrap would say now."""
        cards = tuple(node.card() for node in self.nodes.values() if node.is_alive)
        self.router.apply(ClusterSnapshot("boot", next(self.versions), False, cards))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.001)

    async def run(
        self, prompt: list[int], sampling: int | Sampling, *, deadline_s: float = 20.0, client_id: str = ""
    ) -> tuple[list[int], Done]:
        """The tokens of one request, and its Done. sampling: or only max_tokens."""
        if isinstance(sampling, int):
            sampling = Sampling(max_tokens=sampling, seed=1)
        name = f"r{next(self.versions)}"
        return await self._events(
            Generation(name, "model", array("i", prompt), sampling, deadline_s, client_id=client_id)
        )

    async def run_choices(
        self, prompt: list[int], samplings: Sequence[Sampling], *, deadline_s: float = 20.0
    ) -> list[tuple[list[int], Done]]:
        """The same of all choices of one request."""
        name, tokens = f"r{next(self.versions)}", array("i", prompt)
        first = Generation(f"{name}-0", "model", tokens, samplings[0], deadline_s, leads=len(samplings) > 1)
        others = [
            Generation(f"{name}-{n}", "model", tokens, each, deadline_s, parent=first.request)
            for n, each in enumerate(samplings[1:], 1)
        ]
        return await asyncio.gather(*(self._events(generation) for generation in (first, *others)))

    async def _events(self, generation: Generation) -> tuple[list[int], Done]:
        tokens: list[int] = []
        async with aclosing(self.dispatch.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return tokens, event
                assert event.position == len(tokens)
                tokens.extend(event.token_ids)
        raise AssertionError("no Done")

    async def until_idle(self) -> None:
        """After any fault, idle means: 0 pages in use, 0 quarantined, 0 pinned, and books that add up."""
        alive = [node for node in self.nodes.values() if node.is_alive]
        await self.until(lambda: all(node.is_idle() for node in alive))
        for node in alive:
            node.parts.scheduler.check_integrity()
            node.parts.pages.check_integrity()
            node.parts.reader.check_integrity()
            node.parts.fetch.check_integrity()
            node.parts.export.check_integrity()
        assert self.router.ledger.num_requests() == 0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + length).randrange(VOCAB) for _ in range(length)]
