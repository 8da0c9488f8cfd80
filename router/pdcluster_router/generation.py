"""The seam between what speaks to clients (HTTP, gRPC) and `dispatch`: one Generation in, a stream of Chunks and one Done out.

Plain values. Nothing here knows HTTP, JSON, sockets or how a pair of nodes is chosen.

The contract of `Dispatcher.generate`:
  1. The first event is a Chunk and carries the route that was known when the first token came; the last event is a Done.
  2. Chunks come strictly by position, each output token once, whatever attempts ran behind them.
  3. Failure is an exception of `errors`, before or after the first Chunk; nothing comes after it.
  4. `aclose()` before the end, or cancelling the task that waits in it, cancels the request on both legs.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pdcluster.messages import FinishReason, Sampling, TokenLogprobs

if TYPE_CHECKING:
    from pdcluster.api.text import TextModel

Mode = Literal["remote", "local"]
Force = Literal["auto", "remote", "local"]
HangUp = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """In whose name a request runs and how urgent it is. priority: lower goes first."""

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


ANYBODY = Standing()


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice of one API request, ready to run.

    request: id, unique per choice; token_ids: the prompt, array('i'); deadline_s: seconds the caller gives it;
    salt: what names the prefix cache it shares, from its tenant and the request's own cache_salt, b"" for none. mode: that it must have, None for the
    router's own; session: key of its conversation, "" for none. client_id: what its client calls it, "" for none. hang_up: ends a wait for a client
    that does not read; None where there is no such wait.
    """

    request: str
    model: str
    token_ids: array[int]
    sampling: Sampling
    deadline_s: float
    salt: bytes = b""
    standing: Standing = ANYBODY
    mode: Force | None = None
    session: str = ""
    client_id: str = ""
    hang_up: HangUp | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request runs: mode local has no prefill leg of its own, so `prefill` is None there; backend names the transfer ("" for none)."""

    mode: Mode
    prefill: str | None
    decode: str | None
    backend: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one request's life, as far as they are known; None where there is no such moment (no second token)."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    ttft_s: float | None = None
    ttst_s: float | None = None
    decode_s: float = 0.0
    decode_tokens: int = 0
    transfer_bytes: int = 0
    pulled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output tokens, the first of them at `position`. prompt_logprobs come with the first chunk, one per prompt token but the first."""

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    route: Route


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a generation that went well. stop_token: the id that ended it, if one did (it is among the emitted tokens)."""

    reason: FinishReason
    stop_token: int | None
    cached_tokens: int
    attempts: int
    route: Route
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the router knows of a model that some node serves. created: Unix seconds; max_len: prompt and output tokens together."""

    id: str
    created: int
    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Dispatcher(Protocol):
    def generate(self, generation: Generation) -> AsyncGenerator[Chunk | Done, None]:
        """Run it; see the module's contract. Raises subclasses of errors.PdclusterError."""
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
