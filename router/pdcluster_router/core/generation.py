"""The seam between what speaks to clients (HTTP, gRPC) and `dispatch`: one Generation in, a stream of Chunks and one
Done out.

Plain values. Nothing here knows HTTP, JSON, sockets or how a pair of nodes is chosen.

The contract of `Dispatcher.start`, whose Sink hears of the generation as it goes, without a task or a queue between:
  1. First `on_chunk`, with the route that was known when the first token came; last `on_done`.
  2. Chunks come strictly by position, each output token once, whatever attempts ran behind them.
  3. Failure is `on_error`, with an error of `errors` unless there is a bug, before or after the first Chunk; nothing
     comes after it.
  4. The sink may be called before `start` returns. `Running.cancel` cancels the request on both legs; the sink hears
     nothing more.

`streaming.events_of` makes the same a stream of events, for who prefers to wait for them.
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
# Takes what is nothing but more of a stream, its position and tokens, without a Chunk. False: it was not taken, and
# comes as one.
Take = Callable[[int, tuple[int, ...]], bool]


class TenantPriority(msgspec.Struct, frozen=True):
    """In whose name a request runs and how urgent it is. priority: lower goes first."""

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


ANYBODY = TenantPriority()


class Generation(msgspec.Struct, frozen=True):
    """One choice of one API request, ready to run.

    request: id, unique per choice; token_ids: the prompt, array('i'); deadline_s: seconds the caller gives it; salt:
    what names the prefix cache it shares, from its tenant and the request's own cache_salt, b"" for none. mode: that it
    must have, None for the router's own; session: key of its conversation, "" for none. client_id: what its client
    calls it, "" for none. hang_up: ends a wait for a client that does not read; None where there is no such wait.
    leads: other choices of the same prompt follow; leader: the one that it follows itself.
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
    """Where a request runs: mode local has no prefill leg of its own, so `prefill` is None there; backend names the
    transfer ("" for none). cached_tokens: of the prompt, None until a node has said so; attempts: the one that runs
    included."""

    mode: Mode
    prefill: str | None
    decode: str | None
    backend: str
    cached_tokens: int | None = None
    attempts: int = 1


class TokenChunk(msgspec.Struct, frozen=True):
    """New output tokens, the first of them at `position`. prompt_logprobs come with the first chunk, one per prompt
    token but the first."""

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    route: RequestRoute


class Done(msgspec.Struct, frozen=True):
    """The end of a generation that went well. stop_token: the id that ended it, if one did (it is among the emitted
    tokens)."""

    reason: FinishReason
    stop_token: int | None
    cached_tokens: int
    attempts: int
    route: RequestRoute
    timeline: Timeline


class ModelInfo(msgspec.Struct, frozen=True):
    """What the router knows of a model that some node serves. created: Unix seconds; max_len: prompt and output tokens
    together."""

    id: str
    created: int
    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Sink(Protocol):
    """Whoever wants the tokens. Called in the router's event loop; it neither blocks nor raises."""

    def on_chunk(self, chunk: TokenChunk) -> None: ...

    def way(self) -> Take | None:
        """A short way for what comes after a stream's first two tokens, as long as nothing else happens to it; None:
        there is none, or not now."""
        ...

    def on_done(self, done: Done) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Running(Protocol):
    def cancel(self, reason: str) -> None:
        """End it on the nodes; nobody wants its tokens any more. Idempotent, also after its end."""
        ...

    def finish(self, num_output: int) -> None:
        """The same when so many tokens were all that was wanted: a stop string came. A good end."""
        ...


class Dispatcher(Protocol):
    def start(self, generation: Generation, sink: Sink) -> Running:
        """Run it; see the module's contract. What keeps it from running at all is told to the sink, too."""
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
        """Why no request can ever be served while the nodes are those there are; None where there may be one."""
        ...
