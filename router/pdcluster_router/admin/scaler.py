"""KEDA's external scaler (https://keda.sh/docs/concepts/external-scalers/): each pool's wanted nodes over gRPC.

The trigger's metadata names the pool by `role`. The metric is the number of nodes that the pool's work needs, with 1 as
the target for each node, so the pool gets as many.

KEDA sends no header of ours, but the whole metadata of a trigger. It replaces a name in `tokenFromEnv` by that variable
of the pods which it scales, and so it shows the token.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import grpc

from pdcluster.api.validate import closest
from pdcluster.bootstrap.demand import ROLES
from pdcluster.core.messages import Role
from pdcluster.rpc import externalscaler_pb2 as pb
from pdcluster.rpc import externalscaler_pb2_grpc as stubs
from pdcluster.rpc.scaling import METRIC
from pdcluster.rpc.server_options import server_options
from pdcluster_router.frontend.grpc import WATCH, answering
from pdcluster_router.http.call_limits import CallGroup, CallLimits, open_reads
from pdcluster_router.queueing.demand import PoolSignal

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalScaler"].full_name

LOOK_S = 0.5
# Streams count apart: KEDA's other calls get through however many there are.
MAX_STREAMS, MAX_CALLS = 64, 32
MAX_MESSAGE_BYTES = 64 * 1024
# Of the trigger's metadata.
TOKEN = "tokenFromEnv"

Signals = Callable[[], Mapping[Role, PoolSignal]]


class PoolScaler(stubs.ExternalScalerServicer):
    """Runs in the router's event loop."""

    def __init__(self, signals: Signals, token: str | None = None) -> None:
        self._signals = signals
        self._token = None if token is None else token.encode()

    async def IsActive(self, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=self._wanted(await self._role_of(request, context)) > 0)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """The first answer at once, later ones when it changes."""
        role, told = await self._role_of(request, context), None
        while True:
            is_active = self._wanted(role) > 0
            if is_active is not told:
                told = is_active
                yield pb.IsActiveResponse(result=is_active)
            await asyncio.sleep(LOOK_S)

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext
    ) -> pb.GetMetricSpecResponse:
        await self._role_of(request, context)
        return pb.GetMetricSpecResponse(
            metricSpecs=[pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)]
        )

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetMetricsResponse:
        role = await self._role_of(request.scaledObjectRef, context)
        if not request.metricName.endswith(METRIC):  # KEDA may put its own prefix before it
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is no metric {request.metricName[:200]!r}; ask for {METRIC}"
            )
        wanted = self._wanted(role)
        return pb.GetMetricsResponse(
            metricValues=[
                pb.MetricValue(metricName=request.metricName, metricValue=wanted, metricValueFloat=float(wanted))
            ]
        )

    def _wanted(self, role: Role) -> int:
        signal = self._signals().get(role)
        return 0 if signal is None else signal.wanted

    async def _role_of(self, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext) -> Role:
        """Ends the call unless it carries the token and names a role."""
        given = request.scalerMetadata.get(TOKEN, "").strip().encode()
        if self._token is not None and not hmac.compare_digest(given, self._token):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the scaler token is missing or wrong; give the trigger {TOKEN}: NAME, and the pods that variable",
            )
        return await _role_of(request, context)


async def _role_of(request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext) -> Role:
    asked = request.scalerMetadata.get("role", "")
    for role in ROLES:
        if asked == role:
            return role
    problem = (
        f"the role {asked[:200]!r} does not exist{closest(asked, ROLES)}" if asked else "the trigger names no role"
    )
    await context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{problem}; write role: {', '.join(ROLES[:-1])} or {ROLES[-1]} in its metadata",
    )
    raise AssertionError("abort raises")


@asynccontextmanager
async def listening(signals: Signals, address: str, token: str | None = None) -> AsyncIterator[str]:
    """Serve while the block runs. Yields HOST:PORT. token: that triggers must carry; None: none."""
    reads = open_reads()
    streams, others = CallGroup("StreamIsActive", MAX_STREAMS, reads), CallGroup("the scaler", MAX_CALLS, reads)
    watchers = CallGroup("Watch", MAX_STREAMS, reads)
    limits = CallLimits({f"/{SERVICE}/StreamIsActive": streams, WATCH: watchers}, others)
    options = (*server_options(), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))
    server = grpc.aio.server(interceptors=(limits,), options=options)
    stubs.add_ExternalScalerServicer_to_server(PoolScaler(signals, token), server)
    async with answering(server, SERVICE, address, flag="--set router.scaler") as bound:
        yield bound
