"""A LocalCluster in virtual time over a simulated wire: processes that can die, hang, lose their connections and come
back, and a watch over every byte that lands in a page.

Real here: node loops, schedulers, pools, both halves of the transfer protocol, links, codec, the router's cluster,
dispatch and attempts, with the product's own timeouts. Simulated: ZMQ's sockets, the medium, the clock, the model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from fake_backend import FakeBackend, FakeNetwork, Fault
from local_cluster import EngineKit, LocalCluster, LocalNode, oracle_kit
from oracle import OracleEngine
from virtual_time import VirtualLoop
from virtual_wire import Context, Wire

from pdcluster.bootstrap.card import Adapter, ClusterSnapshot
from pdcluster.core.messages import Role
from pdcluster.core.step import StepPlan
from pdcluster.transfer.backends.base import Handle, Peer, Stamp
from pdcluster.transfer.layout.spans import CopyRuns
from pdcluster.transfer.protocol.session import Settings
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.core.stages import StageDeadlines

STEP_S = 0.001
SHORTEST_WAIT_S = 0.0002
# The bootstrap tells of a death this much later.
UNLISTED_AFTER_S = 1.5


class TimedOracle(OracleEngine):
    """A step, or one group of its layers, takes STEP_S."""

    def __init__(self, num_pages: int, page_tokens: int, clock: Callable[[], float]) -> None:
        super().__init__(num_pages, page_tokens)
        self._clock = clock
        self.hold = True
        self.due: float | None = None

    def launch(self, plan: StepPlan) -> None:
        is_next = self._plan is not None
        super().launch(plan)
        if not is_next:
            self.due = self._clock() + STEP_S

    def advance(self) -> None:
        if self.due is None or self._clock() < self.due or self._plan is None:
            return
        self.hold = False
        if self._plan.milestones:
            self.tick()
        else:
            self.finish()
        self.hold = True
        self.due = None if self._plan is None else self._clock() + STEP_S


class Watch:
    """The neighbours of a node, as a bootstrap would tell it."""

    def __init__(self) -> None:
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.news: list[Peer] = []

    def gone(self) -> list[Peer]:
        news, self.news = self.news, []
        return news

    def set_draining(self, is_draining: bool) -> None:
        """Nobody asks."""

    def set_role(self, role: Role) -> None:
        """Nobody asks."""

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """These nodes have none."""

    def set_weights_share(self, share: float) -> None:
        self.share = share


class WakingNetwork(FakeNetwork):
    """A scripted medium whose events wake the nodes. plan_write: the fault of a write, told who writes what where."""

    loop: VirtualLoop
    wake: Callable[[], None]
    plan_write: Callable[[SimulatedBackend, Peer, Stamp, CopyRuns], Fault]

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        super().at(delay_s, action)
        self.loop.call_later(delay_s + 1e-6, self.wake)


class SimulatedBackend(FakeBackend):
    network: WakingNetwork

    def write(
        self, peer: Peer, source_region: int, target_region: int, stamp: Stamp, runs: CopyRuns, *rest: bool
    ) -> Handle:
        fault = self.network.plan_write(self, peer, stamp, runs)
        self.network.plan = lambda _: fault
        return super().write(peer, source_region, target_region, stamp, runs, *rest)


class SimulatedNode(LocalNode):
    cluster: SimulatedCluster
    _waiter: asyncio.Future[None] | None = None
    _woken = False

    def wake(self) -> None:
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _run(self) -> None:
        engine = self.engine
        assert isinstance(engine, TimedOracle)
        while self.is_alive:
            self._woken = False
            if not self.is_paused:
                engine.advance()
                self.loop.turn()
            if not self._woken:
                await self._sleep(engine)
            await asyncio.sleep(0)

    async def _sleep(self, engine: TimedOracle) -> None:
        now = self.cluster.clock()
        wait_s = self.loop.wait_s() if engine.due is None else min(self.loop.wait_s(), engine.due - now)
        self._waiter = self.cluster.event_loop.create_future()
        timer = self.cluster.event_loop.call_later(max(wait_s, SHORTEST_WAIT_S), self.wake)
        await self._waiter
        timer.cancel()

    async def die(self) -> None:
        """SIGKILL: what it sent is on its way, everything else ends here."""
        self.is_alive = False
        self.wake()
        await self.task
        self.cluster.network.kill(self.me)
        self.parts.links.hub.close()

    async def close(self) -> None:
        self.wake()
        await super().close()


class SimulatedCluster(LocalCluster):
    """Use inside `run_virtually`. checks_permits: a medium like tcp; without, one like shm. problems: what must never
    happen, and did."""

    def __init__(
        self,
        event_loop: VirtualLoop,
        roles: dict[str, Role],
        *,
        num_pages: int = 256,
        checks_permits: bool = True,
        group_s: float = 0.0004,
    ) -> None:
        self.event_loop = event_loop
        self.zmq = Wire(event_loop)
        self.problems: list[str] = []
        super().__init__(
            roles,
            num_pages=num_pages,
            make_kit=self._kit,
            make_backend=self._backend,
            group_s=group_s,
            clock=event_loop.time,
        )
        self.context.destroy(0)
        self.wire = WireSettings()
        self.stages = StageDeadlines()
        self.report_s = 0.05
        self.transfer = Settings(chunk_bytes=128, window_bytes=1024, verify_bytes=512)
        self.network = WakingNetwork(event_loop.time, checks_permits=checks_permits, on_land=self._on_land)
        self.network.loop = event_loop
        self.network.wake = self._wake_all
        self.network.plan_write = lambda *_: Fault()

    async def _start_all(self) -> None:
        await super()._start_all()
        self._follower = self.event_loop.create_task(self.router.follow(self._later_snapshots()))

    async def _later_snapshots(self) -> AsyncIterator[ClusterSnapshot]:
        """`announce` applies them itself; following them is what opens lost links again."""
        await self.event_loop.create_future()
        yield ClusterSnapshot("boot", 0, True, ())

    def context_of(self, process: str) -> Context:  # type: ignore[override]
        return self.zmq.context(process)

    def make_node(self, name: str, role: Role) -> SimulatedNode:
        node = SimulatedNode(self, name, role, self.make_kit(self.num_pages))
        os.close(node.neighbours.wakeup_fd)
        node.neighbours = Watch()
        object.__setattr__(node.parts.links, "neighbours", node.neighbours)
        self.zmq.wakers[name] = node.wake
        return node

    def _kit(self, num_pages: int) -> EngineKit:
        return oracle_kit(num_pages, lambda count, tokens: TimedOracle(count, tokens, self.clock))

    def _backend(self, me: Peer) -> SimulatedBackend:
        return SimulatedBackend(self.network, me)

    def _wake_all(self) -> None:
        for node in self.nodes.values():
            node.wake()

    def _on_land(self, backend: FakeBackend, stamp: Stamp, spans: list[tuple[int, int]]) -> None:
        """No live page has a foreign writer: while bytes land, the page belongs to that ticket."""
        node = self.nodes.get(backend.me.node)
        if node is None or node.me != backend.me or not node.is_alive:
            return
        page_bytes = node.engine.page_bytes
        for offset, nbytes in spans:
            for page in range(offset // page_bytes, -(-(offset + nbytes) // page_bytes)):
                writer = node.parts.pages.writer_of(page)
                if writer != stamp.nonce:
                    self.problems.append(
                        f"a write of ticket {stamp.nonce:x} lands in page {page} of {backend.me.node}, whose writer "
                        f"is {writer}"
                    )

    # ------------------------------------------------------------ processes

    async def crash(self, name: str, *, restart_s: float) -> None:
        """The process dies, its supervisor starts it again after restart_s, and the bootstrap tells of both."""
        dead = self.nodes[name]
        if not dead.is_alive:
            return
        await dead.die()
        self.graves.append(dead)
        self.event_loop.call_later(restart_s, self._restart, dead)
        self.event_loop.call_later(UNLISTED_AFTER_S, self.declare_gone, dead.me)

    @property
    def graves(self) -> list[LocalNode]:
        return self.__dict__.setdefault("_graves", [])

    def _restart(self, dead: LocalNode) -> None:
        if self.nodes[dead.me.node] is dead:
            self.start(dead.me.node, dead.role)

    def declare_gone(self, boot: Peer) -> None:
        """The bootstrap's lease of that boot ended, rightly or not."""
        for node in self.nodes.values():
            if node.is_alive and node.me != boot:
                node.neighbours.news.append(boot)
                node.wake()
        self.announce()

    async def __aexit__(self, *exc: object) -> None:
        self._follower.cancel()
        self.router.close()
        self.router.apply = lambda snapshot: None  # type: ignore[method-assign]  # a late restart changes nothing
        for node in [*self.nodes.values(), *self.graves]:
            await node.close()

    def crashed_tasks(self) -> list[str]:
        """Nodes whose loop raised."""
        found = []
        for node in [*self.nodes.values(), *self.graves]:
            if node.task.done() and not node.task.cancelled() and node.task.exception() is not None:
                found.append(f"{node.me.node} crashed: {node.task.exception()!r}")
        return found
