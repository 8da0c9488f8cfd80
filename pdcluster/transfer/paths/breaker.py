"""When to leave a path (one backend to one peer) alone, and when to try it again. Pure: callers pass the time.

B1 A closed path is used. A number of failures within a window opens it.
B2 An open path is left alone for a pause. Each opening soon after the last one doubles the pause, up to a maximum.
B3 After the pause the path is half-open: one write may go, the probe. Success closes the path; failure opens it again.
A probe without an answer is forgotten after a while, so that the next one may go.
B4 Only writes that began after the last opening count for an open path. Older ones were part of why it opened.
B5 `Breakers.usable` is never empty. When every path to a peer is open, it names the one whose pause ends first: trying
is better than nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pdcluster.transfer.backends.base import Peer


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """A number of failures within window_s opens a path for pause_s, at most for longest_s. probe_s: how long a probe
    may stay unanswered.
    """

    failures: int = 3
    window_s: float = 10.0
    pause_s: float = 1.0
    longest_s: float = 60.0
    probe_s: float = 15.0


class Breaker:
    """One path."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures: deque[float] = deque(maxlen=settings.failures)
        self._opened: float | None = None
        self._probed: float | None = None
        self._pause = 0.0
        self._closed_at = 0.0

    def state(self, now: float) -> BreakerState:
        if self._opened is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.opens_until else BreakerState.HALF_OPEN

    @property
    def opens_until(self) -> float:
        """The end of the pause. For a closed path it lies in the past."""
        return float("-inf") if self._opened is None else self._opened + self._pause

    def has_room(self, now: float) -> bool:
        """Whether a write may begin now."""
        state = self.state(now)
        probing = self._probed is not None and now < self._probed + self._settings.probe_s
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not probing)

    def begin(self, now: float) -> None:
        """Record that a write begins. On a half-open path it is the probe."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._probed = now

    def succeeded(self, began: float, now: float) -> bool:
        """Record a success of a write that began at `began`. True when it closes the path."""
        if self._opened is None or began < self._opened:
            return False  # B4
        self._opened = self._probed = None
        self._closed_at = now
        self._failures.clear()
        return True

    def failed(self, began: float, now: float) -> bool:
        """Record a failure of a write that began at `began`. True when it opens the path."""
        if self._opened is not None:
            return began >= self._opened and self._open(now)  # B4
        self._failures.append(now)
        return (
            len(self._failures) == self._settings.failures
            and now - self._failures[0] <= self._settings.window_s
            and self._open(now)
        )

    def _open(self, now: float) -> bool:
        settings = self._settings
        again = self._pause and (self._opened is not None or now - self._closed_at <= settings.longest_s)
        self._pause = min(2 * self._pause, settings.longest_s) if again else settings.pause_s
        self._opened, self._probed = now, None
        self._failures.clear()
        return True


class Breakers:
    """All paths of a node. The node loop's thread owns them."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._breakers: dict[tuple[Peer, str], Breaker] = {}
        self.counters: Counter[str] = Counter()

    def usable(self, peer: Peer, backends: Sequence[str], now: float) -> list[str]:
        """The given backends, in order, by which a write may begin now. Never empty (B5)."""
        usable = [name for name in backends if self._at(peer, name).has_room(now)]
        return usable or [min(backends, key=lambda name: self._at(peer, name).opens_until)]

    def has_room(self, peer: Peer, backend: str, now: float) -> bool:
        return self._at(peer, backend).has_room(now)

    def begin(self, peer: Peer, backend: str, now: float) -> None:
        breaker = self._at(peer, backend)
        if breaker.state(now) is BreakerState.HALF_OPEN:
            self.counters["probes"] += 1
        elif breaker.state(now) is BreakerState.OPEN:
            self.counters["used_while_open"] += 1
        breaker.begin(now)

    def succeeded(self, peer: Peer, backend: str, began: float, now: float) -> None:
        if self._at(peer, backend).succeeded(began, now):
            self.counters["closed"] += 1

    def failed(self, peer: Peer, backend: str, began: float, now: float) -> None:
        if self._at(peer, backend).failed(began, now):
            self.counters["opened"] += 1

    def state(self, peer: Peer, backend: str, now: float) -> BreakerState:
        return self._at(peer, backend).state(now)

    def forget(self, peer: Peer) -> None:
        """Forget a boot that is gone for good."""
        self._breakers = {key: breaker for key, breaker in self._breakers.items() if key[0] != peer}

    def _at(self, peer: Peer, backend: str) -> Breaker:
        key = (peer, backend)
        breaker = self._breakers.get(key)
        if breaker is None:
            breaker = self._breakers[key] = Breaker(self._settings)
        return breaker
