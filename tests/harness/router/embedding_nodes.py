"""Nodes that embed and nodes that generate, without sockets, behind a real dispatcher and the HTTP application. Nodes
that embed answer at once, unless a test gives them another act."""

from __future__ import annotations

import struct
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace
from scripted_cluster import FakeCluster, make_chooser, make_node
from scripted_dispatcher import EOS, TEXT, VOCAB
from version_choice import FirstVersion

from pdcluster.api.text.model_text import TextModel
from pdcluster.bootstrap.card import Capabilities
from pdcluster.core import messages as m
from pdcluster.core.errors import UnknownModel
from pdcluster.kv.hashing import chain_root
from pdcluster_router.core.generation import Generation, ModelInfo
from pdcluster_router.core.job import HashChain
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import listening, router_metrics
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

EMBEDS = ModelInfo("embedder", 1_700_000_000, 64, VOCAB, (EOS,), "digest-e", embeds=True)
GENERATES = ModelInfo("writer", 1_700_000_000, 64, VOCAB, (EOS,), "digest-g")
SIZE = 8

Answer = Callable[[object], None]
Act = Callable[[m.Prefill, Answer], None]


def vector_of(token_ids: Sequence[int], size: int = SIZE) -> list[float]:
    """What a node embeds these tokens as; numbers that float32 has exactly."""
    return [(sum(token_ids) * 31 + len(token_ids) * 7 + index * 3) % 97 / 64 for index in range(size)]


def embedded(message: m.Prefill, size: int | None = None) -> m.Embedded:
    assert message.pooling is not None
    tokens = m.unpack_tokens(message.work.token_ids)
    found = vector_of(tokens, size or message.pooling.dimensions or SIZE)
    timings = m.LegTimings(queue_s=0.25, cached_tokens=min(2, len(tokens)))
    return m.Embedded(message.work.request, message.work.attempt, struct.pack(f"<{len(found)}f", *found), timings)


def embeds(message: m.Prefill, answer: Answer) -> None:
    answer(m.Scheduled(message.work.request, message.work.attempt, None))
    answer(embedded(message))


def stays_silent(message: m.Prefill, answer: Answer) -> None:
    """For whom the test answers, or nobody."""


class Models(FirstVersion):
    def models(self) -> tuple[ModelInfo, ...]:
        return EMBEDS, GENERATES

    def text(self, model: str) -> TextModel:
        if model not in (EMBEDS.id, GENERATES.id):
            raise UnknownModel(model)
        return TEXT

    def chain(self, model: str, salt: bytes, weights: str | None = None) -> HashChain:
        return HashChain(chain_root(block_tokens=4, salt=salt), 4)

    def refusal(self) -> str | None:
        return None


class EmbeddingNodes:
    """asked: what nodes were asked to embed, with who was. acts: what nodes do in the place of embedding at once."""

    def __init__(self, *names: str, writer: bool = True, **settings: Any) -> None:
        able = Capabilities(pulls=False, embeds=True)
        nodes = [
            replace(make_node(name, "mixed"), capabilities=able, models=frozenset((EMBEDS.digest,)), max_len=64)
            for name in names
        ]
        if writer:
            nodes.append(replace(make_node("writer", "mixed"), models=frozenset((GENERATES.digest,)), max_len=64))
        self.cluster = FakeCluster(nodes)
        self.asked: list[tuple[str, m.Prefill]] = []
        self.acts: dict[str, Act] = {}
        for name in names:
            self.cluster.handlers[name] = self._handler(name)
        stages = StageDeadlines(queue_s=5.0, hold_s=0.01)
        settings = {"retries": 2, "hold_s": 0.2, **settings}
        self.dispatch = Dispatch(
            self.cluster, Models(), make_chooser(self.cluster), DispatchSettings(stages=stages, **settings)
        )

    def _handler(self, name: str) -> Callable[[Any, Answer], None]:
        def handle(message: object, answer: Answer) -> None:
            if isinstance(message, m.Prefill):
                self.asked.append((name, message))
                self.acts.get(name, embeds)(message, answer)

        return handle

    def kill(self, name: str) -> None:
        self.cluster.kill(next(node for node in self.cluster.nodes if node.name == name))

    def tell(self, name: str, body: Any) -> None:
        self.cluster.ledger.deliver(body.request, f"{name}-boot", body)

    def cancelled(self, name: str) -> list[str]:
        return [message.request for message in self.cluster.sent_to(name, m.Cancel)]

    def check_books(self) -> None:
        """No request is open, and no node is thought to have work."""
        assert not self.cluster.ledger.num_requests()
        assert not any(self.cluster.ledger.in_flight(node.incarnation) for node in self.cluster.nodes)

    @asynccontextmanager
    async def served(self, settings: HttpSettings | None = None, places: Places | None = None) -> AsyncIterator[str]:
        app = create_app(self.dispatch, settings or HttpSettings(), router_metrics(), places)
        async with listening(app, "127.0.0.1:0", drain_s=1.0) as address:
            yield f"http://{address}"


def embedding_of(tokens: Sequence[int], dimensions: int = 0, request: str = "r") -> Generation:
    return Generation(
        request, EMBEDS.id, array("i", tokens), m.Sampling(max_tokens=1, seed=0), 5.0, mode="local", served=EMBEDS,
        pooling=m.Pooling(dimensions),
    )  # fmt: skip
