"""One run of the request fuzz: a router without front doors over simulated nodes, in virtual time, and what must hold.

Real: node table, ledger, prefix index, models, policies, gate, hold queue, requests. Simulated: links, nodes, clients,
the bootstrap's snapshots and the clock. `run_plan` gives the problems of a run; there must be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from unittest import mock

from fuzz_client import MODEL, Client
from fuzz_idle import LOOK_S, IdleWatch
from fuzz_link import FuzzLink, Network
from fuzz_mishaps import Mishaps
from fuzz_node import FuzzNode
from fuzz_plan import BLOCK, VOCAB, NodeSpec, Plan
from fuzz_tokens import EOS, TOKEN_BYTES
from leftovers import find_names
from virtual_time import Stuck, VirtualLoop

from pdcluster.bootstrap.card import Capabilities, ClusterSnapshot, NodeCard
from pdcluster.checkpoint import bundled
from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.node.reports.load_report import ModelFiles
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster import node_table
from pdcluster_router.cluster.events import EventLog
from pdcluster_router.cluster.models import ModelRegistry
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.policy.selector import PolicyHolder, PolicySelector
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.request.dispatcher import Dispatch
from pdcluster_router.request.request import Request
from pdcluster_router.request.retries import DispatchSettings

HEAL_S = 3.0
# How long a request asks full nodes for room.
HOLD_S = 20.0
# What may take longest after that: parking, expected blocks, leases, coarse timers.
QUIET_S = 25.0
# Bounded heaps that drop what is over when they are looked at.
LAZY = ("._expiries",)
STAGES = StageDeadlines(queue_s=20.0, liveness_s=6.0, handshake_s=2.0, transfer_s=4.0)
ME = Peer("router", "router-boot")


@dataclass(frozen=True)
class Problem:
    at: float
    kind: str
    text: str


class FuzzLoop(VirtualLoop):
    """Work for other threads is done at once, so that a run with the same plan is the same run."""

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> asyncio.Future[object]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@cache
def text_files() -> ModelFiles:
    return ModelFiles(bundled.path())


class World:
    """Implements what nodes, clients and the watch need of the rest."""

    def __init__(self, loop: FuzzLoop, plan: Plan) -> None:
        self.loop, self.plan = loop, plan
        self.log: deque[str] = deque(maxlen=20_000)
        self.problems: list[Problem] = []
        self.is_healed = False
        self.network = Network(loop, self.note, self.fault_all)
        self.nodes: dict[str, FuzzNode] = {}
        self.clients = {ask.name: Client(self, ask) for ask in plan.asks}
        self.versions = ["w0"]
        self.forbidden: set[str] = set()
        self._boots: dict[str, FuzzNode] = {}
        self._unlisted: set[str] = set()
        self._faults: set[tuple[str, str]] = set()
        self._paused: dict[tuple[str, str], float] = {}
        self._news: asyncio.Queue[ClusterSnapshot] = asyncio.Queue()
        self._requests: list[weakref.ref[object]] = []
        self._mishaps = Mishaps(self)
        self._start = loop.time()
        self._open_router()

    def _open_router(self) -> None:
        plan = self.plan
        self.table = NodeTable(ME, context=self.network, settings=WireSettings())  # type: ignore[arg-type]
        self.models = ModelRegistry(self.table, None)
        selector = PolicySelector(
            PolicyHolder(make_policy(plan.policy)), self.table.glance, self.table.held,
            force=plan.mode, fallback=plan.fallback, expected=self.table.expected,
        )  # fmt: skip
        tenants = {ask.tenant for ask in plan.asks}
        hold = HoldLimits(
            count=plan.hold_count, age_s=plan.age_s, patience_s=plan.patience_s, is_shared=len(tenants) > 1
        )
        settings = DispatchSettings(stages=STAGES, hold_s=HOLD_S, hold=hold, slo=Slo(plan.ttft_s))
        self.dispatch = Dispatch(self.table, self.models, selector, settings, self.loop.time)
        self.watch = IdleWatch(self)

    # ------------------------------------------------------------ what others ask

    @property
    def now(self) -> float:
        return self.loop.time() - self._start

    def note(self, text: str) -> None:
        self.log.append(f"{self.now:9.4f} {text}")

    def problem(self, kind: str, text: str) -> None:
        self.problems.append(Problem(round(self.now, 4), kind, text))
        self.note(f"PROBLEM {kind}: {text}")

    def fault(self, request: str, incarnation: str) -> None:
        self._faults.add((request, incarnation))

    def fault_all(self, incarnation: str) -> None:
        """Any request may have met a fault of this boot."""
        for name, client in self.clients.items():
            if client.is_open:
                self.fault(name, incarnation)

    def refused(self, request: str, incarnation: str, hint_s: float) -> None:
        more_s = self.network.latency_s(self._boots[incarnation].me.node)
        for who, seconds in ((request, max(hint_s, STAGES.hold_s)), ("", min(hint_s, 0.1))):
            key, until = (who, incarnation), self.now + seconds + more_s
            self._paused[key] = max(self._paused.get(key, 0.0), until)

    def forbid(self, request: str) -> None:
        self.forbidden.add(request)

    def has_failed(self, request: str, node: FuzzNode) -> bool:
        return (request, node.me.incarnation) in self._faults

    def is_able(self, request: str, node: FuzzNode) -> bool:
        pauses = (self._paused.get((who, node.me.incarnation), 0.0) for who in (request, ""))
        is_honest = not any(self.clients[name].is_open for name in node.forgotten) and not node.refuses_all
        return is_honest and self.network.is_clear(node.me.node) and max(pauses) < self.now

    def is_heard(self, node: FuzzNode) -> bool:
        return self.network.is_clear(node.me.node)

    def chunk(self, message: m.FetchFile) -> m.FileChunk:
        return text_files().chunk(message)

    def node_of(self, incarnation: str) -> FuzzNode | None:
        node = self._boots[incarnation]
        return None if node.is_dead else node

    def accepting(self) -> list[FuzzNode]:
        return [node for node in self.nodes.values() if node.takes_work and node.is_linked]

    def check_work(self, node: FuzzNode, work: m.Work) -> None:
        client, num = self.clients[work.request], work.num_prompt
        is_right = work.token_ids[: TOKEN_BYTES * num] == client.prompt.tobytes()
        emitted = m.unpack_tokens(work.token_ids[TOKEN_BYTES * num :])
        if not is_right or emitted != client.tokens[: len(emitted)]:
            self.problem("wrong work", f"{node.me.incarnation} is asked for {work.request} behind {emitted}")

    @property
    def token_keys(self) -> list[str]:
        return self.versions

    def is_limit(self, client: Client, num_tokens: int) -> bool:
        """Only the largest node's limit ends an answer. One that came or went lately may have counted or not."""
        is_some = any(node.max_len <= num_tokens for node in self.plan.nodes)
        lasting = [node for node in self.nodes.values() if self.now - node.accepting_since > 1.0]
        had_no_room = self.now - client.heard_at >= 0.9 * min(HOLD_S, client.ask.deadline_s)
        return is_some and (had_no_room or not self.watch.has_row_for(client, lasting, num_tokens + 1))

    # ------------------------------------------------------------ errors

    def on_error(self, client: Client, error: errors.PdclusterError) -> None:
        name, waited_s = client.ask.name, self.now - (client.arrived or 0.0)
        text = f"{name} after {waited_s:.2f} s: {type(error).__name__}: {error}"
        if isinstance(error, errors.IntegrityError | errors.ProtocolError) or type(error) is errors.PdclusterError:
            self.problem("internal error", text)
        elif isinstance(error, errors.DeadlineExceeded) and error.stage == "request":
            if waited_s < client.ask.deadline_s - 0.01:
                self.problem("early deadline", text)
        elif isinstance(error, errors.ContextTooLong):
            has_one = len(self.versions) == 1  # else boots of former weights do not come back
            known = [
                node
                for boot, node in self._boots.items()
                if boot not in self._unlisted and (has_one or not node.is_dead)
            ]
            if self.watch.has_row_for(client, known, client.num_tokens):
                self.problem("refused without a reason", text)
        elif isinstance(error, errors.BadRequest):
            if name not in self.forbidden:
                self.problem("refused without a reason", text)
        elif isinstance(error, errors.ModelChanged):
            if len(self.versions) == 1:
                self.problem("refused without a reason", text)
        elif isinstance(error, errors.Overloaded) and error.reason == "slo" and self.plan.policy == "seconds":
            node = self.watch.could_serve(client)  # other policies look at caches more than at time
            if node is not None and not self._is_asked_later(node):
                self.problem("refused beside an idle node", f"{text}; {node.me.incarnation} is idle")
        elif self.plan.is_calm and not isinstance(error, errors.Overloaded) and not self._lacks_pair(client):
            self.problem("fails although nothing happened", text)
        for sibling in self.clients.values():
            if sibling is not client and (sibling.ask.parent or sibling.ask.name) == (client.ask.parent or name):
                sibling.leave("another choice failed")

    def _is_asked_later(self, node: FuzzNode) -> bool:
        """Whether something is on its way there, or others, who go first, wait until they may ask again."""
        boot = node.me.incarnation
        is_paused = any(to == boot and until > self.now for (_, to), until in self._paused.items())
        return is_paused or self.table.ledger.in_flight(boot) > 0

    def _lacks_pair(self, client: Client) -> bool:
        """Whether it asks for two nodes, and there are no two that it fits on."""
        fitting = [node for node in self.plan.nodes if node.max_len > len(client.prompt) + client.ask.max_tokens]
        is_remote = (client.ask.mode or self.plan.mode) == "remote" or self.plan.fallback == "deny"
        pairs = [
            (one, other)
            for one in fitting
            for other in fitting
            if one is not other and one.role != "decode" and other.role != "prefill"
        ]
        return is_remote and not pairs

    # ------------------------------------------------------------ the bootstrap

    def start_node(self, spec: NodeSpec) -> None:
        boot = f"{spec.name}.{sum(node.spec is spec for node in self._boots.values())}"
        node = FuzzNode(self, spec, boot, self.versions[-1])
        node.models = self._card(node).model_digests
        self.nodes[spec.name] = self._boots[boot] = node
        self.network.start(spec.name, boot, node)
        self.note(f"{boot} starts as {spec.role}")
        self.loop.call_later(0.02, self.announce)

    def announce(self) -> None:
        cards = [self._card(node) for node in self.nodes.values() if node.me.incarnation not in self._unlisted]
        self._news.put_nowait(ClusterSnapshot("boot", len(self.log), False, tuple(cards)))

    def _card(self, node: FuzzNode) -> NodeCard:
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_tokens=BLOCK, dtype="float32")
        fingerprint = Fingerprint(MODEL, node.weights, m.PROTOCOL_VERSION, BLOCK, layout)
        spec, plan = node.spec, self.plan
        return NodeCard(
            spec.name, node.me.incarnation, node.role, node.endpoint.address, MODEL, fingerprint, spec.max_len, VOCAB,
            spec.num_pages, (EOS,), text_files().digest, ("shm",), model_aliases=(),
            capabilities=Capabilities(
                pulls=plan.first_token == "prefill", first_token=plan.first_token, parks_s=plan.parks_s
            ),
            weights_label=node.weights, weights_epoch=int(node.weights[1:]),
        )  # fmt: skip

    async def _snapshots(self) -> AsyncIterator[ClusterSnapshot]:
        while True:
            yield await self._news.get()

    def unlist(self, node: FuzzNode) -> None:
        self._unlisted.add(node.me.incarnation)
        self.announce()

    def relist(self, node: FuzzNode) -> None:
        if node.me.incarnation in self._unlisted and not node.is_dead:
            self._unlisted.discard(node.me.incarnation)
            self.announce()

    def change_model(self) -> None:
        self.versions.append(f"w{len(self.versions)}")

    # ------------------------------------------------------------ the run

    async def play(self) -> None:
        self.loop.set_exception_handler(self._on_exception)
        tasks = [
            self.loop.create_task(work)
            for work in (self.table.follow(self._snapshots()), self.models.keep_loaded(),
                         self.dispatch.waiting.follow(self.table), self._watch())
        ]  # fmt: skip
        try:
            for spec in self.plan.nodes:
                self.start_node(spec)
            while not self.dispatch.models():
                await asyncio.sleep(0.01)
            self._start, lasting = self.loop.time(), asyncio.all_tasks(self.loop)
            self._schedule()
            await self._wait_for_answers()
            await asyncio.sleep(QUIET_S)
            self._check_books(asyncio.all_tasks(self.loop) - lasting)
        finally:
            for task in [*tasks, *self._mishaps.tasks]:
                task.cancel()
            await asyncio.gather(*tasks, *self._mishaps.tasks, return_exceptions=True)
            self.table.close()

    def _schedule(self) -> None:
        plan, at = self.plan, self._at
        for ask in plan.asks:
            client = self.clients[ask.name]
            at(ask.at, self._ask, client)
            if ask.leave_s is not None:
                at(ask.at + ask.leave_s + 1e-6, client.leave, "client left")
        for mishap in plan.mishaps:
            at(mishap.at, self._mishaps.happen, mishap)
        at(plan.heal_at, self._mishaps.heal)

    def _at(self, moment: float, action: Callable[..., object], *words: object) -> None:
        self.loop.call_at(self._start + moment, action, *words)

    def _ask(self, client: Client) -> None:
        client.start(self.dispatch)
        if isinstance(client.running, Request):
            self._requests.append(weakref.ref(client.running))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for node in self.nodes.values():
                accepts = node.takes_work and node.is_linked
                node.accepting_since = min(node.accepting_since, self.now) if accepts else float("inf")
                node.idle_since = min(node.idle_since, self.now) if accepts and node.is_idle else float("inf")
            self.watch.look()

    async def _wait_for_answers(self) -> None:
        clients = self.clients.values()
        until = max((ask.at + ask.deadline_s for ask in self.plan.asks), default=0.0) + self.plan.heal_at + HEAL_S
        while not (self.is_healed and all(client.is_over for client in clients)) and self.now < until:
            await asyncio.sleep(0.1)
        for client in clients:
            if not client.is_over:
                self.problem("no answer", f"{client.ask.name} has none after {self.now:.0f} s: {client.running}")

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.problem("an exception", f"{context.get('message')}: {context.get('exception')!r}")

    # ------------------------------------------------------------ afterwards

    def _check_books(self, tasks: set[asyncio.Task[object]]) -> None:
        """Nothing of any request is left, at the router or on nodes."""
        dispatch, shared, ledger = self.dispatch, self.dispatch.shared, self.table.ledger
        self.table.expected(b"x" * m.HASH_BYTES)  # ends those whose time is over
        counts = {
            "requests in the ledger": ledger.num_requests(),
            "open requests": len(dispatch.open),
            "held requests": dispatch.waiting.num_held,
            "parents of forks": len(shared.fork_groups),
            "timers": len(shared.timers),
            "expected chains": len(self.table.caches.index.expected),
            "tasks": len(tasks),
        }
        for boot in self._boots:
            counts[f"legs on {boot}"], work = ledger.counts(boot)
            counts[f"work on {boot}"] = sum(map(abs, work))
        for boot, node in self._boots.items():
            counts[f"legs at {boot}"] = len(list(node.legs()))
            counts[f"pages of {boot}"] = node.pages.num_used
        roots = {"waiting": dispatch.waiting, "table": self.table, "open": dispatch.open, "timers": shared.timers,
                 "forks": shared.fork_groups, "refusing": shared.refusing, "rounds": (shared.local_rounds, shared.remote_rounds)}  # fmt: skip
        left = find_names(roots, set(self.clients), "pdcluster", (EventLog, Network))
        for name, count in counts.items():
            if count:
                self.problem("left in the books", f"{count} {name}")
        for path in [each for each in left if not any(name in each for name in LAZY)][:5]:
            self.problem("left in the books", path)
        for check in (shared.timers.check_integrity, ledger.pending.check_integrity,
                      self.table.caches.index.expected.check_integrity):  # fmt: skip
            try:
                check()
            except errors.IntegrityError as error:
                self.problem("left in the books", str(error))

    def check_memory(self) -> None:
        """No request is alive. Call it once nobody runs any more."""
        gc.collect()
        alive = sum(each() is not None for each in self._requests)
        if alive:
            self.problem("left in the books", f"{alive} requests are alive after their end")


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Outcome:
    """What a run came to. The problems must be none."""

    plan: Plan
    problems: tuple[Problem, ...]
    log: tuple[str, ...]
    num_right: int
    num_errors: int
    num_left: int


def run_plan(plan: Plan) -> Outcome:
    loop = FuzzLoop()
    time = SimpleNamespace(monotonic=loop.time)
    with (
        quiet_logs(),
        mock.patch.object(node_table, "NodeLink", FuzzLink),
        mock.patch.object(node_table, "time", time),
    ):
        world = run_in(loop, plan)
    clients = world.clients.values()
    return Outcome(
        plan,
        tuple(world.problems),
        tuple(world.log),
        sum(client.done is not None for client in clients),
        sum(client.error is not None for client in clients),
        sum(client.has_left for client in clients),
    )


def run_in(loop: FuzzLoop, plan: Plan) -> World:
    world: World | None = None
    try:
        asyncio.set_event_loop(loop)
        world = World(loop, plan)
        loop.run_until_complete(world.play())
    except Stuck as error:
        assert world is not None
        world.problem("no answer", str(error))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert world is not None
    return world
