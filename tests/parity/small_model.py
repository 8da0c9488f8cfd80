"""A small model, and engines of it for the nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

from checkpoints import KERNEL_CACHE, Shape
from local_cluster import EngineKit
from local_cluster import Shape as NodeShape

from pdcluster.core.messages import PROTOCOL_VERSION
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.kv.layout import Fingerprint
from pdcluster.transfer.backends.base import Region
from pdcluster.transfer.layout.geometry import PageShape

MODEL = Shape("qwen3", num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=120)
PAGE = 16


def make_kit(directory: Path, *, token_budget: int = 24, reserve_tokens: int = 16, vocab_size: int = MODEL.vocab_size):
    def make(num_pages: int) -> EngineKit:
        engine = Engine(EngineConfig(directory, KERNEL_CACHE, page_tokens=PAGE, num_pages=num_pages, threads=1))
        region = Region(0, engine.pool.address, engine.pool.nbytes, engine.pool.fd)
        shape = NodeShape(
            vocab_size, num_pages, PAGE, PageShape.of(engine.full_layout, 1), (region,), (engine.pool.view,)
        )
        return EngineKit(
            engine,
            shape,
            Fingerprint("model", engine.weights_digest, PROTOCOL_VERSION, PAGE, engine.layout),
            512,
            token_budget,
            reserve_tokens,
        )

    return make
