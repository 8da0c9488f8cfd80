"""What a simulated node sends to the router, late and with losses: numbered cache changes and load reports.

A lost message leaves a gap in the numbers. The router notices it with the next message, ignores what follows, asks for
a snapshot and goes on from that. Load reports replace each other, so a lost one is only older news.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from pdcluster.core.messages import Load
from pdcluster_router.prefix_index.index import PrefixIndex
from pdcluster_router.replay.node import SimNode


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """The link.

    delay_s: from node to router.
    loss: share of messages that never come.
    """

    delay_s: float = 0.0
    loss: float = 0.0


IMMEDIATE = FeedSpec()
# Least time between two load reports, as `node.report_s`. The router's own ledger has what it sent since.
REPORT_S = 0.05


@dataclass(frozen=True, slots=True)
class _Delta:
    sent_s: float
    number: int
    added: bytes
    removed: bytes
    snapshot: bool = False


@dataclass(slots=True)
class Feed:
    """The feed of one node to one router.

    num_gaps: how often a snapshot was needed.
    """

    node: SimNode
    index: PrefixIndex
    spec: FeedSpec
    chance: random.Random
    num_gaps: int = 0
    report: Load | None = None
    report_s: float = -1.0
    _number: int = 0
    _expected: int = 1
    _deltas: deque[_Delta] = field(default_factory=deque)
    _reports: deque[tuple[float, Load]] = field(default_factory=deque)
    _snapshot_at: float | None = None
    _report_due_s: float = -1.0

    @property
    def next_s(self) -> float:
        """When it has something to say or to read, unless the node's cache changes before."""
        moments = [self._report_due_s]
        if self._deltas:
            moments.append(self._deltas[0].sent_s + self.spec.delay_s)
        if self._reports:
            moments.append(self._reports[0][0] + self.spec.delay_s)
        if self._snapshot_at is not None:
            moments.append(self._snapshot_at)
        return min(moments)

    def update(self, now: float) -> None:
        """The node sends, then the router reads what has arrived. Without anything of both it has no effect."""
        delay_s = self.spec.delay_s
        self._speak(now)
        while self._deltas and self._deltas[0].sent_s + delay_s <= now:
            self._read(self._deltas.popleft(), now)
        if now >= self._report_due_s:
            self._report_due_s = now + REPORT_S
            if not self._is_lost():
                self._reports.append((now, self.node.load(now)))
        while self._reports and self._reports[0][0] + delay_s <= now:
            self.report_s, self.report = self._reports.popleft()

    def _speak(self, now: float) -> None:
        if self._snapshot_at is not None and now >= self._snapshot_at:
            self.node.cache.take_changes()
            self._number += 1
            self._deltas.append(_Delta(now, self._number, b"".join(self.node.cache.names()), b"", snapshot=True))
            self._snapshot_at = None
        changes = self.node.cache.take_changes()
        if changes:
            self._number += 1
            if not self._is_lost():
                added = b"".join(block for block, is_there in changes.items() if is_there)
                removed = b"".join(block for block, is_there in changes.items() if not is_there)
                self._deltas.append(_Delta(now, self._number, added, removed))

    def _read(self, delta: _Delta, now: float) -> None:
        name, index = self.node.name, self.index
        if delta.snapshot:
            index.snapshot(name, delta.added)
        elif delta.number != self._expected:
            if self._snapshot_at is None and not any(d.snapshot for d in self._deltas):
                self.num_gaps += 1
                self._snapshot_at = now + self.spec.delay_s
            return
        else:
            if delta.removed:
                index.remove(name, delta.removed)
            if delta.added:
                index.add(name, delta.added)
        self._expected = delta.number + 1

    def _is_lost(self) -> bool:
        return self.spec.loss > 0 and self.chance.random() < self.spec.loss
