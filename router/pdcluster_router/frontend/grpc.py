"""The gRPC front door: the same preparation, dispatch and answers as HTTP, as typed messages.

A call's deadline is the request's. Its cancellation cancels both legs. A client that does not read holds one message.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from time import monotonic

import grpc
import msgspec
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdcluster.api.openai.requests import ChatRequest, CompletionRequest
from pdcluster.api.text.chat_template import TakesLong
from pdcluster.api.text.choice_text import TextPiece
from pdcluster.api.text.template_bounds import BRIEF
from pdcluster.core.address import format_address, parse_address
from pdcluster.core.errors import BadRequest, Cancelled, ConfigError, DeadlineExceeded, PdclusterError
from pdcluster.processes.tasks import running
from pdcluster.rpc import inference as convert
from pdcluster.rpc import inference_pb2 as pb
from pdcluster.rpc import inference_pb2_grpc as stubs
from pdcluster.rpc.server_options import server_options
from pdcluster.rpc.status import retry_metadata, status_of
from pdcluster.settings.tls_files import TlsCertificate
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.core.generation import Dispatcher
from pdcluster_router.core.ids import ID_BYTES
from pdcluster_router.core.tenants import Tenant
from pdcluster_router.core.tracing import RequestTrace, Tracing
from pdcluster_router.frontend.choices import OutputChoice, merge, pieces_of
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.prepare import (
    MANY_MESSAGES,
    Prepared,
    Terms,
    constrained,
    find_model,
    is_batch_of,
    is_long,
    mode_of,
    named_versions,
    prepare_chat,
    prepare_completion,
)
from pdcluster_router.frontend.prepare_threads import prepare_threads
from pdcluster_router.frontend.response import record, route_report, usage_of
from pdcluster_router.http.call_limits import (
    READ_S,
    CallGroup,
    CallLimits,
    MessageReads,
    machine_of,
    open_reads,
)
from pdcluster_router.http.connection import PARTING_S
from pdcluster_router.http.tls import ServerTls
from pdcluster_router.http.unfinished import BODIES_BYTES
from pdcluster_router.http.watched_health import WatchedHealth

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
# For calls that are no generations.
STOP_GRACE_S = 0.5
# Larger requests are unpacked in a thread. They may hold schemas or a hundred thousand token ids.
LONG_BYTES = 256 << 10
# Calls that count apart: those that watch health, and those that ask for it or for the server's methods.
MAX_WATCHERS, MAX_OTHERS = 256, 64
WATCH = f"/{health.SERVICE_NAME}/Watch"
# gRPC rounds a client's remaining time up to two or three digits. So a client that gives up at its deadline may come
# early.
ROUNDED_S, ROUNDED_SHARE = 0.02, 0.01
# Of a traced call, as OpenTelemetry has them.
SERVER_FAULTS = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
)
# How often health is checked.
HEALTH_S = 0.2


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Limits of gRPC.

    deadline_s: for calls without one, and the most that one may ask for.
    stall_s: longest time for a client to read a message.
    arriving_bytes: memory of messages that are being read.
    read_s: longest time for a message to arrive.
    last_word_s: for a client that reads nothing, to take its error.
    connection_age_s: then a connection takes no more calls, and clients make another. Python's gRPC cannot reset a
    call, so a call that nobody reads ends with its connection.
    id_prefix: begins request ids.
    is_port_shared: other workers listen there, too.
    """

    max_message_bytes: int = 8 * 2**20
    max_calls: int = 2048
    max_choices: int = 128
    deadline_s: float = 600.0
    stall_s: float = 60.0
    arriving_bytes: int = BODIES_BYTES
    read_s: float = READ_S
    last_word_s: float = 1.0
    connection_age_s: float = 600.0
    id_prefix: str = ""
    is_port_shared: bool = False


class Inference(stubs.InferenceServicer):
    """Runs in the router's event loop. gRPC cancels a call's task when its client leaves or its deadline passes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: GrpcSettings,
        metrics: RouterMetrics,
        places: Places,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._dispatcher = dispatcher
        self._settings = settings
        self._metrics = metrics
        self._places = places
        self.reads = MessageReads(max(settings.arriving_bytes // settings.max_message_bytes, 2), settings.read_s)
        # When the server ends running calls. A call cancelled then was not left by its client.
        self.ends_at = math.inf

    async def Generate(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        """requests: is not used: the message is read here, once its tenant is known."""
        arrived, given_s = monotonic(), context.time_remaining()
        code = grpc.StatusCode.CANCELLED
        request_id, own_id = self._settings.id_prefix + token_hex(ID_BYTES), _client_id(context) or ""
        trace: RequestTrace | None = None
        try:
            tenant = self._places.identify(_metadata(context, "authorization"))
            if self._tracing is not None:
                trace = self._trace(self._tracing, context, request_id, arrived, tenant)
            request = await self.reads.read(context, tenant.name or machine_of(context))
            if request is None or request is grpc.aio.EOF:
                raise BadRequest(
                    "the call's bytes are no GenerateRequest; make the client from this server's inference.proto"
                )
            terms = Terms(
                request_id, arrived, self._settings.max_choices, 0.0, tenant=tenant, client_id=own_id, trace=trace
            )
            await self._generate(request, context, terms)
            code = grpc.StatusCode.OK
        except PdclusterError as error:
            code = status_of(error)
            await self._fail(context, error)
        except asyncio.CancelledError:
            if given_s is not None and monotonic() - arrived >= given_s * (1.0 - ROUNDED_SHARE) - ROUNDED_S:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
            elif monotonic() < self.ends_at:
                self._metrics.disconnects.inc()
            raise
        except Exception as error:  # the top of a call: a bug of ours must not hurt other calls
            code = grpc.StatusCode.INTERNAL
            log.exception("a call of Generate failed")
            await self._fail(
                context, PdclusterError(f"internal error: {type(error).__name__}; the server's log has it")
            )
        finally:
            if trace is not None:
                status = {"rpc.response.status_code": code.name}
                trace.end(monotonic(), status, has_failed=code in SERVER_FAULTS)
            self._metrics.grpc_requests.labels("Generate", code.name).inc()
            self._metrics.request_seconds.labels("Generate").observe(monotonic() - arrived)

    async def ListModels(self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext) -> pb.ListModelsReply:
        try:
            self._places.identify(_metadata(context, "authorization"))
        except PdclusterError as error:
            self._metrics.grpc_requests.labels("ListModels", status_of(error).name).inc()
            await self._fail(context, error)
        self._metrics.grpc_requests.labels("ListModels", grpc.StatusCode.OK.name).inc()
        return convert.models_to_proto(
            [(name, model.created, model.max_len, model.vocab_size) for model, name in named_versions(self._dispatcher)]
        )

    def _trace(
        self,
        tracing: Tracing,
        context: grpc.aio.ServicerContext,
        request_id: str,
        arrived: float,
        tenant: Tenant,
    ) -> RequestTrace | None:
        trace = tracing.begin(_metadata(context, "traceparent"), f"{SERVICE}/Generate", arrived, tenant.name)
        if trace is not None:
            trace.note(
                {
                    "rpc.system.name": "grpc",
                    "rpc.method": f"{SERVICE}/Generate",
                    "gen_ai.operation.name": "text_completion",
                    "pdcluster.request": request_id,
                    "pdcluster.client_id": _client_id(context) or "",
                }
            )
        return trace

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, terms: Terms) -> None:
        with self._places.taken(terms.tenant):
            await context.send_initial_metadata((("x-request-id", terms.client_id or terms.request_id),))
            mode = mode_of(_metadata(context, "x-pdcluster-mode"))
            is_batch = is_batch_of(_metadata(context, "x-pdcluster-class"))
            reader = _Reader(self._settings.stall_s)
            terms = msgspec.structs.replace(
                terms, deadline_s=self._deadline_s(context), mode=mode, hang_up=reader.hang_up, is_batch=is_batch
            )
            prepared = await self._prepare(request, terms)
            pieces = merge([pieces_of(choice, self._dispatcher) for choice in prepared.choices])
            try:
                async with aclosing(pieces):
                    await self._stream(prepared, pieces, context, reader)
            finally:
                record(prepared.choices, self._metrics)

    async def _prepare(self, request: pb.GenerateRequest, terms: Terms) -> Prepared:
        if self._dispatcher.awaits_model:
            await self._dispatcher.first_model()
        convert_it = partial(
            convert.request_from_proto, request, find_model(self._dispatcher, request.model or None).info.id
        )
        takes_long = len(request.chat.messages) > MANY_MESSAGES or request.ByteSize() > LONG_BYTES
        asked = await prepare_threads().run(terms.tenant.name, convert_it) if takes_long else convert_it()
        return await constrained(await self._prepared(asked, terms), terms)

    async def _prepared(self, asked: ChatRequest | CompletionRequest, terms: Terms) -> Prepared:
        in_thread = partial(prepare_threads().run, terms.tenant.name)
        if isinstance(asked, ChatRequest):
            if not is_long(asked):
                try:
                    return prepare_chat(asked, self._dispatcher, terms, BRIEF)
                except TakesLong as error:
                    log.debug("request %s: %s", terms.request_id, error)
            return await in_thread(partial(prepare_chat, asked, self._dispatcher, terms))
        prepare = partial(prepare_completion, asked, self._dispatcher, terms)
        return await in_thread(prepare) if is_long(asked) else prepare()

    async def _stream(
        self,
        prepared: Prepared,
        pieces: AsyncGenerator[tuple[int, TextPiece], None],
        context: grpc.aio.ServicerContext,
        reader: _Reader,
    ) -> None:
        num_open = len(prepared.choices)
        positions: dict[int, int] = {}
        async for index, piece in pieces:
            reply = _reply(prepared.choices[index], index, piece, positions.get(index))
            positions[index] = positions.get(index, 0) + len(piece.tokens)
            if piece.finish:
                num_open -= 1
                if not num_open:
                    convert.add_usage(reply, usage_of(prepared))
            await reader.write(context, reply)

    def _deadline_s(self, context: grpc.aio.ServicerContext) -> float:
        left = context.time_remaining()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the call's deadline had passed when it came; set a longer one")
        return self._settings.deadline_s if left is None else min(left, self._settings.deadline_s)

    async def _fail(self, context: grpc.aio.ServicerContext, error: PdclusterError) -> None:
        """Send the status behind what the client has not read. The call ends now, to free its place. A client that
        reads later gets both.
        """
        self._metrics.errors.labels(error.code).inc()
        try:
            async with asyncio.timeout(self._settings.last_word_s):
                await context.abort(status_of(error), str(error), retry_metadata(error))
        except TimeoutError:
            log.info("a client does not read why its call ended: %s", error)


class _Reader:
    """A call's client, as far as it reads."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._waiting: asyncio.Timeout | None = None

    async def write(self, context: grpc.aio.ServicerContext, reply: pb.GenerateReply) -> None:
        """Send a message. Raises Cancelled when the client reads nothing for too long, or was hung up on."""
        try:
            async with asyncio.timeout(self._stall_s) as self._waiting:
                await context.write(reply)
        except TimeoutError:
            raise Cancelled("the client did not read what it was sent") from None
        finally:
            self._waiting = None

    def hang_up(self) -> None:
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())


def _reply(choice: OutputChoice, index: int, piece: TextPiece, position: int | None) -> pb.GenerateReply:
    """One message of a stream.

    position: of the piece's first token; None for the choice's first piece.
    """
    reply = convert.piece_to_proto(
        index, piece, position or 0, logprobs=choice.generation.sampling.logprobs is not None
    )
    if piece.finish:
        convert.add_report(reply, route_report(choice))
    elif position is None and (route := choice.route) is not None:
        convert.add_route(reply, route.mode, route.prefill, route.decode, route.backend)
        convert.add_first_timings(reply, choice.clock.since_start(choice.clock.first))
    return reply


def _metadata(context: grpc.aio.ServicerContext, name: str) -> str | None:
    given = next((value for key, value in context.invocation_metadata() or () if key == name), None)
    return given if isinstance(given, str) else None


def _client_id(context: grpc.aio.ServicerContext) -> str | None:
    """The client's x-request-id, when it is short and plain."""
    given = _metadata(context, "x-request-id")
    return given if given is not None and 0 < len(given) <= 128 and given.isascii() and given.isprintable() else None


@asynccontextmanager
async def listening(
    servicer: Inference,
    dispatcher: Dispatcher,
    address: str,
    settings: GrpcSettings,
    *,
    drain_s: float,
    tls: ServerTls | None = None,
) -> AsyncIterator[str]:
    """Serve while the block runs; yields HOST:PORT. Leaving it takes no new calls, and open ones finish within
    drain_s. tls: None: connections are plain.
    """
    server = grpc.aio.server(
        options=(
            *server_options(is_port_shared=settings.is_port_shared),
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.http2.bdp_probe", 0),  # with it a message that nobody reads is held by the megabyte
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.max_connection_age_ms", round(settings.connection_age_s * 1e3)),
            ("grpc.max_connection_age_grace_ms", round((settings.deadline_s + settings.last_word_s) * 1e3)),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ),
        interceptors=(_limits(servicer.reads, settings),),
    )
    server.add_generic_rpc_handlers((_handlers(servicer),))
    states = WatchedHealth()
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = bind(server, address, flag="--grpc", tls=tls)
    await server.start()
    try:
        async with running(partial(_keep_health, states, dispatcher), "grpc health"):
            yield bound
    finally:
        await states.enter_graceful_shutdown()
        servicer.ends_at = monotonic() + PARTING_S + drain_s - ROUNDED_S
        await asyncio.sleep(PARTING_S)  # calls that clients made before they could know are taken, not reset
        await server.stop(drain_s)


def _limits(reads: MessageReads, settings: GrpcSettings) -> CallLimits:
    """Generations, watchers and everything else count apart."""
    work, small = CallGroup(SERVICE, settings.max_calls, reads, is_fair=False), open_reads()
    watchers, others = CallGroup("Watch", MAX_WATCHERS, small), CallGroup("other methods", MAX_OTHERS, small)
    return CallLimits({f"/{SERVICE}/Generate": work, WATCH: watchers}, others)


def _handlers(servicer: Inference) -> grpc.GenericRpcHandler:
    """The generated registration. Bytes that are no message are the caller's error, without a traceback in the log."""
    methods = {
        "Generate": grpc.stream_stream_rpc_method_handler(
            servicer.Generate, request_deserializer=_parse, response_serializer=pb.GenerateReply.SerializeToString
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            servicer.ListModels,
            request_deserializer=lambda _: pb.ListModelsRequest(),
            response_serializer=pb.ListModelsReply.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _parse(body: bytes) -> pb.GenerateRequest | None:
    """None for bytes that are no message."""
    try:
        request = pb.GenerateRequest()
        request.ParseFromString(body)
    except DecodeError:
        return None
    return request


async def _keep_health(states: WatchedHealth, dispatcher: Dispatcher) -> None:
    """Keep health states: the process serves while it runs, the service while some route could take a request."""
    await states.set("", health_pb2.HealthCheckResponse.SERVING)
    told = None
    while True:
        is_ready = dispatcher.readiness().can_serve
        if is_ready is not told:
            told = is_ready
            state = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
            await states.set(SERVICE, state)
        await asyncio.sleep(HEALTH_S)


@asynccontextmanager
async def answering(
    server: grpc.aio.Server, service: str, address: str, *, flag: str, tls: ServerTls | None = None
) -> AsyncIterator[str]:
    """Serve small calls while the block runs, with health and reflection. Yields HOST:PORT."""
    states = WatchedHealth()
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = bind(server, address, flag=flag, tls=tls)
    await server.start()
    for name in ("", service):
        await states.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield bound
    finally:
        await states.enter_graceful_shutdown()
        await server.stop(STOP_GRACE_S)


def bind(server: grpc.aio.Server, address: str, *, flag: str, tls: ServerTls | None = None) -> str:
    """Bind an address. Raises ConfigError that names its flag."""
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(tls, flag.removeprefix("--")))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address} for gRPC: {error}; choose another address with {flag}"
        ) from error
    return format_address(parse_address(address)[0], port)


def _credentials(tls: ServerTls, listener: str) -> grpc.ServerCredentials:
    """The library asks for a newer certificate at each handshake, in threads of its own. TLS 1.2 is its least."""
    shown = tls.certificate

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        tls.count(listener, "begun")
        before, shown = shown, tls.certificate
        return None if shown is before else _configuration(shown)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), newer)


def _configuration(certificate: TlsCertificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)])
