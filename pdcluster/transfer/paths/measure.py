"""Which backend carries the next write to a peer: the fastest one measured for that boot, unless it keeps failing.

A pair is measured once, on its own first writes. Each backend in turn carries a few of them, one at a time, into the
ticket's still private pages. Nothing is sent only to measure. A backend's first write pays for its connection and does
not count; neither do very small writes. Durations come from the backends (`base.Backend.take_duration`), so that a busy
node loop does not blur them.

The reported bandwidth follows later writes. The choice stays as measured until a look at another path disagrees. A
measured path that is not chosen carries one write after a pause, which doubles up to a maximum. On a half-open path
that write is the probe. If it beats the chosen path's present speed, all paths of the pair are measured again. One
write alone changes nothing, as it may have met a bad moment.

Bookkeeping over an injected clock. `breaker` has the rules of failing paths, `ladder` those of failed chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.breaker import Breakers, BreakerSettings, BreakerState

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How paths are measured.
    warm_writes: first writes of a backend that do not count.
    sample_writes, sample_bytes: a backend is measured after this many more.
    margin: a backend wins over those before it in the node's order only if it is this many times as fast. The order
    reflects copies, checks and CPU.
    smallest_bytes: smallest write that measures.
    patience_s: a slower write no longer blocks the others.
    again_s: pause before a backend that failed or was slow is measured again, and before a look at one that is not
    chosen. It doubles up to longest_s.
    live_bytes, weight: bytes of one sample of the reported bandwidth, and the sample's weight.
    max_peers: number of boots remembered.
    """

    warm_writes: int = 1
    sample_writes: int = 3
    sample_bytes: int = 8 << 20
    margin: float = 1.15
    smallest_bytes: int = 1 << 16
    patience_s: float = 0.5
    again_s: float = 5.0
    longest_s: float = 300.0
    live_bytes: int = 1 << 20
    weight: float = 0.3
    max_peers: int = 1024


@dataclass(frozen=True, slots=True)
class PathReport:
    """The present state of one path. bytes_s: KV bytes per second of concurrent writes to that peer; 0 until
    measured.
    """

    peer: Peer
    backend: str
    bytes_s: float
    state: BreakerState
    is_chosen: bool


@dataclass(slots=True)
class PathTotal:
    """What went by one path since this node started, over all boots of the peer."""

    peer: str
    backend: str
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Rate:
    """Measurements of one path, from writes that succeeded.
    nbytes, seconds: without the warm-up writes.
    not_before: earliest time of the next measurement; pause: the last wait.
    in_flight, since, live_*: writes in flight, and what ended meanwhile.
    """

    writes: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    not_before: float = float("-inf")
    pause: float = 0.0
    in_flight: int = 0
    since: float = 0.0
    live_writes: int = 0
    live_nbytes: int = 0
    live_bytes_s: float = 0.0

    @property
    def bytes_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def forget(self) -> None:
        """Start measuring from the beginning."""
        self.writes, self.nbytes, self.seconds, self.not_before = 0, 0, 0.0, float("-inf")

    def restart(self, now: float) -> None:
        self.since, self.live_writes, self.live_nbytes = now, 0, 0


class Paths:
    """All paths from this node. The node loop's thread owns them."""

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
        self._totals: dict[tuple[str, str], PathTotal] = {}

    def meet(self, peer: Peer, backends: Sequence[str]) -> None:
        """Record that these backends can serve a ticket of the peer."""
        rates = self._rates.pop(peer, {})
        self._rates[peer] = rates  # keep the latest peer last
        for name in backends:
            self._rate(peer, name)
        while len(self._rates) > self._settings.max_peers:
            self.forget(next(iter(self._rates)))

    def best(self, peer: Peer, backends: Sequence[str], nbytes: int | None = None) -> str:
        """The backend for the next write; changes nothing. nbytes: its size; None returns the present choice without
        measuring.
        """
        if len(backends) == 1:
            return backends[0]
        usable = self._breakers.usable(peer, sorted(backends, key=self._order.index), self._clock())
        measures = nbytes is not None and nbytes >= self._settings.smallest_bytes and len(usable) > 1
        unmeasured = [name for name in usable if not self._is_known(peer, name)] if measures else []
        if unmeasured:
            return min(unmeasured, key=lambda name: self._rate(peer, name).writes)
        best = usable[0]
        for name in usable[1:]:
            if self._rate(peer, name).bytes_s > self._settings.margin * self._rate(peer, best).bytes_s:
                best = name
        due = (name for name in usable if name != best and self._is_due(self._rate(peer, name)))
        return next(due, best) if measures else best

    def has_room(self, peer: Peer, backend: str) -> bool:
        """Whether the path may begin a write now."""
        return self._breakers.has_room(peer, backend, self._clock())

    def is_measuring(self, peer: Peer, backends: Sequence[str], nbytes: int) -> bool:
        """Whether a write of that size to the peer must wait until no other is in flight."""
        large = nbytes >= self._settings.smallest_bytes
        return (
            large
            and len(backends) > 1
            and any(self._can_measure(peer, name) and not self._is_known(peer, name) for name in backends)
        )

    def begin(self, peer: Peer, backend: str) -> float:
        """Record that a write begins. Returns the time, for `succeeded` and `failed`."""
        now = self._clock()
        self._breakers.begin(peer, backend, now)
        rate = self._rate(peer, backend)
        if not rate.in_flight:
            rate.restart(now)
        rate.in_flight += 1
        if self._is_measured(rate):
            rate.not_before = now + max(rate.pause, self._settings.again_s)  # one look at a time
        return now

    def succeeded(self, peer: Peer, backend: str, began: float, nbytes: int, seconds: float | None) -> None:
        """Record a success. seconds: duration of the write; None when its backend cannot tell."""
        if peer not in self._rates:
            return  # forgotten meanwhile
        self._breakers.succeeded(peer, backend, began, self._clock())
        total = self._total(peer, backend)
        total.num_bytes += nbytes
        total.seconds += seconds or 0.0
        rate = self._rate(peer, backend)
        rate.in_flight = max(rate.in_flight - 1, 0)
        if self._is_measured(rate):
            self._observe(rate, nbytes, seconds)
            if nbytes >= self._settings.smallest_bytes:
                self._compare(peer, backend, nbytes / seconds if seconds else 0.0)
        elif nbytes >= self._settings.smallest_bytes:
            self._sample(peer, rate, nbytes, seconds)

    def failed(self, peer: Peer, backend: str, began: float) -> None:
        """Record that the path, not the ticket, failed a write. Measuring does not wait for it."""
        if peer not in self._rates:
            return
        now, rate = self._clock(), self._rate(peer, backend)
        self._breakers.failed(peer, backend, began, now)
        rate.in_flight = max(rate.in_flight - 1, 0)
        rate.restart(now)
        if not self._is_measured(rate):
            rate.forget()
        self._postpone(rate, now)

    def ended(self, peer: Peer, backend: str) -> None:
        """Record that a write ended without telling anything about its path."""
        if peer in self._rates:
            rate = self._rate(peer, backend)
            rate.in_flight = max(rate.in_flight - 1, 0)
            rate.restart(self._clock())

    def distrust(self, peer: Peer, backend: str, began: float) -> None:
        """Record that a write delivered wrong bytes, or nothing."""
        if peer in self._rates:
            self._breakers.failed(peer, backend, began, self._clock())

    def forget(self, peer: Peer) -> None:
        """Forget a boot that is gone for good."""
        self._rates.pop(peer, None)
        self._breakers.forget(peer)

    def totals(self) -> tuple[PathTotal, ...]:
        """Bytes and seconds by path. Peers beyond max_peers are counted together as "other"."""
        return tuple(replace(total) for total in self._totals.values())

    def _total(self, peer: Peer, backend: str) -> PathTotal:
        name = peer.node
        if (name, backend) not in self._totals and len(self._totals) >= self._settings.max_peers:
            name = "other"
        return self._totals.setdefault((name, backend), PathTotal(name, backend))

    def report(self, max_peers: int | None = None) -> list[PathReport]:
        """The latest boot of each node, of the peers met last."""
        now = self._clock()
        latest = {peer.node: peer for peer in self._rates}
        peers = list(latest.values())[-max_peers:] if max_peers is not None else list(latest.values())
        chosen = {peer: self.best(peer, list(self._rates[peer])) for peer in peers}
        return [
            PathReport(
                peer,
                name,
                rate.live_bytes_s or rate.bytes_s,
                self._breakers.state(peer, name, now),
                name == chosen[peer],
            )
            for peer in peers
            for name, rate in self._rates[peer].items()
        ]

    # ------------------------------------------------------------ measuring

    def _rate(self, peer: Peer, backend: str) -> _Rate:
        rates = self._rates.setdefault(peer, {})
        rate = rates.get(backend)
        if rate is None:
            rate = rates[backend] = _Rate()
        return rate

    def _sample(self, peer: Peer, rate: _Rate, nbytes: int, seconds: float | None) -> None:
        rate.writes += 1
        if rate.writes > self._settings.warm_writes and seconds is not None:
            rate.nbytes += nbytes
            rate.seconds += seconds
        if self._is_measured(rate):
            rate.not_before = self._clock() + max(rate.pause, self._settings.again_s)
            rate.live_bytes_s = rate.bytes_s
            self._tell(peer)

    def _observe(self, rate: _Rate, nbytes: int, seconds: float | None) -> None:
        """Add what was moved while writes were in flight. One write counts by its own duration, several by this node's
        clock.
        """
        now = self._clock()
        rate.live_writes += 1
        rate.live_nbytes += nbytes
        if rate.live_nbytes >= self._settings.live_bytes:
            took = seconds if rate.live_writes == 1 and not rate.in_flight and seconds is not None else now - rate.since
            if took > 0:
                rate.live_bytes_s += self._settings.weight * (rate.live_nbytes / took - rate.live_bytes_s)
            rate.restart(now)

    def _compare(self, peer: Peer, backend: str, bytes_s: float) -> None:
        """Compare a measured path's write with the chosen path. Logs when the choice changes."""
        rates = self._rates[peer]
        chosen = self.best(peer, list(rates))
        if backend == chosen:
            return
        self._postpone(rates[backend], self._clock())
        if bytes_s > self._settings.margin * rates[chosen].live_bytes_s:
            self.counters["measured_again"] += 1
            for rate in rates.values():
                rate.forget()

    def _postpone(self, rate: _Rate, now: float) -> None:
        settings = self._settings
        rate.pause = min(2 * rate.pause, settings.longest_s) if rate.pause else settings.again_s
        rate.not_before = now + rate.pause

    def _is_known(self, peer: Peer, backend: str) -> bool:
        """Whether nothing needs measuring now."""
        rate, now = self._rate(peer, backend), self._clock()
        return (
            self._is_measured(rate)
            or now < rate.not_before
            or (rate.in_flight > 0 and now > rate.since + self._settings.patience_s)
        )

    def _can_measure(self, peer: Peer, name: str) -> bool:
        """Whether the path is being measured, or could be now. A path with an open breaker would make all others
        wait.
        """
        return self._rate(peer, name).in_flight > 0 or self.has_room(peer, name)

    def _is_due(self, rate: _Rate) -> bool:
        """Whether another look is due."""
        return self._is_measured(rate) and self._clock() >= rate.not_before

    def _is_measured(self, rate: _Rate) -> bool:
        settings = self._settings
        return rate.writes >= settings.warm_writes + settings.sample_writes or rate.nbytes >= settings.sample_bytes

    def _tell(self, peer: Peer) -> None:
        rates = self._rates[peer]
        if all(self._is_known(peer, name) for name in rates):
            speeds = ", ".join(f"{name} {rate.bytes_s / 1e9:.2f} GB/s" for name, rate in rates.items())
            LOG.info("KV to node %s goes by %s (%s)", peer.node, self.best(peer, list(rates)), speeds)
