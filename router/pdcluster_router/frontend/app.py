"""The OpenAI-compatible HTTP application: paths, limits and errors.

Connections call it (`connection.Application`), and it answers through their exchanges, without a framework. `prepare`
and `response` handle generations; `server` listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, structs
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pdcluster.api.anthropic.events import MessagesFormat
from pdcluster.api.anthropic.replies import MessagesErrors, TokenCount, list_of, model_of
from pdcluster.api.anthropic.requests import decode_count, decode_messages
from pdcluster.api.openai import limits, requests
from pdcluster.api.openai.embeddings import decode_embeddings
from pdcluster.api.openai.replies import DetokenizeReply, ModelCard, ModelList, TokenizeReply
from pdcluster.api.openai.responses.events import RESPONSE_PREFIX, ResponsesFormat, failed_stream
from pdcluster.api.openai.responses.requests import client_error, decode_responses
from pdcluster.api.text.chat_template import TakesLong
from pdcluster.api.text.template_bounds import BRIEF, PATIENT, Bounds
from pdcluster.api.validate import closest
from pdcluster.core.errors import DeadlineExceeded, PdclusterError, Unauthorized, Unavailable, UnknownName, Unservable
from pdcluster.core.version import VERSION
from pdcluster.processes.tasks import watched
from pdcluster.telemetry.health import Verdict, alive
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.core.generation import Dispatcher, ModelInfo
from pdcluster_router.core.tenants import ANYBODY, Tenant
from pdcluster_router.core.tracing import RequestTrace, Tracing
from pdcluster_router.frontend.embeddings import EmbeddingAnswer, PreparedEmbeddings, are_long, prepare_embeddings
from pdcluster_router.frontend.grammar_pool import shared_pool
from pdcluster_router.frontend.health import AGE_S, CachedExposition, readiness_of
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.prepare import (
    CLASS,
    DEADLINE,
    MODE,
    OPENAI_CHAT,
    ChatApi,
    Prepared,
    Terms,
    constrained,
    count_chat,
    deadline_of,
    find_model,
    is_batch_of,
    is_long,
    mode_of,
    named_versions,
    prepare_chat,
    prepare_completion,
    tokenize,
)
from pdcluster_router.frontend.prepare_threads import prepare_threads
from pdcluster_router.frontend.response import answer
from pdcluster_router.http.connection import DISCARD_FACTOR
from pdcluster_router.http.cors import ORIGIN, Cors
from pdcluster_router.http.errors import (
    ClientLeft,
    MethodNotAllowed,
    SlowRequest,
    UnsupportedMediaType,
    allow,
    answer_error,
    fail,
    too_large,
)
from pdcluster_router.http.exchange import Exchange, OpenAIErrors
from pdcluster_router.http.head import HOST
from pdcluster_router.http.hosts import HostRule
from pdcluster_router.http.unfinished import BODIES_BYTES

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], None]
Exposition = Callable[[], Awaitable[bytes]]

T = TypeVar("T")

# More tokens are detokenized in a thread.
MANY_TOKENS = 4096
MODELS_PREFIX = "/v1/models/"
AUTHORIZATION = b"authorization"
TRACEPARENT = b"traceparent"
X_API_KEY = b"x-api-key"
# Sent by clients of Anthropic's API.
ANTHROPIC_VERSION = b"anthropic-version"
MESSAGES_ERRORS = MessagesErrors()
MESSAGES = ChatApi(MessagesFormat, "msg_", cuts_length=True, moves_system=True)
MESSAGES_SHORT = structs.replace(MESSAGES, make_format=partial(MessagesFormat, omits_thinking=True))
# As OpenTelemetry names them.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
COUNT_TOKENS = "/v1/messages/count_tokens"
# Asked by machines again and again: they are answered, and not counted among requests.
PROBES = frozenset(("/health", "/ready", "/livez", "/readyz", "/metrics"))
SERVED = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/v1/embeddings", "/v1/models",
)  # fmt: skip
BATCH_PATHS = ("/v1/files", "/v1/batches", "/v1/messages/batches")
# First parts of paths that clients of OpenAI-like servers may ask for.
NOT_SERVED = (
    "/v1/responses/", "/v1/conversations", "/v1/messages/", "/v1/rerank", "/v1/score", "/v1/images",
    "/v1/audio", "/v1/videos", "/v1/uploads", "/v1/moderations", "/v1/assistants",
    "/v1/threads", "/v1/vector_stores", "/v1/fine_tuning", "/v1/evals", "/v1/containers", "/v1/realtime",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of HTTP.

    body_s: longest time for a body to arrive.
    stall_s: longest time for a client to read.
    arriving_bytes: memory of bodies that have not arrived whole.
    is_shared: several tenants share it.
    metrics_age_s: how old what /metrics says may be.
    id_prefix: begins request ids.
    cors_origins: pages that may use the API, "*" for all.
    hosts: names that it answers to; None: all.
    """

    max_requests: int = 1024
    max_body_bytes: int = 8 * 2**20
    max_choices: int = 128
    deadline_s: float = 600.0
    body_s: float = 30.0
    stall_s: float = 60.0
    arriving_bytes: int = BODIES_BYTES
    is_shared: bool = False
    metrics_age_s: float = AGE_S
    id_prefix: str = ""
    cors_origins: tuple[str, ...] = ()
    hosts: HostRule | None = None


def create_app(
    dispatcher: Dispatcher,
    settings: HttpSettings,
    metrics: RouterMetrics,
    places: Places | None = None,
    exposition: Exposition | None = None,
    readiness: Callable[[], Verdict] | None = None,
    tracing: Tracing | None = None,
) -> App:
    """Make the application.

    places: shared with other front doors; None for its own.
    exposition: answers a scrape; None for this process's metrics.
    readiness: answers /readyz; None: as the dispatcher says.
    tracing: None: no request is traced.
    """
    places = places or Places(settings.max_requests)
    app = App(dispatcher, settings, metrics, places, exposition, readiness or partial(readiness_of, dispatcher))
    app.tracing = tracing
    return app


class App:
    """Implements connection.Application. Runs in one event loop with its exchanges."""

    tracing: Tracing | None = None

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: HttpSettings,
        metrics: RouterMetrics,
        places: Places,
        exposition: Exposition | None,
        readiness: Callable[[], Verdict],
    ) -> None:
        self._readiness = readiness
        self._exposed = CachedExposition(exposition or self._own_exposition, settings.metrics_age_s)
        self.settings = settings
        self._dispatcher = dispatcher
        self.metrics = metrics
        self._places = places
        self._preparing: set[asyncio.Task[None]] = set()
        self._cors = Cors(settings.cors_origins)
        self._get: Mapping[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._exposition,
            "/v1/models": self._models,
            "/tokenizer_info": self._tokenizer_info,
        }
        self._post: Mapping[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/v1/completions": self._completion,
            "/v1/messages": self._messages,
            COUNT_TOKENS: self._count_tokens,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    # ------------------------------------------------ what connections tell

    def begin(self, exchange: Exchange) -> None:
        """Check what the head tells: the tenant, and whether the body is worth waiting for."""
        if exchange.path not in PROBES:
            self.metrics.http_requests_open.value += 1
        try:
            if self._cors.is_on:
                exchange.extra = self._cors.lines(exchange.headers.get(ORIGIN))
            if ANTHROPIC_VERSION in exchange.headers or exchange.path.startswith("/v1/messages"):
                exchange.errors = MESSAGES_ERRORS
                exchange.extra += b"request-id: %b\r\n" % exchange.trace
            if self.settings.hosts is not None:
                self.settings.hosts.check(exchange.header(HOST))
            is_work = exchange.path in self._post
            if not is_work or exchange.method != "POST":
                self._check_method(exchange)
            if exchange.method == "OPTIONS":
                return
            if is_work:
                headers = exchange.headers
                tenant = exchange.tenant = self._places.identify(self._authorization(exchange))
                if self.tracing is not None:
                    exchange.request_trace = self._trace(self.tracing, exchange, tenant)
                if headers.get(b"content-type") != b"application/json" or b"content-encoding" in headers:
                    _check_media_type(exchange)
                if b"content-length" in headers:
                    self._check_declared_length(exchange)
        except Exception as error:  # the top of a request
            fail(exchange, error, self.metrics)

    def _authorization(self, exchange: Exchange) -> str | None:
        """What says whose request it is: authorization, or x-api-key alone, or both where they say the same."""
        headers = exchange.headers
        given = exchange.header(AUTHORIZATION) if AUTHORIZATION in headers else None
        if not headers.get(X_API_KEY):
            return given
        key = f"Bearer {exchange.header(X_API_KEY)}"
        if given is not None and given.split()[1:] != key.split()[1:] and self._places.is_shared:
            raise Unauthorized("x-api-key and authorization name two keys; send one of them")
        return key if given is None else given

    def _trace(self, tracing: Tracing, exchange: Exchange, tenant: Tenant) -> RequestTrace | None:
        path = exchange.path
        trace = tracing.begin(exchange.header(TRACEPARENT), f"POST {path}", exchange.arrived, tenant.name)
        if trace is not None:
            trace.note(
                {
                    "http.request.method": "POST",
                    "http.route": path,
                    "gen_ai.operation.name": OPERATIONS.get(path, "tokenize"),
                    "pdcluster.request": exchange.id,
                    "pdcluster.client_id": exchange.client_id,
                }
            )
        return trace

    def _check_method(self, exchange: Exchange) -> None:
        _, methods = self._route(exchange.path)
        if exchange.method not in methods:
            way_out = f"use {' or '.join(methods[:-1])}"
            raise MethodNotAllowed(f"{exchange.method} {exchange.path} is not possible; {way_out}", methods)

    def complete(self, exchange: Exchange) -> None:
        try:
            if exchange.is_too_large:
                raise too_large(exchange.body_bytes, self.settings.max_body_bytes)
            if exchange.method == "OPTIONS":
                self._options(exchange)
                return
            handler = self._post.get(exchange.path)
            if handler is None:
                self._route(exchange.path)[0](exchange)
                return
            assert exchange.tenant is not None  # identified with the head
            self._places.take(exchange.tenant)
            exchange.has_place = True
            handler(exchange)
        except Exception as error:  # the top of a request: a bug of ours must not hurt other requests
            fail(exchange, error, self.metrics)

    def late(self, exchange: Exchange) -> None:
        if exchange.is_too_large:
            self.complete(exchange)
        else:
            fail(
                exchange,
                SlowRequest(f"the body did not arrive within {self.settings.body_s:g} s; send it faster"),
                self.metrics,
            )

    def crowded(self, exchange: Exchange) -> None:
        fail(exchange, self._places.no_room_for_body(exchange.tenant), self.metrics)

    def stalled(self, exchange: Exchange) -> None:
        self._end(exchange, ClientLeft(f"the client read nothing for {self.settings.stall_s:g} s"))

    def gone(self, exchange: Exchange) -> None:
        self._end(exchange, ClientLeft("the client closed the connection"))

    def stopping(self, exchange: Exchange) -> None:
        self._end(
            exchange, Unavailable("the router stops, and this request took longer than it waits for; send it again")
        )

    def _end(self, exchange: Exchange, error: PdclusterError) -> None:
        if exchange.on_gone is not None:
            exchange.on_gone(error)
        if not exchange.finished:
            fail(exchange, error, self.metrics)

    def over(self, exchange: Exchange) -> None:
        metrics, path = self.metrics, exchange.path
        if exchange.has_place and exchange.tenant is not None:
            self._places.give_back(exchange.tenant)
            exchange.has_place = False
        if exchange.request_trace is not None:
            status = exchange.status
            exchange.request_trace.end(monotonic(), {"http.response.status_code": status}, has_failed=status >= 500)
        if path not in PROBES:
            metrics.http_requests_open.value -= 1
            endpoint = path if path in self._post else self._endpoint(path)
            metrics.answered(endpoint, exchange.status, monotonic() - exchange.arrived)

    def _check_declared_length(self, exchange: Exchange) -> None:
        """Refuse a declared length that is too large before the body is sent, also with 100-continue."""
        declared = exchange.headers.get(b"content-length")
        limit = self.settings.max_body_bytes
        if declared is None or not declared.isdigit() or int(declared) <= limit:
            return
        if b"expect" in exchange.headers or int(declared) > limit * DISCARD_FACTOR:
            raise too_large(int(declared), limit)

    # ------------------------------------------------ routing

    def _route(self, path: str) -> tuple[Handler, tuple[str, ...]]:
        if path in self._post:
            return self._post[path], ("POST", "OPTIONS")
        if path in self._get:
            return self._get[path], ("GET", "HEAD", "OPTIONS")
        if path.startswith(MODELS_PREFIX):
            return self._model, ("GET", "HEAD", "OPTIONS")
        if path.startswith(BATCH_PATHS):
            raise UnknownName(
                f"{path[:200]} is not served: routers keep nothing; run pdctl batch run IN.jsonl -o OUT.jsonl, which "
                "reads OpenAI's batch files"
            )
        if path.startswith(NOT_SERVED):
            served = ", ".join(SERVED)
            raise UnknownName(f"{path[:200]} is not served here; of OpenAI's and Anthropic's APIs there are {served}")
        raise UnknownName(f"there is no {path[:200]}{closest(path, self._paths())}")

    def _options(self, exchange: Exchange) -> None:
        """Answer OPTIONS without a key. Browsers ask what a page may send; others may know which paths exist."""
        methods = self._route(exchange.path)[1]
        exchange.reply(200, b"", allow(methods) + self._cors.preflight(exchange.headers, methods))

    def _paths(self) -> tuple[str, ...]:
        return (*self._post, *self._get)

    def _endpoint(self, path: str) -> str:
        """The metric's label. Only known paths, so that clients cannot create series."""
        if path in self._post or path in self._get:
            return path
        return "/v1/models" if path.startswith(MODELS_PREFIX) else "other"

    # ------------------------------------------------ generations

    def _chat(self, exchange: Exchange) -> None:
        self._converse(exchange, requests.decode_chat(exchange.take_body()), OPENAI_CHAT)

    def _converse(self, exchange: Exchange, request: requests.ChatRequest, api: ChatApi) -> None:
        terms = self._terms(exchange)
        if not is_long(request) and not self._dispatcher.awaits_model:
            try:
                prepared = prepare_chat(request, self._dispatcher, terms, BRIEF, api)
            except TakesLong as error:
                log.debug("request %s: %s", exchange.id, error)
            else:
                self._begin(exchange, prepared, terms)
                return
        self._prepare_later(exchange, partial(prepare_chat, request, self._dispatcher, terms, api=api), terms)

    def _responses(self, exchange: Exchange) -> None:
        exchange.errors = RESPONSES_ERRORS
        asked = decode_responses(exchange.take_body())
        if asked.chat.stream:
            exchange.failure = partial(failed_stream, asked.terms, RESPONSE_PREFIX + exchange.id)
        self._converse(
            exchange,
            asked.chat,
            ChatApi(partial(ResponsesFormat, asked.terms), RESPONSE_PREFIX, cuts_length=True, moves_system=True),
        )

    def _messages(self, exchange: Exchange) -> None:
        asked = decode_messages(exchange.take_body())
        self.metrics.ignored_fields(asked.ignored)
        self._converse(exchange, asked.chat, MESSAGES_SHORT if asked.omits_thinking else MESSAGES)

    def _count_tokens(self, exchange: Exchange) -> None:
        asked, tenant = decode_count(exchange.take_body()), exchange.tenant or ANYBODY
        self.metrics.ignored_fields(asked.ignored)
        self._reply_tokens(exchange, is_long(asked.chat), partial(self._counted, asked.chat, tenant))

    def _counted(self, chat: requests.ChatRequest, tenant: Tenant, bounds: Bounds) -> bytes:
        model = find_model(self._dispatcher, chat.model, embeds=False)
        return msgspec.json.encode(TokenCount(count_chat(chat, model, tenant, bounds, MESSAGES)))

    def _completion(self, exchange: Exchange) -> None:
        request = requests.read_completion(exchange.take_body())
        requests.check_completion(request)
        terms = self._terms(exchange)
        if is_long(request) or self._dispatcher.awaits_model:
            self._prepare_later(exchange, partial(prepare_completion, request, self._dispatcher, terms), terms)
        else:
            self._begin(exchange, prepare_completion(request, self._dispatcher, terms), terms)

    def _embeddings(self, exchange: Exchange) -> None:
        request, terms = decode_embeddings(exchange.take_body()), self._terms(exchange)
        prepare, then = partial(prepare_embeddings, request, self._dispatcher, terms), partial(self._embed, exchange)
        if are_long(request) or self._dispatcher.awaits_model:
            self._later(exchange, partial(self._in_thread, exchange, prepare), then, terms.left_s)
        else:
            then(prepare())

    def _embed(self, exchange: Exchange, prepared: PreparedEmbeddings) -> None:
        EmbeddingAnswer(exchange, prepared, self._dispatcher, self.metrics).start()

    def _prepare_later(self, exchange: Exchange, prepare: Callable[[], Prepared], terms: Terms) -> None:
        """Prepare in a thread, once a model is served where requests wait for one."""

        async def work() -> Prepared:
            return await constrained(await self._in_thread(exchange, prepare), terms)

        self._later(exchange, work, partial(self._answer, exchange), terms.left_s)

    async def _in_thread(self, exchange: Exchange, prepare: Callable[[], T]) -> T:
        if self._dispatcher.awaits_model:
            await self._dispatcher.first_model()
        return await prepare_threads().run("" if exchange.tenant is None else exchange.tenant.name, prepare)

    def _begin(self, exchange: Exchange, prepared: Prepared, terms: Terms) -> None:
        if prepared.shape is None:
            self._answer(exchange, prepared)
        elif (grammar := shared_pool().known(prepared.shape)) is not None:
            prepared.constrain(grammar, terms.left_s)
            self._answer(exchange, prepared)
        else:
            self._later(exchange, partial(constrained, prepared, terms), partial(self._answer, exchange), terms.left_s)

    def _answer(self, exchange: Exchange, prepared: Prepared) -> None:
        answer(exchange, prepared, self._dispatcher, self.metrics)

    def _later(
        self,
        exchange: Exchange,
        work: Callable[[], Awaitable[T]],
        then: Callable[[T], None],
        within_s: float | None = None,
    ) -> None:
        """Run slow work as a task, mostly in a thread, so that streams go on.

        within_s: includes the wait for a free thread; None: as long as a request may take.
        """
        limit_s = self.settings.deadline_s if within_s is None else within_s
        task = watched(self._run(exchange, work, then, limit_s), f"prepare {exchange.id}")
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)
        exchange.on_gone = task.cancel

    async def _run(
        self, exchange: Exchange, work: Callable[[], Awaitable[T]], then: Callable[[T], None], limit_s: float
    ) -> None:
        try:
            try:
                async with asyncio.timeout(limit_s):
                    found = await work()
            except TimeoutError:
                raise DeadlineExceeded(
                    "the request was not prepared by its deadline; allow it more time, or retry when less is going on"
                ) from None
            exchange.on_gone = None
            then(found)
        except Exception as error:  # the top of a task
            fail(exchange, error, self.metrics)

    def _terms(self, exchange: Exchange) -> Terms:
        tenant = exchange.tenant
        assert tenant is not None  # identified with the head
        headers, deadline_s = exchange.headers, self.settings.deadline_s
        if DEADLINE in headers:
            deadline_s = deadline_of(exchange.header(DEADLINE), deadline_s)
        mode = mode_of(exchange.header(MODE)) if MODE in headers else None
        is_batch = CLASS in headers and is_batch_of(exchange.header(CLASS))
        return Terms(
            exchange.id, exchange.arrived, self.settings.max_choices, deadline_s, tenant, mode, exchange.client_id,
            trace=exchange.request_trace, is_batch=is_batch,
        )  # fmt: skip

    # ------------------------------------------------ tokens

    def _tokenize(self, exchange: Exchange) -> None:
        request = requests.decode_tokenize(exchange.take_body())
        tenant = exchange.tenant or ANYBODY
        self._reply_tokens(exchange, is_long(request), partial(self._tokens, request, tenant))

    def _reply_tokens(self, exchange: Exchange, takes_long: bool, work: Callable[[Bounds], bytes]) -> None:
        if not takes_long:
            try:
                exchange.reply(200, work(BRIEF))
                return
            except TakesLong as error:
                log.debug("request %s: %s", exchange.id, error)
        self._reply_later(exchange, partial(work, PATIENT))

    def _reply_later(self, exchange: Exchange, work: Callable[[], bytes]) -> None:
        name = "" if exchange.tenant is None else exchange.tenant.name
        self._later(exchange, lambda: prepare_threads().run(name, work), lambda body: exchange.reply(200, body))

    def _tokens(self, request: requests.TokenizeRequest, tenant: Tenant, bounds: Bounds) -> bytes:
        model = find_model(self._dispatcher, request.model)
        token_ids = tokenize(request, model, tenant, bounds)
        reply = TokenizeReply(len(token_ids), model.info.max_len, token_ids.tolist())
        if request.return_token_strs:
            reply.token_strs = [model.text.pieces.of(token_id).decode(errors="replace") for token_id in token_ids]
        return msgspec.json.encode(reply)

    def _tokenizer_info(self, exchange: Exchange) -> None:
        """As in vLLM, for lm-eval's remote tokenizer."""
        self._places.identify(self._authorization(exchange))
        exchange.reply(200, msgspec.json.encode(find_model(self._dispatcher, None).text.info))

    def _detokenize(self, exchange: Exchange) -> None:
        request = requests.decode_detokenize(exchange.take_body())
        work = partial(self._text_of, request)
        if len(request.tokens) > MANY_TOKENS:
            self._reply_later(exchange, work)
        else:
            exchange.reply(200, work())

    def _text_of(self, request: requests.DetokenizeRequest) -> bytes:
        model = find_model(self._dispatcher, request.model)
        limits.check_output(len(request.tokens), model.info, "tokens")
        token_ids = limits.check_token_ids(request.tokens, model.info.vocab_size, "tokens")
        text = model.text.decode(token_ids, skip_special_tokens=bool(request.skip_special_tokens))
        return msgspec.json.encode(DetokenizeReply(text))

    # ------------------------------------------------ state

    def _health(self, exchange: Exchange) -> None:
        exchange.reply(200, b'{"status":"ok","version":"%b"}' % VERSION.encode())

    def _livez(self, exchange: Exchange) -> None:
        exchange.reply(200, alive([]).body())

    def _readyz(self, exchange: Exchange) -> None:
        verdict = self._readiness()
        exchange.reply(verdict.code, verdict.body())

    def _ready(self, exchange: Exchange) -> None:
        """200 only while a request would be served at once. Answered here: a waiting probe is no failed request."""
        found, verdict = self._dispatcher.readiness(), self._readiness()
        if verdict.facts["can_serve"]:
            exchange.reply(200, b'{"status":"ready"}')
        elif found.refusal is not None:
            answer_error(exchange, Unservable(f"not ready: {found.refusal}"))
        else:
            answer_error(exchange, Unavailable(f"not ready: {'; '.join(verdict.reasons)}"))

    def _exposition(self, exchange: Exchange) -> None:
        self._later(exchange, self._exposed.text, partial(_expose, exchange))

    async def _own_exposition(self) -> bytes:
        return generate_latest(self.metrics.registry)

    def _models(self, exchange: Exchange) -> None:
        self._places.identify(self._authorization(exchange))
        named = named_versions(self._dispatcher)
        if ANTHROPIC_VERSION in exchange.headers:
            listed = list_of([model_of(name, model.created, model.max_len) for model, name in named])
            exchange.reply(200, msgspec.json.encode(listed))
            return
        reply = ModelList([_card(model, name) for model, name in named])
        exchange.reply(200, msgspec.json.encode(reply))

    def _model(self, exchange: Exchange) -> None:
        self._places.identify(self._authorization(exchange))
        name = unquote(exchange.path.removeprefix(MODELS_PREFIX))
        info = find_model(self._dispatcher, name).info
        is_of_messages = ANTHROPIC_VERSION in exchange.headers
        card = model_of(name, info.created, info.max_len) if is_of_messages else _card(info, name)
        exchange.reply(200, msgspec.json.encode(card))


class ResponsesErrors(OpenAIErrors):
    """Of requests that are chats within. The errors name the fields that were sent."""

    def body(self, error: PdclusterError, trace: str) -> bytes:
        return super().body(client_error(error), trace)


RESPONSES_ERRORS = ResponsesErrors()


def _expose(exchange: Exchange, body: bytes) -> None:
    exchange.reply(200, body, b"content-type: %b\r\n" % CONTENT_TYPE_LATEST.encode())


def _card(model: ModelInfo, name: str) -> ModelCard:
    """name: that requests use, perhaps with a label of weights."""
    weights = UNSET if name == model.id else model.weights.label
    return ModelCard(name, model.created, model.max_len, model.parent or UNSET, weights)


def _check_media_type(exchange: Exchange) -> None:
    given = exchange.header(b"content-type")
    if given is not None and given.partition(";")[0].strip().lower() not in ("application/json", ""):
        raise UnsupportedMediaType(f"content-type is {given[:100]}; send JSON with content-type: application/json")
    encoding = exchange.header(b"content-encoding")
    if encoding not in (None, "", "identity"):
        raise UnsupportedMediaType(f"content-encoding {encoding[:100]} is not supported; send the body uncompressed")
