"""Pages of sequences, and their credit: pages kept available for their growth (`Scheduler`, rule 1). Pure.

It decides no admission or preemption. It says what there is room for, and gives all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster.core.errors import IntegrityError
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.sequence import Sequence
from pdcluster.scheduler.sharing import Forks


class Credit:
    """Owned by one scheduler.

    reserve_tokens: output tokens for whose pages every row has credit.
    """

    def __init__(self, pool: PagePool, reserve_tokens: int) -> None:
        self._pool = pool
        self._reserve_tokens = reserve_tokens
        # Sum over all sequences.
        self._total = 0

    @property
    def num_spare(self) -> int:
        """Pages without credit on them."""
        return max(self._pool.num_available - self._total, 0)

    def growth(self, sequence: Sequence, num_pages: int) -> int:
        """Pages beyond num_pages for the sequence's next reserve_tokens tokens. A remote prefill never grows; the last
        token needs no KV.
        """
        if sequence.remote:
            return 0
        ahead = min(sequence.num_tokens + self._reserve_tokens, sequence.max_total - 1)
        return max(self._pool.pages_for(ahead) - num_pages, 0)

    def take(self, sequence: Sequence, max_cached: int, *, is_alone: bool) -> bool:
        """Pages for all tokens of the sequence: a cached prefix of at most max_cached pages, and fresh ones.

        is_alone: no credit is needed.
        """
        pool = self._pool
        sequence.extend_hashes(sequence.num_tokens)
        num_cached = pool.match_length(sequence.hashes, max_cached)
        num_pages = pool.pages_for(sequence.num_tokens)
        num_fresh = num_pages - num_cached
        credit = self.growth(sequence, num_pages)
        needed = num_fresh if is_alone else num_fresh + credit + self._total
        if needed > pool.num_available:
            return False
        cached = pool.match(sequence.hashes, num_cached)
        if needed > pool.num_available - pool.num_idle(cached):
            return False
        pool.acquire(cached)
        fresh = pool.allocate(num_fresh)
        assert fresh is not None
        sequence.add_pages(cached + fresh)
        sequence.num_published = num_cached
        sequence.num_computed = num_cached * pool.page_tokens
        self._set_credit(sequence, credit)
        return True

    def take_fork(self, sequence: Sequence, forks: Forks) -> bool:
        """The prompt's pages from the parent sequence, and one of its own."""
        credit = self.growth(sequence, self._pool.pages_for(sequence.num_tokens))
        if 1 + credit + self._total > self._pool.num_available:
            return False
        forks.take(sequence)
        self._set_credit(sequence, credit)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """One more page when num_tokens need it; False when there is none."""
        if sequence.num_pages * self._pool.page_tokens >= num_tokens:
            return True
        pages = self._pool.allocate(1)
        if pages is None:
            return False
        sequence.add_pages(pages)
        self._set_credit(sequence, self.growth(sequence, sequence.num_pages))
        return True

    def forgo_growth(self, sequence: Sequence) -> None:
        """The sequence grows no more. Its pages stay."""
        self._set_credit(sequence, 0)

    def _set_credit(self, sequence: Sequence, credit: int) -> None:
        self._total += credit - sequence.credit
        sequence.credit = credit

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError when the credit of the live sequences differs from the count."""
        credit = sum(sequence.credit for sequence in sequences)
        if credit != self._total:
            raise IntegrityError(f"scheduler: the rows' credit is {credit} pages, {self._total} are counted")
