"""Registrations, leases and versions, by a clock of the test."""

from dataclasses import replace

import pytest
from bootstrap_cards import FINGERPRINT, LAYOUT, OTHER_ENGINE, make_card
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdcluster.bootstrap.card import Capabilities, NodeCard
from pdcluster.bootstrap.store import NodeStore, StoreSettings, differences
from pdcluster.checkpoint.weights_digest import group_names
from pdcluster.core.errors import BadRequest, ConfigError, NameTaken, Overloaded
from pdcluster.kv.layout import Fingerprint
from pdcluster.transfer.backends.base import Peer

LEASE_S = 6.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> NodeStore:
    return NodeStore(StoreSettings(lease_s=LEASE_S, max_nodes=3), clock)


def names(store: NodeStore) -> list[tuple[str, str]]:
    return [(card.node, card.incarnation) for card in store.snapshot().nodes]


def test_a_registered_node_is_in_until_its_lease_ends(store: NodeStore, clock: Clock) -> None:
    store.register(make_card())
    clock.now += LEASE_S - 0.01
    assert store.expire() == () and names(store) == [("prefill-0", "boot-1")]
    clock.now += 0.02
    assert store.expire() == (Peer("prefill-0", "boot-1"),) and names(store) == []


def test_keeping_alive_renews_the_lease_and_takes_over_role_and_drain(store: NodeStore, clock: Clock) -> None:
    store.register(make_card())
    clock.now += LEASE_S - 1
    version = store.version
    assert store.keep_alive(Peer("prefill-0", "boot-1"), role="decode", draining=True)
    clock.now += LEASE_S - 1
    store.expire()
    assert store.snapshot().nodes == (make_card(role="decode", draining=True),)
    assert store.version > version


def test_keeping_alive_without_a_change_is_no_new_version(store: NodeStore) -> None:
    store.register(make_card())
    version = store.version
    assert store.keep_alive(Peer("prefill-0", "boot-1"), role="prefill", draining=False)
    store.register(make_card())
    assert store.version == version


@pytest.mark.parametrize("peer", [Peer("prefill-0", "boot-2"), Peer("other", "boot-1")])
def test_a_boot_that_is_not_in_cannot_be_kept_alive(store: NodeStore, peer: Peer) -> None:
    store.register(make_card())
    assert not store.keep_alive(peer, role="prefill", draining=False)


def test_a_boot_whose_lease_ended_may_register_again(store: NodeStore, clock: Clock) -> None:
    store.register(make_card())
    clock.now += LEASE_S
    assert not store.keep_alive(Peer("prefill-0", "boot-1"), role="prefill", draining=False)
    store.register(make_card())
    assert names(store) == [("prefill-0", "boot-1")]


def test_a_newer_boot_replaces_the_older_one_which_cannot_come_back(store: NodeStore) -> None:
    store.register(make_card(incarnation="boot-1"))
    store.register(make_card(incarnation="boot-2"))
    assert names(store) == [("prefill-0", "boot-2")]
    with pytest.raises(ConfigError, match=r"replaced by boot boot-2; give every node a name"):
        store.register(make_card(incarnation="boot-1"))
    assert names(store) == [("prefill-0", "boot-2")]


def test_a_boot_at_another_address_waits_for_the_lease_of_the_one_that_has_its_name(
    store: NodeStore, clock: Clock
) -> None:
    store.register(make_card(incarnation="boot-1"))
    moved = make_card(incarnation="boot-2", address="127.0.0.2:4000")
    with pytest.raises(NameTaken, match="boot-1 at 127") as refusal:
        store.register(moved)
    assert refusal.value.retry_after_s == LEASE_S and names(store) == [("prefill-0", "boot-1")]
    assert store.keep_alive(Peer("prefill-0", "boot-1"), role="prefill", draining=False)
    clock.now += LEASE_S
    store.register(moved)
    assert names(store) == [("prefill-0", "boot-2")]


def test_leaving_is_idempotent_and_never_hits_another_boot(store: NodeStore) -> None:
    store.register(make_card(incarnation="boot-2"))
    store.leave(Peer("prefill-0", "boot-1"))
    assert names(store) == [("prefill-0", "boot-2")]
    store.leave(Peer("prefill-0", "boot-2"))
    store.leave(Peer("prefill-0", "boot-2"))
    assert names(store) == []


def test_a_node_that_does_not_fit_is_refused_with_every_field_that_differs(store: NodeStore) -> None:
    store.register(make_card("prefill-0"))
    other = replace(FINGERPRINT, weights="sha-2", layout=replace(LAYOUT, dtype="bfloat16"))
    with pytest.raises(ConfigError) as refusal:
        store.register(make_card("decode-0", fingerprint=other))
    for part in (
        "'decode-0'",
        "'prefill-0'",
        "weights 'sha-2' here, 'sha-1' there",
        "dtype 'bfloat16' here, 'float32' there",
    ):
        assert part in str(refusal.value)
    assert "head_dim" not in str(refusal.value) and names(store) == [("prefill-0", "boot-1")]


def test_a_node_that_promises_equal_bits_and_one_that_does_not_are_no_cluster(store: NodeStore) -> None:
    store.register(make_card("prefill-0"))
    other = replace(FINGERPRINT, arithmetic="invariant, bf16 pairs, 1 rank")
    with pytest.raises(
        ConfigError,
        match=r"arithmetic 'invariant, bf16 pairs, 1 rank' here, 'default' there.*--deterministic on all or none",
    ):
        store.register(make_card("decode-0", fingerprint=other))


@pytest.mark.parametrize("first, second", [(FINGERPRINT, OTHER_ENGINE), (OTHER_ENGINE, FINGERPRINT)])
def test_a_cluster_has_one_engine(store: NodeStore, first: Fingerprint, second: Fingerprint) -> None:
    store.register(make_card("prefill-0", fingerprint=first))
    says = f"'decode-0' runs the engine '{second.engine}'.*'prefill-0' of this cluster runs '{first.engine}'"
    with pytest.raises(ConfigError, match=says):
        store.register(make_card("decode-0", fingerprint=second))
    assert names(store) == [("prefill-0", "boot-1")]
    store.register(make_card("prefill-0", "boot-2", fingerprint=second))
    store.register(make_card("decode-0", fingerprint=second))


def test_a_node_that_serves_another_model_name_is_refused(store: NodeStore) -> None:
    store.register(make_card("prefill-0"))
    with pytest.raises(ConfigError, match="served model 'big' here, 'tiny' there"):
        store.register(make_card("decode-0", model="big"))


def test_a_node_that_embeds_does_not_join_those_that_generate_with_the_same_model(store: NodeStore) -> None:
    embedding = Capabilities(embeds=True)
    store.register(make_card("prefill-0"))
    with pytest.raises(ConfigError, match="does not fit the cluster of node 'prefill-0': embeds here, generates there"):
        store.register(make_card("decode-0", capabilities=embedding))
    store.leave(Peer("prefill-0", "boot-1"))
    store.register(make_card("decode-0", capabilities=embedding))
    store.register(make_card("decode-1", capabilities=embedding))
    with pytest.raises(ConfigError, match="generates here, embeds there"):
        store.register(make_card("prefill-0"))


def test_the_last_node_may_come_back_with_another_layout(store: NodeStore) -> None:
    store.register(make_card("prefill-0"))
    store.register(make_card("prefill-0", "boot-2", fingerprint=replace(FINGERPRINT, weights="sha-2")))
    assert store.snapshot().nodes[0].weights == "sha-2"


def test_differences_name_fields_of_the_layout_too() -> None:
    assert list(differences(FINGERPRINT, FINGERPRINT)) == []
    assert list(differences(replace(FINGERPRINT, layout=replace(LAYOUT, head_dim=64)), FINGERPRINT)) == [
        "head_dim 64 here, 32 there"
    ]
    assert not list(differences(replace(FINGERPRINT, layout=replace(LAYOUT, page_tokens=64)), FINGERPRINT)), (
        "page sizes may differ"
    )


def test_a_node_of_an_earlier_version_is_refused_with_the_reason(store: NodeStore) -> None:
    """Its card says nothing of groups, and its digest of the same weights is another."""
    store.register(make_card("prefill-0"))
    new = replace(FINGERPRINT, weights="sha-2", weight_groups=bytes(4 * len(group_names(LAYOUT.num_layers))))
    with pytest.raises(ConfigError, match=r"weights 'sha-2' here, 'sha-1' there \(a node of an earlier version"):
        store.register(make_card("decode-0", fingerprint=new))


def test_few_of_many_groups_of_weights_are_named() -> None:
    names = group_names(LAYOUT.num_layers)
    ours = replace(FINGERPRINT, weights="sha-2", weight_groups=bytes(4 * len(names)))
    theirs = replace(FINGERPRINT, weight_groups=b"x" * 4 * len(names))
    (text,) = differences(ours, theirs)
    assert text.endswith(f"({', '.join(names[:6])} and {len(names) - 6} more)")
    (text,) = differences(ours, replace(theirs, weight_groups=theirs.weight_groups[4:]))
    assert text.endswith("(of models of another shape)")


def test_the_number_of_nodes_is_bounded(store: NodeStore) -> None:
    for number in range(3):
        store.register(make_card(f"n{number}"))
    with pytest.raises(Overloaded, match="max_nodes"):
        store.register(make_card("n3"))
    store.register(make_card("n0", "boot-2"))
    assert len(names(store)) == 3


def test_a_bad_card_is_refused_and_changes_nothing(store: NodeStore) -> None:
    version = store.version
    with pytest.raises(BadRequest):
        store.register(make_card(max_len=0))
    assert store.version == version


def test_a_young_store_says_that_it_is_settling_for_one_lease(store: NodeStore, clock: Clock) -> None:
    assert store.snapshot().settling
    version = store.version
    clock.now += LEASE_S
    store.expire()
    assert not store.snapshot().settling and store.version > version


def test_two_boots_of_a_store_have_different_ids(clock: Clock) -> None:
    assert NodeStore(StoreSettings(), clock).boot != NodeStore(StoreSettings(), clock).boot


@pytest.mark.parametrize("changes", [{"lease_s": 0.0}, {"max_nodes": 0}])
def test_settings_that_cannot_work_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        StoreSettings(**changes)


NODES = st.sampled_from(["a", "b", "c", "d", "e"])


class AnyHistory(RuleBasedStateMachine):
    """Against the simplest model: a dict of name → (boot, lease end)."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = NodeStore(StoreSettings(lease_s=LEASE_S, max_nodes=4), self.clock)
        self.model: dict[str, tuple[str, float]] = {}
        self.replaced: set[Peer] = set()
        self.last = self.store.snapshot()

    def live(self) -> dict[str, tuple[str, float]]:
        self.model = {node: (boot, ends) for node, (boot, ends) in self.model.items() if ends > self.clock.now}
        return self.model

    @rule(node=NODES, boot=st.sampled_from(["1", "2", "3"]))
    def register(self, node: str, boot: str) -> None:
        known = self.live().get(node)
        try:
            self.store.register(make_card(node, boot))
        except ConfigError:
            assert Peer(node, boot) in self.replaced
            return
        except Overloaded:
            assert known is None and len(self.model) == 4
            return
        assert Peer(node, boot) not in self.replaced
        if known is not None and known[0] != boot:
            self.replaced.add(Peer(node, known[0]))
        self.model[node] = (boot, self.clock.now + LEASE_S)

    @rule(node=NODES, boot=st.sampled_from(["1", "2", "3"]), draining=st.booleans())
    def keep_alive(self, node: str, boot: str, draining: bool) -> None:
        known = self.store.keep_alive(Peer(node, boot), role="mixed", draining=draining)
        assert known == (self.live().get(node, ("", 0.0))[0] == boot)
        if known:
            self.model[node] = (boot, self.clock.now + LEASE_S)

    @rule(node=NODES, boot=st.sampled_from(["1", "2", "3"]))
    def leave(self, node: str, boot: str) -> None:
        self.store.leave(Peer(node, boot))
        if self.model.get(node, ("", 0.0))[0] == boot:
            del self.model[node]

    @precondition(lambda self: self.model)
    @rule(seconds=st.sampled_from([0.5, 2.9, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        self.store.expire()
        found = self.store.snapshot()
        assert [(card.node, card.incarnation) for card in found.nodes] == sorted(
            (node, boot) for node, (boot, _) in self.live().items()
        )
        assert (found.version > self.last.version) if found != self.last else (found.version == self.last.version)
        self.last = found


TestAnyHistory = AnyHistory.TestCase


# ---------------------------------------------------------------- versions of weights


def card_of(node: str, weights: str, label: str = "base", epoch: int = 0) -> NodeCard:
    return make_card(
        node=node,
        incarnation=f"{node}-{epoch}",
        address=f"{node}:1",
        fingerprint=replace(FINGERPRINT, weights=weights),
        weights_label=label,
        weights_epoch=epoch,
    )


def test_other_weights_join_under_an_epoch_and_a_label_of_their_own(store: NodeStore) -> None:
    store.register(card_of("a", "A"))
    store.register(card_of("b", "B", "tuned", 1))
    store.register(card_of("c", "A"))
    assert {card.node: str(card.weights_version) for card in store.snapshot().nodes} == {
        "a": "base (epoch 0)",
        "b": "tuned (epoch 1)",
        "c": "base (epoch 0)",
    }


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (card_of("c", "half"), "weights 'half' here, 'A' there"),
        (card_of("c", "half", "tuned", 1), "weights 'half' here, 'B' there"),
        (card_of("c", "B", "other", 1), "one label and one epoch mean one digest"),
        (card_of("c", "C", "tuned", 2), "one label and one epoch mean one digest"),
        (card_of("c", "C", "base", 2), "one label and one epoch mean one digest"),
    ],
)
def test_weights_that_nobody_announced_are_refused(store: NodeStore, card: NodeCard, why: str) -> None:
    store.register(card_of("a", "A"))
    store.register(card_of("b", "B", "tuned", 1))
    with pytest.raises(ConfigError) as caught:
        store.register(card)
    assert why in str(caught.value)
    assert {card.node for card in store.snapshot().nodes} == {"a", "b"}


def test_a_node_of_files_that_no_node_has_is_refused_after_a_rollout(store: NodeStore) -> None:
    store.register(card_of("a", "B", "tuned", 1))
    with pytest.raises(ConfigError, match="which no node of the cluster has: they serve tuned"):
        store.register(card_of("b", "A"))
    store.register(card_of("a", "A", "base", 2))  # undone
    store.register(card_of("b", "A"))


def test_the_share_of_weights_changes_with_a_renewal(store: NodeStore) -> None:
    store.register(card_of("a", "A"))
    peer = Peer("a", "a-0")
    store.keep_alive(peer, role="prefill", draining=False, weights_share=10.0)
    store.keep_alive(peer, role="prefill", draining=False)
    assert store.snapshot().nodes[0].weights_share == 10.0
    with pytest.raises(BadRequest, match="0 to 100 percent"):
        store.keep_alive(peer, role="prefill", draining=False, weights_share=101.0)


def test_a_node_that_served_before_a_rollout_comes_back_with_its_weights(store: NodeStore) -> None:
    """The bootstrap was restarted, and others registered first. The node still ends what it has."""
    store.register(card_of("a", "B", "tuned", 1))
    with pytest.raises(ConfigError):
        store.register(card_of("b", "A"))
    store.register(card_of("b", "A"), again=True)
    assert {card.node for card in store.snapshot().nodes} == {"a", "b"}
