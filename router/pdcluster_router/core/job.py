"""One request over all its attempts: what was asked, what was emitted, which nodes to leave alone, and how an attempt
says that another one has to follow. Plain state; no waiting, no frames."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from pdcluster.core import errors
from pdcluster.core.messages import HASH_BYTES, FinishReason, Sampling, Work, pack_tokens
from pdcluster.kv.hashing import extend
from pdcluster_router.core.generation import Force


@dataclass(frozen=True, slots=True)
class HashChain:
    """How the model's nodes name KV: the root of the chain (kv.hashing.chain_root) and the tokens of a block."""

    root: bytes
    block_tokens: int


class HashedPrompt:
    """A prompt as nodes get it, packed and with the hashes of its blocks. Kept of the prompt that was asked about last:
    the choices of a request come one after the other and have theirs in common, which may take ten milliseconds to
    make. Owned by the router's event loop."""

    def __init__(self) -> None:
        self._prompt: Sequence[int] = ()
        self._chain: HashChain | None = None
        self._found = b"", b""

    def of(self, prompt: Sequence[int], chain: HashChain) -> tuple[bytes, bytes]:
        """Packed tokens and hashes. Another object is another prompt, whatever it holds."""
        if prompt is not self._prompt or chain != self._chain:
            packed = pack_tokens(prompt)
            self._found = packed, extend(b"", packed, root=chain.root, block_tokens=chain.block_tokens)
            self._prompt, self._chain = prompt, chain
        return self._found


class RetryAttempt(Exception):
    """This attempt is over without an answer; `incarnation` is the node to avoid, None when none is to blame."""

    def __init__(self, cause: errors.PdclusterError, incarnation: str | None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.incarnation = incarnation


class Job(msgspec.Struct, eq=False):
    """force: the mode it must have, None for the router's own; session: key of its conversation. excluded: incarnations
    that failed the request; busy: until when a node asked to be left alone, by incarnation. cached_tokens: of the
    prompt, found in a cache by the first attempt that got so far. attempts: legs that were sent; tries: attempts as
    clients count them. hashes, packed: made when they are needed, unless they are given. has_prompt_logprobs: none are
    still to come. fork_of: another choice whose KV it shares, on the boot fork_on; None for neither."""

    request: str
    prompt: Sequence[int]
    sampling: Sampling
    deadline: float
    chain: HashChain
    force: Force | None = None
    session: str = ""
    emitted: list[int] = []
    hashes: bytes = b""
    attempts: int = 0
    tries: int = 1
    excluded: set[str] = set()
    busy: dict[str, float] = {}
    has_prompt_logprobs: bool = False
    cached_tokens: int | None = None
    fork_of: str | None = None
    fork_on: str | None = None
    # Of those emitted, that `packed` and `hashes` know; -1: not even the prompt.
    num_hashed: int = -1
    # All tokens so far, as nodes get them; made anew only when there are more of them, and not for every node that is
    # asked.
    packed: bytes = b""

    def work(self, attempt: int, now: float, num_emitted: int) -> Work:
        """For nodes: the prompt and the first num_emitted tokens after it."""
        packed = self._hashed_tokens()
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
        )

    def hashes_so_far(self) -> bytes:
        """Of the prompt and all that was emitted."""
        self._hashed_tokens()
        return self.hashes

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """They come with the row of the node that computed the prompt, which may be so large that the decode node's
        rows are here sooner."""
        return self.sampling.prompt_logprobs is not None and not self.has_prompt_logprobs and len(self.prompt) > 1

    def busy_s(self, incarnation: str, now: float) -> float:
        """How long the node wants to be left alone; 0 when it does not."""
        return max(self.busy.get(incarnation, now) - now, 0.0)

    def note_cached(self, num_tokens: int) -> bool:
        """A node found that many tokens in its cache: whether that is news. What a later attempt finds was computed for
        this request, so it does not count."""
        if self.cached_tokens is not None:
            return False
        self.cached_tokens = min(num_tokens, len(self.prompt))
        return True

    def ending(self, eos_token_ids: Collection[int], max_len: int | None) -> tuple[FinishReason, int | None] | None:
        """Why nothing more may be asked for, by the scheduler's own rule, when its last word was lost: reason and stop
        token. None: go on."""
        num_output, sampling = len(self.emitted), self.sampling
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
        """All tokens so far, packed; `hashes` covers them afterwards. Blocks that were hashed before are not hashed
        again."""
        if self.num_hashed == len(self.emitted):
            return self.packed
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
