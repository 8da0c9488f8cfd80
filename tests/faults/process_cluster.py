"""A LocalCluster whose nodes are processes (`faulty_node`) over a real medium, with a wire between them that a test
owns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from faulty_node import SEALED, TRANSFER, WIRE, kit
from local_cluster import LocalCluster, OneModel
from meddling_proxy import MeddlingProxy

from pdcluster.bootstrap.card import ClusterSnapshot, NodeCard
from pdcluster.core.messages import Role
from pdcluster.transfer.backends.base import Peer
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.policy.registry import DEFAULT, make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

HERE = Path(__file__).parent
PATH = [
    str(HERE),
    *map(str, sorted((HERE.parent / "harness").iterdir())),
    str(HERE.parents[1]),
    str(HERE.parents[1] / "router"),
]
REPLY_S = 30.0
START_S = 120.0
STAGES = StageDeadlines(queue_s=6.0, handshake_s=2.0, transfer_s=2.0, liveness_s=4.0, hold_s=0.02)


class ProcessNode:
    """One boot. said: what it reports while it is held at a step."""

    def __init__(self, name: str, role: Role, backend: str, boot: int) -> None:
        self.me = Peer(name, f"{name}-{boot}")
        self.role = role
        self.backend = backend
        self.is_alive = True
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.broken = ""
        self._event_loop = asyncio.get_running_loop()
        self._statuses: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ready: asyncio.Future[dict[str, Any]] = self._event_loop.create_future()
        argv = [sys.executable, str(HERE / "faulty_node.py"), name, role, backend, str(boot)]
        environment = {**os.environ, "PYTHONPATH": ":".join(PATH)}
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the node
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._complaints}
        self.process = subprocess.Popen(argv, **pipes, env=environment, text=True)  # type: ignore[call-overload]
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print as they like
                self._event_loop.call_soon_threadsafe(self._hear, json.loads(line))
        self._event_loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(AssertionError(f"{self.me.node} did not start:\n{self._last_words()}"))

    def _last_words(self) -> str:
        self._complaints.seek(0)
        return self._complaints.read()[-6000:]

    def _hear(self, words: dict[str, Any]) -> None:
        if "ready" in words and not self.ready.done():
            self.ready.set_result(words)
        elif "status" in words:
            self._statuses.put_nowait(words)
        elif "at" in words:
            self.said.put_nowait(words)
        elif "broken" in words:
            self.broken = words["broken"]

    async def wait_ready(self) -> dict[str, Any]:
        async with asyncio.timeout(START_S):
            return await self.ready

    def tell(self, do: str, **words: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it was killed on purpose

    async def status(self) -> dict[str, Any]:
        self.tell("status")
        try:
            async with asyncio.timeout(REPLY_S):
                return await self._statuses.get()
        except TimeoutError:
            raise AssertionError(
                f"{self.me.node} says nothing for {REPLY_S:g} s:\n{await asyncio.to_thread(self.stacks)}"
            ) from None

    def stacks(self) -> str:
        """What its threads do; this ends it."""
        if (code := self.process.poll()) is not None:
            return f"process ended with {code}\n{self._last_words()}"
        with open(f"/proc/{self.process.pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGABRT)
        self.process.wait(10)
        return f"process state {state}\n{self._last_words()}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.is_alive = False
        self.process.kill()

    def card(self) -> NodeCard:
        own = kit_of_all()
        address = self.ready.result()["address"]
        sizes = {"max_len": own.max_len, "vocab_size": own.shape.vocab_size, "num_pages": own.shape.num_pages}
        return NodeCard(
            self.me.node,
            self.me.incarnation,
            self.role,
            address,
            "model",
            own.fingerprint,
            backends=("tcp" if self.backend == SEALED else self.backend,),
            **sizes,
        )

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self.process.wait)
        self._thread.join(5)
        self._complaints.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was said to the dead is lost


_kit: list[Any] = []


def kit_of_all() -> Any:
    """What every node is made of, without its engine's memory being used here."""
    if not _kit:
        _kit.append(kit())
    return _kit[0]


class ProcessCluster(LocalCluster):
    """Use as `async with`. proxies: by node, in front of what its adverts name; none for shm."""

    nodes: dict[str, ProcessNode]  # type: ignore[assignment]

    def __init__(self, roles: dict[str, Role], backend: str) -> None:
        super().__init__(roles)
        self.backend = backend
        self.wire, self.transfer, self.stages = WIRE, TRANSFER, STAGES
        self.proxies: dict[str, MeddlingProxy] = {}
        self.buried: list[ProcessNode] = []

    async def _start_all(self) -> None:
        self.router = NodeTable(Peer("router", "router-1"), context=self.context, settings=self.wire)
        selector = PolicySelector(
            PolicyHolder(make_policy(DEFAULT)), self.router.view, self.router.cached, force="remote"
        )
        model = OneModel(kit_of_all().shape.block_tokens)
        self.dispatch = Dispatch(self.router, model, selector, DispatchSettings(stages=self.stages, hold_s=5.0))
        self._follower = asyncio.create_task(self.router.follow(self._later_snapshots()))
        await asyncio.gather(*(self.boot(name) for name in self.roles))
        await self.until_listed()

    async def _later_snapshots(self) -> AsyncIterator[ClusterSnapshot]:
        """`announce` applies them itself; following them is what opens lost links again."""
        await asyncio.get_running_loop().create_future()
        yield ClusterSnapshot("boot", 0, True, ())

    async def boot(self, name: str) -> None:
        """A new boot under an old name; its adverts name the old proxy."""
        node = ProcessNode(name, self.roles[name], self.backend, next(self.boots))
        if name in self.nodes:
            self.buried.append(self.nodes[name])
        self.nodes[name] = node
        node.is_alive = False  # not listed before it is ready
        port = (await node.wait_ready())["port"]
        if port is not None:
            if name not in self.proxies:
                self.proxies[name] = MeddlingProxy(port)
            self.proxies[name].target = port
            node.tell("proxy", port=self.proxies[name].port)
        node.is_alive = True
        self.announce()

    async def until_listed(self) -> None:
        await self.until(lambda: len(self.router.view().nodes) == len(self.roles), timeout_s=REPLY_S)

    def kill(self, name: str) -> None:
        self.nodes[name].kill()

    def declare_gone(self, boot: Peer) -> None:
        """What the bootstrap says when the lease of a boot ended."""
        for node in self.nodes.values():
            if node.is_alive:
                node.tell("gone", node=boot.node, boot=boot.incarnation)
        self.announce()

    async def restart_dead(self) -> None:
        assert not (broken := "".join(node.broken for node in [*self.nodes.values(), *self.buried])), broken
        dead = [node for node in self.nodes.values() if node.process.poll() is not None or not node.is_alive]
        for node in dead:
            node.is_alive = False
            self.declare_gone(node.me)
        await asyncio.gather(*(self.boot(node.me.node) for node in dead))
        await self.until_listed()

    async def wait_idle(self, limit_s: float) -> list[str]:
        """What is still held after the limit, or is wrong in the books. By the loop's clock, which does not count
        stalls."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while True:
            statuses = {node.me.node: await node.status() for node in self.nodes.values()}
            held = {name: status["status"] for name, status in statuses.items() if any(status["status"].values())}
            waiting = self.router.ledger.num_requests()
            if not held and not waiting:
                return [problem for status in statuses.values() for problem in status["problems"]]
            if loop.time() > until:
                return [f"{name} holds {counts}" for name, counts in held.items()] + [
                    f"the router waits for {waiting} requests"
                ] * bool(waiting)
            await asyncio.sleep(0.02)

    async def __aexit__(self, *exc: object) -> None:
        self._follower.cancel()
        self.router.close()
        for node in [*self.nodes.values(), *self.buried]:
            if node.process.poll() is None:
                node.signal(signal.SIGCONT)
            await node.close()
        for proxy in self.proxies.values():
            await asyncio.to_thread(proxy.end)
        self.context.destroy(0)
