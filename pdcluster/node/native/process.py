"""The process of a node with the native engine: engine, transfer media and card."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import zmq

from pdcluster.bootstrap.card import NodeCard
from pdcluster.checkpoint.hub import served_name
from pdcluster.core.errors import ConfigError
from pdcluster.core.messages import PROTOCOL_VERSION
from pdcluster.core.version import VERSION
from pdcluster.engine.engine import Engine
from pdcluster.engine.ops.batch_invariant import invariant_arithmetic
from pdcluster.engine.ops.quantized import int8_arithmetic
from pdcluster.kv.layout import DEFAULT_ARITHMETIC, Fingerprint
from pdcluster.node.native.assembly import KV_REGION, Shape, Wiring, assemble
from pdcluster.node.native.components import NodeComponents
from pdcluster.node.native.engine_side import NativeSide
from pdcluster.node.native.engine_start import NodeEngine, is_sealed, start_engine
from pdcluster.node.native.tensor_parallel.endpoint_client import RankLink
from pdcluster.node.reports.load_report import ModelFiles
from pdcluster.node.server import NodeProcess, OpenedEngine, serve
from pdcluster.scheduler.limits import SchedulerLimits, logprob_tokens_of
from pdcluster.settings.config import NodeConfig
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.backends.staged.staging import Fabric
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.transfer.protocol.session import Settings as TransferSettings
from pdcluster.wire.sockets import WireSettings

logger = logging.getLogger(__name__)


def run(config: NodeConfig) -> int:
    """Serve until a signal. Returns 0 after a drain. Raises what broke the engine."""
    check(config)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    return serve(config, open_native)


def open_native(process: NodeProcess) -> OpenedEngine:
    """Load the model, start the transfer media and build the node."""
    config, me = process.config, process.me
    engine = start_engine(config, process.model_dir, me, KV_REGION)
    process.engine_stack.push(partial(leave_last, engine.local))
    process.engine_stack.callback(engine.driver.close)
    backends = media_of_all(open_backends(config, me), engine.links)
    for backend in backends.values():
        process.engine_stack.callback(backend.shutdown)
    wiring = replace(wiring_of(config, me, process.context, backends), spans=process.spans)
    parts = assemble(
        wiring, shape_of(config, engine), engine.driver, limits_of(config, engine.local), process.files, process.agent,
        process.clock, engine.local.grammars,
    )  # fmt: skip
    for each in parts.backends:
        process.stack.callback(each.shutdown)
    health = process.health if config.health else None
    side = NativeSide(
        parts,
        clock=process.clock,
        looks_ahead=config.scheduler.look_ahead,
        health=health,
    )
    card = card_of(config, me, engine.local, parts, process.files, tuple(backends), process.model_dir)
    return OpenedEngine(parts.links, side, card)


def wiring_of(
    config: NodeConfig, me: Peer, context: zmq.Context[zmq.Socket[bytes]], backends: Mapping[str, Backend]
) -> Wiring:
    return Wiring(
        me,
        config.role,
        config.listen,
        context,
        wire_settings(config),
        backends,
        transfer_settings(config),
        config.transfer.parking_s,
        parking_share=config.transfer.parking_percent / 100,
        pull_s=config.transfer.pull_s,
    )


class Sticky(Protocol):
    @property
    def num_stuck(self) -> int: ...


def leave_last(
    engine: Sticky, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
) -> None:
    """Log why the node broke, after everything else is closed. It may not reach whoever would log it."""
    if engine.num_stuck and error is not None:
        logger.critical("this node broke", exc_info=error)
    leave_if_stuck(engine.num_stuck, 0 if error is None else 1)


def leave_if_stuck(num_threads: int, code: int) -> None:
    """End the process while library threads still compute. An interpreter that ends around them is aborted by the C++
    runtime, and a drain would look like a crash.
    """
    if num_threads:
        logger.warning("%d threads still compute for grammars that took too long; leaving without them", num_threads)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check(config: NodeConfig) -> None:
    """Refuse by name what is not built."""
    if config.vllm.args:
        raise ConfigError("vLLM's arguments are given, but node.engine is native; add --engine vllm, or leave them out")
    if config.vllm.adapters:
        raise ConfigError(
            "node.vllm.adapters is set, but node.engine is native, which has no LoRA adapters; add --engine vllm"
        )
    if config.device != "cpu" and config.role != "mixed":
        raise ConfigError(
            f"node.role is {config.role} on {config.device}, but KV in device memory cannot be moved yet; use role "
            "mixed"
        )
    if config.deterministic and config.device != "cpu":
        raise ConfigError(
            f"node.deterministic is set, but its kernels are for CPUs and node.device is {config.device}; leave one "
            "of them out"
        )
    if config.scheduler.look_ahead and config.tp > 1:
        raise ConfigError(
            f"node.scheduler.look_ahead is set and node.tp is {config.tp}, but only rank 0 knows what it draws; "
            "leave one of them out"
        )
    if config.quantization != "none" and (config.device != "cpu" or config.deterministic):
        other = (
            "node.deterministic is set"
            if config.deterministic
            else f"its kernels are for CPUs and node.device is {config.device}"
        )
        raise ConfigError(f"node.quantization is {config.quantization}, but {other}; leave one of them out")
    page_tokens, block_tokens = config.kv.page_tokens, config.kv.hash_block_tokens
    if page_tokens % block_tokens:
        raise ConfigError(
            f"node.kv.page_tokens {page_tokens} must be a multiple of node.kv.hash_block_tokens {block_tokens}; use "
            "equal values"
        )


def open_backends(config: NodeConfig, me: Peer) -> dict[str, Backend]:
    """The media of this node, best first. None for a pool in device memory, which then serves in mode local."""
    if config.device != "cpu":
        return {}
    transfer = config.transfer
    fabric = Fabric(transfer.devices, transfer.gid_index, transfer.rails)
    return create_backends(
        transfer.backend,
        me,
        host=config.transfer_host(),
        staging_bytes=transfer.staging_bytes,
        fabric=fabric,
        port=transfer.port,
        is_sealed=is_sealed(config),
    )


def media_of_all(backends: dict[str, Backend], links: Sequence[RankLink]) -> dict[str, Backend]:
    """Media that every rank of the node has."""
    lacking = [name for name in backends if not all(name in link.ends for link in links)]
    for name in lacking:
        logger.warning("this node goes on without %s, which not all of its ranks could start", name)
        backends.pop(name).shutdown()
    return backends


def limits_of(config: NodeConfig, engine: Engine) -> SchedulerLimits:
    return SchedulerLimits(
        token_budget=config.scheduler.token_budget,
        max_rows=config.scheduler.max_rows,
        max_waiting=config.scheduler.max_waiting,
        max_len=usable_len(engine),
        eos_token_ids=frozenset(engine.config.eos_token_ids),
        logprob_tokens=logprob_tokens_of(engine.config.vocab_size),
    )


def usable_len(engine: Engine) -> int:
    """The longest request: what the model takes and the pool holds."""
    return min(engine.max_len, engine.num_pages * engine.layout.page_tokens)


def shape_of(config: NodeConfig, engine: NodeEngine) -> Shape:
    return Shape(
        vocab_size=engine.local.config.vocab_size,
        num_pages=engine.local.num_pages,
        block_tokens=config.kv.hash_block_tokens,
        pages=engine.pages,
        regions=(engine.region,),
        memories=(engine.memory,),
        links=engine.links,
        weights=engine.local.weights_digest,
    )


def wire_settings(config: NodeConfig) -> WireSettings:
    return WireSettings(
        heartbeat_s=config.heartbeat_s,
        lease_s=config.lease_s,
        advertise_host=config.advertise,
        cluster_keys=config.security.cluster_keys(),
    )


def transfer_settings(config: NodeConfig) -> TransferSettings:
    transfer = config.transfer
    return TransferSettings(
        digests=transfer.digests == "always",
        chunk_bytes=transfer.chunk_bytes,
        window_bytes=transfer.window_bytes,
        trials=transfer.retries + 1,
        commit_s=transfer.deadline_s,
    )


def card_of(
    config: NodeConfig,
    me: Peer,
    engine: Engine,
    parts: NodeComponents,
    files: ModelFiles,
    backends: tuple[str, ...],
    model_dir: Path,
) -> NodeCard:
    """The node's card."""
    model, *aliases = config.served_model_name or (served_name(model_dir),)
    return NodeCard(
        node=me.node,
        incarnation=me.incarnation,
        role=config.role,
        address=parts.links.hub.address,
        model=model,
        fingerprint=Fingerprint(
            model,
            engine.weights_digest,
            PROTOCOL_VERSION,
            config.kv.hash_block_tokens,
            engine.full_layout,
            arithmetic_of(config),
            engine.weight_groups,
        ),
        max_len=usable_len(engine),
        vocab_size=engine.config.vocab_size,
        num_pages=engine.num_pages,
        eos_ids=engine.config.eos_token_ids,
        tokenizer_hash=files.digest,
        backends=backends,
        device=config.device,
        pid=os.getpid(),
        model_aliases=tuple(aliases),
        version=VERSION,
        link_key=parts.links.hub.link_key,
    )


def arithmetic_of(config: NodeConfig) -> str:
    if config.quantization != "none":
        return int8_arithmetic(config.quantization, config.tp)
    return invariant_arithmetic(config.tp) if config.deterministic else DEFAULT_ARITHMETIC
