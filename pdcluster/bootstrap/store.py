"""Who is alive: nodes with leases, one boot of each name, one layout for all. Pure state with an injected clock.

A node is in from its registration until it leaves or its lease ends. Every change raises the version, so that watchers
get each state once. A boot at the address of another one of its name replaces that at once: nobody else can listen
there. A boot at another address waits until the lease of the other one ends.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic

from pdcluster.bootstrap.card import Adapter, ClusterSnapshot, NodeCard, check_card
from pdcluster.checkpoint.weights_digest import differing_groups
from pdcluster.core.errors import ConfigError, NameTaken, Overloaded
from pdcluster.core.messages import Role
from pdcluster.kv.layout import Fingerprint
from pdcluster.transfer.backends.base import Peer

__all__ = ["ClusterSnapshot", "NodeCard", "NodeStore", "StoreSettings", "differences"]

MAX_REPLACED = 4096
# Groups of weights that a refusal names.
MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """lease_s: how long a silent node stays in.
    max_nodes: bounds what callers can make the store hold.
    """

    lease_s: float = 6.0
    max_nodes: int = 4096

    def __post_init__(self) -> None:
        if self.lease_s <= 0 or self.max_nodes < 1:
            raise ConfigError(
                f"bootstrap lease_s is {self.lease_s} and max_nodes {self.max_nodes}; both must be positive"
            )


@dataclass(frozen=True, slots=True)
class _Lease:
    card: NodeCard
    ends_at: float


class NodeStore:
    """Owned by one thread. `boot` names this store's life. Versions of two boots do not compare."""

    def __init__(self, settings: StoreSettings, clock: Callable[[], float] = monotonic) -> None:
        self.boot = secrets.token_hex(8)
        self.version = 1
        self._settings, self._clock = settings, clock
        self._settled_at = clock() + settings.lease_s
        self._settling = True
        self._leases: dict[str, _Lease] = {}
        self._replaced: OrderedDict[Peer, None] = OrderedDict()

    @property
    def lease_s(self) -> float:
        return self._settings.lease_s

    def __len__(self) -> int:
        return len(self._leases)

    def register(self, card: NodeCard, *, again: bool = False) -> None:
        """Take a node in, in place of a boot of that name which has ended. again: this boot was in before, here or at
        another bootstrap, so its weights were once announced.

        Raises BadRequest for a bad card, Overloaded for too many nodes, NameTaken where another process has its name.
        Raises ConfigError when it does not fit the cluster, or a newer boot has its name.
        """
        self.expire()
        check_card(card)
        if card.peer in self._replaced:
            newer = self._leases.get(card.node)
            by = f" by boot {newer.card.incarnation}" if newer else ""
            raise ConfigError(
                f"node {card.node!r} boot {card.incarnation} was replaced{by}; give every node a name of its own"
            )
        self._check_fits(card, again=again)
        known = self._leases.get(card.node)
        if known is None and len(self._leases) >= self._settings.max_nodes:
            raise Overloaded(
                f"the cluster has {len(self._leases)} nodes, which is its limit; raise the bootstrap's max_nodes",
                self.lease_s,
            )
        if known is not None and known.card.incarnation != card.incarnation:
            if known.card.address != card.address:
                raise NameTaken(
                    f"node {card.node!r} is another process, boot {known.card.incarnation} at {known.card.address}, "
                    "which was heard of less than a lease ago; give every node a name of its own",
                    self.lease_s,
                )
            self._remember_replaced(known.card.peer)
        self._put(card)

    def keep_alive(
        self,
        peer: Peer,
        *,
        role: Role,
        draining: bool,
        adapters: tuple[Adapter, ...] = (),
        weights_share: float | None = None,
    ) -> bool:
        """Renew a lease and take over the state that changes. False when that boot is not in and has to register.

        weights_share: None leaves it as it is.
        """
        self.expire()
        known = self._leases.get(peer.node)
        if known is None or known.card.peer != peer:
            return False
        share = known.card.weights_share if weights_share is None else weights_share
        card = replace(known.card, role=role, draining=draining, adapters=adapters, weights_share=share)
        check_card(card)
        self._put(card)
        return True

    def leave(self, peer: Peer) -> None:
        """Forget a boot. Idempotent; says nothing about another boot of that name."""
        known = self._leases.get(peer.node)
        if known is not None and known.card.peer == peer:
            del self._leases[peer.node]
            self.version += 1

    def expire(self) -> tuple[Peer, ...]:
        """Forget the nodes whose lease ended, and say which."""
        now = self._clock()
        over = tuple(lease.card.peer for lease in self._leases.values() if lease.ends_at <= now)
        for peer in over:
            del self._leases[peer.node]
        settled = self._settling and now >= self._settled_at
        if settled:
            self._settling = False
        if over or settled:
            self.version += 1
        return over

    def snapshot(self) -> ClusterSnapshot:
        """The cluster as of the last call that changed it."""
        cards = tuple(self._leases[name].card for name in sorted(self._leases))
        return ClusterSnapshot(self.boot, self.version, self._settling, cards)

    def _put(self, card: NodeCard) -> None:
        known = self._leases.get(card.node)
        self._leases[card.node] = _Lease(card, self._clock() + self._settings.lease_s)
        if known is None or known.card != card:
            self.version += 1

    def _check_fits(self, card: NodeCard, *, again: bool) -> None:
        others = [lease.card for name, lease in self._leases.items() if name != card.node]
        if not others:
            return
        other = next((each for each in others if each.weights_epoch == card.weights_epoch), others[0])
        is_one_epoch = other.weights_epoch == card.weights_epoch
        found = list(differences(card.fingerprint, other.fingerprint, with_weights=is_one_epoch))
        if card.model != other.model:
            found.insert(0, f"served model {card.model!r} here, {other.model!r} there")
        if card.capabilities.embeds != other.capabilities.embeds:
            found.insert(0, f"{_does(card)} here, {_does(other)} there")
        if card.engine != other.engine:
            raise ConfigError(
                f"node {card.node!r} runs the engine {card.engine!r}, and node {other.node!r} of this cluster runs "
                f"{other.engine!r}; a cluster has one engine: start the node with --engine {other.engine}, or with a "
                "bootstrap of its own"
            )
        ours, theirs = card.fingerprint.protocol, other.fingerprint.protocol
        if ours != theirs:
            raise ConfigError(
                f"node {card.node!r} speaks protocol {ours}, and node {other.node!r} of this cluster speaks {theirs}; "
                "run the same pdcluster version, or the new one beside the old one, with bootstraps of its own"
            )
        if found:
            raise ConfigError(
                f"node {card.node!r} does not fit the cluster of node {other.node!r}: {'; '.join(found)}; "
                "start it with the same model, weights, dtype and hash block size, --deterministic on all or none, "
                "the same --quantization, or in a cluster of its own"
            )
        _check_weights(card, others, again=again)

    def _remember_replaced(self, peer: Peer) -> None:
        self._replaced[peer] = None
        while len(self._replaced) > MAX_REPLACED:
            self._replaced.popitem(last=False)


def _does(card: NodeCard) -> str:
    return "embeds" if card.capabilities.embeds else "generates"


def _check_weights(card: NodeCard, others: Sequence[NodeCard], *, again: bool) -> None:
    """Raises ConfigError for weights that nobody announced.

    A node gets an epoch above 0 from an operator's or a trainer's load alone, never from its files. So one epoch has
    one digest and one label, and one label has one digest. Epoch 0 joins where some node has its digest.
    """
    for other in others:
        is_one_label = other.weights_label == card.weights_label
        is_one_epoch = other.weights_epoch == card.weights_epoch
        if (is_one_label or is_one_epoch) and (other.weights != card.weights or (is_one_epoch and not is_one_label)):
            raise ConfigError(
                f"node {card.node!r} has weights {card.weights!r} as {card.weights_version}, and node {other.node!r} "
                f"has {other.weights!r} as {other.weights_version}; one label and one epoch mean one digest: load them "
                "under a label of their own with pdctl weights load"
            )
    if not again and not card.weights_epoch and all(each.weights != card.weights for each in others):
        newest = max(others, key=lambda each: each.weights_epoch)
        raise ConfigError(
            f"node {card.node!r} was started with weights {card.weights!r}, which no node of the cluster has: they "
            f"serve {newest.weights_version}; start it again, so that it fetches those, or load its own with pdctl "
            "weights load"
        )


def differences(ours: Fingerprint, theirs: Fingerprint, *, with_weights: bool = True) -> Iterator[str]:
    """The fields in which two fingerprints differ and may not, as text."""
    left, right = asdict(ours), asdict(theirs)
    left |= left.pop("layout")
    right |= right.pop("layout")
    del left["page_tokens"], left["weight_groups"]
    if not with_weights:
        del left["weights"]
    for name, value in left.items():
        if value != right[name]:
            what = f" ({_of_weights(ours, theirs)})" if name == "weights" else ""
            yield f"{name} {value!r} here, {right[name]!r} there{what}"


def _of_weights(ours: Fingerprint, theirs: Fingerprint) -> str:
    """What of the weights differs, as text."""
    if not ours.weight_groups or not theirs.weight_groups:
        return "a node of an earlier version digests weights otherwise: run the same version"
    found = differing_groups(ours.weight_groups, theirs.weight_groups, ours.layout.num_layers)
    if not found:
        return "of models of another shape"
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more
