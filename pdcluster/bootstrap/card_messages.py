"""Cards and snapshots as protobuf and back. Beyond this file and the servicers, protobuf types are not used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import cast

import msgspec

from pdcluster.bootstrap.card import NATIVE, Adapter, Capabilities, ClusterSnapshot, FirstToken, NodeCard
from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import Role
from pdcluster.core.weights import BASE, FormerWeights
from pdcluster.kv.layout import NATIVE_ENGINE, Fingerprint, KVLayout, KVType
from pdcluster.rpc import bootstrap_pb2 as pb

_ROLES: dict[Role, pb.Role] = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}
_ROLE_NAMES = {number: role for role, number in _ROLES.items()}


def role_to_proto(role: Role) -> pb.Role:
    return _ROLES[role]


def role_from_proto(number: int) -> Role:
    """Raises BadRequest for a number that is no role."""
    role = _ROLE_NAMES.get(cast("pb.Role", number))
    if role is None:
        allowed = ", ".join(f"{pb.Role.Name(value)} ({value})" for value in sorted(_ROLE_NAMES))
        raise BadRequest(f"role has number {number}, allowed are {allowed}", "role")
    return role


def card_to_proto(card: NodeCard) -> pb.NodeCard:
    return pb.NodeCard(
        node=card.node, incarnation=card.incarnation, role=_ROLES[card.role], address=card.address, model=card.model,
        fingerprint=_fingerprint_to_proto(card.fingerprint), fingerprint_digest=card.fingerprint.digest(),
        max_len=card.max_len, vocab_size=card.vocab_size, num_pages=card.num_pages, eos_ids=card.eos_ids,
        tokenizer_hash=card.tokenizer_hash, backends=card.backends, device=card.device, draining=card.draining,
        pid=card.pid,
        model_aliases=card.model_aliases, version=card.version,
        capabilities=capabilities_to_proto(card.capabilities), adapters=adapters_to_proto(card.adapters),
        link_key=card.link_key,
        weights=_weights_to_proto(card), sleeping=card.sleeping,
    )  # fmt: skip


def card_from_proto(card: pb.NodeCard) -> NodeCard:
    """The plain card. Its ranges are not checked here. Raises BadRequest for an unknown kind of fingerprint."""
    fingerprint = _fingerprint_from_proto(card.fingerprint)
    if fingerprint.digest() != card.fingerprint_digest:
        raise BadRequest(
            f"fingerprint digest {card.fingerprint_digest!r} of node {card.node!r} is not that of its fields, "
            f"{fingerprint.digest()!r}; run the same pdcluster version everywhere",
            "fingerprint_digest",
        )
    weights = card.weights if card.HasField("weights") else pb.WeightsState(label=BASE, share=100.0)
    return NodeCard(
        node=card.node, incarnation=card.incarnation, role=role_from_proto(card.role), address=card.address,
        model=card.model,
        fingerprint=fingerprint, max_len=card.max_len, vocab_size=card.vocab_size, num_pages=card.num_pages,
        eos_ids=tuple(card.eos_ids),
        tokenizer_hash=card.tokenizer_hash, backends=tuple(card.backends), device=card.device, draining=card.draining,
        pid=card.pid if card.HasField("pid") else None, model_aliases=tuple(card.model_aliases),
        version=card.version,
        capabilities=capabilities_from_proto(card.capabilities) if card.HasField("capabilities") else NATIVE,
        adapters=adapters_from_proto(card.adapters), link_key=card.link_key,
        weights_label=weights.label, weights_epoch=weights.epoch, weights_share=weights.share,
        weights_source=weights.source, weights_former=_former_from_proto(weights),
        sleeping=card.sleeping,
    )  # fmt: skip


def _weights_to_proto(card: NodeCard) -> pb.WeightsState:
    former = card.weights_former
    return pb.WeightsState(
        label=card.weights_label,
        epoch=card.weights_epoch,
        share=card.weights_share,
        source=card.weights_source,
        former=None if former is None else pb.FormerWeights(**msgspec.structs.asdict(former)),
    )


def _former_from_proto(found: pb.WeightsState) -> FormerWeights | None:
    former = found.former
    return FormerWeights(former.label, former.digest, former.source) if found.HasField("former") else None


def capabilities_to_proto(found: Capabilities) -> pb.Capabilities:
    return pb.Capabilities(**asdict(found))


def capabilities_from_proto(found: pb.Capabilities) -> Capabilities:
    """Ranges are checked with the rest of the card."""
    return Capabilities(
        pulls=found.pulls,
        parks_s=found.parks_s,
        digests=found.digests,
        keyed_sampling=found.keyed_sampling,
        estimated_cost=found.estimated_cost,
        first_token=cast("FirstToken", found.first_token),
        embeds=found.embeds,
        adapters=found.adapters,
    )


def adapters_to_proto(found: Iterable[Adapter]) -> list[pb.Adapter]:
    return [pb.Adapter(name=adapter.name, digest=adapter.digest) for adapter in found]


def adapters_from_proto(found: Iterable[pb.Adapter]) -> tuple[Adapter, ...]:
    """Names and digests are checked with the rest of the card."""
    return tuple(Adapter(adapter.name, adapter.digest) for adapter in found)


def snapshot_to_proto(snapshot: ClusterSnapshot) -> pb.Snapshot:
    nodes = [card_to_proto(card) for card in snapshot.nodes]
    return pb.Snapshot(boot=snapshot.boot, version=snapshot.version, settling=snapshot.settling, nodes=nodes)


def snapshot_from_proto(snapshot: pb.Snapshot) -> ClusterSnapshot:
    return ClusterSnapshot(
        snapshot.boot, snapshot.version, snapshot.settling, tuple(card_from_proto(card) for card in snapshot.nodes)
    )


def _fingerprint_to_proto(fingerprint: Fingerprint) -> pb.Fingerprint:
    layout = fingerprint.layout
    return pb.Fingerprint(
        model=fingerprint.model, weights=fingerprint.weights, protocol=fingerprint.protocol,
        hash_block_tokens=fingerprint.hash_block_tokens,
        layout=pb.KVLayout(
            num_layers=layout.num_layers, num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim,
            page_tokens=layout.page_tokens, dtype=layout.dtype,
        ),
        arithmetic=fingerprint.arithmetic, weight_groups=fingerprint.weight_groups, engine=fingerprint.engine,
    )  # fmt: skip


def _fingerprint_from_proto(fingerprint: pb.Fingerprint) -> Fingerprint:
    layout = fingerprint.layout
    # The dtype is checked with the rest of the card.
    shape = KVLayout(
        layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_tokens, cast("KVType", layout.dtype)
    )
    return Fingerprint(
        fingerprint.model,
        fingerprint.weights,
        fingerprint.protocol,
        fingerprint.hash_block_tokens,
        shape,
        fingerprint.arithmetic,
        fingerprint.weight_groups,
        fingerprint.engine or NATIVE_ENGINE,
    )
