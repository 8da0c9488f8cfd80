"""Which completions are plain (`plain`), and what those with the same options to the same model have in common: options
as nodes get them, and how tokens become text. Knows neither nodes nor HTTP."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec
import numpy as np

from pdcluster.api.openai.limits import DEFAULT_COMPLETION_TOKENS, wire_seed
from pdcluster.api.openai.replies import CompletionChoice, CompletionReply, TokenUsage
from pdcluster.api.openai.requests import CompletionRequest
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.text.segments import SHORT_CHARACTERS
from pdcluster.core.errors import PdclusterError
from pdcluster.core.sampling import Sampling
from pdcluster_router.core.generation import ModelInfo
from pdcluster_router.core.random_pool import draw_bits
from pdcluster_router.frontend.prepare import OPTIONS, SEED_BITS, ServedModel, find_plan

IN_KIND = ("model", *OPTIONS, "skip_special_tokens", "n", "stream")
# Each request may have its own of these, or they are without effect here.
FREE = (
    "prompt", "max_tokens", "seed", "add_special_tokens", "stream_options",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# None of these may be given.
NOT_PLAIN = tuple(name for name in CompletionRequest.__struct_fields__ if name not in (*IN_KIND, *FREE))

# Of a prompt that is looked at sooner than numpy is called.
FEW_TOKENS = 256

key_of = attrgetter(*IN_KIND, *NOT_PLAIN)
_largest = np.maximum.reduce
_encode = msgspec.json.Encoder().encode


class Kind(msgspec.Struct, frozen=True, eq=False):
    """What plain requests with the same options to the same model have in common. sampling: but for length and seed;
    silent: ids that end a generation; dropped: those, and others that are no text; skips: whether special tokens are
    none."""

    info: ModelInfo
    text: TextModel
    sampling: Sampling
    silent: frozenset[int]
    dropped: frozenset[int]
    skips: bool
    name: str
    vocab_size: int
    max_len: int
    is_stream: bool

    def say(self, token_ids: Sequence[int]) -> str:
        """Their text."""
        pieces = self.text.pieces
        if not self.dropped.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self.dropped]
        try:
            return "".join(map(pieces.texts.__getitem__, token_ids))  # type: ignore[arg-type]
        except (TypeError, IndexError):  # parts of characters, ids of a padded vocabulary
            detokenizer = pieces.stream(skip_special_tokens=self.skips, at_start=False)
            return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()


class Asked(msgspec.Struct, frozen=True, eq=False):
    """created: Unix seconds, as its answer tells; salt: see Generation."""

    kind: Kind
    created: int
    salt: bytes

    def completion(self, request: str, model: str, token_ids: Sequence[int], reason: str, usage: TokenUsage) -> bytes:
        """The whole reply, of one choice."""
        said = CompletionChoice(0, self.kind.say(token_ids), reason, None)
        return _encode(CompletionReply("cmpl-" + request, self.created, model, [said], usage))


def kind_of(request: CompletionRequest, infos: Sequence[ModelInfo], text_of: Callable[[str], TextModel]) -> Kind | None:
    if (
        any(getattr(request, name) is not None for name in NOT_PLAIN)
        or request.n not in (None, 1)
        or request.stop is not None
    ):
        return None
    info = next((info for info in infos if info.id == request.model), None)
    if info is None:
        return None
    try:
        text = text_of(info.id)
        plan = find_plan(request, ServedModel(info, text))
    except PdclusterError:
        return None
    skip = request.skip_special_tokens is not False
    dropped = plan.silent | text.pieces.special if skip else plan.silent
    return Kind(
        info,
        text,
        plan.sampling,
        plan.silent,
        dropped,
        skip,
        info.id,
        info.vocab_size,
        info.max_len,
        bool(request.stream),
    )


def packed(request: CompletionRequest, kind: Kind) -> tuple[Sequence[int], bytes] | None:
    """The prompt's tokens, also as nodes get them; None where it is refused, or takes long."""
    prompt: object = request.prompt
    if type(prompt) is list:
        try:
            told = struct.pack(f"{len(prompt)}i", *prompt)
        except struct.error:
            return None
    elif type(prompt) is str:
        if not 0 < len(prompt) <= SHORT_CHARACTERS:
            return None
        prompt = kind.text.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
        return (prompt, prompt.tobytes()) if 0 < len(prompt) < kind.max_len else None
    elif type(prompt) is array:
        told = prompt.tobytes()
    else:
        return None
    if not 0 < len(prompt) < kind.max_len or not _are_ids(prompt, told, kind.vocab_size):
        return None
    return prompt, told


def _are_ids(prompt: Sequence[int], told: bytes, vocab_size: int) -> bool:
    """told: the same, packed."""
    if len(prompt) <= FEW_TOKENS:
        return max(prompt) < vocab_size and told[3::4].isascii()  # the sign is the highest bit of a number's last byte
    return (
        int(_largest(np.frombuffer(told, np.uint32))) < vocab_size
    )  # without a sign, what is below 0 is above all others


def sampling_of(request: CompletionRequest, kind: Kind, num_prompt: int) -> Sampling | None:
    """None where it is refused."""
    left, max_tokens, planned, seed = kind.max_len - num_prompt, request.max_tokens, kind.sampling, request.seed
    if max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS if left > DEFAULT_COMPLETION_TOKENS else left
    if max_tokens > left or max_tokens < (planned.min_tokens or 1):
        return None
    return msgspec.structs.replace(
        planned, max_tokens=max_tokens, seed=draw_bits(SEED_BITS) if seed is None else wire_seed(seed)
    )
