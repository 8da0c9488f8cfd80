"""One attempt of one request on a node: its tokens, how many have KV, and their pages.

Plain state owned by the scheduler; others read. `lifecycle.RESIDENCE` is its state table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdcluster.core.errors import BadRequest, IntegrityError
from pdcluster.core.history import history_of
from pdcluster.core.lifecycle import RESIDENCE, Residence
from pdcluster.core.messages import HASH_BYTES, Sampling, TokenLogprobs, Work
from pdcluster.kv.hashing import extend, is_extendable

# Output tokens for which a token array has room at first, so that short answers never copy it.
_HEADROOM = 64


class Sequence:
    """A sequence.

    key: unique on the node.
    arrived: on the scheduler's clock.
    tokens: the prompt, then every known output token. num_computed of them have KV in `pages`. Views stay valid, but a
    table entry may change to another page with the same contents between steps.
    """

    __slots__ = (
        "_hash_root",
        "_num_pages",
        "_pages",
        "_tokens",
        "arrived",
        "attempt",
        "block_tokens",
        "credit",
        "first_scheduled",
        "first_token_at",
        "hashes",
        "history",
        "is_batch",
        "key",
        "last_token_at",
        "max_total",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_overtaken",
        "num_preempted",
        "num_prompt",
        "num_published",
        "num_pulled",
        "num_tokens",
        "order",
        "parent",
        "prompt_logprobs",
        "remote",
        "request",
        "sampling",
        "state",
        "stop_token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self, work: Work, *, key: str, remote: bool = False, arrived: float = 0.0, block_tokens: int = 32
    ) -> None:
        _check(work, block_tokens)
        self.key = key
        self.request = work.request
        self.attempt = work.attempt
        # Another node decodes it: it is parked after its first token.
        self.remote = remote
        # It gives way to all other work.
        self.is_batch = work.is_batch
        self.sampling: Sampling = work.sampling
        self.stop_token_ids = frozenset(work.sampling.stop_token_ids)
        self.num_prompt = work.num_prompt
        self.num_tokens = len(work.token_ids) // 4
        self._tokens: NDArray[np.int32] = np.empty(self.num_tokens + _HEADROOM, np.int32)
        self._tokens[: self.num_tokens] = np.frombuffer(work.token_ids, "<i4")
        self.history = history_of(
            self.sampling.shaping, self._tokens[: self.num_prompt], self._tokens[self.num_prompt : self.num_tokens]
        )
        self._pages: NDArray[np.int32] = np.empty(0, np.int32)
        self._num_pages = 0
        self.hashes = bytearray(work.hashes)
        self._hash_root = work.hash_root
        self.block_tokens = block_tokens
        self.state = Residence.WAITING
        # Another choice of the prompt, whose KV it may take over on admission.
        self.parent: Sequence | None = None
        # Launched steps that compute it, and so write to its pages.
        self.num_in_flight = 0
        self.num_computed = 0
        # Leading pages that are in the prefix cache.
        self.num_published = 0
        # Tokens whose KV was cached when it first got pages. Until then, when it came.
        self.num_cached = 0
        # Of those, tokens fetched from another node for this sequence.
        self.num_pulled = 0
        # Pages kept available for its growth.
        self.credit = 0
        # Tokens at which it ends at the latest; set by the scheduler.
        self.max_total = 0
        self.order = 0
        self.num_preempted = 0
        self.num_overtaken = 0
        # False for a replay: an earlier attempt reported them with the first token.
        self.wants_prompt_logprobs = self.sampling.prompt_logprobs is not None and self.num_tokens == self.num_prompt
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.arrived = arrived
        self.first_scheduled: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.key}, {self.state.name}, {self.num_computed}/{self.num_tokens} tokens, "
            f"{self._num_pages} pages)"
        )

    def advance(self, event: str) -> None:
        self.state = RESIDENCE[self.state, event]

    # ------------------------------------------------------------ tokens

    @property
    def num_output(self) -> int:
        """Output tokens of the whole request so far, and the position of the next one."""
        return self.num_tokens - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens without KV."""
        return self.num_tokens - self.num_computed

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self._tokens[: self.num_tokens]

    def append(self, token: int) -> None:
        """Append the next output token. Its history has it from the step that drew it. A token drawn elsewhere must be
        added.
        """
        if self.num_tokens == len(self._tokens):
            self._tokens = _grown(self._tokens, self.num_tokens + 1)
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    def extend_hashes(self, num_tokens: int) -> None:
        """Extend the hash chain over the full blocks of the first num_tokens tokens, where its start is known."""
        if num_tokens > self.num_tokens:
            raise IntegrityError(
                f"hashes of {num_tokens} tokens of {self.key}, which has {self.num_tokens}: what is behind them is "
                "not its text"
            )
        if num_tokens // self.block_tokens * HASH_BYTES <= len(self.hashes) or not is_extendable(
            self.hashes, self._hash_root
        ):
            return
        packed = self._tokens[:num_tokens].data
        self.hashes += extend(self.hashes, packed, root=self._hash_root, block_tokens=self.block_tokens)

    # ------------------------------------------------------------ pages

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def pages(self) -> NDArray[np.int32]:
        """Page ids in token order."""
        return self._pages[: self._num_pages]

    def add_pages(self, pages: list[int]) -> None:
        end = self._num_pages + len(pages)
        if end > len(self._pages):
            self._pages = _grown(self._pages, end)
        self._pages[self._num_pages : end] = pages
        self._num_pages = end

    def replace_page(self, index: int, page: int) -> None:
        self._pages[index] = page

    def take_pages(self) -> list[int]:
        """Give up all pages. The array that `pages` returned before stays as it was."""
        pages: list[int] = self.pages.tolist()
        self._pages = np.empty(0, np.int32)
        self._num_pages = 0
        self.num_computed = self.num_published = 0
        return pages


def _grown(values: NDArray[np.int32], at_least: int) -> NDArray[np.int32]:
    """A copy longer by half at least, so that appending costs O(1) on average."""
    longer = np.empty(max(at_least, len(values) + len(values) // 2), np.int32)
    longer[: len(values)] = values
    return longer


def _check(work: Work, block_tokens: int) -> None:
    num_tokens, rest = divmod(len(work.token_ids), 4)
    if rest:
        raise BadRequest(f"token_ids has {len(work.token_ids)} bytes, which is no multiple of 4; send int32 ids")
    if num_tokens == 0:
        raise BadRequest("the prompt is empty; send at least one token", "prompt")
    if not 1 <= work.num_prompt <= num_tokens:
        raise BadRequest(
            f"num_prompt is {work.num_prompt}, but token_ids holds {num_tokens} tokens; it must be between 1 and that"
        )
    num_hashes, rest = divmod(len(work.hashes), HASH_BYTES)
    if rest or num_hashes > num_tokens // block_tokens:
        raise BadRequest(
            f"hashes has {len(work.hashes)} bytes; {num_tokens} tokens have {num_tokens // block_tokens} hashes of "
            f"{HASH_BYTES} bytes"
        )
    if work.hash_root and len(work.hash_root) != HASH_BYTES:
        raise BadRequest(
            f"hash_root has {len(work.hash_root)} bytes; a chain's root has {HASH_BYTES}, or none when it is not known"
        )
