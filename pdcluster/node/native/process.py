"""The process of a node with the native engine: engine, transfer media and card."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec.structs import replace as replace_fields

from pdcluster.bootstrap.card import NodeCard
from pdcluster.checkpoint.hub import local_model
from pdcluster.checkpoint.weight_image import StoredImage, WeightImage
from pdcluster.core.errors import ConfigError, ModelError
from pdcluster.core.messages import PROTOCOL_VERSION, PrepareWeights
from pdcluster.core.version import VERSION
from pdcluster.core.weights import NODE_SOURCE, WeightsVersion, holder_of
from pdcluster.engine.engine import Engine
from pdcluster.engine.ops.batch_invariant import invariant_arithmetic
from pdcluster.engine.ops.quantized import int8_arithmetic
from pdcluster.kv.layout import DEFAULT_ARITHMETIC, Fingerprint
from pdcluster.node.control import NodeLinks
from pdcluster.node.native.asleep import KeptWeights, SleepingSide, give_memory_back
from pdcluster.node.native.assembly import KV_REGION, Shape, Wiring, assemble, links_of
from pdcluster.node.native.engine_side import NativeSide
from pdcluster.node.native.engine_start import (
    ModelFacts,
    NodeEngine,
    end_process,
    engine_config,
    is_sealed,
    start_engine,
)
from pdcluster.node.native.tensor_parallel.endpoint_client import RankLink
from pdcluster.node.native.weights_source import (
    check_config,
    check_place,
    check_received,
    check_replacement,
    check_same,
    held_files,
    hold_beside,
    image_of,
)
from pdcluster.node.server import NextBoot, NodeProcess, OpenedEngine, link_settings, new_incarnation, nothing, serve
from pdcluster.node.weights_exchange import ImageIntake
from pdcluster.processes.leaving import leave_last
from pdcluster.scheduler.limits import SchedulerLimits, logprob_tokens_of
from pdcluster.settings.config import NodeConfig, cache_directory
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.backends.staged.staging import Fabric
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.transfer.protocol.session import Settings as TransferSettings

logger = logging.getLogger(__name__)


def run(config: NodeConfig) -> int:
    """Serve until a signal. Returns 0 after a drain. Raises what broke the engine."""
    check(config)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    return serve(config, open_native)


def open_native(process: NodeProcess) -> OpenedEngine:
    """Load the model, start the transfer media and build the node."""
    config = process.config
    held = held_files(config, process.model_dir)
    own = replace(engine_config(config, process.model_dir), weights_files=() if held is None else held.paths)
    engine = start_engine(config, own, process.me, KV_REGION)
    if held is not None:
        held.close()
    return open_around(engine, WeightsVersion(digest=engine.local.weights_digest), None, process)


def open_around(
    engine: NodeEngine, version: WeightsVersion, image: WeightImage | None, process: NodeProcess
) -> OpenedEngine:
    """Build the node around a started engine, which it closes at its end. image: the weights' bytes, if others may have
    them.
    """
    config, me, served = process.config, process.me, ModelFacts.of(engine.local)
    process.engine_stack.callback(_note_stuck, engine.local, process.end_stack)
    process.engine_stack.callback(engine.driver.close)
    backends = media_of_all(open_backends(config, me), engine.links)
    for backend in backends.values():
        process.engine_stack.callback(backend.shutdown)
    wiring = replace(wiring_of(process, backends), spans=process.spans)
    parts = assemble(
        wiring, shape_of(config, engine), engine.driver, limits_of(config, served), process.files, process.agent,
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
    card = card_of(process, served, version, parts.links, tuple(backends))
    return OpenedEngine(
        parts.links, side, card, partial(prepare, process, served), _intake(process, served, card.address),
        partial(fall_asleep, process, served, version, image),
    )  # fmt: skip


def fall_asleep(
    process: NodeProcess, served: ModelFacts, version: WeightsVersion, image: WeightImage | None
) -> NextBoot:
    """Make the boot without an engine. Weights that are in no file are kept on the disk, whose room is taken now.

    Raises ModelError where it has none.
    """
    kept = None
    if image is not None and holder_of(process.weights_source) is not None:
        kept = KeptWeights(image, cache_directory())
    opens = partial(_open_asleep, served, version, kept)
    me = Peer(process.me.node, new_incarnation())
    return NextBoot(version, me, opens, nothing if kept is None else kept.close, process.weights_source)


def _open_asleep(
    served: ModelFacts, version: WeightsVersion, kept: KeptWeights | None, process: NodeProcess
) -> OpenedEngine:
    stored = None
    if kept is not None:
        process.engine_stack.callback(kept.close)
        try:
            stored = kept.fill()
        except ModelError as error:
            logger.error("the weights %s are gone, and have to be pushed or loaded again: %s", version, error)
    give_memory_back()
    links = links_of(wiring_of(process, {}), process.files, process.agent, process.clock, is_sleeping=True)
    card = replace(card_of(process, served, version, links, ()), sleeping=True, draining=True)
    asleep = replace(served, is_asleep=True)
    prepares, intake = partial(prepare, process, asleep, stored=stored), _intake(process, asleep, card.address)
    return OpenedEngine(links, SleepingSide(links), card, prepares, intake)


def prepare(
    process: NodeProcess,
    serving: ModelFacts,
    message: PrepareWeights,
    image: WeightImage | None,
    stored: StoredImage | None = None,
) -> NextBoot:
    """Load other weights of the model beside those that serve, and warm them up. Nothing that serves changes.

    image: holds them; None: they are in files. stored: has those that served before the node slept.
    Raises ModelError for weights that do not fit or have another digest than was asked for, ConfigError where memory
    is short.
    """
    wanted, source, held = message.version, message.source, None
    me, watch = Peer(process.me.node, new_incarnation()), RankWatch()
    try:
        check_place(process.config)
        if image is None and holder_of(source) is not None:
            if stored is None or wanted.digest != serving.weights_digest:
                raise ModelError(
                    f"node {process.me.node} has no weights {wanted} in memory any more; push or load them again"
                )
            image = stored.open()
        if image is None:
            found = local_model(Path(source)) if source else process.model_dir
            check_replacement(found, process.model_dir, serving.config)
            held = hold_beside(process.config, found)
            image, files = image_of(found, held), () if held is None else held.paths
        else:
            found, source, files = process.model_dir, NODE_SOURCE, image.paths
            check_config(found, serving.config)
        engine = _start_beside(process, serving, me, found, files, watch)
        version = replace_fields(wanted, digest=engine.local.weights_digest)
        try:
            check_same(engine.local, serving, wanted.digest)
        except ModelError:
            engine.driver.close()
            raise
    except BaseException:
        if image is not None:
            image.close()
        raise
    finally:
        if held is not None:
            held.close()
    opens = partial(_take_over, watch, engine, version, image)
    return NextBoot(version, me, opens, engine.driver.close, source, image, lambda: watch.lost)


class RankWatch:
    """A rank that is gone ends the node once its engine serves. Before that, only what is ready is lost: why."""

    def __init__(self) -> None:
        self.lost, self.serves = "", False

    def __call__(self, reason: str) -> None:
        if self.serves:
            end_process(reason)
        logger.warning("the weights that were ready are lost: %s", reason)
        self.lost = reason


def _take_over(
    watch: RankWatch, engine: NodeEngine, version: WeightsVersion, image: WeightImage | None, process: NodeProcess
) -> OpenedEngine:
    watch.serves = True
    return open_around(engine, version, image, process)


def _start_beside(
    process: NodeProcess, serving: ModelFacts, me: Peer, model: Path, files: tuple[Path, ...], watch: RankWatch
) -> NodeEngine:
    config = process.config
    own = replace(
        engine_config(config, model),
        weights_files=files,
        num_pages=serving.num_pages,
        populates=serving.is_asleep,  # beside another pool its pages are first used when that one is gone
        text_dir=process.model_dir,
    )
    return start_engine(config, own, me, KV_REGION, watch)


def _intake(process: NodeProcess, serving: ModelFacts, address: str) -> ImageIntake:
    return ImageIntake(
        address,
        partial(check_received, process.model_dir, serving.config),
        partial(_weights_media, process.config),
        process.agent.find,
        is_sealed(process.config),
    )


def _weights_media(config: NodeConfig, me: Peer) -> dict[str, Backend]:
    """For one transfer of weights, on a port of its own."""
    transfer = config.transfer
    return create_backends(
        transfer.backend,
        me,
        host=config.transfer_host(),
        staging_bytes=transfer.staging_bytes,
        fabric=Fabric(transfer.devices, transfer.gid_index, transfer.rails),
        is_sealed=is_sealed(config),
    )


def _note_stuck(engine: Engine, end_stack: ExitStack) -> None:
    """Threads of this engine that nobody can end outlive it, and the process must not end around them."""
    if engine.num_stuck:
        end_stack.push(partial(leave_last, engine))


def wiring_of(process: NodeProcess, backends: Mapping[str, Backend]) -> Wiring:
    config = process.config
    return Wiring(
        process.me,
        process.role,
        config.listen,
        process.context,
        link_settings(process),
        backends,
        transfer_settings(config),
        config.transfer.parking_s,
        parking_share=config.transfer.parking_percent / 100,
        pull_s=config.transfer.pull_s,
        is_cordoned=process.is_cordoned,
    )


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


def limits_of(config: NodeConfig, served: ModelFacts) -> SchedulerLimits:
    return SchedulerLimits(
        token_budget=config.scheduler.token_budget,
        max_rows=config.scheduler.max_rows,
        max_waiting=config.scheduler.max_waiting,
        max_len=served.usable_len,
        eos_token_ids=frozenset(served.config.eos_token_ids),
        logprob_tokens=logprob_tokens_of(served.config.vocab_size),
    )


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
    process: NodeProcess, served: ModelFacts, version: WeightsVersion, links: NodeLinks, backends: tuple[str, ...]
) -> NodeCard:
    """The node's card."""
    config, me = process.config, process.me
    model, *aliases = process.names
    return NodeCard(
        node=me.node,
        incarnation=me.incarnation,
        role=process.role,
        address=links.hub.address,
        model=model,
        fingerprint=Fingerprint(
            model,
            served.weights_digest,
            PROTOCOL_VERSION,
            config.kv.hash_block_tokens,
            served.full_layout,
            arithmetic_of(config),
            served.weight_groups,
        ),
        max_len=served.usable_len,
        vocab_size=served.config.vocab_size,
        num_pages=served.num_pages,
        eos_ids=served.config.eos_token_ids,
        tokenizer_hash=process.files.digest,
        backends=backends,
        device=config.device,
        pid=os.getpid(),
        model_aliases=tuple(aliases),
        version=VERSION,
        link_key=links.hub.link_key,
        draining=process.is_cordoned,
        weights_label=version.label,
        weights_epoch=version.epoch,
        weights_share=process.weights_share,
        weights_source=process.weights_source,
        weights_former=process.weights_former,
    )


def arithmetic_of(config: NodeConfig) -> str:
    if config.quantization != "none":
        return int8_arithmetic(config.quantization, config.tp)
    return invariant_arithmetic(config.tp) if config.deterministic else DEFAULT_ARITHMETIC
