"""Takes requests and runs each to its one answer. `request` has the life of one.

It knows no HTTP, sockets or tokenizers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from pdcluster.bootstrap.demand import RouterDemand
from pdcluster.core import errors
from pdcluster.telemetry.metrics import ExplainMetrics, HoldMetrics
from pdcluster_router.cluster.legs import ClusterLinks
from pdcluster_router.core.generation import Done, Force, Generation, ModelInfo, Readiness, Running, Sink, TokenChunk
from pdcluster_router.explain.recorder import Explainer
from pdcluster_router.policy.selector import PolicySelector
from pdcluster_router.queueing.gate import Gate
from pdcluster_router.queueing.pauses import PauseMode
from pdcluster_router.queueing.waiting import WaitingRequests
from pdcluster_router.request.open_requests import OpenRequests
from pdcluster_router.request.request import Request
from pdcluster_router.request.retries import DispatchSettings
from pdcluster_router.request.serving import ServedModels
from pdcluster_router.request.shared import Shared
from pdcluster_router.request.stream import events_of

if TYPE_CHECKING:
    from pdcluster.api.text.model_text import TextModel

__all__ = ["Dispatch", "DispatchSettings"]

# How often a pause looks whether requests still run.
PAUSE_LOOK_S = 0.02
log = logging.getLogger(__name__)


class RefusedRequest:
    """Implements generation.Running for a request that never ran."""

    def cancel(self, reason: str) -> None:
        return

    def finish(self, num_output: int) -> None:
        return


class Dispatch:
    """Implements generation.Dispatcher over the cluster. Owned by the router's event loop."""

    def __init__(
        self,
        cluster: ClusterLinks,
        models: ServedModels,
        selector: PolicySelector,
        settings: DispatchSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: HoldMetrics | None = None,
        explainer: Explainer | None = None,
    ) -> None:
        self.explainer = explainer or Explainer(ExplainMetrics(CollectorRegistry()), time.time)
        gate = Gate(settings.hold, settings.headroom, settings.slo)
        self.waiting = WaitingRequests(gate, metrics or HoldMetrics(CollectorRegistry()), clock, settings.stages.hold_s)
        selector.queue = gate.queue
        # Requests that wait for the first node.
        self._num_early = 0
        # Ends a pause that nobody ends.
        self._pause_end: asyncio.TimerHandle | None = None
        self.shared = Shared(cluster, models, selector, settings, self.waiting, self.explainer, clock)

    @property
    def open(self) -> OpenRequests:
        return self.shared.open

    def models(self) -> Sequence[ModelInfo]:
        return self.shared.models.models()

    def versions(self, model: str) -> Sequence[ModelInfo]:
        return self.shared.models.versions(model)

    def choose_version(self, model: str, request: str, mode: Force | None) -> ModelInfo:
        return self.shared.models.choose_version(model, request, mode or self.shared.selector.force)

    def text(self, model: str) -> TextModel:
        return self.shared.models.text(model)

    def readiness(self) -> Readiness:
        shared = self.shared
        return Readiness(
            bool(self.models()), shared.models.refusal(), shared.selector.blocked(), shared.settings.from_zero
        )

    @property
    def awaits_model(self) -> bool:
        return self.shared.settings.from_zero and not self.models()

    async def first_model(self) -> None:
        """Bounded as the hold queue is."""
        hold = self.shared.settings.hold
        if self._num_early >= hold.count:
            waiting = f"{self._num_early} requests wait for the first node, no more may"
            raise errors.Overloaded(waiting, 5.0, "hold_count")
        self._num_early += 1
        try:
            async with asyncio.timeout(hold.age_s):
                await self.shared.models.first()
        except TimeoutError:
            raise errors.Unavailable(f"no node came within {hold.age_s:g} s; see whether pools scale up") from None
        finally:
            self._num_early -= 1

    def demand(self, router: str) -> RouterDemand:
        """What clients ask for, as of now. Call it about once a second, with the name of this router's boot."""
        shared = self.shared
        found = shared.demand.report(router, shared.clock(), self.waiting.held(), shared.selector.usual_output)
        return replace(found, num_held=found.num_held + self._num_early)

    def start(self, generation: Generation, sink: Sink) -> Running:
        """Run one request to its one answer, by the contract of `generation`."""
        try:
            request = Request.of(self.shared, generation, sink)
        except errors.PdclusterError as error:
            sink.on_error(error)
            return RefusedRequest()
        request.start()
        return request

    def abort_all(self) -> int:
        """End all open requests with the tokens they have, by finish_reason abort. Returns how many.

        Embeddings have nothing yet and end with an error.
        """
        entries = self.open.all()
        for entry in reversed(entries):  # forks before their parents, whose end would place them
            entry.abort()
        return len(entries)

    @property
    def is_paused(self) -> bool:
        return self.waiting.pause.is_on

    async def pause(self, mode: PauseMode, max_pause_s: float) -> int:
        """Hold new requests. Open ones all end with what they have (abort), or those that run are awaited or held.
        Returns once none runs: how many it ended, awaited or held.

        After max_pause_s the pause ends by itself: whoever made it may be gone. Raises DeadlineExceeded when requests
        still run by then.
        """
        entries = self.open.all()
        running = [entry for entry in entries if entry.is_running]
        self.waiting.pause.begin(mode, self.shared.clock())
        self._end_pause_later(max_pause_s)
        if mode == "abort":
            self.abort_all()
        for entry in running if mode == "keep" else ():
            entry.hold("the router is paused")
        while any(listed().is_running for listed in self.open.values()):
            await asyncio.sleep(PAUSE_LOOK_S)
            if not self.is_paused:
                raise errors.DeadlineExceeded("requests still ran when the pause ended", "request")
        return len(entries if mode == "abort" else running)

    def resume(self) -> bool:
        """End the pause. Its time counts for no request. False where there was none."""
        since, now = self.waiting.pause.end(), self.shared.clock()
        if self._pause_end is not None:
            self._pause_end.cancel()
        if since is None:
            return False
        for entry in self.open.all():
            if not entry.is_running:
                entry.pass_over(now - max(since, entry.started))
        self.waiting.pass_over(since, now)
        return True

    def _end_pause_later(self, max_pause_s: float) -> None:
        if self._pause_end is not None:
            self._pause_end.cancel()
        self._pause_end = asyncio.get_running_loop().call_later(max_pause_s, self._pause_is_over, max_pause_s)

    def _pause_is_over(self, max_pause_s: float) -> None:
        log.warning("the pause lasted %g s and ends by itself; whoever made it did not resume", max_pause_s)
        self.resume()

    def generate(self, generation: Generation) -> AsyncGenerator[TokenChunk | Done, None]:
        """The same as a stream of events."""
        return events_of(self, generation)
