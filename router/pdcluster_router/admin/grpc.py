"""The Admin service over gRPC, on its own port, behind a token where one is set. Translates calls to Operations."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import msgspec

from pdcluster.bootstrap.card_messages import adapters_to_proto, capabilities_to_proto, role_from_proto, role_to_proto
from pdcluster.core.errors import PdclusterError
from pdcluster.core.reported import PathLoad
from pdcluster.core.version import VERSION
from pdcluster.core.weights import WeightsVersion
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.rpc.bootstrap_pb2 import FormerWeights, WeightsState
from pdcluster.rpc.server_options import server_options
from pdcluster.rpc.status import status_of
from pdcluster_router.admin import pushes, sleeping
from pdcluster_router.admin.operations import (
    CachedNode,
    NodeAdapter,
    NodeStatus,
    Operations,
    PolicyStatus,
    RequestStatus,
    RolloutProgress,
    WeightsRollout,
)
from pdcluster_router.cluster.events import Event
from pdcluster_router.explain.text import text_of
from pdcluster_router.frontend.grpc import answering
from pdcluster_router.frontend.health import RouterHealth
from pdcluster_router.http.tls import ServerTls
from pdcluster_router.queueing.pauses import USUAL_PAUSE_S, pause_mode

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name
DRAIN_S = FINISH_S = 600.0
NODE_EVENTS = 20
MAX_CALLS = 64


class AdminService(stubs.AdminServicer):
    """Runs in the event loop of a router or of its supervisor."""

    def __init__(self, operations: Operations, name: str = "router", router: RouterHealth | None = None) -> None:
        """router: None: GetStatus is not implemented."""
        self._operations, self._name, self._router = operations, name, router

    async def ListNodes(self, request: pb.ListNodesRequest, context: grpc.aio.ServicerContext) -> pb.ListNodesReply:
        return pb.ListNodesReply(nodes=map(_node, await self._operations.nodes()))

    async def DescribeNode(
        self, request: pb.DescribeNodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.NodeDescription:
        found = await self._operations.node(request.node)
        here = await self._operations.requests(found.name)
        events = [event async for event in self._operations.events(0, follow=False) if event.subject == found.name][
            -NODE_EVENTS:
        ]
        return pb.NodeDescription(
            node=_node(found),
            paths=[_path(path, path.peer) for path in _paths_of(found)],
            received=[
                _path(path, other.name)
                for other in await self._operations.nodes()
                for path in _paths_of(other)
                if path.peer == found.name
            ],
            requests=map(_request, here.requests),
            events=map(_event, events),
            silent_workers=here.silent,
            cost=_cost(found),
        )

    async def Cordon(self, request: pb.CordonRequest, context: grpc.aio.ServicerContext) -> pb.Node:
        return _node(await self._operations.cordon(request.node, cordoned=request.cordoned))

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DrainProgress]:
        deadline_s = request.deadline_s if request.HasField("deadline_s") else DRAIN_S
        async for progress in self._operations.drain(request.node, deadline_s):
            yield pb.DrainProgress(
                waiting=progress.waiting,
                running=progress.running,
                pages_parked=progress.pages_parked,
                safe_to_stop=progress.is_done,
                moved=progress.num_moved,
            )

    async def SetRole(self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext) -> pb.Node:
        return _node(await self._operations.set_role(request.node, role_from_proto(request.role)))

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ChangeAdapterReply:
        return _adapters(await self._operations.change_adapter(request.name, request.path, tuple(request.nodes)))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ChangeAdapterReply:
        return _adapters(await self._operations.change_adapter(request.name, None, tuple(request.nodes)))

    async def OpenPush(self, request: pb.OpenPushRequest, context: grpc.aio.ServicerContext) -> pb.OpenPushReply:
        tensors = [(each.name, each.kind, tuple(each.shape)) for each in request.tensors]
        writer = request.writer, request.writer_incarnation
        return _opened(await pushes.open_push(self._operations, request.label, writer, tensors))

    async def CommitPush(self, request: pb.CommitPushRequest, context: grpc.aio.ServicerContext) -> pb.CommitPushReply:
        version = WeightsVersion(request.label, request.epoch)
        found = await pushes.commit_push(self._operations, request.node, version, request.digests)
        return pb.CommitPushReply(digest=found.digest)

    async def LoadWeights(
        self, request: pb.LoadWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RolloutProgress]:
        wanted = WeightsRollout(
            request.source,
            request.label,
            request.max_unavailable if request.HasField("max_unavailable") else 1,
            request.canary_percent if request.HasField("canary_percent") else None,
            request.finish_s if request.HasField("finish_s") else FINISH_S,
            request.releases_first,
        )
        async with aclosing(self._operations.load_weights(wanted)) as steps:
            async for progress in steps:
                yield _progress(progress)

    async def UndoWeights(
        self, request: pb.UndoWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RolloutProgress]:
        finish_s = request.finish_s if request.HasField("finish_s") else FINISH_S
        async with aclosing(self._operations.undo_weights(finish_s)) as steps:
            async for progress in steps:
                yield _progress(progress)

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseReply:
        longest_s = request.max_pause_s if request.HasField("max_pause_s") else USUAL_PAUSE_S
        return pb.PauseReply(running=await self._operations.pause(pause_mode(request.mode), longest_s))

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.ResumeReply:
        return pb.ResumeReply(was_paused=await self._operations.resume())

    async def GetPause(self, request: pb.GetPauseRequest, context: grpc.aio.ServicerContext) -> pb.GetPauseReply:
        return pb.GetPauseReply(is_paused=await self._operations.is_paused())

    async def Sleep(self, request: pb.SleepRequest, context: grpc.aio.ServicerContext) -> pb.SleepReply:
        longest_s = request.max_pause_s if request.HasField("max_pause_s") else USUAL_PAUSE_S
        mode = pause_mode(request.mode or "abort")
        return pb.SleepReply(nodes=await sleeping.put_to_sleep(self._operations, mode, longest_s, request.finish_s))

    async def Wake(self, request: pb.WakeRequest, context: grpc.aio.ServicerContext) -> pb.WakeReply:
        return pb.WakeReply(nodes=await sleeping.wake(self._operations))

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRequestsReply:
        found = await self._operations.requests(request.node)
        return pb.ListRequestsReply(requests=map(_request, found.requests), silent_workers=found.silent)

    async def CancelRequest(
        self, request: pb.CancelRequestRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelRequestReply:
        return pb.CancelRequestReply(cancelled=await self._operations.cancel(request.id, request.reason))

    async def Explain(self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext) -> pb.ExplainReply:
        found = await self._operations.explain(request.id)
        return pb.ExplainReply(
            json=[msgspec.json.encode(each).decode() for each in found], text="\n\n".join(map(text_of, found))
        )

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: grpc.aio.ServicerContext) -> pb.Policy:
        return _policy(await self._operations.policy())

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: grpc.aio.ServicerContext) -> pb.Policy:
        live = request.live if request.HasField("live") else None
        shadow = request.shadow if request.HasField("shadow") else None
        return _policy(await self._operations.set_policy(live=live, shadow=shadow, dry_run=request.dry_run))

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.RouterStatus:
        if (router := self._router) is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this Admin service knows no status")
            raise AssertionError  # abort has raised already
        verdict = await router.readiness()
        return pb.RouterStatus(
            name=self._name,
            version=VERSION,
            status=verdict.status,
            reasons=verdict.reasons,
            can_serve=bool(verdict.facts.get("can_serve")),
            metrics=(await router.exposition()).decode() if request.metrics else "",
            warnings=router.warnings,
        )

    async def GetCache(self, request: pb.GetCacheRequest, context: grpc.aio.ServicerContext) -> pb.CacheReply:
        found = await self._operations.cache(digests=request.digests)
        views = [
            pb.CacheView(worker=view.worker, entries=view.entries, bytes=view.bytes, nodes=map(_cached, view.nodes))
            for view in found.views
        ]
        return pb.CacheReply(
            entries=found.entries,
            bytes=found.bytes,
            nodes=map(_cached, found.nodes),
            views=views,
            silent_workers=found.silent,
        )

    async def Events(self, request: pb.EventsRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Event]:
        async for event in self._operations.events(request.since, follow=request.follow):
            yield _event(event)


def _policy(found: PolicyStatus) -> pb.Policy:
    return pb.Policy(**msgspec.structs.asdict(found))


def _adapters(told: Iterable[NodeAdapter]) -> pb.ChangeAdapterReply:
    return pb.ChangeAdapterReply(nodes=[pb.NodeAdapter(**msgspec.structs.asdict(each)) for each in told])


def _progress(found: RolloutProgress) -> pb.RolloutProgress:
    version = found.version
    return pb.RolloutProgress(
        node=found.node, stage=found.stage, label=version.label, epoch=version.epoch, digest=version.digest,
        done=found.num_done, nodes=found.num_nodes, running=found.running, context_tokens=found.context_tokens,
        seconds=found.seconds,
    )  # fmt: skip


def _opened(found: pushes.OpenedPush) -> pb.OpenPushReply:
    reply = pb.OpenPushReply(node=found.node, epoch=found.version.epoch, is_there=found.target is None)
    if (target := found.target) is not None:
        reply.incarnation, reply.nonce, reply.region = target.receiver.incarnation, target.nonce, target.region
        reply.starts.extend(target.starts)
        reply.is_sealed = target.is_sealed
        reply.adverts.extend(pb.MediumAdvert(name=name, advert=advert) for name, advert in target.receiver.adverts)
    return reply


def _weights(found: NodeStatus) -> WeightsState:
    version, former = found.weights, found.weights_former
    return WeightsState(
        label=version.label,
        epoch=version.epoch,
        digest=version.digest,
        share=found.weights_share,
        source=found.weights_source,
        former=None if former is None else FormerWeights(**msgspec.structs.asdict(former)),
    )


def _request(found: RequestStatus) -> pb.Request:
    return pb.Request(**msgspec.structs.asdict(found))


def _cached(found: CachedNode) -> pb.CachedNode:
    return pb.CachedNode(
        node=found.node,
        incarnation=found.incarnation,
        blocks=found.blocks,
        is_exact=found.is_exact,
        digest=found.digest,
    )


def _paths_of(node: NodeStatus) -> tuple[PathLoad, ...]:
    """Of KV that it writes."""
    return node.load.paths if node.load is not None else ()


def _path(path: PathLoad, peer: str) -> pb.Path:
    return pb.Path(
        peer=peer, backend=path.backend, bytes_per_s=path.bytes_s, breaker=path.state, is_chosen=path.is_chosen
    )


def _node(found: NodeStatus) -> pb.Node:
    node = pb.Node(
        name=found.name, incarnation=found.incarnation, role=role_to_proto(found.role), state=found.state,
        address=found.address, model=found.model,
        device=found.device, backends=found.backends, max_len=found.max_len, in_flight=found.in_flight,
        version=found.version, models=found.models, engine=found.engine,
        capabilities=capabilities_to_proto(found.capabilities), adapters=adapters_to_proto(found.adapters),
        weights=_weights(found),
    )  # fmt: skip
    if (load := found.load) is not None:
        node.load.CopyFrom(pb.NodeLoad(**{name: getattr(load, name) for name in pb.NodeLoad.DESCRIPTOR.fields_by_name}))
    return node


def _cost(found: NodeStatus) -> pb.NodeCost | None:
    cost = found.load.cost if found.load is not None else None
    return None if cost is None else pb.NodeCost(**msgspec.structs.asdict(cost))


def _event(event: Event) -> pb.Event:
    return pb.Event(sequence=event.sequence, at=event.at, kind=event.kind, subject=event.subject, message=event.message)


# ---------------------------------------------------------------- serving


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token, and answers our errors with their status. Health and reflection need the token,
    too.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:
            return handler
        given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        is_known = self._expected is None or hmac.compare_digest(str(given).encode(), self._expected)
        if not details.method.startswith(f"/{SERVICE}/"):
            return handler if is_known else _refusing()
        return _translating(handler) if is_known else _refusing()


def _refusing() -> grpc.RpcMethodHandler:
    """Of streams, whatever the method is: no message is read before the refusal."""

    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "the admin token is missing or wrong; send metadata authorization: Bearer TOKEN",
        )

    return grpc.stream_stream_rpc_method_handler(refuse)


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


def _same_kind(
    handler: grpc.RpcMethodHandler, call: Callable[..., Any], stream: Callable[..., Any]
) -> grpc.RpcMethodHandler:
    serializers = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, **serializers)
    return grpc.unary_unary_rpc_method_handler(call, **serializers)


@asynccontextmanager
async def listening(
    operations: Operations,
    address: str,
    token: str | None,
    name: str = "router",
    router: RouterHealth | None = None,
    *,
    tls: ServerTls | None = None,
) -> AsyncIterator[str]:
    """Serve while the block runs; yields HOST:PORT. name, router: for GetStatus. tls: None: calls are in clear text."""
    server = grpc.aio.server(interceptors=(Guard(token),), options=server_options(), maximum_concurrent_rpcs=MAX_CALLS)
    stubs.add_AdminServicer_to_server(AdminService(operations, name, router), server)
    async with answering(server, SERVICE, address, flag="--admin", tls=tls) as bound:
        yield bound
