"""Prefill and decode nodes of different ranks and page sizes, with real rank processes: the tokens of one engine,
greedy and seeded."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import KERNEL_CACHE, Shape, build_model, greedy, prompt, save
from driver import Driver
from local_cluster import EngineKit, LocalCluster, LocalNode
from local_cluster import Shape as NodeShape

from pdcluster.core.messages import PROTOCOL_VERSION, Role, Sampling
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.kv.layout import Fingerprint
from pdcluster.node.native.engine_start import NodeEngine, engine_config, start_engine
from pdcluster.settings.config import KVConfig, NodeConfig, TransferConfig
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.wire.sockets import WireSettings

pytestmark = pytest.mark.timeout(300)

MODELS = {
    "4 kv heads": Shape("qwen3", num_heads=8, num_kv_heads=4, head_dim=32, num_layers=3),
    "2 kv heads": Shape("llama", num_heads=4, num_kv_heads=2, head_dim=32, config={"attention_bias": True}),
}
BLOCK = 16
OUTPUT = 16
LENGTHS = (1, 15, 16, 17, 63, 79, 150)
SAMPLINGS = {
    "greedy": Sampling(max_tokens=OUTPUT, seed=0, temperature=0.0, ignore_eos=True),
    "seeded": Sampling(max_tokens=OUTPUT, seed=11, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, ignore_eos=True),
}


@dataclass(frozen=True)
class Side:
    ranks: int
    page_tokens: int

    def __str__(self) -> str:
        return f"tp{self.ranks}-page{self.page_tokens}"


@dataclass(frozen=True)
class Case:
    prefill: Side
    decode: Side
    backend: str
    model: str = "4 kv heads"
    layer_groups: bool = False

    def __str__(self) -> str:
        return (
            f"{self.prefill}-to-{self.decode}-{self.backend}-{self.model[0]}kv{'-groups' if self.layer_groups else ''}"
        )


CHOSEN = [
    Case(Side(2, 16), Side(1, 16), "shm"),
    Case(Side(1, 16), Side(2, 64), "tcp", layer_groups=True),
    Case(Side(2, 64), Side(4, 16), "shm", "2 kv heads"),
    Case(Side(4, 16), Side(2, 16), "tcp", layer_groups=True),
    Case(Side(1, 16), Side(1, 64), "shm"),
    Case(Side(1, 64), Side(1, 16), "mooncake", layer_groups=True),
    Case(Side(1, 48), Side(1, 32), "fake"),
]


def cases() -> Iterator[object]:
    """The whole matrix for the full run, a chosen few in every run."""
    yield from (pytest.param(case, id=str(case)) for case in CHOSEN)
    media = itertools.cycle(["shm", "tcp"])
    sides = [Side(ranks, page) for ranks in (1, 2, 4) for page in (16, 64)]
    for (prefill, decode), model in itertools.product(itertools.product(sides, sides), MODELS):
        case = Case(
            prefill, decode, next(media), model, layer_groups=random.Random(str(prefill) + str(decode)).random() < 0.5
        )
        if case not in CHOSEN:
            yield pytest.param(case, id=str(case), marks=pytest.mark.full)


@dataclass(frozen=True)
class Reference:
    directory: Path
    prompts: list[list[int]]
    tokens: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """What one engine does, which is what transformers does."""
    torch.set_num_threads(1)
    return {name: make_reference(shape, tmp_path_factory.mktemp("model")) for name, shape in MODELS.items()}


def make_reference(shape: Shape, directory: Path) -> Reference:
    model = build_model(shape, seed=3)
    save(model, directory)
    prompts = []
    for length in LENGTHS:
        tried = (prompt(length, shape.vocab_size, seed) for seed in range(40))
        prompts.append(next(tokens for tokens in tried if greedy(model, tokens, OUTPUT).least_gap >= 1e-3))
    engine = Engine(EngineConfig(directory, KERNEL_CACHE, page_tokens=BLOCK, num_pages=256, threads=1))
    tokens = {
        name: [job.tokens for job in Driver(engine).run(prompts, [sampling] * len(prompts))]
        for name, sampling in SAMPLINGS.items()
    }
    engine.close()
    assert tokens["greedy"] == [greedy(model, each, OUTPUT).tokens for each in prompts]
    return Reference(directory, [each.tolist() for each in prompts], tokens)


class MixedCluster(LocalCluster):
    """A prefill and a decode node of the given sides. Ranks above 0 never learn what rank 0 draws, so that nobody plans
    ahead of it."""

    looks_ahead = False

    def __init__(self, case: Case, directory: Path) -> None:
        make_backend = None
        if case.backend != "fake":

            def make_backend(me):
                return create_backends(case.backend, me, host="127.0.0.1", staging_bytes=1 << 22)[case.backend]

        super().__init__(
            {"p0": "prefill", "d0": "decode"},
            make_backend=make_backend,
            group_s=1e-12 if case.layer_groups else 1.0,
            force="remote",
        )
        self.wire = WireSettings(
            heartbeat_s=0.1, lease_s=20.0
        )  # starting ranks holds everything else here up for seconds
        self.case = case
        self.directory = directory
        self.lost: list[str] = []

    def make_node(self, name: str, role: Role) -> LocalNode:
        side = self.case.prefill if role == "prefill" else self.case.decode
        config = NodeConfig(
            tp=side.ranks,
            threads=1,
            kv=KVConfig(memory_bytes=4 << 20, page_tokens=side.page_tokens, hash_block_tokens=BLOCK),
            transfer=TransferConfig(backend=self.case.backend) if self.case.backend != "fake" else TransferConfig(),
            warmup=False,
        )
        me = Peer(name, f"{name}-{next(self.boots)}")
        return LocalNode(
            self,
            name,
            role,
            kit_of(start_engine(config, engine_config(config, self.directory), me, 0, self.lost.append)),
            me,
        )


def kit_of(engine: NodeEngine) -> EngineKit:
    local = engine.local
    shape = NodeShape(
        local.config.vocab_size, local.num_pages, BLOCK, engine.pages, (engine.region,), (engine.memory,), engine.links
    )
    fingerprint = Fingerprint("model", local.weights_digest, PROTOCOL_VERSION, BLOCK, local.full_layout)
    return EngineKit(engine.driver, shape, fingerprint, 512, token_budget=48, reserve_tokens=16)


async def pull_second_turns(cluster: LocalCluster, reference: Reference) -> None:
    """What goes on from a part of a greedy answer must give the rest of it, over KV that prefill fetched from
    decode."""
    sampling, part = Sampling(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True), OUTPUT - 4
    pairs = list(zip(reference.prompts, reference.tokens["greedy"], strict=True))
    turns = await asyncio.gather(*(cluster.run(prompt + answer[:part], sampling) for prompt, answer in pairs))
    assert [tokens for tokens, _ in turns] == [answer[part:] for _, answer in pairs]
    pulls = cluster.nodes["p0"].parts.fetch.counters
    too_coarse = (
        cluster.nodes["p0"].kit.shape.pages.page_tokens == 48
    )  # decode never has one such page more than prefill
    assert too_coarse or pulls["ok"] > 0, dict(pulls)
    await cluster.until_idle()


@pytest.mark.parametrize("case", list(cases()))
async def test_any_two_layouts_give_the_tokens_of_one_engine(case: Case, references: dict[str, Reference]) -> None:
    reference = references[case.model]
    async with MixedCluster(case, reference.directory) as cluster:
        assert cluster.nodes["p0"].kit.shape.pages.ranks == case.prefill.ranks
        for name, sampling in SAMPLINGS.items():
            results = await asyncio.gather(*(cluster.run(tokens, sampling) for tokens in reference.prompts))
            assert [tokens for tokens, _ in results] == reference.tokens[name], name
            assert {done.route.mode for _, done in results} == {"remote"}
        again = await asyncio.gather(*(cluster.run(tokens, SAMPLINGS["greedy"]) for tokens in reference.prompts))
        assert [tokens for tokens, _ in again] == reference.tokens["greedy"], "and with every prefix cached"
        assert again[-1][1].cached_tokens >= 64
        await cluster.until_idle()
        await pull_second_turns(cluster, reference)
        assert not cluster.lost
