"""What one node reports, whatever the wire admits, leaves requests with a choice and predictions with a value."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

import pytest
import zmq
from drawn_examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_cases import COST, make_load

from pdcluster.bootstrap.card import NodeCard
from pdcluster.core.messages import PROTOCOL_VERSION, CostReport, Endpoint, Envelope, Load, PathLoad, Role
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire import codec
from pdcluster.wire.router_link import LinkState
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster.node_table import NodeState, NodeTable
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.predicted_seconds import Seconds

FINGERPRINT = Fingerprint(
    "tiny", "sha-1", 1, 32, KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, page_tokens=32, dtype="float32")
)
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
COUNTS = (
    "waiting", "running", "waiting_tokens", "waiting_pairs", "context_tokens", "rows", "slots", "slots_used",
    "pages_total", "pages_free",
    "pages_cached", "pages_parked",
)  # fmt: skip

amounts = st.sampled_from([0, 1, 1000, 2**31, 2**63 - 1])
spans = st.sampled_from([0.0, 5e-324, 1e-310, 1e-300, 1e-200, 1e-100, 1e-18, 1e-12, 1e-3, 1.0, 1e9])
roots = st.tuples(*[st.sampled_from([0.0, 5e-324, -1e9, 1e9, 1e-3])] * 6)
costs = st.builds(CostReport, *[spans] * 6, *[amounts] * 3, spans, spans, roots, spans, spans, roots)


@st.composite
def reports(draw: st.DrawFn) -> Load:
    load = make_load(**{name: draw(amounts) for name in draw(st.sets(st.sampled_from(COUNTS)))})
    paths = tuple(
        [
            PathLoad(f"n{number}", "shm", draw(st.sampled_from([5e-324, 1e-300, 0.5, 1e15])), is_chosen=True)
            for number in range(3)
        ]
    )
    fields = {name: getattr(load, name) for name in Load.__struct_fields__}
    return Load(**fields | {"cost": draw(costs), "paths": paths, "itl_s": draw(spans)})


def as_heard(load: Load) -> Load:
    """The wire admits it."""
    (heard,) = codec.decode(codec.encode(Envelope(PROTOCOL_VERSION, "n0", "n0-boot", "boot", 1, (load,)))).messages
    assert isinstance(heard, Load)
    return heard


@dataclass
class StandingLink:
    state: LinkState = LinkState.UP


def cluster_of(roles: tuple[Role, ...], loads: list[Load]) -> NodeTable:
    cluster = NodeTable(
        Peer("router", "boot"), context=cast("zmq.Context[zmq.Socket[bytes]]", None), settings=WireSettings()
    )
    fields: dict[str, Any] = {
        "max_len": 32768,
        "vocab_size": 1000,
        "num_pages": 64,
        "eos_ids": (2,),
        "tokenizer_hash": "abc",
        "backends": ("shm",),
    }
    for number, (role, load) in enumerate(zip(roles, loads, strict=True)):
        name = f"n{number}"
        card = NodeCard(name, f"{name}-boot", role, f"{name}:1", "tiny", FINGERPRINT, **fields)
        state = cluster._nodes[card.incarnation] = NodeState(
            card, Endpoint(name, card.incarnation, card.address), link=cast(Any, StandingLink())
        )
        cluster._on_state(card.incarnation, LinkState.UP)
        cluster.caches.is_overdue = lambda *_: False  # type: ignore[method-assign]
        cluster._on_message(state, load)
    return cluster


@pytest.mark.usefixtures("way")
@settings(
    max_examples=examples(300, 3000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    roles=st.tuples(*[st.sampled_from(ROLES)] * 3),
    report=reports(),
    query=st.builds(
        Query,
        st.sampled_from([1, 100, 5000]),
        cached=st.sampled_from([{}, {"n0-boot": 90}, {"n1-boot": 5000}]),
        expected_output=st.sampled_from([1, 4096]),
        itl_s=st.sampled_from([0.0, 0.05]),
        fallback=st.sampled_from(["on-failure", "conditional"]),
    ),
)
async def test_one_node_with_extreme_numbers_takes_nobody_choice_or_prediction(
    roles: tuple[Role, ...], report: Load, query: Query
) -> None:
    usual = make_load()
    sane = Load(**{name: getattr(usual, name) for name in Load.__struct_fields__} | {"cost": COST.report()})
    view = cluster_of(roles, [as_heard(report), sane, sane]).view()
    choice = Seconds().choose(query, view)
    assert isfinite(choice.record.ttft_s or 0.0) and isfinite(choice.record.tpot_s or 0.0)
    assert all(isfinite(each.cost) for each in choice.record.candidates.read())
