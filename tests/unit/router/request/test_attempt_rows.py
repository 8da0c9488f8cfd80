"""Rows of a decode leg have a short way through an attempt when they just go on: it leads where the long one does,
whatever comes in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_cluster import FakeCluster, make_chooser, make_node, make_ticket

from pdcluster.core import messages as m
from pdcluster.core.sampling import Sampling
from pdcluster.kv.hashing import chain_root
from pdcluster_router.core.generation import Mode, TokenChunk
from pdcluster_router.core.job import HashChain, Job
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.request.attempt import Attempt

TOKENS = tuple(range(100, 112))
LOGPROBS = tuple(m.TokenLogprobs(-float(index)) for index in range(len(TOKENS)))


class LongWay(Attempt):
    """Takes every row of the decode leg as one that may be early, late or both."""

    def goes_on(self, incarnation: str, row: m.TokenRow) -> bool:
        return False


class World:
    """One attempt on scripted nodes, its first messages sent and answered."""

    def __init__(self, kind: type[Attempt], mode: Mode, prompt_logprobs: int | None) -> None:
        self.now = 0.0
        cluster = FakeCluster([make_node("p0", "prefill"), make_node("d0", "decode")])
        prefill, decode = cluster.nodes
        chain = HashChain(chain_root(block_tokens=4), 4)
        self.job = Job("r1", list(range(10)), Sampling(12, 1, prompt_logprobs=prompt_logprobs), 600.0, chain)
        choice = RoutingDecision(mode, prefill if mode == "remote" else None, decode)
        self.attempt = kind(self.job, choice, cluster, make_chooser(cluster), StageDeadlines(), lambda: self.now)
        self.attempt.start()
        self.chunks: list[TokenChunk] = []
        (self.work,) = [
            sent.work for _, sent in cluster.sent if isinstance(sent, m.Prefill if mode == "local" else m.Reserve)
        ]
        if mode == "remote":
            self.hear("p0-boot", m.TokenRow("r1", 0, 0, TOKENS[:1], LOGPROBS[:1]))
            self.hear("d0-boot", m.Reserved(make_ticket(self.work, decode, prefill.endpoint)))

    def hear(self, incarnation: str, body: m.NodeMessage | m.TokenRow) -> None:
        self.now += 1.0
        if isinstance(body, m.TokenRow) and self.attempt.goes_on(incarnation, body):
            self.chunks.append(TokenChunk(body.position, body.tokens, body.logprobs, (), self.attempt.route()))
        else:
            self.chunks += self.attempt.handle(incarnation, body)

    @property
    def seen(self) -> tuple[object, ...]:
        """All that a client or a node may notice of it."""
        attempt = self.attempt
        positions = [leg and leg.position for leg in (attempt._prefill, attempt._decode)]
        times = attempt.first_token_at, attempt.second_token_at
        return (
            self.chunks,
            self.job.emitted,
            positions,
            times,
            attempt._early,
            attempt.is_done,
            attempt._clocks,
            attempt.next_deadline(),
        )


def rows_of(world: World, cuts: list[tuple[int, int]], is_told: bool) -> list[m.TokenRow]:
    of_prompt = LOGPROBS[:9] if is_told else ()
    rows = []
    for begin, size in cuts:
        part = slice(begin, begin + size)
        rows.append(
            m.TokenRow("r1", world.work.attempt, begin, TOKENS[part], LOGPROBS[part], of_prompt if begin == 0 else ())
        )
    return rows


@pytest.mark.parametrize("mode", ["local", "remote"])
@given(
    cuts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), max_size=12),
    goes_on=st.integers(0, 12),
    is_told=st.booleans(),
    asks=st.booleans(),
)
def test_rows_in_any_order_lead_to_the_same_by_both_ways(
    mode: Mode, cuts: list[tuple[int, int]], goes_on: int, is_told: bool, asks: bool
) -> None:
    """goes_on: so many tokens come first, one by one and in order."""
    worlds = [World(kind, mode, 0 if asks and is_told else None) for kind in (Attempt, LongWay)]
    for world in worlds:
        for sent in rows_of(world, [(position, 1) for position in range(goes_on)] + cuts, is_told):
            world.hear("d0-boot", sent)
        world.hear("d0-boot", m.Finished("r1", world.work.attempt, "length", len(TOKENS), m.LegTimings()))
    assert worlds[0].seen == worlds[1].seen
    emitted = worlds[0].job.emitted
    assert tuple(emitted) == TOKENS[: len(emitted)]
    assert [token for chunk in worlds[0].chunks for token in chunk.token_ids] == emitted
