"""Starts a node's engine, alone or over ranks, and gathers what the rest of the node must know of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.model.config import ModelConfig
from pdcluster.kv.layout import KVLayout
from pdcluster.node.native.components import StepEngine
from pdcluster.node.native.tensor_parallel.channel import Media
from pdcluster.node.native.tensor_parallel.endpoint_client import RankLink
from pdcluster.node.native.tensor_parallel.engine import RankedEngine, RankSettings
from pdcluster.processes.control_groups import usable_cores
from pdcluster.processes.free_memory import check_memory, default_kv_bytes, free_memory
from pdcluster.settings.config import NodeConfig, cache_directory
from pdcluster.settings.sources import CACHE_VARIABLE
from pdcluster.transfer.backends.base import Peer, Region
from pdcluster.transfer.layout.geometry import PageShape

logger = logging.getLogger(__name__)

EXIT_RANK_LOST = 70


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """A started engine.

    driver: driven by the loop, closed by the node.
    local: rank 0's engine in this process.
    region, memory: its pool and bytes; none for device memory.
    links: to the other ranks' transfer endpoints.
    """

    driver: StepEngine
    local: Engine
    pages: PageShape
    region: Region
    memory: memoryview
    links: tuple[RankLink, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What stays known of an engine when it is closed.

    is_asleep: it is closed.
    """

    config: ModelConfig
    full_layout: KVLayout
    num_pages: int
    max_len: int
    weights_digest: str
    weight_groups: bytes
    is_asleep: bool = False

    @staticmethod
    def of(engine: Engine) -> ModelFacts:
        return ModelFacts(
            engine.config, engine.full_layout, engine.num_pages, engine.max_len, engine.weights_digest,
            engine.weight_groups,
        )  # fmt: skip

    @property
    def usable_len(self) -> int:
        """The longest request: what the model takes and the pool holds."""
        return min(self.max_len, self.num_pages * self.full_layout.page_tokens)


def start_engine(
    config: NodeConfig, own: EngineConfig, me: Peer, region: int, on_lost: Callable[[str], None] | None = None
) -> NodeEngine:
    """Load the model and warm up.

    own: as `engine_config` makes it.
    region: id of rank 0's pool; others follow.
    on_lost: called when a rank is gone. By default it ends this process.
    """
    if config.device == "cpu" and own.populates:
        check_memory(own.kv_bytes)  # before weights are read, which may take minutes
    warn_if_unwritable(own.cache_dir)
    if config.tp == 1:
        engine = Engine(own)
        _warm_up(engine, wanted=config.warmup)
        return _describe(engine, engine, region, ranks=1)
    ranked = RankedEngine(own, _rank_settings(config, me, region), on_lost if on_lost is not None else end_process)
    _warm_up(ranked, wanted=config.warmup)
    return replace(_describe(ranked, ranked.local, region, ranks=config.tp), links=ranked.links)


def _warm_up(engine: Engine | RankedEngine, *, wanted: bool) -> None:
    """An engine that cannot is closed, with its weights and its pool."""
    try:
        if wanted:
            engine.warmup()
    except BaseException:
        engine.close()
        raise


def end_process(reason: str) -> None:
    """End this process at once, as by SIGKILL. A node that lost a rank must not go on in any thread.

    Its other ranks die with it, its peers see closed connections, and its supervisor restarts it.
    """
    logger.critical("this node gives itself up: %s", reason)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_RANK_LOST)


def _describe(driver: StepEngine, local: Engine, region: int, *, ranks: int) -> NodeEngine:
    pool = local.pool
    memory = pool.view if pool.fd is not None else memoryview(bytearray())
    return NodeEngine(
        driver,
        local,
        PageShape.of(local.full_layout, ranks),
        Region(region, pool.address, pool.nbytes, pool.fd),
        memory,
    )


def engine_config(config: NodeConfig, model_dir: Path) -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        cache_dir=cache_directory(),
        dtype=config.dtype,
        device=config.device,
        page_tokens=config.kv.page_tokens,
        kv_bytes=config.kv.memory_bytes or default_kv_bytes(free_memory()),
        max_len=config.max_len,
        deterministic=config.deterministic,
        quantization=config.quantization,
        threads=config.threads or max(1, usable_cores() // config.tp),
    )


def warn_if_unwritable(cache_dir: Path) -> None:
    """Say once what a cache that cannot be written costs."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(cache_dir, os.W_OK) else "no permission"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        logger.warning(
            "the cache %s cannot be written (%s), so what it lacks runs uncompiled and slowly; set %s to a directory "
            "that can",
            cache_dir,
            why,
            CACHE_VARIABLE,
        )


def _rank_settings(config: NodeConfig, me: Peer, region: int) -> RankSettings:
    return RankSettings(
        size=config.tp,
        cores=share_cores(config.cores, config.tp),
        pulse_s=config.heartbeat_s / 2,
        silence_s=config.lease_s,
        log=config.log,
        media=_media(config, me, region) if config.device == "cpu" else None,
    )


def _media(config: NodeConfig, me: Peer, region: int) -> Media:
    transfer = config.transfer
    return Media(
        node=me.node,
        incarnation=me.incarnation,
        region=region,
        backend=transfer.backend,
        host=config.transfer_host(),
        staging_bytes=transfer.staging_bytes,
        devices=transfer.devices,
        gid_index=transfer.gid_index,
        rails=transfer.rails,
        port=transfer.port,
        is_sealed=is_sealed(config),
    )


def is_sealed(config: NodeConfig) -> bool:
    """Whether the transfer engine's sockets are encrypted."""
    return config.transfer.seal == "always" and bool(config.security.cluster_keys())


def share_cores(cores: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank. With fewer cores than ranks all share them."""
    if len(cores) < ranks:
        return (cores,) * ranks if cores else ()
    return tuple(cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks] for rank in range(ranks))
