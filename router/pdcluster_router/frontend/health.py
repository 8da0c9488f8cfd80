"""What a router says to probes, on its HTTP port and on its health port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from pdcluster.core.errors import Unavailable
from pdcluster.telemetry.health import BEAT_S, Probes, Pulse, Verdict, alive
from pdcluster_router.core.generation import Dispatcher

# For the loop to make the text of a scrape.
SCRAPE_S = 5.0
# How old what the API's port shows may be.
AGE_S = 1.0


def readiness_of(dispatcher: Dispatcher, *, is_draining: bool = False, warnings: Sequence[str] = ()) -> Verdict:
    """The verdict of /readyz.

    It fails before a tokenizer is known, while draining, and when the nodes' model can never be served. "No node takes
    work now" is degraded, as requests are held then.

    warnings: what an operator has to mend though requests are served: degraded, too.
    """
    found = _readiness_of(dispatcher, is_draining=is_draining)
    if not warnings or not found.is_good:
        return found
    return Verdict(True, "degraded", [*found.reasons, *warnings], found.facts)


def _readiness_of(dispatcher: Dispatcher, *, is_draining: bool) -> Verdict:
    found = dispatcher.readiness()
    facts = {"can_serve": found.can_serve and not is_draining}
    if is_draining:
        return Verdict(False, "not ready", ["the router drains: it is about to end"], facts)
    if found.refusal is not None:
        return Verdict(False, "not ready", [found.refusal], facts)
    if not found.is_model_known and found.is_awaited:
        return Verdict(True, "degraded", ["requests wait for the first node"], facts)
    if not found.is_model_known:
        reason = "no tokenizer is known yet: no node has registered, or its files are being read"
        return Verdict(False, "not ready", [reason], facts)
    if found.blocked is not None:
        return Verdict(True, "degraded", [f"requests are held: {found.blocked}"], facts)
    return Verdict(True, "ready", facts=facts)


class RouterHealth:
    """Probes of one router process. The loop sets the verdict; the port's threads read it."""

    def __init__(
        self,
        readiness: Callable[[], Awaitable[Verdict]],
        exposition: Callable[[], Awaitable[bytes]],
        warnings: tuple[str, ...] = (),
    ) -> None:
        """warnings: what operators should know of its settings; no probe says it."""
        self.warnings = warnings
        self.is_draining = False
        self._pulse = Pulse()
        self.readiness, self.exposition = readiness, exposition
        self._verdict = Verdict(False, "starting", ["the router starts"], {"can_serve": False})
        self._loop = asyncio.get_running_loop()
        self.probes = Probes(self.live, self.ready, self.metrics)

    async def keep(self) -> None:
        """Beat and look until cancelled."""
        while True:
            self._verdict = await self.readiness()
            self._pulse.beat()
            await asyncio.sleep(BEAT_S)

    def live(self) -> Verdict:
        return alive(self._pulse.problems(), loop_age_s=round(self._pulse.age_s, 3))

    def ready(self) -> Verdict:
        problems = self._pulse.problems()
        return Verdict(False, "not ready", problems, {"can_serve": False}) if problems else self._verdict

    def metrics(self) -> bytes:
        """Made by the loop, which owns what is counted. Raises Unavailable when it does not answer in time."""
        making = asyncio.run_coroutine_threadsafe(self._text(), self._loop)
        try:
            return making.result(SCRAPE_S)
        except TimeoutError:
            making.cancel()
            raise Unavailable(f"the router's loop made no metrics within {SCRAPE_S:g} s") from None

    async def _text(self) -> bytes:
        return await self.exposition()


class CachedExposition:
    """The text of a scrape, made at most once in age_s: making it takes time from all requests. Owned by the loop."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], age_s: float = AGE_S) -> None:
        self._make, self._age_s = make, age_s
        self._text, self._until = b"", 0.0
        self._lock = asyncio.Lock()

    async def text(self) -> bytes:
        """Raises what making it raised."""
        async with self._lock:
            if monotonic() >= self._until:
                self._text = await self._make()
                self._until = monotonic() + self._age_s
            return self._text
