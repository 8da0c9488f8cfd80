"""The seam between front doors (HTTP, gRPC) and dispatch.

One Generation goes in. Chunks and one Done come out. These are plain values: they know no HTTP, JSON, sockets or nodes.

`Dispatcher.start` calls its Sink without a task or queue between:

1. `on_chunk` comes first, with the route that was known at the first token. `on_done` comes last.
2. Chunks come strictly by position. Each output token comes once, whatever attempts ran.
3. A failure is `on_error` with an error of `errors`, before or after the first chunk. Nothing follows it.
4. The sink may be called before `start` returns. After `Running.cancel` the sink is not called.

`stream.events_of` makes an event stream of this.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from pdcluster.api.openai.replies import Timeline as Timeline
from pdcluster.core.messages import FinishReason, Sampling, TokenLogprobs

if TYPE_CHECKING:
    from pdcluster.api.text.model_text import TextModel

Mode = Literal["remote", "local"]
Force = Literal["auto", "remote", "local"]
HangUp = Callable[[], None]
# Takes plain continuations of a stream, by position, without a TokenChunk. False: it must come as a chunk.
Take = Callable[[int, tuple[int, ...]], bool]


class TenantPriority(msgspec.Struct, frozen=True):
    """In whose name a request runs, and how urgent it is.

    priority: lower goes first.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


ANYBODY = TenantPriority()


class Generation(msgspec.Struct, frozen=True):
    """One choice of one API request, ready to run.

    request: id, unique per choice.
    token_ids: the prompt, array('i').
    deadline_s: seconds that the caller allows.
    salt: names the shared prefix cache; b"" for none.
    mode: the required mode; None for the router's own.
    session: key of its conversation, "" for none.
    client_id: the client's own name for it, "" for none.
    hang_up: ends a wait for a client that does not read; None where there is none.
    leads: other choices of the prompt share its KV.
    parent: the choice whose KV it shares.
    """

    request: str
    model: str
    token_ids: array[int]
    sampling: Sampling
    deadline_s: float
    salt: bytes = b""
    standing: TenantPriority = ANYBODY
    mode: Force | None = None
    session: str = ""
    client_id: str = ""
    hang_up: HangUp | None = None
    leads: bool = False
    parent: str | None = None


class RequestRoute(msgspec.Struct, frozen=True):
    """Where a request runs.

    prefill: None in mode local.
    backend: the transfer, "" for none.
    cached_tokens: of the prompt; None until a node reported it.
    attempts: with the one that runs.
    """

    mode: Mode
    prefill: str | None
    decode: str | None
    backend: str
    cached_tokens: int | None = None
    attempts: int = 1


class TokenChunk(msgspec.Struct, frozen=True):
    """New output tokens from `position` on.

    prompt_logprobs: come with the first chunk, one per prompt token but the first.
    """

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    route: RequestRoute


class Done(msgspec.Struct, frozen=True):
    """The good end of a generation.

    stop_token: the id that ended it, if any; it is among the emitted tokens.
    """

    reason: FinishReason
    stop_token: int | None
    cached_tokens: int
    attempts: int
    route: RequestRoute
    timeline: Timeline


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that some node serves.

    created: Unix seconds.
    max_len: prompt and output tokens together.
    """

    id: str
    created: int
    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Sink(Protocol):
    """Receives the tokens, in the router's event loop. It neither blocks nor raises."""

    def on_chunk(self, chunk: TokenChunk) -> None: ...

    def way(self) -> Take | None:
        """The fast path for tokens after a stream's first two, while nothing else happens; None where there is none."""
        ...

    def on_done(self, done: Done) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Running(Protocol):
    def cancel(self, reason: str) -> None:
        """End it on the nodes; nobody wants its tokens. Idempotent, also after its end."""
        ...

    def finish(self, num_output: int) -> None:
        """A good end after that many tokens: a stop string matched."""
        ...


class Dispatcher(Protocol):
    def start(self, generation: Generation, sink: Sink) -> Running:
        """Run a generation by the module's contract. The sink also receives what keeps it from running."""
        ...

    def models(self) -> Sequence[ModelInfo]:
        """Empty while no node is known."""
        ...

    def text(self, model: str) -> TextModel:
        """The model's tokenizer and template; raises UnknownModel or Unavailable."""
        ...

    def is_ready(self) -> bool:
        """Whether some route could take a request now."""
        ...

    def refusal(self) -> str | None:
        """Why no request can be served while the same nodes are there; None where one may be."""
        ...
