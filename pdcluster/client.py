"""A typed client of the gRPC API, `Client` for threads and `AsyncClient` for asyncio.

    with Client("127.0.0.1:50051") as client:
        for output in client.generate("def add(a, b):", max_tokens=32, temperature=0.0):
            print(output.text, end="")

    Client("llm.example.com:50051", ca="ca.pem")  # over TLS

Both raise the errors of `pdcluster.core.errors`, as the server meant them. Leaving the iteration early cancels the
request on every node.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack, cast

import grpc

from pdcluster.core.errors import BadRequest
from pdcluster.rpc import inference_pb2 as pb
from pdcluster.rpc import inference_pb2_grpc as stubs
from pdcluster.rpc.status import error_of
from pdcluster.settings.tls_trust import read_roots

MAX_REPLY_BYTES = 64 << 20
_CHANNEL = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
)
FinishReason = Literal["stop", "length", "tool_calls", "abort"]
_FINISH: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_ABORT: "abort",
}
Headers = Mapping[str, str]
ToolMode = Literal["auto", "none", "required"]
_TOOL_MODES: dict[ToolMode, pb.ToolMode] = {
    "auto": pb.TOOL_MODE_AUTO,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; role: system, developer, user, assistant or tool. Of an assistant also what it called and
    thought, of a tool the call that it answers."""

    role: str
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a chat's model may call. parameters: a JSON schema, as text or as an object; strict: its
    arguments are held to it."""

    name: str
    description: str | None = None
    parameters: str | Mapping[str, object] | None = None
    strict: bool | None = None


# Text, token ids, or the turns of a chat.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Structured:
    """What the output must look like; set one of them. json: a JSON schema, as text or as an object; grammar: EBNF."""

    json: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None


class PlainOptions(TypedDict, total=False):
    """What a request may set; the meaning is that of the HTTP API's field of the same name. logprobs: number of
    alternatives beside each token."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    n: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    logprobs: int
    echo: bool
    cache_salt: str
    priority: int
    return_prompt_token_ids: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    prompt_logprobs: int
    prompt_cache_key: str
    weights: str
    weights_change: Literal["fail", "replay"]


class ChatOptions(TypedDict, total=False):
    """For a chat. tool_choice: a tool that has to be called, or whether one may or has to be; template_kwargs: for the
    model's chat template."""

    tools: Sequence[Tool]
    tool_choice: ToolMode | Tool
    parallel_tool_calls: bool
    template_kwargs: Mapping[str, object]
    add_generation_prompt: bool
    continue_final_message: bool


class Options(PlainOptions, ChatOptions, total=False):
    """All that a request may set."""

    structured_outputs: Structured


@dataclass(frozen=True, slots=True)
class Logprobs:
    """logprob None: nothing predicts a prompt's first token."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Route:
    """prefill is "" in mode local, transfer "" where no KV moves."""

    mode: str
    prefill: str
    decode: str
    transfer: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds; None where it is not known (yet)."""

    ttft_s: float | None
    ttst_s: float | None
    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    exposed_s: float | None
    decode_s: float | None
    transfer_bytes: int | None
    attempts: int | None
    placed_s: float | None


@dataclass(frozen=True, slots=True)
class WeightsRange:
    """Which weights made the output tokens from from_position up to, and without, to_position."""

    from_position: int
    to_position: int
    label: str
    digest: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of one call of a tool; id and name come with its first part, else they are ""."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Output:
    """One message of the stream: what became certain of one choice. route and timings come with a choice's first and
    last output, finish_reason and weights with its last, usage with the last of all. reasoning and tool_calls, of a
    chat, are no part of the text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    position: int
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason | None
    route: Route | None
    timings: Timings | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Logprobs, ...]
    usage: Usage | None
    reasoning: str
    tool_calls: tuple[CallDelta, ...]
    weights: tuple[WeightsRange, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole request: the text of each choice, how each ended and which weights made it; of a chat also what was
    thought and called."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[FinishReason, ...]
    usage: Usage
    reasonings: tuple[str, ...]
    tool_calls: tuple[tuple[ToolCall, ...], ...]
    weights: tuple[tuple[WeightsRange, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """created: Unix seconds; max_len: prompt and output tokens together."""

    id: str
    created: int
    max_len: int
    vocab_size: int


class Client:
    """Safe to use from several threads. timeout_s of a call is its deadline, which the server honours on every node.
    api_key: of a tenant, where the cluster has some. ca: a file with the certificates that the router's is signed by,
    in PEM; without it calls are in clear text. tls_name: what that certificate is valid for, where it is not the
    address's host."""

    def __init__(
        self, address: str, api_key: str | None = None, *, ca: Path | str | None = None, tls_name: str | None = None
    ) -> None:
        self._address = address
        self._metadata = _metadata(api_key)
        if ca is None:
            self._channel = grpc.insecure_channel(address, _CHANNEL)
        else:
            self._channel = grpc.secure_channel(address, *_secure(ca, tls_name))
        self._stub = stubs.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def models(self, timeout_s: float = 10.0) -> list[Model]:
        try:
            return _models(self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata))
        except grpc.RpcError as error:
            raise error_of(error, self._address) from error

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        headers: Headers | None = None,
        **options: Unpack[Options],
    ) -> Generator[Output, None, None]:
        """Outputs as they come; close the generator to cancel. headers: such as x-request-id and traceparent."""
        call = self._stub.Generate(
            _request(prompt, options), timeout=timeout_s, metadata=(*self._metadata, *_pairs(headers))
        )
        try:
            for reply in call:
                yield _output(reply)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from error
        finally:
            call.cancel()

    def complete(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        headers: Headers | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        with closing(self.generate(prompt, timeout_s=timeout_s, headers=headers, **options)) as outputs:
            return _whole(list(outputs))


class AsyncClient:
    """As `Client`, for the event loop it was made in."""

    def __init__(
        self, address: str, api_key: str | None = None, *, ca: Path | str | None = None, tls_name: str | None = None
    ) -> None:
        self._address = address
        self._metadata = _metadata(api_key)
        if ca is None:
            self._channel = grpc.aio.insecure_channel(address, _CHANNEL)
        else:
            self._channel = grpc.aio.secure_channel(address, *_secure(ca, tls_name))
        self._stub = stubs.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def models(self, timeout_s: float = 10.0) -> list[Model]:
        try:
            return _models(
                await self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata)
            )
        except grpc.RpcError as error:
            raise error_of(error, self._address) from error

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        headers: Headers | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Output, None]:
        """Outputs as they come; close the generator to cancel. headers: such as x-request-id and traceparent."""
        call = self._stub.Generate(
            _request(prompt, options), timeout=timeout_s, metadata=(*self._metadata, *_pairs(headers))
        )
        try:
            async for reply in call:
                yield _output(reply)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from error
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        headers: Headers | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        async with aclosing(self.generate(prompt, timeout_s=timeout_s, headers=headers, **options)) as outputs:
            return _whole([output async for output in outputs])


# ---------------------------------------------------------------- to and from protobuf


def _secure(ca: Path | str, name: str | None) -> tuple[grpc.ChannelCredentials, Sequence[tuple[str, object]]]:
    """Credentials and options of a channel. Raises ConfigError."""
    named = () if name is None else (("grpc.ssl_target_name_override", name),)
    return grpc.ssl_channel_credentials(read_roots(Path(ca))), (*_CHANNEL, *named)


def _pairs(headers: Headers | None) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in (headers or {}).items())


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()


def _request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    try:
        for_chat = ChatOptions.__annotations__.keys()
        plain = cast(
            PlainOptions,
            {name: value for name, value in options.items() if name != "structured_outputs" and name not in for_chat},
        )
        request = pb.GenerateRequest(**plain)
        if (asked := options.get("structured_outputs")) is not None:
            request.structured_outputs.CopyFrom(_structured(asked))
        if isinstance(prompt, str):
            request.text = prompt
        elif all(isinstance(part, int) for part in prompt):
            request.token_ids.ids.extend(part for part in prompt if isinstance(part, int))
            request.token_ids.SetInParent()
        else:
            request.chat.CopyFrom(_chat(_turns(prompt), options))
        if request.WhichOneof("prompt") != "chat" and (given := sorted(for_chat & options.keys())):
            raise BadRequest(
                f"{given[0]} is for a chat; send a list of Message as the prompt, or leave it out", given[0]
            )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(
            f"the request cannot be sent: {error}; see pdcluster.client.Options for what may be set"
        ) from error
    return request


def _chat(turns: Sequence[Message], options: Options) -> pb.Chat:
    chat = pb.Chat(
        messages=[_message(said) for said in turns], tools=[_tool(tool) for tool in options.get("tools", ())]
    )
    for name in ("parallel_tool_calls", "add_generation_prompt", "continue_final_message"):
        if (given := options.get(name)) is not None:
            setattr(chat, name, given)
    if (choice := options.get("tool_choice")) is not None:
        chat.tool_choice.CopyFrom(
            pb.ToolChoice(function=choice.name) if isinstance(choice, Tool) else pb.ToolChoice(mode=_mode(choice))
        )
    if (kwargs := options.get("template_kwargs")) is not None:
        chat.template_kwargs = json.dumps(kwargs)
    return chat


def _mode(choice: ToolMode) -> pb.ToolMode:
    if choice not in _TOOL_MODES:
        raise BadRequest(
            f"tool_choice is {choice!r}; it must be a Tool or one of {', '.join(_TOOL_MODES)}", "tool_choice"
        )
    return _TOOL_MODES[choice]


def _message(said: Message) -> pb.ChatMessage:
    calls = [pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in said.tool_calls]
    return pb.ChatMessage(
        role=said.role,
        content=said.content,
        tool_calls=calls,
        reasoning=said.reasoning,
        tool_call_id=said.tool_call_id,
        name=said.name,
    )


def _tool(tool: Tool) -> pb.Tool:
    if not isinstance(tool, Tool):  # a dict, as HTTP has them
        raise BadRequest(f"tools has a {type(tool).__name__}; it takes pdcluster.client.Tool", "tools")
    parameters = (
        tool.parameters if tool.parameters is None or isinstance(tool.parameters, str) else json.dumps(tool.parameters)
    )
    return pb.Tool(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)


def _structured(asked: Structured) -> pb.StructuredOutputs:
    given = [field.name for field in fields(Structured) if getattr(asked, field.name) != field.default]
    if len(given) != 1:
        raise BadRequest(
            f"structured_outputs must set exactly one of {', '.join(Structured.__slots__)}", "structured_outputs"
        )
    value = getattr(asked, given[0])
    if given[0] == "choice":
        return pb.StructuredOutputs(choice=pb.Choices(texts=value))
    if given[0] == "json" and not isinstance(value, str):
        value = json.dumps(value)
    return pb.StructuredOutputs(**{given[0]: value})


def _turns(prompt: Iterable[object]) -> list[Message]:
    turns = [part for part in prompt if isinstance(part, Message)]
    if len(turns) != len(list(prompt)):
        raise BadRequest("the prompt mixes kinds; send a string, token ids, or a list of Message", "prompt")
    return turns


def _models(reply: pb.ListModelsReply) -> list[Model]:
    return [Model(model.id, model.created, model.max_len, model.vocab_size) for model in reply.models]


def _output(reply: pb.GenerateReply) -> Output:
    return Output(
        index=reply.index,
        text=reply.text,
        token_ids=tuple(reply.token_ids),
        position=reply.position,
        logprobs=_logprobs(reply.logprobs),
        finish_reason=_FINISH.get(reply.finish_reason),
        route=Route(reply.route.mode, reply.route.prefill, reply.route.decode, reply.route.transfer)
        if reply.HasField("route")
        else None,
        timings=_timings(reply.timings) if reply.HasField("timings") else None,
        prompt_token_ids=tuple(reply.prompt_token_ids),
        prompt_logprobs=_logprobs(reply.prompt_logprobs),
        usage=_usage(reply.usage) if reply.HasField("usage") else None,
        reasoning=reply.reasoning,
        tool_calls=tuple(CallDelta(call.index, call.id, call.name, call.arguments) for call in reply.tool_calls),
        weights=tuple(
            WeightsRange(each.from_position, each.to_position, each.label, each.digest, each.epoch)
            for each in reply.weights
        ),
    )


def _logprobs(tokens: Iterable[pb.TokenLogprobs]) -> tuple[Logprobs, ...]:
    return tuple(
        Logprobs(
            token.token_id,
            token.logprob if token.HasField("logprob") else None,
            tuple(zip(token.top_ids, token.top_logprobs, strict=True)),
        )
        for token in tokens
    )


def _timings(timings: pb.Timings) -> Timings:
    return Timings(**{name: getattr(timings, name) if timings.HasField(name) else None for name in Timings.__slots__})


def _usage(usage: pb.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens if usage.HasField("cached_tokens") else None
    )


def _whole(outputs: Sequence[Output]) -> Completion:
    num_choices = max(output.index for output in outputs) + 1
    of = [[output for output in outputs if output.index == index] for index in range(num_choices)]
    reasons = [next(output.finish_reason for output in choice if output.finish_reason) for choice in of]
    usage = next(output.usage for output in outputs if output.usage)
    texts = tuple("".join(output.text for output in choice) for choice in of)
    tokens = tuple(tuple(token_id for output in choice for token_id in output.token_ids) for choice in of)
    reasonings = tuple("".join(output.reasoning for output in choice) for choice in of)
    calls = tuple(_calls(choice) for choice in of)
    weights = tuple(tuple(each for output in choice for each in output.weights) for choice in of)
    return Completion(texts, tokens, tuple(reasons), usage, reasonings, calls, weights)


def _calls(outputs: Sequence[Output]) -> tuple[ToolCall, ...]:
    """Of one choice, put together."""
    deltas = [delta for output in outputs for delta in output.tool_calls]
    return tuple(
        ToolCall(first.id, first.name, "".join(delta.arguments for delta in deltas if delta.index == first.index))
        for first in deltas
        if first.id
    )
