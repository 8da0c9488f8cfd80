"""Embeddings over HTTP: each input is a request of its own, admitted and placed like a prompt; one reply has them all.

A request runs as many inputs at a time as it may have choices. If one fails, the others are cancelled and its error
answers. An answer has no task: messages of nodes drive it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from pdcluster.api.openai.embeddings import (
    EmbeddingReply,
    EmbeddingRequest,
    EmbeddingUsage,
    Encoding,
    encoded_item,
    inputs_of,
)
from pdcluster.api.text.segments import SHORT_CHARACTERS
from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import Pooling
from pdcluster.core.sampling import Sampling
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.core.generation import Dispatcher, Done, Generation, Running, TokenChunk, WeightsChange
from pdcluster_router.frontend.prepare import (
    PART_CHARACTERS,
    ServedModel,
    Terms,
    VersionAsked,
    encode_prompt,
    find_model,
    names_weights,
)
from pdcluster_router.frontend.response import named_headers
from pdcluster_router.http.errors import ClientLeft, fail
from pdcluster_router.http.exchange import JSON, Exchange

# Of a whole answer. A number takes about 20 bytes as float and 5 as base64.
MAX_REPLY_BYTES = 64 * 2**20
# Nodes want one, and draw nothing.
NO_SAMPLING = Sampling(max_tokens=1, seed=0, temperature=0.0)


class PreparedEmbeddings(msgspec.Struct, frozen=True):
    """A request ready to run. inputs: token ids, array('i')."""

    model: ServedModel
    inputs: Sequence[array[int]]
    encoding: Encoding
    pooling: Pooling
    terms: Terms
    salt: bytes
    priority: int | None
    weights_change: WeightsChange | None = None
    names_weights: bool = False

    def generation(self, index: int) -> Generation:
        terms = self.terms
        return Generation(
            request=f"{terms.request_id}-{index}",
            model=self.model.info.id,
            token_ids=self.inputs[index],
            sampling=NO_SAMPLING,
            deadline_s=terms.left_s,
            salt=self.salt,
            standing=terms.standing(self.priority),
            mode="local",
            client_id=terms.client_id,
            trace=terms.trace,
            served=self.model.info,
            pooling=self.pooling,
            weights_change=self.weights_change,
            names_weights=self.names_weights,
        )


def are_long(request: EmbeddingRequest) -> bool:
    """Whether tokenizing takes long enough for a thread. Token ids need no tokenizing."""
    texts = [request.input] if isinstance(request.input, str) else request.input
    return sum(len(text) + PART_CHARACTERS for text in texts if isinstance(text, str)) > SHORT_CHARACTERS


def prepare_embeddings(request: EmbeddingRequest, dispatcher: Dispatcher, terms: Terms) -> PreparedEmbeddings:
    if terms.mode == "remote":
        raise BadRequest(
            "x-pdcluster-mode is remote, but one node makes an embedding; leave it out", "x-pdcluster-mode"
        )
    asked = VersionAsked(terms.request_id, request.weights, "local")
    model = find_model(dispatcher, request.model, embeds=True, asked=asked)
    terms.standing(request.priority)  # it may be too urgent for the key
    given = inputs_of(request)
    names = ["input"] if len(given) == 1 else [f"input[{index}]" for index in range(len(given))]
    adds_special = request.add_special_tokens is not False
    inputs = [
        encode_prompt(entry, model, name, add_special_tokens=adds_special, least_output=0)
        for entry, name in zip(given, names, strict=True)
    ]
    tenant = terms.tenant
    salt = tenant.cache_salt(request.cache_salt) if request.cache_salt else tenant.salt
    return PreparedEmbeddings(
        model, inputs, request.encoding_format or "float", Pooling(request.dimensions or 0), terms, salt,
        request.priority, request.weights_change, names_weights(request.model, request.weights),
    )  # fmt: skip


class EmbeddingAnswer:
    """An answer, from its start until its exchange is over. Every input has ended by then."""

    def __init__(
        self, exchange: Exchange, prepared: PreparedEmbeddings, dispatcher: Dispatcher, metrics: RouterMetrics
    ) -> None:
        self._exchange, self._prepared, self._dispatcher, self._metrics = exchange, prepared, dispatcher, metrics
        self._items: dict[int, msgspec.Raw] = {}
        self._num_started = 0
        # By index, of the inputs that have begun and not ended.
        self._running: dict[int, Running | None] = {}
        self._headers = JSON
        self._is_starting = self._is_over = False

    def start(self) -> None:
        self._exchange.on_gone = self.end
        self._start_more()

    def _start_more(self) -> None:
        """Keep as many inputs running as may. An input may end before its start returns, and asks for more then."""
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._may_start:
                self._start_one()
        except Exception as error:  # the top of an answer
            self.end(error)
        finally:
            self._is_starting = False

    @property
    def _may_start(self) -> bool:
        is_left = self._num_started < len(self._prepared.inputs)
        return is_left and not self._is_over and len(self._running) < self._prepared.terms.max_choices

    def _start_one(self) -> None:
        index = self._num_started
        self._num_started += 1
        self._running[index] = None
        running = self._dispatcher.start(self._prepared.generation(index), _InputSink(self, index))
        if self._is_over:
            running.cancel("another input failed")
        elif index in self._running:
            self._running[index] = running

    def take(self, index: int, done: Done) -> None:
        """The vector of an input."""
        if self._is_over:
            return
        del self._running[index]
        try:
            self._add(index, done)
            body = self._body() if len(self._items) == len(self._prepared.inputs) else None
        except Exception as error:  # the top of an answer
            self.end(error)
            return
        if body is None:
            self._start_more()
        else:
            self._reply(body)

    def _add(self, index: int, done: Done) -> None:
        prepared, route = self._prepared, done.route
        item = encoded_item(index, done.vector, prepared.encoding)
        num_bytes, num_inputs = memoryview(item).nbytes, len(prepared.inputs)
        if num_bytes * num_inputs > MAX_REPLY_BYTES:
            raise BadRequest(
                f"{num_inputs} embeddings of {num_bytes} bytes are more than the {MAX_REPLY_BYTES} bytes of a reply; "
                "send fewer inputs in a request, or encoding_format base64",
                "input",
            )
        self._items[index] = item
        if index == 0:
            self._headers = named_headers(JSON, route.mode, route.prefill, route.decode, route.backend)
        num_prompt, num_cached = len(prepared.inputs[index]), done.cached_tokens
        self._metrics.embedded(num_prompt, num_cached, done.timeline.queue_s)
        self._metrics.tenants.used(prepared.terms.tenant.name, num_prompt, num_cached, 0)

    def _body(self) -> bytes:
        prepared, items = self._prepared, self._items
        num_tokens = sum(map(len, prepared.inputs))
        data = [items[index] for index in range(len(items))]
        return msgspec.json.encode(EmbeddingReply(data, prepared.model.info.id, EmbeddingUsage(num_tokens, num_tokens)))

    def _reply(self, body: bytes) -> None:
        self._is_over = True
        self._exchange.on_gone = None
        self._exchange.reply(200, body, self._headers)

    def end(self, error: Exception) -> None:
        """Answer with the error. Nothing of the other inputs stays."""
        if self._is_over:
            return
        self._is_over = True
        running, self._running = list(self._running.values()), {}
        self._exchange.on_gone = None
        reason = "client left" if isinstance(error, ClientLeft) else str(error)
        for each in running:
            if each is not None:
                each.cancel(reason)
        fail(self._exchange, error, self._metrics)


class _InputSink:
    """Implements generation.Sink for one input."""

    __slots__ = ("_answer", "_index")

    def __init__(self, answer: EmbeddingAnswer, index: int) -> None:
        self._answer, self._index = answer, index

    def on_chunk(self, chunk: TokenChunk) -> None:
        """An embedding has none."""

    def fast_token_path(self) -> None:
        return None

    def on_done(self, done: Done) -> None:
        self._answer.take(self._index, done)

    def on_error(self, error: Exception) -> None:
        self._answer.end(error)
