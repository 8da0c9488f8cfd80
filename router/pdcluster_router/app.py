"""The OpenAI-compatible HTTP application: which path does what, how many requests at a time, and what becomes of errors.

A raw ASGI application without a framework. Preparing and answering generations is in `prepare` and `answer`, running it under a server in `server`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pdcluster.api import limits, openai
from pdcluster.api.replies import DetokenizeReply, ModelCard, ModelList, TokenizeReply
from pdcluster.api.validate import closest
from pdcluster.errors import PdclusterError, Unavailable
from pdcluster.metrics import RouterMetrics
from pdcluster_router.answer import answer
from pdcluster_router.asgi import ClientLeft, Exchange, MethodNotAllowed, NotFound, Receive, Scope, Send
from pdcluster_router.generation import Dispatcher, ModelInfo
from pdcluster_router.places import Places
from pdcluster_router.prepare import Terms, deadline_of, encode, encode_chat, find_model, mode_of, prepare_chat, prepare_completion
from pdcluster_router.tenants import Tenant

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
Exposition = Callable[[], Awaitable[bytes]]

MODELS_PREFIX = "/v1/models/"
AUTHORIZATION = b"authorization"
DEADLINE = b"x-request-deadline-s"
MODE = b"x-pdcluster-mode"


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """body_s: longest time for a body to arrive; stall_s: longest time for a client to read what it was sent;
    id_prefix: begins the ids of requests."""

    max_requests: int = 1024
    max_body_bytes: int = 8 * 2**20
    max_choices: int = 128
    deadline_s: float = 600.0
    body_s: float = 30.0
    stall_s: float = 60.0
    id_prefix: str = ""


def create_app(
    dispatcher: Dispatcher, settings: HttpSettings, metrics: RouterMetrics, places: Places | None = None, exposition: Exposition | None = None
) -> App:
    """places: shared with other front doors; None for its own. exposition: what a scrape gets, None for this process's metrics."""
    return App(dispatcher, settings, metrics, places or Places(settings.max_requests), exposition)


class App:
    """Lives in one event loop, as all its exchanges do."""

    def __init__(
        self, dispatcher: Dispatcher, settings: HttpSettings, metrics: RouterMetrics, places: Places, exposition: Exposition | None = None
    ) -> None:
        self._exposed = exposition
        self._dispatcher = dispatcher
        self._settings = settings
        self._metrics = metrics
        self._places = places
        self._get: Mapping[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._exposition,
            "/v1/models": self._models,
        }
        self._post: Mapping[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served; run the server with lifespan and websockets off")
        exchange = Exchange(scope, receive, send, self._settings.stall_s, self._settings.id_prefix)
        self._metrics.http_requests_open.inc()
        try:
            await self._answered(exchange)
        finally:
            exchange.close()
            self._metrics.http_requests_open.dec()
            endpoint = self._endpoint(exchange.path)
            self._metrics.http_requests.labels(endpoint, str(exchange.status)).inc()
            self._metrics.request_seconds.labels(endpoint).observe(monotonic() - exchange.arrived)

    async def _answered(self, exchange: Exchange) -> None:
        try:
            await self._handle(exchange)
        except ClientLeft as error:
            exchange.status = error.http_status
            self._metrics.disconnects.inc()
            log.info("request %s: %s", exchange.id, error)
            exchange.drop()
        except PdclusterError as error:
            await self._fail(exchange, error)
        except Exception:  # the top of a request: a bug of ours, which must not take the others with it
            log.exception("request %s to %s failed", exchange.id, exchange.path)
            await self._fail(exchange, PdclusterError(f"internal error; the server's log has it under request {exchange.id}"))

    async def _fail(self, exchange: Exchange, error: PdclusterError) -> None:
        self._metrics.errors.labels(error.code).inc()
        if exchange.started:
            log.warning("request %s failed after its first byte: %s", exchange.id, error)
        try:
            await exchange.fail(error)
        except ClientLeft as gone:
            log.info("request %s: %s", exchange.id, gone)
            exchange.drop()

    # ------------------------------------------------ routing

    async def _handle(self, exchange: Exchange) -> None:
        handler, methods = self._route(exchange.path)
        if exchange.method not in methods:
            raise MethodNotAllowed(f"{exchange.method} {exchange.path} is not possible; use {' or '.join(methods)}")
        await handler(exchange)

    def _route(self, path: str) -> tuple[Handler, tuple[str, ...]]:
        if path in self._post:
            return self._post[path], ("POST",)
        if path in self._get:
            return self._get[path], ("GET", "HEAD")
        if path.startswith(MODELS_PREFIX):
            return self._model, ("GET", "HEAD")
        raise NotFound(f"there is no {path[:200]}{closest(path, self._paths())}")

    def _paths(self) -> tuple[str, ...]:
        return (*self._post, *self._get)

    def _endpoint(self, path: str) -> str:
        """The metric's label: known paths only, so that clients cannot make up series."""
        if path.startswith(MODELS_PREFIX):
            return "/v1/models"
        return path if path in self._post or path in self._get else "other"

    # ------------------------------------------------ generations

    async def _chat(self, exchange: Exchange) -> None:
        with self._places.taken(exchange.header(AUTHORIZATION)) as tenant:
            request = openai.decode_chat(await self._body(exchange))
            prepared = await prepare_chat(request, self._dispatcher, self._terms(exchange, tenant))
            await answer(exchange, prepared, self._dispatcher, self._metrics)

    async def _completion(self, exchange: Exchange) -> None:
        with self._places.taken(exchange.header(AUTHORIZATION)) as tenant:
            request = openai.decode_completion(await self._body(exchange))
            prepared = await prepare_completion(request, self._dispatcher, self._terms(exchange, tenant))
            await answer(exchange, prepared, self._dispatcher, self._metrics)

    def _terms(self, exchange: Exchange, tenant: Tenant) -> Terms:
        deadline_s = deadline_of(exchange.header(DEADLINE), self._settings.deadline_s)
        mode = mode_of(exchange.header(MODE))
        return Terms(exchange.id, exchange.arrived, self._settings.max_choices, deadline_s, tenant, mode, exchange.client_id, exchange.hang_up)

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.read_json(self._settings.max_body_bytes, self._settings.body_s)

    # ------------------------------------------------ tokens

    async def _tokenize(self, exchange: Exchange) -> None:
        with self._places.taken(exchange.header(AUTHORIZATION)):
            request = openai.decode_tokenize(await self._body(exchange))
            model = find_model(self._dispatcher, request.model)
            if request.prompt is not None:
                token_ids = await encode(model.text, request.prompt, add_special_tokens=request.add_special_tokens is not False)
            else:
                openai.check_template_kwargs(request.chat_template_kwargs)
                token_ids = await encode_chat(model.text, request, bool(request.add_special_tokens))
            reply = TokenizeReply(len(token_ids), model.info.max_len, token_ids.tolist())
            if request.return_token_strs:
                reply.token_strs = [model.text.pieces.of(token_id).decode(errors="replace") for token_id in token_ids]
            await exchange.reply(200, msgspec.json.encode(reply))

    async def _detokenize(self, exchange: Exchange) -> None:
        with self._places.taken(exchange.header(AUTHORIZATION)):
            request = openai.decode_detokenize(await self._body(exchange))
            model = find_model(self._dispatcher, request.model)
            token_ids = limits.check_token_ids(request.tokens, model.info.vocab_size, "tokens")
            text = model.text.decode(token_ids, skip_special_tokens=bool(request.skip_special_tokens))
            await exchange.reply(200, msgspec.json.encode(DetokenizeReply(text)))

    # ------------------------------------------------ state

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        if self._dispatcher.is_ready():
            await exchange.reply(200, b'{"status":"ready"}')
        else:  # answered here: a probe that waits is no failed request
            await exchange.fail(Unavailable("not ready: no route exists yet; it needs a prefill and a decode node, or a mixed one"))

    async def _exposition(self, exchange: Exchange) -> None:
        body = await self._exposed() if self._exposed is not None else generate_latest(self._metrics.registry)
        await exchange.reply(200, body, ((b"content-type", CONTENT_TYPE_LATEST.encode()),))

    async def _models(self, exchange: Exchange) -> None:
        self._places.identify(exchange.header(AUTHORIZATION))
        reply = ModelList([_card(model) for model in self._dispatcher.models()])
        await exchange.reply(200, msgspec.json.encode(reply))

    async def _model(self, exchange: Exchange) -> None:
        self._places.identify(exchange.header(AUTHORIZATION))
        model = find_model(self._dispatcher, exchange.path.removeprefix(MODELS_PREFIX))
        await exchange.reply(200, msgspec.json.encode(_card(model.info)))


def _card(model: ModelInfo) -> ModelCard:
    return ModelCard(model.id, model.created, model.max_len)
