"""Dispatch over a scripted pair of nodes, requests for it, and all the tokens of an answer."""

from __future__ import annotations

from array import array
from contextlib import aclosing

from scripted_cluster import FakeCluster, ScriptedPair, make_chooser, make_node
from version_choice import FirstVersion

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.kv.hashing import chain_root
from pdcluster_router.core.generation import Done, Generation, TokenChunk
from pdcluster_router.core.job import HashChain
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.policy.base import Force
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings


class NoModels(FirstVersion):
    def models(self):
        return ()

    def text(self, model):
        raise errors.UnknownModel(model)

    def chain(self, model, salt, weights=None):
        return HashChain(chain_root(block_tokens=4, salt=salt), 4)


def make_generation(request: str = "r1", max_tokens: int = 4, deadline_s: float = 5.0) -> Generation:
    return Generation(request, "model", array("i", range(10)), m.Sampling(max_tokens=max_tokens, seed=1), deadline_s)


def make_pair(**knobs) -> tuple[FakeCluster, ScriptedPair, Dispatch]:
    cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
    pair = ScriptedPair(cluster, cluster.nodes[0], cluster.nodes[1], **knobs)
    pair.install()
    return cluster, pair, make_dispatch(cluster)


def make_dispatch(cluster: FakeCluster, force: Force = "auto", **settings) -> Dispatch:
    stages = StageDeadlines(handshake_s=0.2, transfer_s=0.2, hold_s=0.01)
    settings.setdefault("hold_s", 0.3)
    return Dispatch(
        cluster, NoModels(), make_chooser(cluster, force=force), DispatchSettings(stages=stages, **settings)
    )


async def collect(dispatch: Dispatch, generation: Generation) -> tuple[list[int], Done]:
    tokens: list[int] = []
    async with aclosing(dispatch.generate(generation)) as events:
        async for event in events:
            if isinstance(event, Done):
                return tokens, event
            assert isinstance(event, TokenChunk)
            assert event.position == len(tokens), "chunks come strictly by position"
            tokens.extend(event.token_ids)
    raise AssertionError("a generation ended without Done")


EXPECTED = [100, 101, 102, 103]
