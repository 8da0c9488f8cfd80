"""The block hashes that passed this router, as a cache that never evicts.

`explain` judges decisions by it, and the replay measures what nodes evict. It gives the length of the prefix that a
prompt shares with some earlier request. Each hash has one slot in a table of fixed size, and a later hash may overwrite
it. So old prefixes fade, and an answer may be too short. It is too long only by chance, 2⁻⁶⁴ a block.
"""

from __future__ import annotations

import numpy as np

from pdcluster.core.messages import HASH_BYTES

# 8 MiB; 33 million tokens in blocks of 32.
TABLE_BLOCKS = 1 << 20

FEW_BLOCKS = 24


class IdealCache:
    """Hashes of blocks that were seen. Owned by one thread."""

    def __init__(self, num_blocks: int = TABLE_BLOCKS) -> None:
        self._table = np.zeros(num_blocks, dtype=np.uint64)
        # The same memory, for chains so short that a call of numpy costs more than its work.
        self._places = self._table.data
        self._place_of, self._at = num_blocks.__rmod__, self._places.__getitem__

    def note(self, hashes: bytes) -> int:
        """Leading blocks of the chain that were seen before. From now on all of them count as seen."""
        return self._note_few(hashes) if len(hashes) <= FEW_BLOCKS * HASH_BYTES else self._note_many(hashes)

    def _note_few(self, hashes: bytes) -> int:
        words = memoryview(hashes).cast("Q")[:: HASH_BYTES // 8].tolist()
        found = list(map(self._at, map(self._place_of, words)))
        if found == words:  # as when a prompt comes again
            return len(words)
        places, place_of, num_seen, is_known = self._places, self._place_of, 0, True
        for word, there in zip(words, found, strict=True):
            if there != word:
                places[place_of(word)], is_known = word, False
            elif is_known:
                num_seen += 1
        return num_seen

    def _note_many(self, hashes: bytes) -> int:
        words = np.frombuffer(hashes, dtype=np.uint64)[:: HASH_BYTES // 8]
        if not len(words):
            return 0
        places = words % np.uint64(len(self._table))
        unknown = np.flatnonzero(self._table[places] != words)
        self._table[places] = words
        return int(unknown[0]) if len(unknown) else len(words)
