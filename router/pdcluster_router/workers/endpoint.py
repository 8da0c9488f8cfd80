"""A worker's end of the control channel: answers questions from its Admin and metrics, and sends events.

A worker that loses its supervisor ends: no one would restart, stop or ask it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry

from pdcluster.core.errors import PdclusterError, ProtocolError, Unavailable
from pdcluster.processes.tasks import beside
from pdcluster.telemetry.health import Verdict
from pdcluster_router.admin.operations import Operations
from pdcluster_router.workers import frames
from pdcluster_router.workers.channel import Channel
from pdcluster_router.workers.exposition import families_of
from pdcluster_router.workers.worker import WorkerIdentity

SUPERVISOR = "the router's supervisor"
# Longest wait for the metrics of all workers.
SCRAPE_S = 5.0


class WorkerEndpoint:
    """Owned by the worker's event loop."""

    def __init__(
        self, operations: Operations, registry: CollectorRegistry, readiness: Callable[[], Awaitable[Verdict]]
    ) -> None:
        self._operations, self._readiness = operations, readiness
        self._registry = registry
        self._channel: Channel | None = None

    async def exposition(self) -> bytes:
        """The metrics of all workers, merged by the supervisor."""
        if self._channel is None:
            raise Unavailable("the router's supervisor is not reached yet; ask again")
        return await self._channel.ask(frames.AskExposition(), bytes, SCRAPE_S)

    async def serve(self, worker: WorkerIdentity, incarnation: str) -> None:
        """Answer until cancelled. Raises when the supervisor is gone."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(worker.control))
        except OSError as error:
            raise PdclusterError(
                f"worker {worker.number} cannot reach its supervisor at {worker.control}: {error.strerror}"
            ) from error
        self._channel = channel = Channel(SUPERVISOR, reader, writer, self._answer, lambda event: None)
        channel.introduce(frames.Joined(worker.number, incarnation, os.getpid()))
        try:
            async with beside(self._tell(channel), "events to the supervisor", lambda _: channel.close()):
                await channel.run()
            raise PdclusterError(f"worker {worker.number} lost its supervisor at {worker.control}")
        finally:
            channel.close()

    async def _tell(self, channel: Channel) -> None:
        async for event in self._operations.events(0, follow=True):
            if not channel.is_open:
                return
            channel.tell(event)

    async def _answer(self, question: frames.AnyQuestion) -> object:
        operations = self._operations
        match question:
            case frames.AskNodes():
                return await operations.nodes()
            case frames.AskCordon(node, cordoned):
                return await operations.cordon(node, cordoned=cordoned)
            case frames.AskMove(node):
                return await operations.move(node)
            case frames.AskAdapter(name, path, nodes):
                return await operations.change_adapter(name, path, nodes)
            case frames.AskWeights(node, order):
                return await operations.change_weights(node, order)
            case frames.AskPause(mode, max_pause_s):
                return await operations.pause(mode, max_pause_s)
            case frames.AskResume():
                return await operations.resume()
            case frames.AskPaused():
                return await operations.is_paused()
            case frames.AskRole(node, role):
                return await operations.set_role(node, role)
            case frames.AskRequests(node):
                return await operations.requests(node)
            case frames.AskCancel(request, reason):
                return await operations.cancel(request, reason)
            case frames.AskExplain(request):
                return await operations.explain(request)
            case frames.AskPolicy():
                return await operations.policy()
            case frames.SetPolicy(live, shadow, dry_run):
                return await operations.set_policy(live=live, shadow=shadow, dry_run=dry_run)
            case frames.AskCacheState(digests):
                return await operations.cache(digests=digests)
            case frames.AskReadiness():
                return await self._readiness()
            case frames.AskMetrics():
                return families_of(self._registry)
            case _:
                raise ProtocolError(f"a worker does not answer {type(question).__name__}")
