"""The Admin service over gRPC: translates calls to `admin` and its answers to protobuf, behind a token where one is set, on a port of its own."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdcluster.errors import PdclusterError
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.rpc.cards import role_from_proto, role_to_proto
from pdcluster.rpc.status import status_of
from pdcluster_router.admin import Admin, KnownNode
from pdcluster_router.events import Event
from pdcluster_router.explain_text import text_of
from pdcluster_router.grpc_api import bind
from pdcluster_router.open_requests import OpenRequest
from pdcluster_router.policy.registry import POLICIES

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name
DRAIN_S = 600.0
NODE_EVENTS = 20
MAX_CALLS = 64
STOP_GRACE_S = 0.5


class AdminService(stubs.AdminServicer):
    """Lives in the router's event loop."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def ListNodes(self, request: pb.ListNodesRequest, context: grpc.aio.ServicerContext) -> pb.ListNodesReply:
        return pb.ListNodesReply(nodes=[_node(found) for found in self._admin.nodes()])

    async def DescribeNode(self, request: pb.DescribeNodeRequest, context: grpc.aio.ServicerContext) -> pb.NodeDescription:
        found = self._admin.node(request.node)
        name, load = found.card.node, found.view.load if found.view is not None else None
        events = [event for event in self._admin.events.since(0) if event.subject == name][-NODE_EVENTS:]
        return pb.NodeDescription(
            node=_node(found),
            paths=[
                pb.Path(peer=path.peer, backend=path.backend, bytes_per_s=path.bytes_s, breaker=path.state, is_chosen=path.is_chosen)
                for path in (load.paths if load is not None else ())
            ],
            requests=[self._request(entry) for entry in self._admin.requests_on(name)],
            events=map(_event, events),
        )

    async def Cordon(self, request: pb.CordonRequest, context: grpc.aio.ServicerContext) -> pb.Node:
        return _node(await self._admin.cordon(request.node, cordoned=request.cordoned))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        deadline_s = request.deadline_s if request.HasField("deadline_s") else DRAIN_S
        async for progress in self._admin.drain(request.node, deadline_s):
            yield pb.DrainProgress(
                waiting=progress.waiting, running=progress.running, pages_parked=progress.pages_parked, safe_to_stop=progress.is_done
            )

    async def SetRole(self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext) -> pb.Node:
        return _node(await self._admin.set_role(request.node, role_from_proto(request.role)))

    async def ListRequests(self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext) -> pb.ListRequestsReply:
        return pb.ListRequestsReply(requests=[self._request(entry) for entry in self._admin.requests_on(request.node)])

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: grpc.aio.ServicerContext) -> pb.CancelRequestReply:
        return pb.CancelRequestReply(cancelled=self._admin.cancel(request.id, request.reason))

    async def Explain(self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext) -> pb.ExplainReply:
        found = self._admin.explain(request.id)
        return pb.ExplainReply(json=[msgspec.json.encode(each).decode() for each in found], text="\n\n".join(map(text_of, found)))

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: grpc.aio.ServicerContext) -> pb.Policy:
        return self._policy()

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: grpc.aio.ServicerContext) -> pb.Policy:
        live = request.live if request.HasField("live") else None
        shadow = request.shadow if request.HasField("shadow") else None
        self._admin.set_policy(live=live, shadow=shadow, dry_run=request.dry_run)
        return self._policy()

    async def GetCache(self, request: pb.GetCacheRequest, context: grpc.aio.ServicerContext) -> pb.CacheReply:
        index = self._admin.cluster.caches.index
        nodes = [pb.CachedNode(node=card.node, blocks=index.num_blocks(card.incarnation)) for card in self._admin.cluster.cards()]
        return pb.CacheReply(entries=index.num_entries, bytes=index.num_bytes, nodes=nodes)

    async def Events(self, request: pb.EventsRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Event]:
        if not request.follow:
            for event in self._admin.events.since(request.since):
                yield _event(event)
            return
        async for event in self._admin.events.follow(request.since):
            yield _event(event)

    def _policy(self) -> pb.Policy:
        policies = self._admin.policies
        return pb.Policy(live=policies.live.name, shadow=policies.shadow.name if policies.shadow is not None else "", known=list(POLICIES))

    def _request(self, entry: OpenRequest) -> pb.Request:
        return pb.Request(
            id=entry.request, model=entry.model, state=entry.state, mode=entry.mode or "", prefill=entry.prefill or "", decode=entry.decode or "",
            prompt_tokens=entry.num_prompt, output_tokens=entry.num_output, attempts=entry.attempts, age_s=self._admin.age_s(entry),
        )  # fmt: skip


def _node(found: KnownNode) -> pb.Node:
    card, view = found.card, found.view
    node = pb.Node(
        name=card.node, incarnation=card.incarnation, role=role_to_proto(view.role if view is not None else card.role),
        state="connecting" if view is None else "ready" if view.accepts_work else "cordoned",
        address=card.address, model=card.model, device=card.device, backends=card.backends, max_len=card.max_len,
        in_flight=view.in_flight if view is not None else 0,
    )  # fmt: skip
    if view is not None and (load := view.load) is not None:
        node.load.CopyFrom(pb.NodeLoad(**{name: getattr(load, name) for name in pb.NodeLoad.DESCRIPTOR.fields_by_name}))
    return node


def _event(event: Event) -> pb.Event:
    return pb.Event(sequence=event.sequence, at=event.at, kind=event.kind, subject=event.subject, message=event.message)


# ---------------------------------------------------------------- serving


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token, where there is one, and answers our errors with their status. Health and reflection need the token too."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:
            return handler
        given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        is_known = self._expected is None or hmac.compare_digest(str(given).encode(), self._expected)
        if not details.method.startswith(f"/{SERVICE}/"):
            return handler if is_known else _refusing(handler)
        return _translating(handler) if is_known else _refusing(handler)


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    async def refuse(request: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the admin token is missing or wrong; send metadata authorization: Bearer TOKEN")

    return _same_kind(handler, refuse, refuse)


def _translating(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    async def call(request: object, context: grpc.aio.ServicerContext) -> object:
        try:
            return await handler.unary_unary(request, context)
        except PdclusterError as error:
            await context.abort(status_of(error), str(error))
            raise  # abort has raised already

    async def stream(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        try:
            async for reply in handler.unary_stream(request, context):
                yield reply
        except PdclusterError as error:
            await context.abort(status_of(error), str(error))

    return _same_kind(handler, call, stream)


def _same_kind(handler: grpc.RpcMethodHandler, call: Callable[..., Any], stream: Callable[..., Any]) -> grpc.RpcMethodHandler:
    serializers = {"request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer}
    if handler.request_streaming:  # reflection only
        return handler if call.__name__ != "refuse" else grpc.stream_stream_rpc_method_handler(stream, **serializers)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, **serializers)
    return grpc.unary_unary_rpc_method_handler(call, **serializers)


@asynccontextmanager
async def listening(admin: Admin, address: str, token: str | None) -> AsyncIterator[str]:
    """Serves while the block runs and gives HOST:PORT."""
    server = grpc.aio.server(interceptors=(Guard(token),), options=(("grpc.so_reuseport", 0),), maximum_concurrent_rpcs=MAX_CALLS)
    stubs.add_AdminServicer_to_server(AdminService(admin), server)
    states = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = bind(server, address, flag="--admin")
    await server.start()
    for service in ("", SERVICE):
        await states.set(service, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield bound
    finally:
        await states.enter_graceful_shutdown()
        await server.stop(STOP_GRACE_S)
