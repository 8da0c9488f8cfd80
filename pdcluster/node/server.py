"""The node process, whatever its engine: health port, model files, links, registration. Runs the loop until SIGTERM or
SIGINT, then drains.

A process is one boot of its node after the other: each load of other weights, and sleep, ends one and begins the next,
with an incarnation, an engine and links of its own. To the cluster that is a restart.
"""

from __future__ import annotations

import gc
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import zmq

from pdcluster.bootstrap.agent import NodeAgent
from pdcluster.bootstrap.card import NodeCard
from pdcluster.bootstrap.credentials import Identity, bootstrap_credentials
from pdcluster.checkpoint.bundled import path as bundled_model
from pdcluster.checkpoint.hub import local_model, served_name
from pdcluster.checkpoint.inspection import check_model_files
from pdcluster.checkpoint.weight_image import WeightImage
from pdcluster.core.messages import PrepareWeights, Role
from pdcluster.core.weights import FormerWeights, WeightsVersion
from pdcluster.node.catching_up import catch_up
from pdcluster.node.control import EngineSide, NodeControl, NodeLinks
from pdcluster.node.reports.health import NodeHealth
from pdcluster.node.reports.load_report import ModelFiles
from pdcluster.node.weights_exchange import ImageIntake
from pdcluster.node.weights_loader import WeightsLoader
from pdcluster.processes.garbage import collect_seldom
from pdcluster.processes.leaving import leave_last
from pdcluster.processes.ready import announce
from pdcluster.settings.config import NodeConfig
from pdcluster.telemetry.health import health_port
from pdcluster.telemetry.tracing import Tracer, open_tracer
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.sockets import WireSettings

logger = logging.getLogger(__name__)

# For ZMQ to give up the address of the boot before.
REBIND_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """What a boot of the node has before its engine.

    names: of the model in the API, the first one first.
    role, is_cordoned: as operators left them at the boot before.
    num_boots: that were before this one.
    stack, engine_stack: closed at the end of the boot, the engine's last.
    end_stack: closed at the end of the process, after the last boot.
    """

    config: NodeConfig
    me: Peer
    model_dir: Path
    names: tuple[str, ...]
    files: ModelFiles
    health: NodeHealth
    agent: NodeAgent
    context: zmq.Context[zmq.Socket[bytes]]
    spans: Tracer | None
    clock: Callable[[], float]
    role: Role
    stack: ExitStack
    engine_stack: ExitStack
    end_stack: ExitStack
    is_cordoned: bool = False
    num_boots: int = 0
    # Of the weights that the boot serves: their share of requests, where they come from, and what was served before.
    weights_share: float = 100.0
    weights_source: str = ""
    weights_former: FormerWeights | None = None


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A started engine, and how its node talks.

    prepare: loads other weights beside these, on a thread; None: the engine cannot while it runs.
    intake: how it takes weights from other processes' memory; None: it does not.
    fall_asleep: makes the boot without an engine; None: there is none, or this is it.
    """

    links: NodeLinks
    side: EngineSide
    card: NodeCard
    prepare: Callable[[PrepareWeights, WeightImage | None], NextBoot] | None = None
    intake: ImageIntake | None = None
    fall_asleep: Callable[[], NextBoot] | None = None


@dataclass(frozen=True, slots=True)
class NextBoot:
    """Implements weights_loader.PreparedBoot.

    me: the boot's name and incarnation.
    source: where the weights come from.
    open: builds the node around the engine, which its engine_stack closes from then on.
    free: closes the engine where it is not opened.
    image: the weights' bytes, for other nodes, as long as the boot serves.
    broken: why it cannot be opened any more; "": it can.
    replace: has an engine that is kept take the weights; without one there is nothing to wait for.
    """

    version: WeightsVersion
    me: Peer
    open: Callable[[NodeProcess], OpenedEngine]
    free: Callable[[], None]
    source: str = ""
    image: WeightImage | None = None
    broken: Callable[[], str] = str
    replace: Callable[[], str | None] = str
    ended: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.free()
        if self.image is not None:
            self.image.close()
        self.ended.set()


def serve(config: NodeConfig, open_engine: Callable[[NodeProcess], OpenedEngine]) -> int:
    """Serve until a signal. Returns 0 after a drain. Raises what broke the engine."""
    with ExitStack() as end_stack:
        health = NodeHealth()
        health.stage = "loading the model"
        health_address = end_stack.enter_context(health_port(config.health, health.probes))
        with ExitStack() as stack:
            process, stop = _open_process(config, health, stack, end_stack), StopSignal()
            following: NextBoot | None = NextBoot(WeightsVersion(), process.me, open_engine, nothing)
            while following is not None:
                process = replace(process, me=following.me)
                process, following = _serve_boot(process, following, health_address, stop)
    logger.info("node %s is done", process.me.node)
    return 0


def _serve_boot(
    process: NodeProcess, boot: NextBoot, health_address: str | None, stop: StopSignal
) -> tuple[NodeProcess, NextBoot | None]:
    """Serve as one boot. Returns the process as operators left it, and the boot that follows; None: it was stopped."""
    config, health, is_first = process.config, process.health, process.health.identity == {}
    health.stage = health.stage or "going over to another boot"
    with ExitStack() as engine_stack, ExitStack() as stack:
        engine_stack.callback(boot.ended.set)
        if boot.image is not None:
            engine_stack.callback(boot.image.close)
        opened = boot.open(replace(process, stack=stack, engine_stack=engine_stack))
        links, card = opened.links, opened.card
        stack.callback(links.hub.close)
        links.acceptance.models = frozenset(card.model_digests)
        links.acceptance.embeds = card.capabilities.embeds
        links.acceptance.block_tokens = card.hash_block_tokens
        serving = card.weights_version, boot.image
        loader = WeightsLoader(
            card.peer, links.outbox, opened.prepare, opened.intake, serving, fall_asleep=opened.fall_asleep,
            is_asleep=card.sleeping,
        )  # fmt: skip
        control = NodeControl(
            links,
            opened.side,
            report_s=config.report_s,
            drain_s=config.drain_s,
            clock=process.clock,
            health=health if health_address is not None else None,
            loader=loader,
        )
        stop.watch(control)
        health.identity = {
            "node": card.node, "model": card.model, "incarnation": card.incarnation, "engine": config.engine,
            "weights": card.weights_label, "weights_epoch": str(card.weights_epoch),
        }  # fmt: skip
        health.stage = "registering"
        newer = None
        if is_first and opened.prepare is not None:
            newer = catch_up(process.agent, control, card, from_files=opened.intake is None)
        if newer is None and not stop.has_come:
            _register(process, card, health_address)
        if is_first:
            collect_seldom()
        else:
            gc.unfreeze()  # what was made before may be garbage now
        try:
            following, standing = control.run(), links.standing
        finally:
            if loader.num_busy:
                process.end_stack.push(partial(leave_last, Busy(loader.num_busy)))
    assert following is None or isinstance(following, NextBoot)
    if following is not None and newer is not None:
        following = replace(following, source=newer.source)
    left = replace(process, role=standing.role, is_cordoned=standing.is_cordoned, num_boots=process.num_boots + 1)
    return _before(left, card, loader, following), following


def _before(left: NodeProcess, card: NodeCard, loader: WeightsLoader, following: NextBoot | None) -> NodeProcess:
    """What the boot that follows this card's is told of weights."""
    if following is not None:
        left = replace(left, weights_source=following.source)
        if loader.share is not None:
            left = replace(left, weights_share=loader.share)
        if following.version.epoch != card.weights_epoch:
            former = FormerWeights(card.weights_label, card.weights, card.weights_source)
            left = replace(left, weights_former=former)
    return left


def _register(process: NodeProcess, card: NodeCard, health_address: str | None) -> None:
    """Let the cluster know this boot, in place of the one before."""
    if process.agent.is_started:
        process.agent.succeed(card)
    else:
        process.agent.start(card, registered=lambda: _announce_ready(process.config, card, health_address))
    logger.info(
        "node %s (%s) %s %s, weights %s, at %s over %s",
        card.node, card.role, "sleeps, with" if card.sleeping else "serves", card.model, card.weights_version,
        card.address, ", ".join(card.backends) or "no transfer",
    )  # fmt: skip


def nothing() -> None:
    """Frees a boot that has nothing before it is opened."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Implements leaving.Sticky: threads that load weights on after the end."""

    num_stuck: int


class StopSignal:
    """SIGTERM and SIGINT, for whichever boot serves. One that comes between two boots ends the second at once, and one
    before the first ends the process.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._control: NodeControl | None = None

    def watch(self, control: NodeControl) -> None:
        if self._control is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda _number, _frame: self._stop())
        self._control = control
        if self.has_come:
            control.stop()

    def _stop(self) -> None:
        self.has_come = True
        if self._control is not None:
            self._control.stop()


def _open_process(config: NodeConfig, health: NodeHealth, stack: ExitStack, end_stack: ExitStack) -> NodeProcess:
    model_dir = local_model(config.model or bundled_model())
    check_model_files(model_dir, needs_tokenizer=False)  # a router may have its own
    me = Peer(config.name or f"{config.role}-{secrets.token_hex(3)}", new_incarnation())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, 0)
    spans = open_tracer(config.tracing, "node", me.node, time.monotonic, time.time)
    if spans is not None:
        stack.callback(spans.close)
    agent = NodeAgent(
        config.bootstrap,
        heartbeat_s=config.heartbeat_s,
        credentials=bootstrap_credentials(config.security.cluster_keys(), Identity("node", me.node)),
    )
    health.registration = agent
    stack.callback(agent.stop)
    return NodeProcess(
        config=config,
        me=me,
        model_dir=model_dir,
        names=config.served_model_name or (served_name(model_dir),),
        files=ModelFiles(model_dir),
        health=health,
        agent=agent,
        context=context,
        spans=spans,
        clock=time.monotonic,
        role=config.role,
        stack=stack,
        engine_stack=stack,
        end_stack=end_stack,
    )


def link_settings(process: NodeProcess) -> WireSettings:
    """Of a boot's links."""
    config = process.config
    return WireSettings(
        rebind_s=REBIND_S if process.num_boots else 0.0,
        heartbeat_s=config.heartbeat_s,
        lease_s=config.lease_s,
        advertise_host=config.advertise,
        cluster_keys=config.security.cluster_keys(),
    )


def new_incarnation() -> str:
    """Names one boot of a node."""
    return secrets.token_hex(8)


def _announce_ready(config: NodeConfig, card: NodeCard, health: str | None = None) -> None:
    announce(
        config.ready_fd, card.address, name=card.node, role=card.role, model=card.model,
        transfer=list(card.backends), health=health,
    )  # fmt: skip
