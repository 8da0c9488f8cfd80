"""From a checked request to its choices: chat template, tokens, lengths, seeds, one Generation per choice.

Long prompts (`is_long`) take long. Callers prepare them in a thread, so that streams go on.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from secrets import randbits
from typing import Any, cast

import msgspec
from msgspec import structs

from pdcluster.api.openai import limits, requests
from pdcluster.api.openai.answer_shape import AnswerShape
from pdcluster.api.openai.dialogue import Dialogue, dialogue_of, marking_of, offered
from pdcluster.api.openai.replies import ChatFormat, CompletionFormat, Head, ReplyFormat, UsageSoFar
from pdcluster.api.openai.sampling_fields import shaping_of
from pdcluster.api.structured import constraints
from pdcluster.api.text.chat_template import Message
from pdcluster.api.text.choice_text import ChoiceText
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.text.segments import SHORT_CHARACTERS
from pdcluster.api.text.stop_strings import NO_STOPS, StopMatcher
from pdcluster.api.text.template_bounds import PATIENT, Bounds
from pdcluster.api.tools.tool_choice import Offer, offer_of
from pdcluster.api.validate import closest
from pdcluster.core.errors import BadRequest, DeadlineExceeded, Unavailable, UnknownModel
from pdcluster.core.grammar import Grammar
from pdcluster.core.sampling import Sampling
from pdcluster_router.core.generation import Dispatcher, Force, Generation, HangUp, ModelInfo, TenantPriority
from pdcluster_router.core.tenants import ANYBODY, Tenant
from pdcluster_router.core.tracing import RequestTrace
from pdcluster_router.frontend.choices import Clock, Echo, OutputChoice
from pdcluster_router.frontend.grammar_pool import shared_pool

SEED_BITS = 63

DEADLINE = b"x-request-deadline-s"
# Headers of `deadline_of`, `mode_of` and `is_batch_of`.
MODE = b"x-pdcluster-mode"
CLASS = b"x-pdcluster-class"

# Characters that a part of a message, or a tool call, counts beside its text.
PART_CHARACTERS = 16

MAX_PLANS = 256

# The most messages of a body take a third of a second to check, and seconds to render.
MANY_MESSAGES = 256


class Terms(msgspec.Struct, frozen=True):
    """Who a request is, and what the server grants it.

    arrived: monotonic seconds, from which deadline_s counts.
    mode: from the header; None without one.
    client_id, hang_up, trace: see Generation.
    is_batch: it gives way to all other requests.
    """

    request_id: str
    arrived: float
    max_choices: int
    deadline_s: float
    tenant: Tenant = ANYBODY
    mode: Force | None = None
    client_id: str = ""
    hang_up: HangUp | None = None
    trace: RequestTrace | None = None
    is_batch: bool = False

    def standing(self, priority: int | None) -> TenantPriority:
        """Raises BadRequest for a priority that the tenant may not ask for."""
        return self.tenant.standing(priority, is_batch=self.is_batch)

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return max(self.deadline_s - (time.monotonic() - self.arrived), 0.0)


class Prepared(msgspec.Struct, frozen=True):
    """A request ready to run.

    choices: in the order of their indexes: all of the first prompt, then all of the second.
    shape: what is asked of each answer, whose grammar is still to come (`constrain`); None for any text.
    """

    choices: list[OutputChoice]
    num_prompts: int
    format: ReplyFormat
    stream: bool
    include_usage: bool
    shape: AnswerShape | None = None

    def constrain(self, grammar: Grammar, left_s: float) -> None:
        """left_s: until its deadline."""
        for choice in self.choices:
            sampling = structs.replace(choice.generation.sampling, grammar=grammar)
            choice.generation = structs.replace(choice.generation, sampling=sampling, deadline_s=left_s)


class ChatApi(msgspec.Struct, frozen=True):
    """The API that a chat is asked in, as far as its answer shows it.

    prefix: of reply ids.
    cuts_length: a length beyond the context is cut to what is left of it; otherwise it is refused.
    moves_system: where a template takes a system message only at the start, later ones become the user's; otherwise
    the template's refusal is the answer.
    """

    make_format: Callable[[Head], ReplyFormat]
    prefix: str
    cuts_length: bool = False
    moves_system: bool = False


OPENAI_CHAT = ChatApi(ChatFormat, "chatcmpl-")


class ServedModel(msgspec.Struct, frozen=True):
    info: ModelInfo
    text: TextModel


class Prompt(msgspec.Struct, frozen=True):
    """One prompt.

    echo: the text to repeat before the output, None for no echo.
    """

    token_ids: array[int]
    echo: str | None = None


def deadline_of(given: str | None, most_s: float) -> float:
    """The deadline of the header x-request-deadline-s: seconds from now, at most what the server allows."""
    if given is None:
        return most_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise BadRequest(
            f"x-request-deadline-s is {given[:100]!r}; it must be a number of seconds above 0, such as 2.5",
            "x-request-deadline-s",
        )
    return min(seconds, most_s)


def mode_of(given: str | None) -> Force | None:
    """The mode of the header x-pdcluster-mode. The body's field pdcluster_mode wins over it."""
    if given is None or given in ("auto", "remote", "local"):
        return cast("Force | None", given)
    raise BadRequest(f"x-pdcluster-mode is {given[:100]!r}; it must be auto, remote or local", "x-pdcluster-mode")


def is_batch_of(given: str | None) -> bool:
    """Whether the header x-pdcluster-class says batch."""
    if given is None or given in ("batch", "interactive"):
        return given == "batch"
    raise BadRequest(f"x-pdcluster-class is {given[:100]!r}; it must be batch or interactive", "x-pdcluster-class")


class VersionAsked(msgspec.Struct, frozen=True):
    """What decides which version of a model's weights a request gets.

    request: id of the API request. label: that its body asks for; None for none.
    """

    request: str
    label: str | None = None
    mode: Force | None = None


def version_asked(request: requests.Common, terms: Terms) -> VersionAsked:
    return VersionAsked(terms.request_id, request.weights, request.pdcluster_mode or terms.mode)


def names_weights(model: str | None, weights: str | None) -> bool:
    """Whether a request asks for its weights by their label."""
    return weights is not None or "@" in (model or "")


def find_model(
    dispatcher: Dispatcher, name: str | None, *, embeds: bool | None = None, asked: VersionAsked | None = None
) -> ServedModel:
    """The model's info and text. name None: the only model, whatever its names and adapters. embeds: raise BadRequest
    for one that does not, or does where it shall generate; None: either will do. asked: None: the newest weights will
    do.

    A name may end in @ and a label of weights.
    """
    models = dispatcher.models()
    if not models:
        raise Unavailable("no node is known yet, so no model can be served; retry, and see /ready")
    if name is None and len({dispatcher.text(info.id) for info in models}) > 1:
        raise BadRequest(f"model is missing; it must be one of {', '.join(model.id for model in models)}", "model")
    for info in models:
        if info.id == name or (name is None and not info.parent):
            _check_kind(info, embeds=info.embeds if embeds is None else embeds)
            text = dispatcher.text(info.id)
            return ServedModel(info if asked is None else _version(dispatcher, info.id, asked), text)
    base, at, label = (name or "").rpartition("@")
    if at and any(info.id == base for info in models):
        if asked is not None and asked.label not in (None, label):
            raise BadRequest(f"weights is {asked.label}, and model {name!r} asks for others; send one", "weights")
        found = find_model(dispatcher, base, embeds=embeds)
        return ServedModel(_labelled(dispatcher, base, label, "model"), found.text)
    known = [model.id for model in models]
    raise UnknownModel(
        f"model {name[:200] if name else name!r} is not served here{closest(name or '', known)}; served: "
        f"{', '.join(known)}",
        "model",
    )


def named_versions(dispatcher: Dispatcher) -> list[tuple[ModelInfo, str]]:
    """The models with all names that requests may use: model, and model@label where it has several versions."""
    found = []
    for model in dispatcher.models():
        found.append((model, model.id))
        versions = dispatcher.versions(model.id)
        if len(versions) > 1:
            found += [(info, f"{info.id}@{info.weights.label}") for info in versions]
    return found


def _version(dispatcher: Dispatcher, model: str, asked: VersionAsked) -> ModelInfo:
    if asked.label is not None:
        return _labelled(dispatcher, model, asked.label, "weights")
    return dispatcher.choose_version(model, asked.request, asked.mode)


def _labelled(dispatcher: Dispatcher, model: str, label: str, param: str) -> ModelInfo:
    """The version of that label. Raises UnknownModel."""
    versions = dispatcher.versions(model)
    for info in versions:
        if info.weights.label == label:
            return info
    known = ", ".join(info.weights.label for info in versions)
    raise UnknownModel(f"model {model!r} is not served here with weights {label[:100]!r}; there are: {known}", param)


def _check_kind(info: ModelInfo, *, embeds: bool) -> None:
    if embeds and not info.embeds:
        raise BadRequest(
            f"model {info.id!r} generates and embeds nothing: the native engine has no embeddings; nodes with --engine "
            "vllm and a pooling model do",
            "model",
        )
    if info.embeds and not embeds:
        raise BadRequest(f"model {info.id!r} embeds and generates nothing; send the text to /v1/embeddings", "model")


def is_long(request: requests.ChatRequest | requests.CompletionRequest | requests.TokenizeRequest) -> bool:
    """Whether rendering and tokenizing take long enough for a thread. Token ids need no tokenizing."""
    if _has_long_forms(request):
        return True
    prompt = None if isinstance(request, requests.ChatRequest) else request.prompt
    if isinstance(prompt, list):
        if prompt and not isinstance(prompt[0], str):
            return False  # all items have one kind, or it is refused
        return sum(len(part) for part in prompt if isinstance(part, str)) > SHORT_CHARACTERS
    if isinstance(prompt, str):
        return len(prompt) > SHORT_CHARACTERS
    if isinstance(request, requests.CompletionRequest) or request.messages is None:
        return False
    messages = request.messages
    return (
        len(messages) > MANY_MESSAGES
        or sum(map(_num_characters, messages)) > SHORT_CHARACTERS
        or _has_long_arguments(request)
    )


def _has_long_forms(request: requests.ChatRequest | requests.CompletionRequest | requests.TokenizeRequest) -> bool:
    """Whether it has tools to render or schemas to check."""
    if (
        isinstance(request, requests.CompletionRequest)
        and request.response_format is None
        and request.structured_outputs is None
    ):
        return False  # the usual case
    tools = None if isinstance(request, requests.CompletionRequest) else request.tools
    forms = (
        None if isinstance(request, requests.TokenizeRequest) else (request.response_format, request.structured_outputs)
    )
    if tools is None and forms in (None, (None, None)):
        return False
    return len(msgspec.json.encode((tools, forms))) > SHORT_CHARACTERS


def _num_characters(message: requests.ChatMessage) -> int:
    """Characters that a template may show."""
    content = message.content or ""
    shown = (
        sum(len(part.text or "") + PART_CHARACTERS for part in content) if isinstance(content, list) else len(content)
    )
    shown += len(requests.reasoning_of(message) or "") + len(message.name or "") + len(message.tool_call_id or "")
    for call in message.tool_calls or ():
        shown += len(call.id or "") + len(call.function.name) + PART_CHARACTERS
        shown += _num_of_arguments(call.function.arguments)
    return shown


def _num_of_arguments(arguments: str | dict[str, object] | None) -> int:
    return len(arguments) if isinstance(arguments, str) else len(msgspec.json.encode(arguments))


def _has_long_arguments(request: requests.ChatRequest | requests.TokenizeRequest) -> bool:
    """Whether it has long tool arguments, which a template may show."""
    kwargs = request.chat_template_kwargs
    return bool(kwargs) and len(msgspec.json.encode(kwargs)) > SHORT_CHARACTERS


async def constrained(prepared: Prepared, terms: Terms) -> Prepared:
    """The same, with the grammar of what is asked of its answers. Raises BadRequest, Overloaded."""
    if prepared.shape is not None:
        try:
            async with asyncio.timeout(terms.left_s):
                grammar = await shared_pool().make(prepared.shape, terms.tenant.name)
        except TimeoutError:
            raise DeadlineExceeded(f"{prepared.shape.param} was not read by the deadline; allow more time") from None
        prepared.constrain(grammar, terms.left_s)
    return prepared


def prepare_chat(
    request: requests.ChatRequest,
    dispatcher: Dispatcher,
    terms: Terms,
    bounds: Bounds = PATIENT,
    api: ChatApi = OPENAI_CHAT,
) -> Prepared:
    """bounds: BRIEF in the event loop. Then it raises TakesLong where the template needs a thread."""
    model = find_model(dispatcher, request.model, embeds=False, asked=version_asked(request, terms))
    marking = marking_of(model.text)
    offer = offered(request, marking)
    rendered = _rendered(request, model, offer, bounds, api)
    limits.check_text(rendered, model.text.bound, model.info, "messages")
    token_ids = encode_rendered(model.text, rendered, bool(request.add_special_tokens), terms.tenant.salt)
    dialogue = dialogue_of(request, offer, marking, rendered)
    build = _Builder(request, model, terms, at_start=not request.continue_final_message, dialogue=dialogue)
    build.shape = dialogue.shape
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limits.check_prompt(len(token_ids), model.info, "messages")
    is_cut = api.cuts_length and asked is not None and asked > model.info.max_len - len(token_ids)
    asked = None if is_cut else asked
    build.is_open_ended = asked is None
    max_tokens = limits.output_tokens(asked, None, len(token_ids), model.info, param)
    sampling = build.sampling(max_tokens, (request.top_logprobs or 0) if request.logprobs else None)
    head = _head(request, api.prefix + terms.request_id, model, len(token_ids), logprobs=bool(request.logprobs))
    build.check_number(1)
    head = structs.replace(head, is_cut=is_cut, temperature=sampling.temperature, top_p=sampling.top_p or 1.0)
    return build.prepared([Prompt(token_ids)], [sampling], api.make_format(head))


def count_chat(request: requests.ChatRequest, model: ServedModel, tenant: Tenant, bounds: Bounds, api: ChatApi) -> int:
    """Tokens of the prompt that `prepare_chat` makes, however long it is."""
    rendered = _rendered(request, model, offered(request, marking_of(model.text)), bounds, api)
    limits.check_bytes(rendered, model.text.bound, model.info, "messages")
    return len(encode_rendered(model.text, rendered, bool(request.add_special_tokens), tenant.salt))


def _rendered(
    request: requests.ChatRequest, model: ServedModel, offer: Offer | None, bounds: Bounds, api: ChatApi
) -> str:
    kwargs = requests.template_kwargs_of(request)
    try:
        return render_chat(model.text, request, offer, kwargs, bounds)
    except BadRequest:
        moved = requests.with_system_first(request) if api.moves_system else None
        if moved is None:
            raise
        return render_chat(model.text, moved, offer, kwargs, bounds)


def prepare_completion(request: requests.CompletionRequest, dispatcher: Dispatcher, terms: Terms) -> Prepared:
    model = find_model(dispatcher, request.model, embeds=False, asked=version_asked(request, terms))
    build = _Builder(request, model, terms, at_start=False)
    given = requests.prompts_of(request)
    build.check_number(len(given))
    prompts, samplings = [], []
    if constraints.asks(request):
        constraints.check_end(request)
        param = constraints.param_of(request.structured_outputs)
        build.shape = AnswerShape(param, request.response_format, request.structured_outputs)
    for index, prompt in enumerate(given):
        param = "prompt" if len(given) == 1 else f"prompt[{index}]"
        prompts.append(_encode_prompt(prompt, request, model, param))
        num_prompt = len(prompts[-1].token_ids)
        max_tokens = limits.output_tokens(
            request.max_tokens, limits.DEFAULT_COMPLETION_TOKENS, num_prompt, model.info, "max_tokens"
        )
        samplings.append(build.sampling(max_tokens, request.logprobs))
    num_prompt = sum(map(len, map(TOKEN_IDS, prompts)))
    head = _head(request, "cmpl-" + terms.request_id, model, num_prompt, logprobs=request.logprobs is not None)
    return build.prepared(prompts, samplings, CompletionFormat(head))


def tokenize(
    request: requests.TokenizeRequest, model: ServedModel, tenant: Tenant = ANYBODY, bounds: Bounds = PATIENT
) -> array[int]:
    """bounds: see prepare_chat."""
    if request.prompt is not None:
        limits.check_bytes(request.prompt, model.text.bound, model.info, "prompt")
        return model.text.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    requests.check_template_kwargs(request.chat_template_kwargs)
    offer = offer_of(request.tools, None, None)
    rendered = render_chat(model.text, request, offer, request.chat_template_kwargs, bounds)
    limits.check_bytes(rendered, model.text.bound, model.info, "messages")
    return encode_rendered(model.text, rendered, bool(request.add_special_tokens), tenant.salt)


def encode_rendered(text: TextModel, rendered: str, add_special_tokens: bool, salt: bytes) -> array[int]:
    """Tokenize a rendered chat. The template writes special tokens, so none are added unless the request insists.

    salt: of the tenant.
    """
    return text.encode(rendered, add_special_tokens=True) if add_special_tokens else text.encode_chat(rendered, salt)


def render_chat(
    text: TextModel,
    request: requests.ChatRequest | requests.TokenizeRequest,
    offer: Offer | None,
    kwargs: Mapping[str, Any] | None,
    bounds: Bounds = PATIENT,
) -> str:
    messages: Sequence[Message] = requests.messages_of(request.messages or [])
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise BadRequest(
            "add_generation_prompt and continue_final_message contradict each other; set one of them",
            "continue_final_message",
        )
    generation_prompt = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    tools = None if offer is None else offer.for_template()
    return text.render_chat(
        messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        kwargs=kwargs,
        tools=tools,
        bounds=bounds,
    )


def _encode_prompt(
    prompt: str | Sequence[int], request: requests.CompletionRequest, model: ServedModel, param: str
) -> Prompt:
    token_ids = encode_prompt(prompt, model, param, add_special_tokens=request.add_special_tokens is not False)
    if isinstance(prompt, str):
        return Prompt(token_ids, prompt if request.echo else None)
    echo = (
        model.text.decode(token_ids, skip_special_tokens=request.skip_special_tokens is not False)
        if request.echo
        else None
    )
    return Prompt(token_ids, echo)


def encode_prompt(
    prompt: str | Sequence[int], model: ServedModel, param: str, *, add_special_tokens: bool, least_output: int = 1
) -> array[int]:
    """Token ids of a text, or checked ones. least_output: tokens that must fit behind them."""
    if isinstance(prompt, str):
        if not prompt:
            raise BadRequest(f"{param} is empty; send at least one character", param)
        limits.check_text(prompt, model.text.bound, model.info, param)
        token_ids = model.text.encode(prompt, add_special_tokens=add_special_tokens)
        limits.check_prompt(len(token_ids), model.info, param, least_output)
        return token_ids
    # Before looking at what may be millions of ids.
    limits.check_prompt(len(prompt), model.info, param, least_output)
    return limits.check_token_ids(prompt, model.info.vocab_size, param)


class RequestPlan(msgspec.Struct, frozen=True):
    """What requests with the same options to the same model share.

    sampling: without length, seed, logprobs and grammar.
    silent: ids that end a generation.
    stops: strings that end it.
    """

    sampling: Sampling
    silent: frozenset[int]
    stops: tuple[str, ...]


# The options that make a RequestPlan, besides the model.
OPTIONS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "bad_words",
    "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip

_options = attrgetter(*OPTIONS)
TOKEN_IDS = attrgetter("token_ids")


class Plans:
    """Cached plans, because clients mostly repeat their options. Options with lists or objects are planned anew.
    Threads may share it.
    """

    def __init__(self) -> None:
        self._made: dict[object, RequestPlan] = {}

    def of(self, request: requests.Common, model: ServedModel) -> RequestPlan:
        key = _options(request), model
        try:
            found = self._made.get(key)
        except TypeError:
            return _plan(request, model)
        if found is None:
            if len(self._made) >= MAX_PLANS:
                self._made.clear()
            found = self._made[key] = _plan(request, model)
        return found


def _plan(request: requests.Common, model: ServedModel) -> RequestPlan:
    text, info = model.text, model.info
    shaping = shaping_of(request, text.defaults, text, info.vocab_size)
    longest = max(request.min_tokens or 0, 1)  # how long it may be is checked elsewhere
    sampling = limits.build_sampling(
        request, text.defaults, info, max_tokens=longest, seed=0, logprobs=None, shaping=shaping
    )
    eos = () if request.ignore_eos else info.eos_token_ids
    return RequestPlan(sampling, frozenset((*eos, *sampling.stop_token_ids)), requests.stops_of(request))


# The plan of a request. Raises BadRequest for options that the model cannot honour.
find_plan = Plans().of


def _head(request: requests.Common, reply_id: str, model: ServedModel, num_prompt: int, *, logprobs: bool) -> Head:
    """The head of a reply.

    num_prompt: tokens of all prompts.
    """
    options, wants_ids = request.stream_options, bool(request.return_token_ids)
    so_far = UsageSoFar(num_prompt, 0, num_prompt) if options is not None and options.continuous_usage_stats else None
    created, wants_usage = int(time.time()), _wants_usage(request)
    pieces = model.text.pieces
    return Head(reply_id, created, model.info.id, pieces, logprobs, wants_ids, wants_usage, so_far, num_prompt)


def _wants_usage(request: requests.Common) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


class _Builder:
    """Makes the choices of one request: n per prompt."""

    def __init__(
        self,
        request: requests.Common,
        model: ServedModel,
        terms: Terms,
        *,
        at_start: bool,
        dialogue: Dialogue | None = None,
    ) -> None:
        self._request = request
        self._model = model
        self._terms = terms
        self._at_start = at_start
        self._dialogue = dialogue
        self._num = request.n or 1
        self._generates = True
        # It may go on to the end of the context. See Generation.
        self.is_open_ended = False
        self.shape: AnswerShape | None = None
        self._plan = find_plan(request, model)
        self._standing = terms.standing(request.priority)

    def check_number(self, num_prompts: int) -> None:
        if num_prompts * self._num > self._terms.max_choices:
            what = f"{num_prompts} prompts × n {self._num} = {num_prompts * self._num} choices"
            raise BadRequest(f"{what}, at most {self._terms.max_choices} are allowed; send several requests", "n")

    def sampling(self, max_tokens: int, logprobs: int | None) -> Sampling:
        """The sampling of one prompt, with its own seed unless one was given.

        A node makes at least one token. Where none is requested it is not reported.
        """
        planned, asked = self._plan.sampling, self._request.seed
        limits.check_least(planned.min_tokens, max_tokens)
        seed = randbits(SEED_BITS) if asked is None else limits.wire_seed(asked)
        self._generates = max_tokens > 0
        length = max_tokens or 1
        return structs.replace(planned, max_tokens=length, seed=seed, logprobs=logprobs)

    def prepared(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling], reply_format: ReplyFormat) -> Prepared:
        """The choices of prompts whose number was checked."""
        if len(prompts) == self._num == 1:
            choices = [self._choice(prompts[0], samplings[0], 0)]
        else:
            choices = [
                self._choice(
                    prompt,
                    structs.replace(sampling, choice=number) if number else sampling,
                    index * self._num + number,
                )
                for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
                for number in range(self._num)
            ]
        stream, usage = bool(self._request.stream), _wants_usage(self._request)
        return Prepared(choices, len(prompts), reply_format, stream, usage, self.shape)

    def _choice(self, prompt: Prompt, sampling: Sampling, index: int) -> OutputChoice:
        reports_prompt = prompt.echo is not None and sampling.logprobs is not None
        num_prompt_logprobs = (
            self._request.prompt_logprobs if sampling.choice == 0 else None
        )  # the prompt's other choices share them
        if reports_prompt or num_prompt_logprobs is not None:
            echoed = sampling.logprobs if reports_prompt else None
            sampling = structs.replace(sampling, prompt_logprobs=max(echoed or 0, num_prompt_logprobs or 0))
        request, terms, model, tenant = self._request, self._terms, self._model, self._terms.tenant
        generation = Generation(  # by position, which costs half
            f"{terms.request_id}-{index}",
            model.info.id,
            prompt.token_ids,
            sampling,
            terms.left_s,
            tenant.cache_salt(request.cache_salt) if request.cache_salt else tenant.salt,
            self._standing,
            request.pdcluster_mode or terms.mode,
            request.prompt_cache_key if isinstance(request.prompt_cache_key, str) else "",
            terms.client_id,
            terms.hang_up,
            self._num > 1 and sampling.choice == 0,
            f"{terms.request_id}-{index - sampling.choice}" if sampling.choice and not reports_prompt else None,
            terms.trace,
            model.info,
            self.is_open_ended,
            None,
            request.weights_change,
            names_weights(request.model, request.weights),
        )
        skip = request.skip_special_tokens is not False
        echo = None if prompt.echo is None else self._echo(prompt, skip, sampling.logprobs)
        speech = None if self._dialogue is None else self._dialogue.speech()
        detokenizer = model.text.detokenizer(
            skip_special_tokens=skip, at_start=self._at_start, shows_marks=speech is not None
        )
        text = ChoiceText(
            detokenizer,
            StopMatcher(self._plan.stops) if self._plan.stops else NO_STOPS,
            self._plan.silent,
            len(prompt.echo or ""),
            speech,
            sampling.min_tokens,
        )
        wants_ids = bool(request.return_token_ids)
        choice = OutputChoice(
            generation, text, Clock(terms.arrived), model.info.vocab_size, echo, wants_ids, num_prompt_logprobs
        )
        choice.generates = self._generates
        if self.shape is not None:
            choice.grammar_param = self.shape.param
        return choice

    def _echo(self, prompt: Prompt, skip: bool, num_logprobs: int | None) -> Echo | None:
        if prompt.echo is None:
            return None
        detokenizer = self._model.text.detokenizer(skip_special_tokens=skip, at_start=True)
        return Echo(prompt.echo, prompt.token_ids, detokenizer, num_logprobs)
