"""What befalls nodes in the request fuzz, by name, and how all of it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from fuzz_node import FuzzNode
from fuzz_plan import Mishap

from pdcluster.core.errors import PdclusterError
from pdcluster.core.messages import Role

if TYPE_CHECKING:
    from fuzz_world import World

SLOW_S = 0.2
UNLISTED_S = 1.5
MANAGE_S = 1.0
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "mixed", "mixed": "prefill"}


class Mishaps:
    """tasks: what operators still do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tasks: set[asyncio.Task[None]] = set()

    def happen(self, mishap: Mishap) -> None:
        world = self._world
        node = world.nodes[mishap.node]
        if world.is_healed or node.is_dead:
            return
        world.note(f"{mishap.kind} {node.me.incarnation} ({mishap.seconds:g})")
        getattr(self, "_" + mishap.kind.replace(" ", "_"))(node, mishap.seconds)

    def heal(self) -> None:
        """Every node is up, as it was at first, and does its work."""
        world = self._world
        world.is_healed = True
        world.network.heal()
        for node in list(world.nodes.values()):
            world.relist(node)
            if node.is_draining and not node.is_dead:
                self._end(node)
            if node.is_dead:
                world.start_node(node.spec)
                continue
            node.is_cordoned = node.refuses_all = False
            node.role = node.spec.role
            node.set_stuck(is_stuck=False)
        world.announce()

    def _later(self, seconds: float, node: FuzzNode, action: Callable[[], None]) -> None:
        """Unless the process is gone or all is well again."""

        def act() -> None:
            if not node.is_dead and not self._world.is_healed:
                action()

        self._world.loop.call_later(seconds, act)

    # ------------------------------------------------------------ processes and links

    def _end(self, node: FuzzNode) -> None:
        node.die()
        self._world.loop.call_later(UNLISTED_S, self._world.unlist, node)

    def _die(self, node: FuzzNode, seconds: float) -> None:
        """A new boot has the same name."""
        self._end(node)
        self._world.loop.call_later(seconds, self._restart, node)

    def _restart(self, node: FuzzNode) -> None:
        if self._world.nodes[node.spec.name] is node:
            self._world.start_node(node.spec)

    def _leave(self, node: FuzzNode, seconds: float) -> None:
        """As at SIGTERM: no new work, then what still runs moves."""
        node.is_draining = True
        node.changed()

        def go() -> None:
            node.move_work("node_draining")
            self._world.loop.call_later(0.1, self._gone, node)

        self._later(seconds, node, go)

    def _gone(self, node: FuzzNode) -> None:
        if not node.is_dead:
            node.die()
            self._world.unlist(node)
            self._world.loop.call_later(1.0, self._restart, node)

    def _return(self, node: FuzzNode, seconds: float) -> None:
        """The bootstrap loses its lease, although it lives."""
        self._world.unlist(node)
        self._world.loop.call_later(seconds, self._world.relist, node)

    def _cut(self, node: FuzzNode, seconds: float) -> None:
        self._world.network.cut(node.spec.name)

    def _mute(self, node: FuzzNode, seconds: float) -> None:
        world = self._world
        world.fault_all(node.me.incarnation)
        world.network.mute(node.spec.name)

        def end() -> None:
            world.fault_all(node.me.incarnation)
            world.network.unmute(node.spec.name)

        world.loop.call_later(seconds, end)

    def _lose_frames(self, node: FuzzNode, seconds: float) -> None:
        self._world.network.lose(node.spec.name, int(3 * seconds) + 1)

    def _slow(self, node: FuzzNode, seconds: float) -> None:
        network = self._world.network
        network.slow(node.spec.name, SLOW_S)
        self._world.loop.call_later(seconds, network.quicken, node.spec.name)

    def _model(self, node: FuzzNode, seconds: float) -> None:
        """All nodes end, and come back with other weights."""
        self._world.change_model()
        for each in list(self._world.nodes.values()):
            if not each.is_dead:
                self._die(each, seconds)

    # ------------------------------------------------------------ what a node does

    def _stick(self, node: FuzzNode, seconds: float) -> None:
        node.set_stuck(is_stuck=True)
        self._later(seconds, node, lambda: node.set_stuck(is_stuck=False))

    def _forget(self, node: FuzzNode, seconds: float) -> None:
        """Its next Welcome tells."""
        node.forget_some()
        self._later(min(seconds, 1.0), node, lambda: self._world.network.cut(node.spec.name))

    def _evict(self, node: FuzzNode, seconds: float) -> None:
        node.evict()

    def _refuse(self, node: FuzzNode, seconds: float) -> None:
        """All work, with a hint."""
        node.refuses_all = True

        def end() -> None:
            node.refuses_all = False

        self._later(seconds, node, end)

    # ------------------------------------------------------------ what operators do

    def _cordon(self, node: FuzzNode, seconds: float) -> None:
        self._do(self._manage(node, seconds, moves=False))

    def _drain(self, node: FuzzNode, seconds: float) -> None:
        self._do(self._manage(node, seconds, moves=True))

    def _role(self, node: FuzzNode, seconds: float) -> None:
        self._do(self._manage(node, seconds, moves=False, role=OTHER[node.role]))

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = self._world.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _manage(self, node: FuzzNode, seconds: float, *, moves: bool, role: Role | None = None) -> None:
        """A change, and its end."""
        manage, boot = self._world.table.manage, node.me.incarnation
        is_cordon = role is None
        try:
            await manage(boot, role=role, cordoned=True if is_cordon else None, moves=moves, timeout_s=MANAGE_S)
            await asyncio.sleep(seconds)
            if not self._world.is_healed:
                former = None if is_cordon else node.spec.role
                await manage(boot, role=former, cordoned=False if is_cordon else None, timeout_s=MANAGE_S)
        except (PdclusterError, TimeoutError) as error:
            self._world.note(f"{boot} cannot be managed: {error}")
