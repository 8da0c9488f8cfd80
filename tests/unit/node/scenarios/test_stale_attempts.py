"""What a node does with work that comes twice, or after its successor."""

from __future__ import annotations

import asyncio

import pytest
from simulated_cluster import SimulatedCluster
from virtual_time import VirtualLoop, run_virtually

from pdcluster.core.messages import Endpoint, Pooling, Prefill, Refused, Reserve, Sampling, Work, pack_tokens
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Received

ROUTER = Peer("router", "another")
WRITER = Endpoint("p9", "p9-boot", "127.0.0.1:9")


def work(attempt: int) -> Work:
    return Work("r", attempt, pack_tokens(range(9)), 9, b"", Sampling(max_tokens=4, seed=1), 20.0)


def after(messages: list[Prefill | Reserve]) -> tuple[list[Refused], int]:
    """What node m0 refuses of these messages, and its legs afterwards, before everything is cancelled and it must be
    idle."""

    async def play(loop: VirtualLoop) -> tuple[list[Refused], int]:
        async with SimulatedCluster(loop, {"m0": "mixed"}) as cluster:
            node = cluster.nodes["m0"]
            said: list[object] = []
            node.parts.links.outbox.message = lambda router, message, **_: said.append(message)  # type: ignore[method-assign]
            for message in messages:
                node.loop.handle(Received(ROUTER, "router", message))
            legs = node.parts.decode.num_legs + node.parts.prefill.num_legs
            node.parts.decode.cancel_router(ROUTER)
            node.parts.prefill.cancel_router(ROUTER)
            await asyncio.sleep(1)
            assert (
                node.parts.scheduler.load().running == 0
                and node.parts.decode.num_legs + node.parts.prefill.num_legs == 0
            )
            return [each for each in said if isinstance(each, Refused)], legs

    return run_virtually(play)


MAKE = {
    "reserve": lambda attempt: Reserve(work(attempt), WRITER),
    "local": lambda attempt: Prefill(work(attempt), remote=False),
    "prefill": lambda attempt: Prefill(work(attempt), remote=True),
}


@pytest.mark.parametrize("kind", MAKE)
def test_an_attempt_that_comes_after_a_later_one_is_refused_and_the_later_one_stays(kind: str) -> None:
    refused, legs = after([MAKE[kind](3), MAKE[kind](1)])
    assert [(each.attempt, each.retryable) for each in refused] == [(1, False)] and "came after attempt 3" in refused[
        0
    ].reason
    assert legs == 1


@pytest.mark.parametrize("kind", MAKE)
def test_a_repeated_attempt_replaces_itself(kind: str) -> None:
    assert after([MAKE[kind](2), MAKE[kind](2)]) == ([], 1)


@pytest.mark.parametrize(
    ("first", "second"), [("prefill", "reserve"), ("reserve", "prefill"), ("prefill", "local"), ("local", "prefill")]
)
def test_the_same_attempt_cannot_be_both_legs_of_one_node(first: str, second: str) -> None:
    refused, legs = after([MAKE[first](2), MAKE[second](2)])
    assert len(refused) == 1 and "here already" in refused[0].reason and legs == 1


def test_a_prompt_to_embed_is_refused_by_name_and_leaves_nothing() -> None:
    (refused,), legs = after([Prefill(work(0), remote=False, pooling=Pooling())])
    assert not refused.retryable and not legs
    assert refused.reason == (
        "node m0 embeds nothing: the native engine has no embeddings; nodes with --engine vllm and a pooling model do"
    )
