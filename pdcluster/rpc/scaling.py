"""Asks a router how many nodes a pool needs."""

from __future__ import annotations

import grpc

from pdcluster.core.messages import Role
from pdcluster.rpc import externalscaler_pb2 as pb
from pdcluster.rpc import externalscaler_pb2_grpc as stubs
from pdcluster.rpc.status import error_of

METRIC = "wanted_nodes"
CALL_S = 2.0


async def wanted_nodes(address: str, role: Role) -> int:
    """Nodes that the role's work needs.

    address: HOST:PORT of `router.scaler`. Raises PdclusterError when the router does not answer.
    """
    pool = pb.ScaledObjectRef(name=role, scalerMetadata={"role": role})
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            reply = await stubs.ExternalScalerStub(channel).GetMetrics(
                pb.GetMetricsRequest(scaledObjectRef=pool, metricName=METRIC), timeout=CALL_S
            )
        except grpc.RpcError as error:
            raise error_of(error, f"router at {address}") from error
    return int(reply.metricValues[0].metricValue)
