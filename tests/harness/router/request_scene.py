"""A script of what nodes, clients and operators do, played to requests at one router, and all that others see of them.

Moments, names and dates are taken out of what is compared; the clock, the dispatcher's and the loop's, moves when the
script says so, and every alarm rings then. Mostly there is one request; a script may ask for more ("ask"), and each
step is about the one whose "turn" it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import msgspec
from answer_by_hand import Line
from prometheus_client import generate_latest
from scripted_cluster import EMPTY_LOAD, FakeCluster, make_chooser, make_node, settle
from scripted_dispatcher import EOS, TEXT, VOCAB
from version_choice import FirstVersion

from pdcluster.core import messages as m
from pdcluster.core.errors import Overloaded, UnknownModel
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster.kv.hashing import chain_root
from pdcluster.telemetry.metrics import ExplainMetrics, HoldMetrics
from pdcluster_router.cluster.in_flight import SentWork, work_of
from pdcluster_router.cluster.view import ClusterView, NodeView
from pdcluster_router.core.generation import ModelInfo
from pdcluster_router.core.job import HashChain, RetryAttempt
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.explain.recorder import Explainer
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import router_metrics
from pdcluster_router.http.errors import ClientLeft
from pdcluster_router.http.exchange import Exchange, ParsedHead
from pdcluster_router.policy.base import Decision, Force
from pdcluster_router.policy.registry import make_policy
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.request.dispatcher import Dispatch
from pdcluster_router.request.retries import DispatchSettings

MODEL = "tiny"
BUSY_LOAD = msgspec.structs.replace(EMPTY_LOAD, waiting=50, running=8, slots_used=8, waiting_tokens=10**7, rows=8)
NO_SLACK = msgspec.structs.replace(EMPTY_LOAD, pages_free=10)

CLUSTERS: dict[str, Callable[[], list[NodeView]]] = {
    "one node": lambda: [make_node("m0", "mixed")],
    "two nodes": lambda: [make_node("m0", "mixed"), make_node("m1", "mixed")],
    "a pair": lambda: [make_node("p0", "prefill"), make_node("d0", "decode")],
    "no slack": lambda: [make_node("p0", "prefill"), make_node("d0", "decode", NO_SLACK)],
    "two pairs": lambda: [
        make_node("p0", "prefill"),
        make_node("p1", "prefill"),
        make_node("d0", "decode"),
        make_node("d1", "decode"),
    ],
    "busy": lambda: [make_node("m0", "mixed", BUSY_LOAD)],
    "no node": list,
}


LOADS = (
    EMPTY_LOAD,
    BUSY_LOAD,
    NO_SLACK,
    msgspec.structs.replace(EMPTY_LOAD, running=8, slots_used=8, rows=8, context_tokens=800),
)
COST = NodeCost(PrefillCost(0.005, 1e-3, samples=100), DecodeCost(0.01, 1e-3, samples=100))

KEYS = ("", "Bearer small-key", "Bearer large-key", "Bearer shared-key", "Bearer nobody", "Basic small-key")
TENANTS = {
    "small": Entry(keys=["small-key"], max_requests=1, priority=1),
    "large": Entry(keys=["large-key"], weight=4.0),
    "shared": Entry(keys=["shared-key"], cache_salt="", priority=-1),
}


@dataclass(frozen=True)
class Setting:
    """How a router is set up, but for its nodes. places: requests at a time; hold_count, hold_bytes: that may wait;
    shadow: a policy, "broken" for one that fails; choosing_s: what a choice takes."""

    has_tenants: bool = False
    places: int = 4
    hold_count: int = 1024
    hold_bytes: int = 2**20
    ttft_s: float | None = None
    policy: str = "product"
    shadow: str = ""
    has_cost: bool = False
    choosing_s: float = 0.0

    def dispatch(self) -> DispatchSettings:
        stages = StageDeadlines(queue_s=20.0, liveness_s=10.0, handshake_s=3.0, transfer_s=5.0, hold_s=60.0)
        hold = HoldLimits(count=self.hold_count, size_bytes=self.hold_bytes, is_shared=self.has_tenants)
        return DispatchSettings(stages=stages, hold_s=0.3, hold=hold, slo=Slo(self.ttft_s))


class BrokenPolicy:
    """Implements policy.base.Policy."""

    name = "broken"

    def choose(self, query: object, view: object) -> object:
        raise RuntimeError("a shadow that fails")


@dataclass
class CountingCluster(FakeCluster):
    """A view counts what was sent, as the real one does."""

    def view(self) -> ClusterView:
        ledger = self.ledger
        return ClusterView(tuple(node.sent(*ledger.counts(node.incarnation)) for node in super().view().nodes))

    def send(self, to: m.Endpoint, message: m.NodeMessage) -> None:
        super().send(to, message)
        if isinstance(message, m.Prefill | m.Reserve):
            work = message.work
            self.ledger.pending.enter(
                to.incarnation, work.request, SentWork(work.attempt, len(self.sent), work_of(message, 0), work.hashes)
            )

    def report(self, number: int, load: m.Load) -> None:
        """A node's, which counts all that it was sent."""
        node = self.nodes[number % len(self.nodes)]
        self.nodes[self.nodes.index(node)] = msgspec.structs.replace(node, load=load)
        self.ledger.pending.reported(node.incarnation, len(self.sent))


class Models(FirstVersion):
    def models(self) -> tuple[ModelInfo, ...]:
        return INFOS

    def text(self, model: str) -> object:
        if model != MODEL:
            raise UnknownModel(model)
        return TEXT

    def chain(self, model: str, salt: bytes, weights: str | None = None) -> HashChain:
        return HashChain(chain_root(block_tokens=4, salt=salt), 4)


INFOS = (ModelInfo(MODEL, 1, 256, VOCAB, (EOS,)),)


class AlarmsByHand:
    """Implements timers.Timers by the test's clock: they ring when the test looks at them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._set: dict[int, tuple[float, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._clock = clock

    def __len__(self) -> int:
        """But for rounds that nobody is in any more."""
        return sum(1 for _, ring in self._set.values() if not isinstance(ring, partial) or ring.args[0])

    def set(self, seconds: float, ring: Callable[[], None]) -> int:
        number = next(self._numbers)
        self._set[number] = self._clock() + seconds - 1e-9, ring
        return number

    def drop(self, tick: int, ring: Callable[[], None]) -> None:
        self._set.pop(tick, None)

    def ring(self) -> None:
        """Those whose time has come, the first one first."""
        for _ in range(100):
            moment, number = min(
                ((moment, number) for number, (moment, _) in self._set.items()), default=(math.inf, -1)
            )
            if moment > self._clock():
                return
            self._set.pop(number)[1]()
        raise AssertionError(f"alarms go on ringing at {self._clock()}: {self._set}")


@dataclass
class Scene:
    """One router and who asks it something. at: whose turn it is."""

    cluster: FakeCluster
    deadline_s: float = 600.0
    setting: Setting = Setting()
    moment: float = 100.0
    # All that was to be seen after each step.
    told: list[object] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    at: int = 0
    # Choices of nodes that were made.
    num_chosen: int = 0

    def __post_init__(self) -> None:
        setting = self.setting
        self.timers = AlarmsByHand(lambda: self.moment)
        self.selector = make_chooser(self.cluster, setting.policy, force=self.force)
        if setting.shadow:
            self.selector.holder.shadow = BrokenPolicy() if setting.shadow == "broken" else make_policy(setting.shadow)  # type: ignore[assignment]
        self.metrics = router_metrics()
        settings, hold = setting.dispatch(), HoldMetrics(self.metrics.registry)
        explainer = Explainer(ExplainMetrics(self.metrics.registry), lambda: 0.0)
        dispatch = Dispatch(self.cluster, Models(), self.selector, settings, lambda: self.moment, hold, explainer)  # type: ignore[arg-type]
        dispatch.shared = dataclasses.replace(dispatch.shared, timers=self.timers)  # type: ignore[arg-type]
        self.dispatch, self.places = (
            dispatch,
            Places(setting.places, Tenants(TENANTS) if setting.has_tenants else None, hold),
        )
        self.app = create_app(dispatch, HttpSettings(deadline_s=self.deadline_s), self.metrics, self.places)
        choose = self.selector.choose
        self.selector.choose = lambda *arguments: self._chosen(choose(*arguments))  # type: ignore[method-assign]
        self.prefixes: list[tuple[int, int]] = []
        self.selector.note_prefix = lambda *tokens: self.prefixes.append(tokens)  # type: ignore[method-assign]

    def wait(self, seconds: float) -> None:
        self.moment += seconds

    def _chosen(self, decision: Decision) -> Decision:
        self.num_chosen += 1
        self.wait(self.setting.choosing_s)
        return decision

    @property
    def force(self) -> Force:
        return "remote" if any(node.role == "prefill" for node in self.cluster.nodes) else "auto"

    @property
    def exchange(self) -> Exchange:
        return self.exchanges[self.at]

    @property
    def line(self) -> Line:
        line = self.exchange.line
        assert isinstance(line, Line)
        return line

    def ask(self, headers: dict[bytes, bytes] | None = None, **fields: object) -> None:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        asked = ParsedHead("POST", path, {b"content-type": b"application/json", **(headers or {})}, True, False)
        line = Line()
        line.end = self.app.over  # type: ignore[method-assign]
        exchange = Exchange(line, asked, "")
        self.at = len(self.exchanges)
        self.exchanges.append(exchange)
        body = json.dumps({"model": MODEL, "seed": 5, **fields}).encode()
        self.app.begin(exchange)
        if not exchange.finished:
            exchange.keep(body)
            self.app.complete(exchange)

    # ------------------------------------------------------------ what happens

    def leg(self, *kinds: type) -> tuple[str, m.Work] | None:
        """The last one of these that was sent for whose turn it is."""
        sent = ((node, message.work) for node, message in reversed(self.cluster.sent) if isinstance(message, kinds))
        return next((leg for leg in sent if leg[1].request.startswith(self.exchange.id)), None)

    def says(self, leg: tuple[str, m.Work] | None, body: Callable[[m.Work], object], boot: str = "boot") -> None:
        if leg is not None:
            self.cluster.ledger.deliver(leg[1].request, f"{leg[0]}-{boot}", body(leg[1]))  # type: ignore[arg-type]

    def row(self, leg: tuple[str, m.Work] | None, tokens: tuple[int, ...], shift: int, boot: str = "boot") -> None:
        if leg is None:
            return
        node, work = leg
        row = m.TokenRow(work.request, work.attempt, max(self.num_output + shift, 0), tokens)
        self.cluster.ledger.deliver_rows(f"{node}-{boot}", [row], self.moment)

    @property
    def num_output(self) -> int:
        return next(
            (entry.num_output for entry in self.dispatch.open.all() if entry.request.startswith(self.exchange.id)), 0
        )

    def step(self, what: str, number: int, tokens: tuple[int, ...]) -> None:
        first, decode = self.leg(m.Prefill), self.leg(m.Reserve) or self.leg(m.Prefill)
        reserve = self.leg(m.Reserve)
        leg = (first, decode)[number % 2]
        timings = m.LegTimings(0.25, 0.5, 0.1, 0.05, 4096, 0.75, 3, number % 5, ("tcp", "")[number % 2], number % 3)
        match what:
            case "scheduled":
                self.says(first, lambda work: m.Scheduled(work.request, work.attempt, number % 7))
            case "computed":
                self.says(first, lambda work: m.Computed(work.request, work.attempt, number % 7))
            case "token":
                self.row(first, tokens[:1], -self.num_output)
            case "row":
                self.row(decode, tokens, 0)
            case "ahead":
                self.row(first, tokens[:1], 1)
            case "again":
                self.row(decode, tokens, -1)
            case "early":
                self.row(decode, tokens, 1)
            case "empty":
                self.row(decode, (), 0)
            case "wrong token":
                self.row(decode, (VOCAB,), 0)
            case "stranger":
                self.row(decode, tokens, 0, "other")
            case "reserved" if reserve is not None:
                work = reserve[1]
                adverts = ((("shm", b""),), ())[number % 2]
                reader = m.Endpoint(reserve[0], f"{reserve[0]}-boot", "x:1", adverts)
                ticket = m.Ticket(7, work.request, work.attempt, reader, reader, 0, b"", 32, 4096, 8, 0, 60.0)
                self.says(reserve, lambda _: m.Reserved(ticket))
            case "delivered" if reserve is not None:
                self.says(first, lambda work: m.Delivered(work.request, work.attempt, timings))
            case "finished":
                total = self.num_output + (0, 0, 0, 1)[number % 4]
                reason = ("length", "eos", "stop")[number % 3]
                self.says(decode, lambda work: m.Finished(work.request, work.attempt, reason, total, timings))  # type: ignore[arg-type]
            case "ended early" if reserve is not None:
                self.says(
                    first, lambda work: m.Finished(work.request, work.attempt, "length", 1 + number // 9, timings)
                )
            case "refused" if leg is first or reserve is not None:
                kind = "prefill" if leg is first else "reserve"
                self.says(leg, lambda work: m.Refused(work.request, work.attempt, kind, "full", 0.01, number % 3 > 0))  # type: ignore[arg-type]
            case "failed":
                self.says(
                    leg,
                    lambda work: m.Failed(
                        work.request, work.attempt, ("node_lost", "bad_request")[number % 2], "broke", number % 3 > 0
                    ),
                )
            case "lost" if leg is not None:
                node = next(node for node in self.cluster.nodes if node.name == leg[0])
                self.cluster.kill(node)
            case "rewelcomed" if leg is not None:
                self.cluster.ledger.rewelcome(f"{leg[0]}-boot")
            case "dead" if leg is not None:
                self.cluster.dead.add(leg[0])  # only who sends finds out
            case "deaf" if leg is not None:
                self.cluster.deaf.add(leg[0])
            case "hears":
                self.cluster.deaf.clear()
            case "pause" | "resume":
                self.line.is_paused = what == "pause"
                if not self.line.is_paused and self.exchange.on_resume is not None:
                    self.exchange.on_resume()
            case "gone" if not self.exchange.finished:
                self.app.gone(self.exchange)
            case "stopping" if not self.exchange.finished:
                self.app.stopping(self.exchange)
            case "cancelled":
                self.dispatch.open.cancel(self.exchange.id, "enough")
            case "aborted":
                self.dispatch.abort_all()
            case "time":
                self.moment += (0.5, 2.9, 5.0, 10.0)[number % 4]
                self.timers.ring()
                self.dispatch.waiting.poke()
            case "ask" if len(self.exchanges) < MOST_ASKED:
                key = KEYS[number % len(KEYS)]
                self.ask({b"authorization": key.encode()} if key else None, **ASKED[sum(tokens) % len(ASKED)])
            case "turn":
                self.at = number % len(self.exchanges)
            case "shut" if self.cluster.nodes:
                node = self.cluster.nodes[number % len(self.cluster.nodes)]
                self.dispatch.shared.refusing.note(
                    RetryAttempt(Overloaded("full", 0.05), node.incarnation), self.moment
                )
            case "report" if isinstance(self.cluster, CountingCluster) and self.cluster.nodes:
                self.cluster.report(number, LOADS[sum(tokens) % len(LOADS)])
                self.dispatch.waiting.poke()

    # ------------------------------------------------------------ what is to be seen

    def look(self) -> object:
        ledger = self.cluster.ledger
        open_ones = [
            (
                o.request,
                o.model,
                o.num_prompt,
                o.started,
                o.attempts,
                o.mode,
                o.prefill,
                o.decode,
                o.num_output,
                o.state,
            )
            for o in self.dispatch.open.all()
        ]
        nodes = [node.incarnation for node in self.cluster.nodes]
        legs = {node: ledger.open_attempts(node) for node in nodes}
        pending = {node: ledger.counts(node) for node in nodes}
        sent = [(node, plain(message)) for node, message in self.cluster.sent]
        asked = [self._told(exchange) for exchange in self.exchanges]
        seen = (
            asked, self.places.num_taken, open_ones, legs, pending, sent, ledger.num_requests(),
            self.dispatch.waiting.num_held,
            (self.selector._num_ended, self.selector._usual_output, self.selector._usual_prompt, self.selector._counter),
            self.prefixes,
            (self.selector._previous, *((sent._work_s, sent._moment) for sent in (self.selector._sent_serving,
            self.selector._sent_decoding))),
        )  # fmt: skip
        text = json.dumps(seen, default=str)
        for number, exchange in enumerate(self.exchanges):
            text = text.replace(exchange.id, f"REQUEST-{number}")
        return json.loads(text)

    def _told(self, exchange: Exchange) -> object:
        """What its client has, and operators are told."""
        line = exchange.line
        assert isinstance(line, Line)
        explained = [
            plain({**msgspec.to_builtins(told), "arrived": 0})
            for told in self.dispatch.explainer.explain_all(exchange.id)
        ]
        answer = re.sub(rb"date: [^\r]*\r\n|\"created\":\d+", b"", line.sent).decode()
        return exchange.status, answer, line.is_cut, exchange.finished, explained

    def counted(self) -> list[str]:
        """Metrics, but for seconds that are measured."""
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return [
            line
            for line in lines
            if line.startswith("pdcluster_") and not re.search(r"_seconds_(sum|bucket)|_created", line)
        ]


def plain(value: object) -> object:
    """Plain values; seconds that are left, rounded."""
    if isinstance(value, msgspec.Struct):
        if isinstance(value, m.Work):
            value = msgspec.structs.replace(value, deadline_s=round(value.deadline_s))
        elif isinstance(value, m.Prefill | m.Reserve):
            value = msgspec.structs.replace(
                value, work=msgspec.structs.replace(value.work, deadline_s=float(round(value.work.deadline_s)))
            )
        return repr(value)
    return json.loads(json.dumps(value, default=str))


Steps = list[tuple[str, int, tuple[int, ...]]]


MOST_ASKED = 6
# What a script may ask for.
ASKED: tuple[dict[str, object], ...] = (
    {"prompt": list(range(5, 15)), "max_tokens": 9},
    {"prompt": list(range(5, 15)), "max_tokens": 9, "stream": True},
    {"prompt": list(range(5, 25)), "ignore_eos": True},
    {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": "hi"}], "priority": 3},
    {"prompt": list(range(40, 160)), "temperature": 0},
    {"prompt": list(range(5, 15)), "priority": -1, "cache_salt": "own"},
)


async def play(
    nodes: str,
    steps: Steps,
    fields: dict[str, object],
    deadline_s: float = 600.0,
    deaf: Collection[str] = (),
    setting: Setting | None = None,
) -> Scene:
    """Each step with what comes of it; then the clients leave that have no answer. deaf: nodes to which nothing can be
    sent at first; fields: of the first request; setting: also counts what is sent to nodes, None: the usual one, which
    does not."""
    if setting is None:
        scene = Scene(FakeCluster(CLUSTERS[nodes](), deaf=set(deaf)), deadline_s)
    else:
        cost = COST if setting.has_cost else None
        made = [msgspec.structs.replace(node, cost=cost) for node in CLUSTERS[nodes]()]
        scene = Scene(CountingCluster(made, deaf=set(deaf)), deadline_s, setting)
    loop = asyncio.get_running_loop()
    time, loop.time = loop.time, lambda: scene.moment  # type: ignore[method-assign]
    try:
        await _play(scene, steps, fields)
    finally:
        loop.time = time  # type: ignore[method-assign]
    return scene


async def _play(scene: Scene, steps: Steps, fields: dict[str, object]) -> None:
    scene.ask({b"authorization": KEYS[2].encode()}, **fields)
    scene.told.append(scene.look())
    for what, number, tokens in steps:
        scene.step(what, number, tokens)
        await settle()
        scene.told.append((what, scene.look()))
    for exchange in scene.exchanges:
        if not exchange.finished:
            exchange.line.is_paused = False
            scene.app._end(exchange, ClientLeft("the test is over"))
    scene.told.append(scene.look())
    scene.told.append(scene.counted())
    scene.told.append((len(scene.timers), len(scene.dispatch.open)))
    await settle()


def told(
    nodes: str,
    steps: Steps,
    fields: dict[str, object],
    deadline_s: float = 600.0,
    deaf: Collection[str] = (),
    setting: Setting | None = None,
) -> list[object]:
    return asyncio.run(play(nodes, steps, fields, deadline_s, deaf, setting)).told


def check(seen: list[object]) -> None:
    """Whatever happened: each client that stayed has one answer and no bug of ours, and nothing is left in the books."""
    asked, num_taken, open_ones, legs, pending, _, num_requests, num_held, *_ = seen[-3]  # type: ignore[misc]
    for status, answer, is_cut, is_finished, _ in asked:
        assert is_finished and (status or is_cut)
        assert answer.count("HTTP/1.1 ") <= 1 and "the server's log has it" not in answer
        assert answer.count("[DONE]") + answer.count('"error"') <= 1
    assert not (num_taken or open_ones or num_requests or num_held) and not any(legs.values())
    assert all(num == 0 for num, _ in pending.values())
    assert seen[-1] == (0, 0), "alarms or open requests are left"
