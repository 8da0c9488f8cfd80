"""Which block hashes a node holds, and what changed since it last said so."""

from __future__ import annotations

from collections import Counter

from pdcluster.core.messages import HASH_BYTES


class HashChanges:
    """Published block hashes, and changes since they were last reported. Several holders can share a hash, hence the
    count.
    """

    def __init__(self) -> None:
        self.present: Counter[bytes] = Counter()
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, hashes: bytes) -> None:
        for block in split_hashes(hashes):
            self.present[block] += 1
            if self.present[block] == 1:
                self._note(block, self._added, self._removed)

    def remove(self, hashes: bytes) -> None:
        for block in split_hashes(hashes):
            self.present[block] -= 1
            if not self.present[block]:
                del self.present[block]
                self._note(block, self._removed, self._added)

    def drain(self) -> tuple[bytes, bytes]:
        """Added and removed since the last call. What came and went in between is in neither."""
        added, removed = b"".join(self._added), b"".join(self._removed)
        self._added, self._removed = {}, {}
        return added, removed

    @staticmethod
    def _note(block: bytes, here: dict[bytes, None], undone: dict[bytes, None]) -> None:
        if block in undone:
            del undone[block]
        else:
            here[block] = None


def split_hashes(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
