"""What nodes say of themselves: cards and snapshots, on the wire and when they are wrong."""

import math
from dataclasses import replace
from typing import Any

import pytest
from bootstrap_cards import ADAPTERS, ALL_OTHER, FINGERPRINT, LAYOUT, OTHER_ENGINE, make_card

from pdcluster.bootstrap.card import NATIVE, Adapter, Capabilities, ClusterSnapshot, NodeCard, check_card
from pdcluster.bootstrap.card_messages import (
    card_from_proto,
    card_to_proto,
    role_from_proto,
    snapshot_from_proto,
    snapshot_to_proto,
)
from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import Endpoint
from pdcluster.kv.layout import KVType
from pdcluster.transfer.backends.base import Peer


def snapshot(*cards: NodeCard, settling: bool = False, version: int = 1) -> ClusterSnapshot:
    return ClusterSnapshot("b", version, settling, cards)


def test_a_card_knows_its_peer_endpoint_and_sizes() -> None:
    card = make_card()
    assert card.peer == Peer("prefill-0", "boot-1")
    assert card.endpoint == Endpoint("prefill-0", "boot-1", "127.0.0.1:4000")
    assert (card.page_tokens, card.hash_block_tokens, card.weights, card.dtype) == (32, 32, "sha-1", "float32")


@pytest.mark.parametrize(
    "card",
    [
        make_card(),
        make_card(pid=None, eos_ids=(), backends=(), draining=True, role="mixed"),
        make_card(fingerprint=OTHER_ENGINE, capabilities=ALL_OTHER),
        make_card(capabilities=replace(NATIVE, parks_s=0.5)),
        make_card(adapters=ADAPTERS),
    ],
)
def test_a_card_comes_back_from_protobuf_as_it_was(card: NodeCard) -> None:
    check_card(card)
    assert card_from_proto(card_to_proto(card)) == card


def test_a_card_of_an_earlier_version_is_that_of_a_native_node() -> None:
    proto = card_to_proto(make_card())
    proto.ClearField("capabilities")
    proto.fingerprint.ClearField("engine")
    card = card_from_proto(proto)
    assert card == make_card() and card.capabilities == NATIVE and card.engine == "native"


def test_earlier_versions_compute_the_same_digest_of_a_native_node_and_none_of_another() -> None:
    """The pinned value is what a bootstrap of version 1.0 computes of these fields."""
    assert FINGERPRINT.digest() == "a68348d08c6eee73"
    assert OTHER_ENGINE.digest() not in (FINGERPRINT.digest(), replace(OTHER_ENGINE, engine="sglang").digest())
    assert OTHER_ENGINE != FINGERPRINT


@pytest.mark.parametrize("dtype, nbytes", [("float32", 4), ("bfloat16", 2), ("float16", 2), ("fp8", 1)])
def test_kv_of_other_engines_has_its_own_types(dtype: KVType, nbytes: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    check_card(make_card(fingerprint=replace(OTHER_ENGINE, layout=layout)))
    assert layout.token_bytes == 2 * 2 * 2 * 32 * nbytes


def test_groups_of_weights_travel_beside_the_fingerprint_s_digest() -> None:
    """Bootstraps of an earlier version compute it without them, and pass over the field."""
    grouped = make_card(fingerprint=replace(FINGERPRINT, weight_groups=b"\x00\xff" * 1024))
    check_card(grouped)
    proto = card_to_proto(grouped)
    assert card_from_proto(proto).fingerprint.weight_groups == grouped.fingerprint.weight_groups
    assert proto.fingerprint_digest == card_to_proto(make_card()).fingerprint_digest
    proto.fingerprint.ClearField("weight_groups")
    assert card_from_proto(proto) == make_card()


def test_an_adapter_s_name_means_its_digest_and_leaves_the_model_s_own_names_alone() -> None:
    plain, card = make_card(), make_card(adapters=ADAPTERS)
    assert card.models == ("tiny", "sql", "sums")
    assert card.model_digest("tiny") == plain.model_digest("tiny")
    other = make_card(adapters=(Adapter("sql", "d2"),))
    digests = {
        card.model_digest("sql"),
        card.model_digest("sums"),
        other.model_digest("sql"),
        plain.model_digest("sql"),
    }
    assert len(digests) == 4
    assert card.model_digests == {card.model_digest(name) for name in ("tiny", "sql", "sums")}
    assert len({adapter.identity for adapter in (*ADAPTERS, *other.adapters)}) == 3


def test_a_snapshot_comes_back_from_protobuf_as_it_was() -> None:
    cards = snapshot(make_card("a"), make_card("b", role="decode"), settling=True, version=2**40)
    assert snapshot_from_proto(snapshot_to_proto(cards)) == cards


def test_a_fingerprint_of_another_version_is_refused() -> None:
    card = card_to_proto(make_card())
    card.fingerprint_digest = "0" * 16
    with pytest.raises(BadRequest, match="same pdcluster version"):
        card_from_proto(card)


@pytest.mark.parametrize("number", [0, 4, 99])
def test_an_unknown_role_is_refused(number: int) -> None:
    with pytest.raises(BadRequest, match="role"):
        role_from_proto(number)


BAD: list[dict[str, Any]] = [
    {"node": ""}, {"node": "n" * 129}, {"incarnation": ""}, {"role": "boss"}, {"address": "nowhere"},
    {"address": "host:0"}, {"address": "h" * 2000},
    {"model": ""}, {"max_len": 0}, {"vocab_size": -1}, {"num_pages": 2**31}, {"eos_ids": (1000,)}, {"eos_ids": (-1,)},
    {"eos_ids": (1,) * 257},
    {"node": "n\n"}, {"node": "\x1b[2J"}, {"incarnation": "a\x00"}, {"model": "m\r\nx: y"}, {"device": "d\t"},
    {"tokenizer_hash": "\x7f"},
    {"backends": ("shm\n",)}, {"fingerprint": replace(FINGERPRINT, weights="\u2028")}, {"address": "a\x01:1"},
    {"node": "\ud800"},
    {"backends": ("",)}, {"backends": ("b" * 129,)}, {"device": "d" * 129}, {"tokenizer_hash": "t" * 129},
    {"fingerprint": replace(FINGERPRINT, weight_groups=bytes(2049))},
    {"fingerprint": replace(FINGERPRINT, protocol=0)}, {"fingerprint": replace(FINGERPRINT, layout=replace(LAYOUT,
    num_layers=0))},
    {"capabilities": replace(ALL_OTHER, parks_s=math.nan)}, {"capabilities": replace(ALL_OTHER, parks_s=math.inf)},
    {"capabilities": replace(ALL_OTHER, parks_s=-0.1)}, {"capabilities": replace(ALL_OTHER, parks_s=86_401.0)},
    {"capabilities": replace(ALL_OTHER, first_token="")}, {"capabilities": replace(ALL_OTHER, first_token="both")},
    {"capabilities": replace(ALL_OTHER, adapters=65)}, {"adapters": tuple(Adapter(f"a{i}", "d") for i in range(65))},
    {"adapters": (Adapter("", "d"),)}, {"adapters": (Adapter("a", ""),)}, {"adapters": (Adapter("a\n", "d"),)},
    {"adapters": (Adapter("n" * 129, "d"),)}, {"adapters": (Adapter("a", "d" * 129),)},
    {"adapters": (Adapter("a", "d"), Adapter("a", "e"))}, {"adapters": (Adapter("tiny", "d"),)},
    {"model_aliases": ("b",), "adapters": (Adapter("b", "d"),)},
    {"fingerprint": replace(OTHER_ENGINE, engine="")}, {"fingerprint": replace(OTHER_ENGINE, engine="v" * 129)},
    {"fingerprint": replace(OTHER_ENGINE, engine="v\n")},
    {"fingerprint": replace(FINGERPRINT, layout=replace(LAYOUT, dtype="int3"))}, {"fingerprint": replace(FINGERPRINT,
    model="m" * 2000)},
]  # fmt: skip


@pytest.mark.parametrize(
    "changes", BAD, ids=lambda changes: f"{next(iter(changes))}={str(next(iter(changes.values())))[:30]}"
)
def test_a_card_with_a_bad_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        check_card(make_card(**changes))


def test_a_node_missing_from_a_settled_snapshot_is_gone() -> None:
    earlier, later = snapshot(make_card("a"), make_card("b")), snapshot(make_card("b"))
    assert later.merged_over(earlier) == later
    assert later.gone_since(earlier) == (Peer("a", "boot-1"),)


def test_a_node_missing_from_a_settling_snapshot_is_kept() -> None:
    earlier, later = snapshot(make_card("a"), make_card("b")), snapshot(make_card("b", draining=True), settling=True)
    merged = later.merged_over(earlier)
    assert merged.nodes == (make_card("a"), make_card("b", draining=True)) and merged.gone_since(earlier) == ()


def test_a_new_boot_of_a_node_is_proof_that_the_old_one_is_gone_even_while_settling() -> None:
    earlier, later = snapshot(make_card("a", "boot-1")), snapshot(make_card("a", "boot-2"), settling=True)
    assert later.merged_over(earlier).gone_since(earlier) == (Peer("a", "boot-1"),)


def test_before_the_first_snapshot_nobody_is_gone() -> None:
    first = snapshot(make_card("a"), settling=True)
    assert first.merged_over(None) == first and first.gone_since(None) == ()


def test_a_name_means_another_model_where_it_embeds() -> None:
    embedding = make_card(capabilities=Capabilities(embeds=True))
    assert embedding.model_digest("tiny") != make_card().model_digest("tiny")
    assert embedding.model_digest("tiny") == make_card("other", capabilities=Capabilities(embeds=True)).model_digest(
        "tiny"
    )
