"""Which path writes a chunk, and what happens after a failure. Bookkeeping above `measure` and `breaker`.

The rungs of a chunk, in order:
L1 The path that `measure.Paths` names for the pair.
L2 After a definite failure: the same medium again, a bounded number of times, while its breaker allows it. It opens
other lanes, because one that failed a write is not used again.
L3 After repeated failures, or when the peer is unreachable that way: any other common medium, best first.
L4 When none is left, or the outcome of one write is not definite: the ticket ends and the router starts a new attempt.
UNKNOWN and LOST are never written again under the same ticket. A refusal by the reader is no failure of a path: the
ticket is dead there. A chunk that fails verification goes by another medium if there is one.
"""

from __future__ import annotations

from collections import Counter

from pdcluster.transfer.backends.base import Peer, WriteStatus
from pdcluster.transfer.paths.measure import Paths
from pdcluster.transfer.protocol.writer_state import Chunk, Outgoing

REASONS = {
    WriteStatus.FAILED: "failed",
    WriteStatus.REFUSED: "refused",
    WriteStatus.LOST: "lost",
    WriteStatus.UNKNOWN: "unknown",
}


class Ladder:
    """The rungs of all chunks of a writer.
    failures: failed writes by reason.
    resends: chunks written again, by reason.
    """

    def __init__(self, paths: Paths, trials: int) -> None:
        """trials: tries of one chunk on one medium."""
        self._paths = paths
        self._trials = trials
        self.failures: Counter[str] = Counter()
        self.resends: Counter[str] = Counter()

    def next_path(self, outgoing: Outgoing, chunk: Chunk) -> str | None:
        """The backend that writes the chunk now; None when the ladder ends here (L4)."""
        left = [name for name in outgoing.backends if name not in chunk.spent]
        if not left:
            return None
        again = chunk.retries == "failed" and chunk.path in left and self._paths.has_room(outgoing.peer, chunk.path)
        return chunk.path if again else self._paths.best(outgoing.peer, left, chunk.nbytes)

    def begin(self, outgoing: Outgoing, chunk: Chunk, name: str) -> None:
        """Record that a backend begins to write the chunk."""
        if chunk.retries:
            self.resends[
                chunk.retries
                if chunk.retries == "not_verified"
                else "same_path"
                if name == chunk.path
                else "other_path"
            ] += 1
        chunk.path = name
        chunk.tries[name] = chunk.tries.get(name, 0) + 1
        chunk.trial += 1
        chunk.retries = ""
        chunk.began = self._paths.begin(outgoing.peer, name)

    def done(self, peer: Peer, chunk: Chunk, seconds: float | None) -> None:
        chunk.done = True
        self._paths.succeeded(peer, chunk.path, chunk.began, chunk.nbytes, seconds)

    def ended_badly(self, peer: Peer, chunk: Chunk, status: WriteStatus) -> None:
        """Record any answer but DONE."""
        self.failures[REASONS[status]] += 1
        if status is WriteStatus.REFUSED:
            self._paths.ended(peer, chunk.path)
        else:
            self._paths.failed(peer, chunk.path, chunk.began)
        if status is WriteStatus.FAILED:
            self._step_down(chunk, is_spent=chunk.tries.get(chunk.path, 0) >= self._trials)

    def unreachable(self, peer: Peer, chunk: Chunk) -> None:
        """Record that the write could not begin. Trying the same path again at once is useless."""
        self.failures["unreachable"] += 1
        self._paths.failed(peer, chunk.path, chunk.began)
        self._step_down(chunk, is_spent=True)

    def not_verified(self, outgoing: Outgoing, chunk: Chunk) -> None:
        """Record that the reader asks for the chunk again."""
        self._paths.distrust(outgoing.peer, chunk.path, chunk.began)
        chunk.done, chunk.retries = False, "not_verified"
        chunk.tries.clear()
        chunk.spent.add(chunk.path)
        if chunk.spent.issuperset(outgoing.backends):
            chunk.spent.clear()

    def _step_down(self, chunk: Chunk, *, is_spent: bool) -> None:
        chunk.retries = chunk.retries or "failed"
        if is_spent:
            chunk.spent.add(chunk.path)
