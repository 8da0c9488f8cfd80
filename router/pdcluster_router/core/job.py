"""One request over all its attempts. Plain state, no waiting, no frames.

It holds what was requested, what was emitted and which nodes to avoid.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from pdcluster.core import errors
from pdcluster.core.messages import HASH_BYTES, FinishReason, Pooling, Sampling, Work, pack_tokens
from pdcluster.kv.hashing import extend
from pdcluster_router.core.generation import Force, ModelInfo, OutputWeights


@dataclass(frozen=True, slots=True)
class HashChain:
    """How a model's nodes name KV."""

    # Root of the chain (pdcluster.kv.hashing.chain_root).
    root: bytes
    # Tokens of a block.
    block_tokens: int


class HashedPrompt:
    """A prompt as nodes receive it: packed, with the hashes of its blocks.

    It caches the last prompt: choices of one request come one after another and share it, and hashing may take 10 ms.
    Owned by the router's event loop.
    """

    def __init__(self) -> None:
        self._prompt: Sequence[int] = ()
        self._chain: HashChain | None = None
        self._found = b"", b""

    def of(self, prompt: array[int], chain: HashChain) -> tuple[bytes, bytes]:
        """Packed tokens and hashes of an array('i'). The cache compares the prompt object, not its tokens."""
        if prompt is not self._prompt or chain != self._chain:
            packed = prompt.tobytes()
            self._found = packed, extend(b"", packed, root=chain.root, block_tokens=chain.block_tokens)
            self._prompt, self._chain = prompt, chain
        return self._found


class RetryAttempt(Exception):
    """An attempt ended without an answer.

    incarnation: the node to avoid; None when none is to blame.
    """

    def __init__(self, cause: errors.PdclusterError, incarnation: str | None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.incarnation = incarnation


class Job(msgspec.Struct, eq=False):
    """One request over all its attempts."""

    request: str
    prompt: Sequence[int]
    sampling: Sampling
    deadline: float
    chain: HashChain
    # The required mode; None: the router chooses.
    force: Force | None = None
    # Key of its conversation.
    session: str = ""
    # Digest of the model that it was prepared for; "" for any.
    model: str = ""
    # The prompt and the output that was asked for; 0: as much as fits on some node.
    most_tokens: int = 0
    # The LoRA adapter by name; "" for none.
    adapter: str = ""
    emitted: list[int] = []
    # Of the blocks of `packed`. Made when needed, unless given.
    hashes: bytes = b""
    # Legs that were sent.
    attempts: int = 0
    # Attempts as clients count them.
    tries: int = 1
    # Incarnations that failed the request.
    excluded: set[str] = set()
    # Until when a node asked for a pause, by incarnation.
    busy: dict[str, float] = {}
    # No prompt logprobs are still to come.
    has_prompt_logprobs: bool = False
    # Of the prompt, found in a cache by the first attempt that got so far.
    cached_tokens: int | None = None
    # Another choice whose KV it shares, on the boot `fork_on`; None for neither.
    fork_of: str | None = None
    fork_on: str | None = None
    # Emitted tokens that `packed` and `hashes` cover; -1: not even the prompt.
    num_hashed: int = -1
    # All tokens so far, as nodes receive them. Remade only when there are more.
    packed: bytes = b""
    # The span of the running attempt, packed; b"" when it is not traced.
    trace: bytes = b""
    # When the first two tokens came.
    first_token_at: float | None = None
    second_token_at: float | None = None
    # An embedding is wanted, and no token.
    pooling: Pooling | None = None
    # The version of its model that it runs with; None where nobody says. Its digest is `model`.
    served: ModelInfo | None = None
    # It waited through a pause, so its next attempt may have whatever weights are there.
    may_change_weights: bool = False
    # Which weights made tokens before that; empty while there was one version.
    past_weights: list[OutputWeights] = []
    # It gives way to all other work.
    is_batch: bool = False

    def work(self, attempt: int, now: float, num_emitted: int) -> Work:
        """The request as nodes receive it: the prompt and the first num_emitted tokens behind it."""
        packed = self.packed if self.num_hashed == len(self.emitted) else self._hashed_tokens()
        num_tokens = len(self.prompt) + num_emitted
        return Work(  # by position, which costs half
            self.request,
            attempt,
            packed[: 4 * num_tokens],
            len(self.prompt),
            self.hashes[: num_tokens // self.chain.block_tokens * HASH_BYTES],
            self.sampling,
            max(self.deadline - now, 0.001),
            self.chain.root,
            self.trace,
            self.model,
            self.adapter,
            self.is_batch,
        )

    def move_to(self, served: ModelInfo, chain: HashChain) -> None:
        """Go on with another version of the weights, from the prompt and all tokens so far. No attempt may run."""
        former, past = self.served, self.past_weights
        first, num_output = past[-1].to if past else 0, len(self.emitted)
        if former is not None and first < num_output:
            past.append(OutputWeights.of(former.weights, first, num_output))
        if past and past[-1].digest == served.weights.digest:
            past.pop()  # back to the version before, which goes on
        self.served, self.model, self.chain = served, served.digest, chain
        self.hashes, self.num_hashed = b"", -1
        self.fork_of = self.fork_on = None
        self.excluded.clear()

    def weights_ranges(self, num_output: int) -> tuple[OutputWeights, ...]:
        """Which weights made the first num_output tokens."""
        past, served = self.past_weights, self.served
        first = past[-1].to if past else 0
        if served is None or first >= num_output:
            return tuple(past)
        return (*past, OutputWeights.of(served.weights, first, num_output))

    def hashes_so_far(self) -> bytes:
        """Hashes of the prompt and all emitted tokens."""
        if self.num_hashed != len(self.emitted):
            self._hashed_tokens()
        return self.hashes

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to come.

        They are in a row of the node that computed the prompt. It may be so large that the decode node's rows arrive
        first.
        """
        return self.sampling.prompt_logprobs is not None and not self.has_prompt_logprobs and len(self.prompt) > 1

    def busy_s(self, incarnation: str, now: float) -> float:
        """Seconds until the node's requested pause ends; 0 for none."""
        return max(self.busy.get(incarnation, now) - now, 0.0)

    def note_cached(self, num_tokens: int) -> bool:
        """Record the tokens that a node found in its cache. True when they are the first so recorded.

        Only the first attempt counts: a later one finds what was computed for this request.
        """
        if self.cached_tokens is not None:
            return False
        self.cached_tokens = min(num_tokens, len(self.prompt))
        return True

    def ending(self, eos_token_ids: Collection[int], max_len: int | None) -> tuple[FinishReason, int | None] | None:
        """Why the output is complete: reason and stop token; None: go on.

        It is the scheduler's own rule, for when the node's last message was lost.
        """
        num_output, sampling = len(self.emitted), self.sampling
        if self.pooling is not None:
            return None
        if num_output > sampling.min_tokens or (num_output and sampling.grammar is not None):
            last = self.emitted[-1]
            if not sampling.ignore_eos and last in eos_token_ids:
                return "eos", last
            if last in sampling.stop_token_ids:
                return "stop", last
        if num_output >= sampling.max_tokens or (max_len is not None and len(self.prompt) + num_output >= max_len):
            return "length", None
        return None

    def _hashed_tokens(self) -> bytes:
        """All tokens so far, packed. `hashes` covers them afterwards; old blocks are not hashed again."""
        self.num_hashed = len(self.emitted)
        if not self.packed:
            self.packed = pack_tokens(self.prompt)
        num_packed = len(self.packed) // 4 - len(self.prompt)
        if num_packed < len(self.emitted):
            self.packed += pack_tokens(self.emitted[num_packed:])
        num_blocks = len(self.packed) // (4 * self.chain.block_tokens)
        if len(self.hashes) < num_blocks * HASH_BYTES:
            self.hashes += extend(self.hashes, self.packed, root=self.chain.root, block_tokens=self.chain.block_tokens)
        return self.packed
