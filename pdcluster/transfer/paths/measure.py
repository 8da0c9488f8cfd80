"""Which backend carries the next write to a peer: the fastest as measured on the first writes to that boot, but none
that keeps failing.

A pair is measured once, on its own first writes: each backend in turn carries a few of them, one at a time, into the
ticket's still private pages. Nothing is sent for the sake of measuring, and no live page is touched. A backend's first
write pays for its connection and does not count, nor do writes so small that they say more about fixed costs. Durations
come from the backends (`base.Backend.take_duration`), so that a busy node loop does not blur them.

The bandwidth that is reported follows the writes since. The choice stays as measured until a look at another path says
otherwise: a path that was measured and is not chosen carries one write after a pause, which doubles from look to look,
up to a longest one. On a path that is half-open that write is the probe. Was it faster than the chosen path is now,
then all paths of the pair are measured again, side by side; one write alone moves nothing, as it may have met a bad
moment.

Plain bookkeeping over an injected clock; the rules of failing paths are in `breaker`, what becomes of a failed chunk in
`ladder`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.breaker import Breakers, BreakerSettings, BreakerState

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """warm_writes of a backend do not count; it is measured after sample_writes more, or sample_bytes. A backend is
    preferred to those before it in the node's order when it is `margin` times as fast: the order is by what else speaks
    for them (copies, checks, CPU). smallest_bytes: of a write that measures. patience_s: a write that takes longer does
    not hold up the others. again_s: pause before a backend that failed, or was too slow, while it was measured is
    measured again, and before one that is not chosen is looked at; it doubles each time, up to longest_s. live_bytes,
    weight: how many bytes make a sample of the reported bandwidth, and how much of it counts. max_peers: boots that are
    remembered, those met last."""

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
    """One path as it stands. bytes_s: KV bytes per second of the writes to that peer together; 0 as long as it was not
    measured."""

    peer: Peer
    backend: str
    bytes_s: float
    state: BreakerState
    is_chosen: bool


@dataclass(slots=True)
class _Rate:
    """Writes of one path that ended well, without the warm-up ones in nbytes and seconds. not_before: it is not worth
    measuring till then, pause: how long that was the last time. in_flight, since, live_*: its writes under way, and
    what ended while some were."""

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
        """It is to be measured, from the beginning."""
        self.writes, self.nbytes, self.seconds, self.not_before = 0, 0, 0.0, float("-inf")

    def restart(self, now: float) -> None:
        self.since, self.live_writes, self.live_nbytes = now, 0, 0


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
        rates = self._rates.pop(peer, {})
        self._rates[peer] = rates  # the last one met comes last
        for name in backends:
            self._rate(peer, name)
        while len(self._rates) > self._settings.max_peers:
            self.forget(next(iter(self._rates)))

    def best(self, peer: Peer, backends: Sequence[str], nbytes: int | None = None) -> str:
        """The one that the next write takes; changes nothing. nbytes: its size; None asks for the choice as it stands,
        without measuring."""
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
        """May a write begin there now, for all that is known?"""
        return self._breakers.has_room(peer, backend, self._clock())

    def is_measuring(self, peer: Peer, backends: Sequence[str], nbytes: int) -> bool:
        """Should a write of that size to the peer wait until it is the only one?"""
        large = nbytes >= self._settings.smallest_bytes
        return (
            large
            and len(backends) > 1
            and any(self._can_measure(peer, name) and not self._is_known(peer, name) for name in backends)
        )

    def begin(self, peer: Peer, backend: str) -> float:
        """A write begins; returns when, for `succeeded` and `failed`."""
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
        """seconds: how long the write took, None when its backend cannot say."""
        if peer not in self._rates:
            return  # forgotten meanwhile
        self._breakers.succeeded(peer, backend, began, self._clock())
        rate = self._rate(peer, backend)
        rate.in_flight = max(rate.in_flight - 1, 0)
        if self._is_measured(rate):
            self._observe(rate, nbytes, seconds)
            if nbytes >= self._settings.smallest_bytes:
                self._compare(peer, backend, nbytes / seconds if seconds else 0.0)
        elif nbytes >= self._settings.smallest_bytes:
            self._sample(peer, rate, nbytes, seconds)

    def failed(self, peer: Peer, backend: str, began: float) -> None:
        """The path, not the ticket, let a write down. Measuring does not wait for it."""
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
        """A write ended in a way that says nothing about its path."""
        if peer in self._rates:
            rate = self._rate(peer, backend)
            rate.in_flight = max(rate.in_flight - 1, 0)
            rate.restart(self._clock())

    def distrust(self, peer: Peer, backend: str, began: float) -> None:
        """What a write that began then brought was wrong, or never came."""
        if peer in self._rates:
            self._breakers.failed(peer, backend, began, self._clock())

    def forget(self, peer: Peer) -> None:
        """The boot is gone for good."""
        self._rates.pop(peer, None)
        self._breakers.forget(peer)

    def report(self, max_peers: int | None = None) -> list[PathReport]:
        """Of the peers met last, the latest boot of each node."""
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
        """What was moved while writes were under way: of one write by its own duration, of several by this node's
        clock."""
        now = self._clock()
        rate.live_writes += 1
        rate.live_nbytes += nbytes
        if rate.live_nbytes >= self._settings.live_bytes:
            took = seconds if rate.live_writes == 1 and not rate.in_flight and seconds is not None else now - rate.since
            if took > 0:
                rate.live_bytes_s += self._settings.weight * (rate.live_nbytes / took - rate.live_bytes_s)
            rate.restart(now)

    def _compare(self, peer: Peer, backend: str, bytes_s: float) -> None:
        """A write of a path that was measured went so fast. Says something when another one is chosen."""
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
        """Is there nothing to be measured now?"""
        rate, now = self._rate(peer, backend), self._clock()
        return (
            self._is_measured(rate)
            or now < rate.not_before
            or (rate.in_flight > 0 and now > rate.since + self._settings.patience_s)
        )

    def _can_measure(self, peer: Peer, name: str) -> bool:
        """Is it being measured, or could it be now? One that its breaker shuts would make all others wait until it
        opens."""
        return self._rate(peer, name).in_flight > 0 or self.has_room(peer, name)

    def _is_due(self, rate: _Rate) -> bool:
        """Is it time for another look?"""
        return self._is_measured(rate) and self._clock() >= rate.not_before

    def _is_measured(self, rate: _Rate) -> bool:
        settings = self._settings
        return rate.writes >= settings.warm_writes + settings.sample_writes or rate.nbytes >= settings.sample_bytes

    def _tell(self, peer: Peer) -> None:
        rates = self._rates[peer]
        if all(self._is_known(peer, name) for name in rates):
            speeds = ", ".join(f"{name} {rate.bytes_s / 1e9:.2f} GB/s" for name, rate in rates.items())
            LOG.info("KV to node %s goes by %s (%s)", peer.node, self.best(peer, list(rates)), speeds)
