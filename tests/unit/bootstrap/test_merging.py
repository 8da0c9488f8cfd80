"""Several bootstraps as one cluster: a node is in while one has it, stale words do not outlive their bootstrap."""

from bootstrap_cards import make_card
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.bootstrap.card import ClusterSnapshot, NodeCard
from pdcluster.bootstrap.merging import RegistryMerge

A, B = "a:1", "b:1"


def snapshot(*cards: NodeCard, settling: bool = False, boot: str = "x") -> ClusterSnapshot:
    return ClusterSnapshot(boot, 1, settling, tuple(sorted(cards, key=lambda card: card.node)))


def card(name: str, boot: str = "1") -> NodeCard:
    return make_card(node=name, incarnation=f"{name}-{boot}")


def boots(found: ClusterSnapshot | None) -> list[str]:
    return [] if found is None else [each.incarnation for each in found.nodes]


def test_one_bootstrap_is_what_it_says() -> None:
    merge = RegistryMerge()
    assert boots(merge.update(A, snapshot(card("p")))) == ["p-1"]
    assert boots(merge.update(A, snapshot())) == []
    assert merge.lost(B) is not None


def test_a_node_that_one_of_them_has_is_in() -> None:
    merge = RegistryMerge()
    merge.update(A, snapshot(card("p")))
    assert boots(merge.update(B, snapshot(card("d")))) == ["d-1", "p-1"]
    assert boots(merge.update(A, snapshot())) == ["d-1"]


def test_what_a_lost_bootstrap_knew_does_not_stay_while_another_is_there() -> None:
    merge = RegistryMerge()
    merge.update(A, snapshot(card("p"), card("d")))
    merge.update(B, snapshot(card("p"), card("d")))
    assert boots(merge.lost(A)) == ["d-1", "p-1"]
    assert boots(merge.update(B, snapshot(card("p")))) == ["p-1"]  # d ended while A was away


def test_while_all_are_lost_the_last_words_hold() -> None:
    merge = RegistryMerge()
    merge.update(A, snapshot(card("p")))
    merge.update(B, snapshot(card("p"), card("d")))
    merge.lost(A)
    assert boots(merge.lost(B)) == ["d-1", "p-1"]


def test_a_young_bootstrap_takes_nobody_away() -> None:
    merge = RegistryMerge()
    merge.update(A, snapshot(card("p"), card("d")))
    merge.lost(A)
    assert boots(merge.update(A, snapshot(card("p"), settling=True))) == ["d-1", "p-1"]
    assert boots(merge.update(A, snapshot(card("p")))) == ["p-1"]


def test_beside_a_settled_one_a_young_bootstrap_brings_back_nobody() -> None:
    merge = RegistryMerge()
    merge.update(A, snapshot(card("p"), card("d")))
    merge.update(B, snapshot(card("p"), card("d")))
    merge.lost(A)
    merge.update(B, snapshot(card("p")))
    assert boots(merge.update(A, snapshot(settling=True))) == ["p-1"]


def test_of_two_boots_of_a_name_at_two_addresses_the_one_seen_first_is_the_node_while_it_is_there() -> None:
    merge = RegistryMerge()
    moved = make_card(node="p", incarnation="p-2", address="127.0.0.2:4000")
    merge.update(A, snapshot(card("p", "1")))
    assert boots(merge.update(B, snapshot(moved))) == ["p-1"]
    assert boots(merge.update(B, snapshot(moved))) == ["p-1"]
    assert boots(merge.update(A, snapshot())) == ["p-2"]
    assert boots(merge.update(A, snapshot(card("p", "3")))) == ["p-2"]


def test_of_two_boots_of_a_name_the_one_seen_last_is_the_node() -> None:
    merge = RegistryMerge()
    merge.update(A, snapshot(card("p", "1")))
    merge.update(B, snapshot(card("p", "1")))
    assert boots(merge.update(B, snapshot(card("p", "2")))) == ["p-2"]
    assert boots(merge.update(A, snapshot(card("p", "1")))) == ["p-2"]
    assert boots(merge.update(A, snapshot(card("p", "2")))) == ["p-2"]


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.sets(st.sampled_from("pdm")), st.booleans(), st.booleans()), max_size=30
    )
)
def test_a_node_that_every_watched_and_settled_bootstrap_has_is_always_in(
    words: list[tuple[str, set[str], bool, bool]],
) -> None:
    merge = RegistryMerge()
    watched: dict[str, ClusterSnapshot] = {}
    for address, names, is_settling, is_lost in words:
        if is_lost:
            watched.pop(address, None)
            found = merge.lost(address)
        else:
            watched[address] = snapshot(*map(card, names), settling=is_settling)
            found = merge.update(address, watched[address])
        if found is None:
            continue
        in_now = {each.node for each in found.nodes}
        assert all({each.node for each in said.nodes} <= in_now for said in watched.values())
        if any(not said.settling for said in watched.values()):
            assert in_now == {each.node for said in watched.values() for each in said.nodes}
