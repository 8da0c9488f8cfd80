"""The controller of roles: who flips, when, why, and what must never happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster.core.messages import Endpoint, Load, Role
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.admin.roles import Flip, RoleController, RoleSettings
from pdcluster_router.cluster.view import ClusterView, NodeView

SETTINGS = RoleSettings()
COST = NodeCost(PrefillCost(0.0, 1e-3, samples=100), DecodeCost(0.01, 0.001, samples=100))


def node(
    name: str, role: Role, *, waiting_tokens: int = 0, rows: int = 0, used_pages: int = 0, draining: bool = False
) -> NodeView:
    load = Load(0, rows, waiting_tokens, 0, 100, 100 - used_pages, 0, 0, 0, 10, rows, draining=draining)
    return NodeView(Endpoint(name, name + "-boot", "a:1"), role, 0, load, 32, 4096, ("shm",), cost=COST)


def decide(nodes: list[NodeView], controller: RoleController | None = None, start: float = 0.0) -> Flip | None:
    """What it says after looking long enough at the same picture."""
    controller = controller or RoleController(SETTINGS)
    flips = [
        controller.decide(start + second, ClusterView(tuple(nodes))) for second in range(int(SETTINGS.sustain_s) + 1)
    ]
    assert not any(flips[:-1]), "a moment is no trend"
    return flips[-1]


BUSY_PROMPTS = [node("p0", "prefill", waiting_tokens=5000), node("d0", "decode", rows=3), node("d1", "decode", rows=2)]
BUSY_DECODE = [
    node("p0", "prefill", waiting_tokens=100),
    node("p1", "prefill", waiting_tokens=50),
    node("d0", "decode", rows=10),
]


def test_waiting_prompts_take_the_decode_node_with_the_least_to_do() -> None:
    flip = decide(BUSY_PROMPTS)
    assert flip is not None and (flip.node.name, flip.role) == ("d1", "prefill")
    assert "5.00 s of prompts wait" in flip.why and "25% used" in flip.why


def test_full_decode_nodes_take_the_prefill_node_with_the_least_to_do() -> None:
    flip = decide(BUSY_DECODE)
    assert flip is not None and (flip.node.name, flip.role) == ("p1", "decode") and "100% used" in flip.why


def test_full_pages_count_as_much_as_full_rows() -> None:
    assert decide([*BUSY_DECODE[:2], node("d0", "decode", rows=1, used_pages=95)]) is not None


def test_the_last_node_of_a_pool_stays() -> None:
    assert decide(BUSY_PROMPTS[:2]) is None
    assert decide(BUSY_DECODE[1:]) is None


def test_a_mixed_node_stands_in_for_the_last_of_a_pool_and_never_flips() -> None:
    flip = decide([*BUSY_PROMPTS[:2], node("m0", "mixed", waiting_tokens=5000)])
    assert flip is not None and flip.node.name == "d0"
    assert decide([node("m0", "mixed", waiting_tokens=5000), node("m1", "mixed")]) is None


def test_a_pool_that_would_be_short_itself_gives_nothing() -> None:
    assert decide([BUSY_PROMPTS[0], node("d0", "decode", rows=6), node("d1", "decode", rows=5)]) is None
    assert (
        decide([node("p0", "prefill", waiting_tokens=300), node("p1", "prefill", waiting_tokens=300), BUSY_DECODE[2]])
        is None
    )


def test_when_both_pools_are_short_nothing_helps() -> None:
    assert decide([BUSY_PROMPTS[0], node("d0", "decode", rows=10), node("d1", "decode", rows=10)]) is None


def test_a_cordoned_node_is_no_candidate() -> None:
    assert decide([*BUSY_PROMPTS[:2], node("d1", "decode", draining=True)]) is None


def test_a_flip_is_followed_by_rest() -> None:
    controller = RoleController(SETTINGS)
    assert decide(BUSY_PROMPTS, controller) is not None
    three = [*BUSY_PROMPTS, node("d2", "decode")]
    flips = [controller.decide(10.0 + second, ClusterView(tuple(three))) for second in range(40)]
    first = next(index for index, flip in enumerate(flips) if flip is not None)
    assert 10.0 + first >= SETTINGS.sustain_s + SETTINGS.dwell_s


def test_a_short_spell_is_forgotten() -> None:
    controller = RoleController(SETTINGS)
    calm = [replace(each, load=replace_tokens(each)) for each in BUSY_PROMPTS]
    for second in range(40):
        busy = BUSY_PROMPTS if second % 5 else calm
        assert controller.decide(float(second), ClusterView(tuple(busy))) is None


def replace_tokens(each: NodeView) -> Load:
    assert each.load is not None
    return Load(0, each.load.running, 0, 0, 100, 100, 0, 0, 0, 10, each.load.slots_used)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prefill", "decode", "mixed"]),
            st.integers(0, 20_000),
            st.integers(0, 10),
            st.integers(0, 100),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_after_any_flip_both_pools_have_a_node_and_are_under_their_marks(
    given_nodes: list[tuple[Role, int, int, int, bool]],
) -> None:
    nodes = [
        node(f"n{index}", role, waiting_tokens=waiting, rows=rows, used_pages=pages, draining=draining)
        for index, (role, waiting, rows, pages, draining) in enumerate(given_nodes)
    ]
    flip = decide(nodes)
    if flip is None:
        return
    after = [replace(each, role=flip.role) if each is flip.node else each for each in nodes if each.accepts_work]
    assert any(each.role != "decode" for each in after) and any(each.role != "prefill" for each in after)
    assert flip.node.role != "mixed" and flip.node.role != flip.role
    # what its effect is does not ask for the flip back
    again = RoleController(SETTINGS)
    for second in range(int(SETTINGS.sustain_s) + 1):
        undo = again.decide(float(second), ClusterView(tuple(after)))
        assert undo is None or undo.node.endpoint != flip.node.endpoint or undo.role == flip.role


@pytest.mark.parametrize("nodes", [[], [node("p0", "prefill")], [node("d0", "decode", rows=10)]])
def test_a_cluster_that_is_not_whole_is_left_alone(nodes: list[NodeView]) -> None:
    assert decide(nodes) is None
