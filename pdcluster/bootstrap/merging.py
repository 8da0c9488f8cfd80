"""The cluster as several bootstraps have it together. Pure state; times are not looked at.

Each bootstrap is whole and knows nothing of the others, so a node may be registered at some of them only. A node is in
as long as one of them has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from pdcluster.bootstrap.card import ClusterSnapshot, NodeCard


class RegistryMerge:
    """What bootstraps that are watched say, as one snapshot.

    1. While one that is watched has settled, only those that are watched count: what a lost one knew may be stale.
    2. Otherwise the last word of each counts, and absence proves nothing.
    3. Of two boots of a name at one address, the one that was seen last is the node: the other one has ended. At two
       addresses it is the one that was seen first, as long as a bootstrap has it.
    """

    def __init__(self) -> None:
        # The last snapshot of each bootstrap, as it came, and with what an earlier one had while it settles.
        self._said: dict[str, ClusterSnapshot] = {}
        self._held: dict[str, ClusterSnapshot] = {}
        self._watched: set[str] = set()
        # When each boot that is known was first seen.
        self._seen: dict[str, int] = {}
        self._numbers = count()

    def update(self, address: str, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """A bootstrap sent a snapshot."""
        self._held[address] = snapshot.merged_over(self._held.get(address))
        self._said[address] = snapshot
        self._watched.add(address)
        return self._merged()

    def lost(self, address: str) -> ClusterSnapshot | None:
        """A bootstrap's watch ended. None where nothing was known."""
        self._watched.discard(address)
        return self._merged() if self._said else None

    def _merged(self) -> ClusterSnapshot:
        watched = [self._said[address] for address in sorted(self._watched)]
        is_settled = any(not each.settling for each in watched)
        counted = watched if is_settled else list(self._held.values())
        cards = self._newest(card for each in counted for card in each.nodes)
        nodes = tuple(cards[name] for name in sorted(cards))
        return ClusterSnapshot("+".join(each.boot for each in counted), next(self._numbers), not is_settled, nodes)

    def _newest(self, found: Iterable[NodeCard]) -> dict[str, NodeCard]:
        """By name."""
        newest: dict[str, NodeCard] = {}
        known: dict[str, int] = {}
        for card in found:
            boot = card.incarnation
            number = known[boot] = self._seen[boot] if boot in self._seen else known.get(boot, next(self._numbers))
            other = newest.get(card.node)
            is_later = other is None or known[other.incarnation] <= number
            if other is None or is_later is (other.address == card.address):
                newest[card.node] = card
        self._seen = known
        return newest
