"""Which backend carries the next write to a peer: the fastest as measured on the first writes to that boot, but none that keeps failing.

A pair is measured once, on its own first writes: each backend in turn carries a few of them, one at a time, into the ticket's still private
pages. Nothing is sent for the sake of measuring, and no live page is touched. A backend's first write pays for its connection and does not
count. Durations come from the backends (`base.Backend.take_duration`), so that a busy node loop does not blur them.

Plain bookkeeping over an injected clock; the rules of failing paths are in `breaker`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster.transfer.base import Peer
from pdcluster.transfer.breaker import Breakers, BreakerSettings, BreakerState

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """warm_writes of a backend do not count; it is measured after sample_writes more, or sample_bytes. A backend is preferred to those before it
    in the node's order when it is `margin` times as fast: the order is by what else speaks for them (copies, checks, CPU). again_s: pause before
    a backend that failed while it was measured is measured again."""

    warm_writes: int = 1
    sample_writes: int = 3
    sample_bytes: int = 8 << 20
    margin: float = 1.15
    again_s: float = 5.0


@dataclass(frozen=True, slots=True)
class PathReport:
    """One path as it stands. bytes_s is 0 as long as it was not measured."""

    peer: Peer
    backend: str
    bytes_s: float
    state: BreakerState
    is_chosen: bool


@dataclass(slots=True)
class _Rate:
    """Writes of one path that ended well, without the warm-up ones in nbytes and seconds. not_before: it is not worth measuring till then."""

    writes: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    not_before: float = float("-inf")

    @property
    def bytes_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


class Paths:
    """All paths from this node. Owned by the node loop's thread."""

    def __init__(
        self,
        order: Sequence[str],
        clock: Callable[[], float],
        *,
        measure: MeasureSettings | None = None,
        breaker: BreakerSettings | None = None,
    ) -> None:
        """order: backend names, best first."""
        self._order = tuple(order)
        self._clock = clock
        self._settings = measure if measure is not None else MeasureSettings()
        self._breakers = Breakers(breaker if breaker is not None else BreakerSettings())
        self._rates: dict[Peer, dict[str, _Rate]] = {}
        self.counters = self._breakers.counters

    def meet(self, peer: Peer, backends: Sequence[str]) -> None:
        """A ticket can be served by these."""
        rates = self._rates.setdefault(peer, {})
        for name in backends:
            rates.setdefault(name, _Rate())

    def best(self, peer: Peer, backends: Sequence[str]) -> str:
        """The one that the next write takes; changes nothing."""
        usable = self._breakers.usable(peer, sorted(backends, key=self._order.index), self._clock())
        unmeasured = [name for name in usable if not self._is_known(peer, name)] if len(usable) > 1 else []
        if unmeasured:
            return min(unmeasured, key=lambda name: self._rate(peer, name).writes)
        best = usable[0]
        for name in usable[1:]:
            if self._rate(peer, name).bytes_s > self._settings.margin * self._rate(peer, best).bytes_s:
                best = name
        return best

    def is_measuring(self, peer: Peer, backends: Sequence[str]) -> bool:
        """Should writes to the peer go one at a time now?"""
        return len(backends) > 1 and not all(self._is_known(peer, name) for name in backends)

    def begin(self, peer: Peer, backend: str) -> float:
        """A write begins; returns when, for `succeeded` and `failed`."""
        now = self._clock()
        self._breakers.begin(peer, backend, now)
        return now

    def succeeded(self, peer: Peer, backend: str, began: float, nbytes: int, seconds: float | None) -> None:
        """seconds: how long the write took, None when its backend cannot say."""
        self._breakers.succeeded(peer, backend, began, self._clock())
        rate = self._rate(peer, backend)
        if self._is_measured(rate):
            return
        rate.writes += 1
        if rate.writes > self._settings.warm_writes and seconds is not None:
            rate.nbytes += nbytes
            rate.seconds += seconds
        if self._is_measured(rate):
            self._tell(peer)

    def failed(self, peer: Peer, backend: str, began: float) -> None:
        """The path, not the ticket, let a write down. Measuring does not wait for it."""
        now = self._clock()
        self._breakers.failed(peer, backend, began, now)
        if not self._is_measured(self._rate(peer, backend)):
            self._rates[peer][backend] = _Rate(not_before=now + self._settings.again_s)

    def forget(self, peer: Peer) -> None:
        """The boot is gone for good."""
        self._rates.pop(peer, None)
        self._breakers.forget(peer)

    def report(self) -> list[PathReport]:
        now = self._clock()
        return [
            PathReport(peer, name, rate.bytes_s, self._breakers.state(peer, name, now), name == self.best(peer, list(rates)))
            for peer, rates in self._rates.items()
            for name, rate in rates.items()
        ]

    def _rate(self, peer: Peer, backend: str) -> _Rate:
        return self._rates.setdefault(peer, {}).setdefault(backend, _Rate())

    def _is_known(self, peer: Peer, backend: str) -> bool:
        """Is there nothing to be measured now?"""
        rate = self._rate(peer, backend)
        return self._is_measured(rate) or self._clock() < rate.not_before

    def _is_measured(self, rate: _Rate) -> bool:
        settings = self._settings
        return rate.writes >= settings.warm_writes + settings.sample_writes or rate.nbytes >= settings.sample_bytes

    def _tell(self, peer: Peer) -> None:
        rates = self._rates[peer]
        if all(self._is_known(peer, name) for name in rates):
            speeds = ", ".join(f"{name} {rate.bytes_s / 1e9:.2f} GB/s" for name, rate in rates.items())
            LOG.info("KV to node %s goes by %s (%s)", peer.node, self.best(peer, list(rates)), speeds)
