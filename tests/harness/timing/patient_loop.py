"""An asyncio loop for tests whose clock does not count stalls: time in which this process did not get to run, or one
callback took very long, passes for nobody in it. Timers, leases and deadlines of whatever lives in the loop run by it,
so that a busy machine cannot make one half of a test late for the other half. Waiting for a timer or a descriptor takes
real time, as ever.
"""

from __future__ import annotations

import asyncio
import selectors
import time

# More than this at a time does not pass, beyond what the loop meant to wait.
MOST_S = 0.01


class PatientClock:
    """monotonic: the clock of the machine."""

    def __init__(self, monotonic=time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen = self._now = monotonic()

    def time(self) -> float:
        return self._now + min(self._monotonic() - self._seen, MOST_S)

    def pass_phase(self, meant_s: float) -> None:
        """The loop has waited, or run its callbacks, which was meant to take so long."""
        seen = self._monotonic()
        self._now += min(seen - self._seen, meant_s + MOST_S)
        self._seen = seen


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, clock: PatientClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None):
        self._clock.pass_phase(0.0)
        ready = super().select(timeout)
        self._clock.pass_phase(max(timeout or 0.0, 0.0))
        return ready


class PatientLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._patience = PatientClock()
        super().__init__(_Selector(self._patience))

    def time(self) -> float:
        return self._patience.time()


class PatientPolicy(asyncio.DefaultEventLoopPolicy):
    """For every loop that tests make, by asyncio.run too."""

    _loop_factory = PatientLoop  # type: ignore[assignment]
