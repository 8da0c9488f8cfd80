"""gRPC's health service, where watchers that do not read hold up nobody.

grpcio's own holds a lock while it writes to a watcher. So one that reads nothing keeps others from new states, and the
server from its end.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2

from pdcluster.core.errors import BadRequest, Cancelled

# How often a watcher's state is compared.
LOOK_S = 0.2
STALL_S = 10.0
MAX_NAME_BYTES = 256

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class WatchedHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """States by service. Owned by the server's loop."""

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        await super().set(service, status)  # it has no watchers, so nothing is written here
        self._states[service] = status

    async def enter_graceful_shutdown(self) -> None:
        await super().enter_graceful_shutdown()
        self._states = dict.fromkeys(self._states, NOT_SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """The state at once, and whenever it changes."""
        if len(request.service) > MAX_NAME_BYTES:
            raise BadRequest(f"a service's name has at most {MAX_NAME_BYTES} characters")
        service, told = request.service, None
        while True:
            status = self._states.get(service, UNKNOWN)
            if status != told:
                told = status
                try:
                    async with asyncio.timeout(STALL_S):
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                except TimeoutError:
                    raise Cancelled("the watcher did not read what it was sent") from None
            await asyncio.sleep(LOOK_S)
