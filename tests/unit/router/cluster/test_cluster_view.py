"""The view that a router keeps: at any moment what it would be if it were made anew, though only what changed is looked
at."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, cast

import pytest
import zmq
from msgspec.structs import replace
from policy_cases import COST, make_load

from pdcluster.bootstrap.card import NodeCard
from pdcluster.core.messages import (
    HASH_BYTES,
    Cancel,
    Endpoint,
    Failed,
    Load,
    NodeMessage,
    Prefill,
    Refused,
    Reserve,
    Work,
)
from pdcluster.core.sampling import Sampling
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.router_link import LinkState
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster.in_flight import SentWork
from pdcluster_router.cluster.legs import RequestLeg
from pdcluster_router.cluster.node_table import NodeState, NodeTable
from pdcluster_router.cluster.view import ClusterView, InFlightWork

FINGERPRINT = Fingerprint(
    "tiny", "sha-1", 1, 32, KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, page_tokens=32, dtype="float32")
)


@dataclass
class StandingLink:
    """A link that is up until the test says otherwise."""

    state: LinkState = LinkState.UP
    lost_because: str = "cut by the test"
    num_sent: int = 0

    def send(self, message: NodeMessage) -> int:
        self.num_sent += 1
        return self.num_sent

    def close(self) -> None:
        pass


class World:
    """A Cluster whose nodes are only said to be there."""

    def __init__(self, number: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.cluster = NodeTable(
            Peer("router", "boot"), context=cast("zmq.Context[zmq.Socket[bytes]]", None), settings=WireSettings()
        )
        self.legs: list[RequestLeg] = []
        self.sequence = 0
        for index in range(number):
            self.join(f"n{index}")

    def join(self, name: str) -> None:
        role = self.chance.choice(["prefill", "decode", "mixed"])
        fields: dict[str, Any] = {
            "max_len": 2048,
            "vocab_size": 1000,
            "num_pages": 64,
            "eos_ids": (2,),
            "tokenizer_hash": "abc",
            "backends": ("shm",),
        }
        card = NodeCard(name, f"{name}-boot", role, f"{name}:1", "tiny", FINGERPRINT, **fields)
        state = NodeState(card, Endpoint(name, card.incarnation, card.address), link=cast(Any, StandingLink()))
        self.cluster._nodes[card.incarnation] = state
        self.cluster._on_state(card.incarnation, LinkState.UP)

    @property
    def names(self) -> list[str]:
        return [incarnation for incarnation, state in self.cluster._nodes.items() if state.is_up]

    async def report(self) -> None:
        if self.names:
            cost = COST.report() if self.chance.random() < 0.7 else None
            self.hear(
                self.chance.choice(self.names), self.load(cost=cost, seen=self.chance.randrange(self.sequence + 1))
            )

    def hear(self, name: str, load: Load) -> None:
        self.cluster._on_message(self.cluster._nodes[name], load)

    def load(self, **changes: Any) -> Load:
        rows = self.chance.randrange(20)
        load = make_load(
            waiting=self.chance.randrange(3), waiting_tokens=self.chance.randrange(5000), rows=rows, slots_used=rows
        )
        return Load(
            **{name: getattr(load, name) for name in Load.__struct_fields__}
            | {"draining": self.chance.random() < 0.1}
            | changes
        )

    async def begin(self) -> None:
        if self.names:
            self.sequence += 1
            incarnation = self.chance.choice(self.names)
            leg = RequestLeg(f"r{self.sequence}", 0, self.cluster._nodes[incarnation].endpoint, [])
            self.cluster.ledger.enter(leg)
            self.cluster.ledger.pending.enter(
                incarnation, leg.request, SentWork(0, self.sequence, InFlightWork(1, 100, 5000, 1, 100), b"")
            )
            self.legs.append(leg)

    async def end(self) -> None:
        if self.legs:
            self.cluster.ledger.leave(self.legs.pop(self.chance.randrange(len(self.legs))))

    async def lose(self) -> None:
        if self.names and self.chance.random() < 0.2:
            incarnation = self.chance.choice(self.names)
            self.cluster._on_state(incarnation, LinkState.LOST)
            self.legs = [leg for leg in self.legs if leg.endpoint.incarnation != incarnation]

    async def come_back(self) -> None:
        for incarnation, state in self.cluster._nodes.items():
            if state.link is None:
                state.link = cast(Any, StandingLink())
                self.cluster._on_state(incarnation, LinkState.UP)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [1, 8, 60])
async def test_a_kept_view_is_what_a_new_one_would_be(number: int, seed: int) -> None:
    world, lent = World(number, seed), list[tuple[ClusterView, object]]()
    cluster, view_of = world.cluster, world.cluster._upkeep._view_of
    for _ in range(150):
        for _ in range(world.chance.randrange(4)):
            await world.chance.choice(
                [world.report, world.report, world.begin, world.end, world.lose, world.come_back]
            )()
        if world.chance.random() < 0.5:
            kept = cluster.view()
            lent.append((kept, numbers_of(kept)))
        else:
            kept = cluster.glance()
        afresh = ClusterView(
            [view_of(state) for state in cluster._nodes.values() if state.is_up and state.load is not None],
            kept.typical,
        )
        cluster.ledger.pending.check_integrity()
        if world.chance.random() < 0.5:
            assert kept.nodes == afresh.nodes
        assert kept.roster.accepting == afresh.roster.accepting
        assert kept.roster.legs.tolist() == afresh.roster.legs.tolist()
        assert kept.table.tolist() == afresh.table.tolist()
    for kept, numbers in lent:
        assert numbers_of(kept) == numbers, "a view that somebody was given stays as it was"


def numbers_of(kept: ClusterView) -> object:
    return kept.table.tolist(), [(node.in_flight, node.pending) for node in kept.nodes]


async def test_who_only_glances_at_the_view_has_it_written_into() -> None:
    """So that what is sent to a node is told in place; a view that was given away is left alone, once."""
    world = World(4, 0)
    for _ in range(40):
        await world.report()
    first = world.cluster.view()
    await world.begin()
    second = world.cluster.glance()
    await world.begin()
    assert first is not second is world.cluster.glance()
    assert sum(node.in_flight for node in second.nodes) == 2 and not any(node.in_flight for node in first.nodes)


async def test_a_view_in_which_nothing_changed_is_the_same_one() -> None:
    world = World(4, 0)
    for _ in range(40):
        await world.report()
    assert world.cluster.view() is world.cluster.view()


async def test_a_report_leaves_the_other_nodes_as_they_were() -> None:
    world = World(4, 0)
    for _ in range(40):
        await world.report()
    before = world.cluster.view()
    world.hear(before.nodes[2].incarnation, world.load(cost=COST.report()))
    after = world.cluster.view()
    assert [mine is other for mine, other in zip(before.nodes, after.nodes, strict=True)] == [True, True, False, True]
    assert before.nodes[2].load is not after.nodes[2].load, "an earlier view stays as it was"


async def test_the_first_cost_that_a_node_reports_is_typical_at_once() -> None:
    world = World(2, 0)
    for name in world.names:
        world.hear(name, world.load())
    assert world.cluster.view().typical is None
    world.hear(world.names[0], world.load())
    assert world.cluster.view().typical is None
    world.hear(world.names[1], world.load(cost=COST.report()))
    assert world.cluster.view().typical == COST


WORK = Work("r", 1, bytes(4 * 64), 64, bytes(range(2 * HASH_BYTES)), Sampling(max_tokens=4, seed=1), 60.0)
ENDS: list[tuple[NodeMessage, bool]] = [
    (Cancel("r", 1, "its client left"), True), (Cancel("r", 0, "of an earlier attempt"), False), (Cancel("other", 1,
    "of another one"), False),
    (Refused("r", 1, "reserve", "full", 0.01), True), (Failed("r", 1, "internal", "broke", retryable=True), True),
]  # fmt: skip


@pytest.mark.parametrize(("end", "is_over"), ENDS)
@pytest.mark.parametrize("computes", [False, True])
async def test_a_slot_that_is_cancelled_is_not_expected_to_get_the_prompt(
    end: NodeMessage, *, is_over: bool, computes: bool
) -> None:
    """One that computes the prompt keeps what it has of it by then."""
    world = World(1, 0)
    (name,), cluster = world.names, world.cluster
    endpoint = cluster._nodes[name].endpoint
    cluster.send(endpoint, Prefill(WORK, remote=False) if computes else Reserve(WORK, endpoint))
    assert cluster.expected(WORK.hashes) == {name: 2}
    if isinstance(end, Cancel):
        cluster.send(endpoint, end)
        is_over = is_over and not computes
    else:
        cluster._on_message(cluster._nodes[name], end)  # type: ignore[arg-type]
    assert cluster.expected(WORK.hashes) == ({} if is_over else {name: 2})


async def test_a_prompt_is_expected_as_long_as_another_request_brings_it() -> None:
    world = World(1, 0)
    (name,), cluster = world.names, world.cluster
    endpoint = cluster._nodes[name].endpoint
    works = [replace(WORK, request=request) for request in ("r", "same", "longer")]
    works[2] = replace(works[2], token_ids=bytes(4 * 96), num_prompt=96, hashes=bytes(range(3 * HASH_BYTES)))
    for work in works:
        cluster.send(endpoint, Reserve(work, endpoint))
    cluster.send(endpoint, Cancel("longer", 1, "its client left"))
    cluster.send(endpoint, Cancel("r", 1, "its client left"))
    assert cluster.expected(WORK.hashes) == {name: 2}
    cluster.ledger.pending.leave(name, "r")
    cluster.send(endpoint, Cancel("same", 1, "its client left"))
    assert cluster.expected(WORK.hashes) == {}
