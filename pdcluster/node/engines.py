"""Starts a node's engine, alone or over ranks, and says what the rest of the node must know of it. It decides nothing about requests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdcluster.config import NodeConfig, cache_directory
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.kv.pool import MappedPool
from pdcluster.node.parts import StepEngine
from pdcluster.node.ranks import RankedEngine, RankSettings
from pdcluster.transfer.base import Region
from pdcluster.transfer.geometry import PageShape

logger = logging.getLogger(__name__)

EXIT_RANK_LOST = 70
LOG_FLUSH_S = 0.2


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """driver: what the loop drives and the node closes at its end; local: the engine of this process, rank 0; regions, memories: each rank's pool and
    its bytes (a single empty one for pools in device memory)."""

    driver: StepEngine
    local: Engine
    pages: PageShape
    regions: tuple[Region, ...]
    memories: tuple[memoryview, ...]


def start_engine(config: NodeConfig, model_dir: Path, first_region: int, on_lost: Callable[[str], None] | None = None) -> NodeEngine:
    """Load the model and warm up. on_lost: told when a rank is gone; the default ends this process."""
    engine_config = _engine_config(config, model_dir)
    if config.tp == 1:
        engine = Engine(engine_config)
        if config.warmup:
            engine.warmup()
        return _describe(engine, engine, (), first_region, ranks=1)
    ranked = RankedEngine(engine_config, _rank_settings(config), on_lost if on_lost is not None else end_process)
    if config.warmup:
        ranked.warmup()
    return _describe(ranked, ranked.local, ranked.mapped_pools, first_region, ranks=config.tp)


def end_process(reason: str) -> None:
    """A node that lost a rank must not go on, in any of its threads: it ends at once, as by SIGKILL. Its other ranks die with it, its peers see their
    connections close, and whoever watches it starts it again."""
    logger.critical("this node gives itself up: %s", reason)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_RANK_LOST)


def _describe(driver: StepEngine, local: Engine, others: tuple[MappedPool, ...], first_region: int, *, ranks: int) -> NodeEngine:
    pool = local.pool
    own = Region(first_region, pool.address, pool.nbytes, pool.fd)
    regions = (own, *(Region(first_region + number, other.address, other.nbytes, other.fd) for number, other in enumerate(others, 1)))
    memories = (pool.view if pool.fd is not None else memoryview(bytearray()), *(other.view for other in others))
    return NodeEngine(driver, local, PageShape.of(local.full_layout, ranks), regions, memories)


def _engine_config(config: NodeConfig, model_dir: Path) -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        cache_dir=cache_directory(),
        dtype=config.dtype,
        device=config.device,
        page_tokens=config.kv.page_tokens,
        kv_bytes=config.kv.memory_bytes,
        max_len=config.max_len,
        threads=config.threads or max(1, len(os.sched_getaffinity(0)) // config.tp),
    )


def _rank_settings(config: NodeConfig) -> RankSettings:
    return RankSettings(
        size=config.tp, cores=share_cores(config.cores, config.tp), pulse_s=config.heartbeat_s / 2, silence_s=config.lease_s, log=config.log
    )


def share_cores(cores: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Cores of each rank; with fewer cores than ranks all share them."""
    if len(cores) < ranks:
        return (cores,) * ranks if cores else ()
    return tuple(cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks] for rank in range(ranks))
