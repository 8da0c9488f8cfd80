"""What the cluster knows about a node, and a snapshot of all nodes: plain values, checked. The store decides who is
alive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from pdcluster.checkpoint.weights_digest import MAX_GROUP_BYTES
from pdcluster.core.address import parse_address
from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import Endpoint, Role
from pdcluster.core.weights import BASE, FormerWeights, WeightsVersion, check_label
from pdcluster.kv.layout import Fingerprint, KVType
from pdcluster.transfer.backends.base import Peer

MAX_NAME_CHARS = 128
MAX_TEXT_CHARS = 1024
MAX_LIST_ITEMS = 256
MAX_ALIASES = 16
MAX_ADAPTERS = 64
# Of parking. A longer promise says nothing.
MAX_PARKS_S = 86_400.0
INT31 = (1 << 31) - 1

# Who makes the first token of a prompt that two nodes serve.
FirstToken = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a node's engine can do beside serving. The defaults are those of our own engine, and of earlier versions,
    which say nothing.
    """

    # Whether it fetches cached KV from other nodes and gives it to them.
    pulls: bool = True
    # How long finished KV may wait for a decode node, in seconds; 0: as long as it is asked to.
    parks_s: float = 0.0
    # Whether the reader checks a digest of the KV that it gets.
    digests: bool = True
    # Whether random numbers depend on seed, choice and position alone, so that a replay samples the same tokens.
    keyed_sampling: bool = True
    # Whether the step costs that it reports come of gaps between steps, with more than steps in them.
    estimated_cost: bool = False
    # Where "decode", the prefill node says Computed, and the decode node makes token 1.
    first_token: FirstToken = "prefill"
    # Whether it embeds prompts. Then it generates nothing.
    embeds: bool = False
    # How many LoRA adapters it can have; 0: none.
    adapters: int = 0


NATIVE = Capabilities()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a node has beside its model."""

    # What requests call it.
    name: str
    # Of its files.
    digest: str

    @property
    def identity(self) -> str:
        """What salts block hashes: no two adapters have the same."""
        return f"{len(self.digest)}:{self.digest}{self.name}"


@dataclass(frozen=True, slots=True)
class NodeCard:
    """One boot of one node, as it introduces itself.

    node: its name, unique in the cluster.
    model: the name that requests use.
    address: host:port of its control socket.
    backends: names of transfer backends, best first.
    tokenizer_hash: content hash of the tokenizer's files.

    Page and hash block sizes are in the fingerprint.
    """

    node: str
    incarnation: str
    role: Role
    address: str
    model: str
    fingerprint: Fingerprint
    max_len: int
    vocab_size: int
    num_pages: int
    eos_ids: tuple[int, ...] = ()
    tokenizer_hash: str = ""
    backends: tuple[str, ...] = ()
    device: str = "cpu"
    draining: bool = False
    pid: int | None = None
    # More names that requests may use.
    model_aliases: tuple[str, ...] = ()
    # Of pdcluster; "" from a node that does not say.
    version: str = ""
    capabilities: Capabilities = NATIVE
    # LoRA adapters; requests may use their names, too.
    adapters: tuple[Adapter, ...] = ()
    # Names the cluster key that its links have; "": none, or an earlier version.
    link_key: str = ""
    # Of its weights, as `core.weights` says.
    weights_label: str = BASE
    weights_epoch: int = 0
    # Of the requests that name no weights, in percent, that these may get.
    weights_share: float = 100.0
    # Where they were loaded from; "": the model that the node was started with.
    weights_source: str = ""
    # What it served before; None: these are its first.
    weights_former: FormerWeights | None = None
    # It has given the memory of weights and KV back, and takes no work before it wakes.
    sleeping: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """Every name that requests may use, the first one first."""
        return self.model, *self.model_aliases, *(adapter.name for adapter in self.adapters)

    def adapter(self, name: str) -> Adapter | None:
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def model_digest(self, name: str) -> str:
        """What that name means here, as 16 hex digits: text, tokens, weights, adapter, hash blocks, and whether it
        embeds or generates. Nodes of one digest may serve the same request.
        """
        return self._digest(name, self.weights)

    def text_digest(self, name: str) -> str:
        """The same without the weights, equal for all versions of one model."""
        return self._digest(name, "any weights")

    def _digest(self, name: str, weights: str) -> str:
        parts = name, self.tokenizer_hash, self.vocab_size, self.eos_ids, weights, self.hash_block_tokens
        adapter = self.adapter(name)
        own = () if adapter is None else (adapter.digest,)
        return _model_digest(*parts, *own, *(("embeds",) if self.capabilities.embeds else ()))

    @property
    def model_digests(self) -> frozenset[str]:
        """Of every name."""
        return frozenset(map(self.model_digest, self.models))

    @property
    def peer(self) -> Peer:
        return Peer(self.node, self.incarnation)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.node, self.incarnation, self.address, link_key=self.link_key)

    @property
    def page_tokens(self) -> int:
        return self.fingerprint.layout.page_tokens

    @property
    def hash_block_tokens(self) -> int:
        return self.fingerprint.hash_block_tokens

    @property
    def weights(self) -> str:
        """Digest of the weights, which salts the block hashes."""
        return self.fingerprint.weights

    @property
    def weights_version(self) -> WeightsVersion:
        return WeightsVersion(self.weights_label, self.weights_epoch, self.weights)

    @property
    def engine(self) -> str:
        return self.fingerprint.engine

    @property
    def dtype(self) -> KVType:
        return self.fingerprint.layout.dtype


@lru_cache(maxsize=1024)
def _model_digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All nodes at one moment, sorted by name. boot and version name the moment.

    settling: the bootstrap is young, so a missing node may only not have registered again yet.
    """

    boot: str
    version: int
    settling: bool
    nodes: tuple[NodeCard, ...]

    def merged_over(self, earlier: ClusterSnapshot | None) -> ClusterSnapshot:
        """This snapshot, and the nodes of an earlier one that it does not disprove. Absence proves nothing while
        settling.
        """
        if earlier is None or not self.settling:
            return self
        known = {card.node: card for card in earlier.nodes} | {card.node: card for card in self.nodes}
        return ClusterSnapshot(self.boot, self.version, self.settling, tuple(known[name] for name in sorted(known)))

    def gone_since(self, earlier: ClusterSnapshot | None) -> tuple[Peer, ...]:
        """Boots of nodes that were there and are not any more."""
        now = {card.peer for card in self.nodes}
        return () if earlier is None else tuple(card.peer for card in earlier.nodes if card.peer not in now)


def check_card(card: NodeCard) -> None:
    """Raises BadRequest for a field that no node of pdcluster sends."""
    for name, value in (("node", card.node), ("incarnation", card.incarnation)):
        _check_text(name, value, MAX_NAME_CHARS, required=True)
    layout = card.fingerprint.layout
    for name, value in (
        ("model", card.model),
        ("fingerprint.model", card.fingerprint.model),
        ("fingerprint.weights", card.fingerprint.weights),
    ):
        _check_text(name, value, MAX_TEXT_CHARS, required=name != "fingerprint.weights")
    for name, value in (
        ("tokenizer_hash", card.tokenizer_hash),
        ("device", card.device),
        ("version", card.version),
        ("arithmetic", card.fingerprint.arithmetic),
        ("link_key", card.link_key),
    ):
        _check_text(name, value, MAX_NAME_CHARS, required=False)
    if len(card.model_aliases) > MAX_ALIASES:
        raise BadRequest(
            f"model_aliases has {len(card.model_aliases)} names; at most {MAX_ALIASES} are allowed", "model_aliases"
        )
    for alias in card.model_aliases:
        _check_text("model_aliases", alias, MAX_TEXT_CHARS, required=True)
    check_adapters(card.adapters, (card.model, *card.model_aliases))
    if card.role not in get_args(Role):
        raise BadRequest(f"role is {card.role!r}, allowed are {', '.join(get_args(Role))}", "role")
    if layout.dtype not in get_args(KVType):
        raise BadRequest(f"dtype is {layout.dtype!r}, allowed are {', '.join(get_args(KVType))}", "dtype")
    _check_text("engine", card.engine, MAX_NAME_CHARS, required=True)
    _check_capabilities(card.capabilities)
    _check_weights(card)
    _check_address(card.address)
    if len(card.fingerprint.weight_groups) > MAX_GROUP_BYTES:
        raise BadRequest(
            f"weight_groups has {len(card.fingerprint.weight_groups)} bytes; at most {MAX_GROUP_BYTES} are allowed",
            "weight_groups",
        )
    for name, number in (
        ("num_layers", layout.num_layers), ("num_kv_heads", layout.num_kv_heads), ("head_dim", layout.head_dim),
        ("page_tokens", layout.page_tokens),
        ("protocol", card.fingerprint.protocol), ("hash_block_tokens", card.fingerprint.hash_block_tokens),
        ("max_len", card.max_len), ("vocab_size", card.vocab_size), ("num_pages", card.num_pages),
    ):  # fmt: skip
        _check_positive(name, number)
    _check_lists(card)


def _check_capabilities(found: Capabilities) -> None:
    if not 0.0 <= found.parks_s <= MAX_PARKS_S:  # which no NaN is
        raise BadRequest(f"parks_s is {found.parks_s}, allowed are 0 to {MAX_PARKS_S:g}", "parks_s")
    if found.first_token not in get_args(FirstToken):
        raise BadRequest(
            f"first_token is {found.first_token!r}, allowed are {', '.join(get_args(FirstToken))}", "first_token"
        )
    if not 0 <= found.adapters <= MAX_ADAPTERS:
        raise BadRequest(f"capability adapters is {found.adapters}, allowed are 0 to {MAX_ADAPTERS}", "adapters")


def _check_weights(card: NodeCard) -> None:
    check_label(card.weights_label)
    if not 0 <= card.weights_epoch <= INT31:
        raise BadRequest(f"weights_epoch is {card.weights_epoch}, allowed are 0 to {INT31}", "weights_epoch")
    if not 0.0 <= card.weights_share <= 100.0:  # which no NaN is
        raise BadRequest(f"weights_share is {card.weights_share}, allowed are 0 to 100 percent", "weights_share")
    former = card.weights_former or FormerWeights(BASE, "")
    check_label(former.label)
    _check_text("weights_source", card.weights_source, MAX_TEXT_CHARS, required=False)
    _check_text("weights_former.digest", former.digest, MAX_NAME_CHARS, required=False)
    _check_text("weights_former.source", former.source, MAX_TEXT_CHARS, required=False)


def check_adapters(adapters: Sequence[Adapter], taken: Sequence[str]) -> None:
    """Raises BadRequest for too many, for odd ones, and for a name that something else has."""
    if len(adapters) > MAX_ADAPTERS:
        raise BadRequest(f"adapters has {len(adapters)} entries, at most {MAX_ADAPTERS} are allowed", "adapters")
    names = set(taken)
    for adapter in adapters:
        _check_text("adapter", adapter.name, MAX_NAME_CHARS, required=True)
        _check_text("adapter digest", adapter.digest, MAX_NAME_CHARS, required=True)
        if adapter.name in names:
            raise BadRequest(f"the name {adapter.name!r} of an adapter is taken by another model", "adapters")
        names.add(adapter.name)


def _check_lists(card: NodeCard) -> None:
    for name, items in (("eos_ids", card.eos_ids), ("backends", card.backends)):
        if len(items) > MAX_LIST_ITEMS:
            raise BadRequest(f"{name} has {len(items)} entries, at most {MAX_LIST_ITEMS} are allowed", name)
    for token in card.eos_ids:
        if not 0 <= token < card.vocab_size:
            raise BadRequest(f"eos_ids holds {token}, the vocabulary has {card.vocab_size} tokens", "eos_ids")
    for backend in card.backends:
        _check_text("backends", backend, MAX_NAME_CHARS, required=True)


def _check_address(where: str) -> None:
    _check_text("address", where, MAX_TEXT_CHARS, required=True)
    try:
        _, port = parse_address(where)
    except ValueError as error:
        raise BadRequest(f"address {where!r} {error}", "address") from error
    if port == 0:
        raise BadRequest(f"address {where!r} has port 0, to which nobody can connect", "address")


def _check_text(name: str, value: str, limit: int, *, required: bool) -> None:
    if len(value) > limit or (required and not value):
        raise BadRequest(f"{name} has {len(value)} characters, allowed are {1 if required else 0} to {limit}", name)
    if not value.isprintable():
        raise BadRequest(f"{name} is {value!r}, allowed are printable characters only", name)


def _check_positive(name: str, value: int) -> None:
    if not 0 < value <= INT31:
        raise BadRequest(f"{name} is {value}, allowed are 1 to {INT31}", name)
