"""The seam between front doors (HTTP, gRPC) and dispatch.

One Generation goes in. A stream of TokenChunks and one Done come out. These are plain values: they know nothing of
HTTP, JSON, sockets or the choice of nodes.

`Dispatcher.start` calls its Sink without a task or queue between:

1. `on_chunk` comes first, with the route that was known at the first token. `on_done` comes last.
2. Chunks come strictly by position. Each output token comes once, whatever attempts ran behind it.
3. A failure is `on_error`, before or after the first chunk. Nothing follows it. Its error is one of
   `pdcluster.core.errors` unless there is a bug.
4. The sink may be called before `start` returns. `Running.cancel` cancels the request on both legs. The sink is
   not called after it.

`request.stream.events_of` makes an async stream of the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from pdcluster.api.openai.replies import OutputWeights as OutputWeights
from pdcluster.api.openai.replies import Timeline as Timeline
from pdcluster.api.text.choice_text import ENTRY_BYTES, PIECE_BYTES
from pdcluster.core.messages import FinishReason, Pooling, Sampling, TokenLogprobs
from pdcluster.core.weights import WeightsVersion

if TYPE_CHECKING:
    from pdcluster.api.text.model_text import TextModel
    from pdcluster_router.core.tracing import RequestTrace

Mode = Literal["remote", "local"]
Force = Literal["auto", "remote", "local"]
# What becomes of a request whose version of the weights no node has any more: it ends with an error, or what it has is
# replayed under the newest version.
WeightsChange = Literal["fail", "replay"]
# abort: the router ended it with what it had.
EndReason = FinishReason | Literal["abort"]
HangUp = Callable[[], None]
# Takes tokens that only continue a stream, and their position. False: not taken, they come as a TokenChunk.
TakeTokens = Callable[[int, tuple[int, ...]], bool]


# The tier of batch requests, below all that a request may ask for.
BATCH_PRIORITY = 11


class TenantPriority(msgspec.Struct, frozen=True):
    """The tenant of a request, and how urgent the request is."""

    tenant: str = ""
    weight: float = 1.0
    # Lower goes first.
    priority: int = 0

    @property
    def is_batch(self) -> bool:
        """Whether it gives way to all other requests."""
        return self.priority >= BATCH_PRIORITY


ANYBODY = TenantPriority()
BASE_WEIGHTS = WeightsVersion()


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that some node serves, under one version of its weights."""

    id: str
    # Unix seconds.
    created: int
    # Prompt and output tokens together, on the largest node of these weights.
    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # What the name means: text, weights and more (NodeCard.model_digest); "" where nobody says.
    digest: str = ""
    # It embeds prompts and generates nothing.
    embeds: bool = False
    # Of a LoRA adapter, the name of the model that it changes; "" for a model.
    parent: str = ""
    weights: WeightsVersion = BASE_WEIGHTS
    # What the name means but for weights, equal for all versions of a model (NodeCard.text_digest).
    text: str = ""

    @property
    def adapter(self) -> str:
        """The adapter's name for nodes; "" for a model."""
        return self.id if self.parent else ""


class Generation(msgspec.Struct, frozen=True):
    """One choice of one API request, or one prompt to embed, ready to run."""

    # Id, unique per choice.
    request: str
    model: str
    # The prompt, array('i').
    token_ids: array[int]
    sampling: Sampling
    # Seconds that the caller allows.
    deadline_s: float
    # Names the prefix cache that it shares, from its tenant and the request's own cache_salt; b"" for none.
    salt: bytes = b""
    standing: TenantPriority = ANYBODY
    # The required mode; None: the router chooses.
    mode: Force | None = None
    # Key of its conversation; "" for none.
    session: str = ""
    # The client's own name for it; "" for none.
    client_id: str = ""
    # Ends a wait for a client that does not read; None where there is no such wait.
    hang_up: HangUp | None = None
    # Whether other choices of the same prompt share its KV.
    leads: bool = False
    # The choice whose KV it shares; None for none.
    parent: str | None = None
    # Of its API request; None where that is not traced.
    trace: RequestTrace | None = None
    # The model that it was prepared for; None: whatever has the name.
    served: ModelInfo | None = None
    # No output length was asked for: it goes wherever the prompt fits, and on to larger nodes from there.
    is_open_ended: bool = False
    # An embedding is wanted, and no token: no chunk comes, and `Done` has the vector. Its mode is local.
    pooling: Pooling | None = None
    # None: as the router's setting says.
    weights_change: WeightsChange | None = None
    # It asked for its weights by their label.
    names_weights: bool = False


class RequestRoute(msgspec.Struct, frozen=True):
    """Where a request runs."""

    mode: Mode
    # None in mode local, which has no prefill leg.
    prefill: str | None
    decode: str | None
    # The transfer backend; "" for none.
    backend: str
    # Of the prompt; None until a node reported it.
    cached_tokens: int | None = None
    # The running one included.
    attempts: int = 1


class TokenChunk(msgspec.Struct, frozen=True):
    """New output tokens; the first of them is at `position`."""

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    # Sent with the first chunk: one for each prompt token but the first.
    prompt_logprobs: tuple[TokenLogprobs, ...]
    route: RequestRoute

    @property
    def num_bytes(self) -> int:
        """About what it takes of memory."""
        listed = sum(2 + len(entry.top_ids) for entry in (*self.logprobs, *self.prompt_logprobs))
        return PIECE_BYTES + (len(self.token_ids) + listed) * ENTRY_BYTES


class Done(msgspec.Struct, frozen=True):
    """The end of a generation without an error."""

    reason: EndReason
    # The id that ended it, if one did. It is among the emitted tokens.
    stop_token: int | None
    cached_tokens: int
    attempts: int
    route: RequestRoute
    timeline: Timeline
    # Of an embedding: packed little-endian float32.
    vector: bytes = b""
    # Which weights made which output tokens; empty where nobody knows, or without a token.
    weights: tuple[OutputWeights, ...] = ()

    @property
    def num_bytes(self) -> int:
        return PIECE_BYTES + len(self.vector)


class Sink(Protocol):
    """Receives the tokens, in the router's event loop. It neither blocks nor raises."""

    def on_chunk(self, chunk: TokenChunk) -> None: ...

    def fast_token_path(self) -> TakeTokens | None:
        """The fast token path; None where there is none now.

        It carries the tokens after a stream's first two, as long as nothing else happens to the stream.
        """
        ...

    def on_done(self, done: Done) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Running(Protocol):
    def cancel(self, reason: str) -> None:
        """End it on the nodes; nobody wants its tokens. Idempotent, also after its end."""
        ...

    def finish(self, num_output: int) -> None:
        """End it well after `num_output` tokens, because a stop string matched. Its nodes are told at once. `on_done`
        comes soon, and what comes before it is not for the client. Idempotent.
        """
        ...


class Readiness(msgspec.Struct, frozen=True):
    """Whether requests can be served.

    is_model_known: a model's text files are loaded.
    refusal: why none can be while the nodes stay the same; None where one may be.
    blocked: why no node would take a request now; None: one would.
    is_awaited: requests wait for the first node.
    """

    is_model_known: bool
    refusal: str | None = None
    blocked: str | None = None
    is_awaited: bool = False

    @property
    def can_serve(self) -> bool:
        return self.is_model_known and self.blocked is None


class Dispatcher(Protocol):
    def start(self, generation: Generation, sink: Sink) -> Running:
        """Run a generation by the module's contract. What keeps it from running goes to the sink too."""
        ...

    def models(self) -> Sequence[ModelInfo]:
        """Of each name the newest version. Empty while no node is known."""
        ...

    def versions(self, model: str) -> Sequence[ModelInfo]:
        """All versions of a model's weights that nodes have, the newest first; empty for an unknown name."""
        ...

    def choose_version(self, model: str, request: str, mode: Force | None) -> ModelInfo:
        """The version for an API request that names none. Safe in any thread."""
        ...

    def text(self, model: str) -> TextModel:
        """The model's tokenizer and template; raises UnknownModel or Unavailable."""
        ...

    @property
    def awaits_model(self) -> bool:
        """Whether no model is served yet and requests wait for one."""
        ...

    async def first_model(self) -> None:
        """Return once a model is served. Raises Overloaded or Unavailable."""
        ...

    def readiness(self) -> Readiness:
        """Whether requests can be served now, and why not."""
        ...
