"""The node process, whatever its engine: health port, model files, links, registration. Runs the loop until SIGTERM or
SIGINT, then drains.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import zmq

from pdcluster.bootstrap.agent import NodeAgent
from pdcluster.bootstrap.card import NodeCard
from pdcluster.bootstrap.credentials import Identity, bootstrap_credentials
from pdcluster.checkpoint.bundled import path as bundled_model
from pdcluster.checkpoint.hub import local_model
from pdcluster.checkpoint.inspection import check_model_files
from pdcluster.node.control import EngineSide, NodeControl, NodeLinks
from pdcluster.node.reports.health import NodeHealth
from pdcluster.node.reports.load_report import ModelFiles
from pdcluster.processes.garbage import collect_seldom
from pdcluster.processes.ready import announce
from pdcluster.settings.config import NodeConfig
from pdcluster.telemetry.health import health_port
from pdcluster.telemetry.tracing import Tracer, open_tracer
from pdcluster.transfer.backends.base import Peer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """What a node process has before its engine.

    stack, engine_stack: closed at the end, the engine's last.
    """

    config: NodeConfig
    me: Peer
    model_dir: Path
    files: ModelFiles
    health: NodeHealth
    agent: NodeAgent
    context: zmq.Context[zmq.Socket[bytes]]
    spans: Tracer | None
    clock: Callable[[], float]
    stack: ExitStack
    engine_stack: ExitStack


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A started engine, and how its node talks."""

    links: NodeLinks
    side: EngineSide
    card: NodeCard


def serve(config: NodeConfig, open_engine: Callable[[NodeProcess], OpenedEngine]) -> int:
    """Serve until a signal. Returns 0 after a drain. Raises what broke the engine."""
    with ExitStack() as engine_stack, ExitStack() as stack:
        health = NodeHealth()
        health.stage = "loading the model"
        health_address = engine_stack.enter_context(health_port(config.health, health.probes))
        process = _open_process(config, health, stack, engine_stack)
        opened = open_engine(process)
        links, card = opened.links, opened.card
        stack.callback(links.hub.close)
        links.acceptance.models = frozenset(card.model_digests)
        links.acceptance.embeds = card.capabilities.embeds
        links.acceptance.block_tokens = card.hash_block_tokens
        control = NodeControl(
            links,
            opened.side,
            report_s=config.report_s,
            drain_s=config.drain_s,
            clock=process.clock,
            health=health if health_address is not None else None,
        )
        _on_signals(control.stop)
        health.identity = {
            "node": card.node, "model": card.model, "incarnation": card.incarnation, "engine": config.engine,
        }  # fmt: skip
        health.stage = "registering"
        process.agent.start(card, registered=lambda: _announce_ready(config, card, health_address))
        collect_seldom()
        logger.info(
            "node %s (%s) serves %s at %s over %s",
            card.node, card.role, card.model, card.address, ", ".join(card.backends) or "no transfer",
        )  # fmt: skip
        control.run()
    logger.info("node %s is done", card.node)
    return 0


def _open_process(config: NodeConfig, health: NodeHealth, stack: ExitStack, engine_stack: ExitStack) -> NodeProcess:
    model_dir = local_model(config.model or bundled_model())
    check_model_files(model_dir, needs_tokenizer=False)  # a router may have its own
    me = Peer(config.name or f"{config.role}-{secrets.token_hex(3)}", secrets.token_hex(8))
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
        config, me, model_dir, ModelFiles(model_dir), health, agent, context, spans, time.monotonic, stack, engine_stack
    )


def _announce_ready(config: NodeConfig, card: NodeCard, health: str | None = None) -> None:
    announce(
        config.ready_fd, card.address, name=card.node, role=card.role, model=card.model,
        transfer=list(card.backends), health=health,
    )  # fmt: skip


def _on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop())
