"""A Dispatcher that plays a script instead of a cluster, and an HTTP server in front of it. Tokens come one per chunk,
as a step gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from tiny_tokenizers import byte_level_files
from version_choice import FirstVersion

from pdcluster.api.text.model_text import TextModel
from pdcluster.core.errors import PdclusterError, UnknownModel
from pdcluster.core.messages import FinishReason, TokenLogprobs
from pdcluster_router.core.generation import (
    Done,
    Generation,
    ModelInfo,
    Readiness,
    RequestRoute,
    Sink,
    Timeline,
    TokenChunk,
)
from pdcluster_router.frontend.app import HttpSettings, create_app
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import listening, router_metrics

MODEL = "tiny"
TEXT = TextModel(byte_level_files())
EOS = TEXT.eos_token_ids[0]
MAX_LEN = 256
VOCAB = TEXT.vocab_size + 8  # padded, as models have it
ROUTE = RequestRoute("remote", "p-1", "d-1", "shm")


@dataclass(frozen=True)
class Wait:
    """Go on when the event is set."""

    event: asyncio.Event


@dataclass(frozen=True)
class Tokens:
    """One chunk."""

    ids: tuple[int, ...]


Step = Wait | Tokens | PdclusterError | Exception


def says(text: str, reason: FinishReason = "eos") -> list[Step]:
    """A chunk per token of the text, and the end of sequence unless it ends by length."""
    ids = [*TEXT.encode(text, add_special_tokens=False), *([EOS] if reason == "eos" else [])]
    return [Tokens((token_id,)) for token_id in ids]


def logprobs_of(token_id: int, wanted: int) -> TokenLogprobs:
    """Any fixed numbers: the token is the best of `wanted`, the others are its neighbours. Without any it is the
    third."""
    others = tuple((token_id + distance) % VOCAB for distance in range(wanted))
    return TokenLogprobs(-0.5, others, tuple(-0.5 - distance for distance in range(wanted)), 3)


class Played:
    """Implements generation.Running: tells a sink what a stream of events says, in a task of its own."""

    def __init__(self, events: AsyncGenerator[TokenChunk | Done, None], sink: Sink, stopped: Done) -> None:
        """stopped: what it ends with at a stop string."""
        self._sink, self._stopped = sink, stopped
        self._task = asyncio.create_task(self._tell(events, sink))

    def finish(self, num_output: int) -> None:
        if not self._task.done():
            self.cancel("a stop string came")
            self._sink.on_done(self._stopped)

    def cancel(self, reason: str) -> None:
        self._task.cancel()

    async def _tell(self, events: AsyncGenerator[TokenChunk | Done, None], sink: Sink) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Done):
                        sink.on_done(event)
                    else:
                        sink.on_chunk(event)
        except Exception as error:
            sink.on_error(error)


@dataclass
class ScriptedDispatcher(FirstVersion):
    script: Callable[[Generation], Iterable[Step]] = lambda _: says("hello world")
    route: RequestRoute = ROUTE
    cached_tokens: int = 3
    is_up: bool = True
    # Why no node takes a request now.
    blocked: str | None = None
    max_len: int = MAX_LEN
    started: list[Generation] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def start(self, generation: Generation, sink: Sink) -> Played:
        return Played(self.generate(generation), sink, self._done("stop", None, 0))

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenChunk | Done, None]:
        self.started.append(generation)
        completed = False
        try:
            async for event in self._play(generation):
                yield event
            completed = True
        finally:
            (self.ended if completed else self.cancelled).append(generation.request)

    async def _play(self, generation: Generation) -> AsyncIterator[TokenChunk | Done]:
        position, last = 0, None
        sampling = generation.sampling
        for step in self.script(generation):
            if isinstance(step, Wait):
                await step.event.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                ids = step.ids[: sampling.max_tokens - position]
                yield self._chunk(generation, position, ids)
                position, last = position + len(ids), ids[-1]
                await asyncio.sleep(0)
                if position >= sampling.max_tokens:
                    break
        stopped = last in (EOS, *sampling.stop_token_ids)
        reason: FinishReason = "length" if not stopped else "eos" if last == EOS else "stop"
        yield self._done(reason, last if stopped else None, position)

    def _done(self, reason: FinishReason, stop_token: int | None, num_output: int) -> Done:
        timeline = Timeline(queue_s=0.25, prefill_s=0.5, transfer_bytes=4096, decode_tokens=num_output - 1)
        return Done(reason, stop_token, self.cached_tokens, self.route.attempts, self.route, timeline)

    def _chunk(self, generation: Generation, position: int, ids: tuple[int, ...]) -> TokenChunk:
        wanted, prompt = generation.sampling.logprobs, generation.sampling.prompt_logprobs
        logprobs = () if wanted is None else tuple(logprobs_of(token_id, wanted) for token_id in ids)
        prompt_logprobs = (
            ()
            if prompt is None or position
            else tuple(logprobs_of(token_id, prompt) for token_id in generation.token_ids[1:])
        )
        return TokenChunk(position, ids, logprobs, prompt_logprobs, self.route)

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo(MODEL, 1_700_000_000, self.max_len, VOCAB, (EOS,))] if self.is_up else []

    def text(self, model: str) -> TextModel:
        if model != MODEL:
            raise UnknownModel(f"no model {model}", "model")
        return TEXT

    @property
    def awaits_model(self) -> bool:
        return False

    async def first_model(self) -> None:
        raise AssertionError("nothing is waited for here")

    def readiness(self) -> Readiness:
        return Readiness(self.is_up, None, self.blocked)


@asynccontextmanager
async def served(
    dispatcher: ScriptedDispatcher, settings: HttpSettings | None = None, places: Places | None = None
) -> AsyncIterator[str]:
    """The application behind a real socket; gives its base URL."""
    app = create_app(dispatcher, settings or HttpSettings(metrics_age_s=0.0), router_metrics(), places)
    async with listening(app, "127.0.0.1:0", drain_s=1.0) as address:
        yield f"http://{address}"


async def until(condition: Callable[[], bool]) -> None:
    """Waits, under the test's own time limit, for something that must happen."""
    while not condition():
        await asyncio.sleep(0.002)


TEMPLATE = """{% if tools %}tools:{{ tools | tojson }} say <tool_call>{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ message.content or '' }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% if open %}<think>
{% endif %}{% endif %}{# </think> #}"""
SPEAKING = TextModel({**byte_level_files(), "chat_template.jinja": TEMPLATE.encode()})


class SpeakingDispatcher(ScriptedDispatcher):
    """Of a model that calls tools and marks its thoughts."""

    def text(self, model: str) -> TextModel:
        return SPEAKING
