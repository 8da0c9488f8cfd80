"""Limits of the scheduler, and whether a sequence fits them. Plain values from the node's config and model."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster.core.errors import BadRequest, ConfigError, RequestTooLarge
from pdcluster.kv.pages import PagePool
from pdcluster.scheduler.sequence import Sequence

# Logits of prompt positions in one step, as far as `logprob_tokens_of` can choose.
LOGPROB_SCORES = 1 << 23


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits.

    token_budget: tokens computed in one step.
    max_rows: running rows and slots.
    max_waiting: bound of the queue; preempted rows come on top.
    max_len: prompt and output tokens of a request.
    reserve_tokens: output tokens of a row for which admission keeps pages.
    max_overtakes: smaller requests that may pass one waiting for pages.
    retry_after_s: hint of a refusal while nothing was measured.
    logprob_tokens: prompt positions with logprobs in one step. Each takes milliseconds with a large vocabulary, for all
    rows.
    """

    token_budget: int
    max_rows: int
    max_waiting: int
    max_len: int
    reserve_tokens: int = 512
    eos_token_ids: frozenset[int] = frozenset()
    max_overtakes: int = 8
    retry_after_s: float = 0.5
    logprob_tokens: int = 64

    def __post_init__(self) -> None:
        for name, value in (
            ("token_budget", self.token_budget),
            ("max_rows", self.max_rows),
            ("max_waiting", self.max_waiting),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}, it must be at least 1")
        if self.max_len < 2:
            raise ConfigError(
                f"max_len is {self.max_len}, it must be at least 2: one prompt token and one output token"
            )
        if self.token_budget <= self.max_rows:
            raise ConfigError(
                f"token_budget {self.token_budget} must exceed max_rows {self.max_rows}: a row decodes one token a "
                "step, prompts need the rest"
            )


def logprob_tokens_of(vocab_size: int) -> int:
    """Positions that delay a step about alike for any vocabulary: 64 with 131,000 tokens or more. Other work per
    position bounds them for a small one.
    """
    return min(max(LOGPROB_SCORES // vocab_size, 64), 512)


def longest(sequence: Sequence, limits: SchedulerLimits, pool: PagePool) -> int:
    """Tokens at which the sequence ends at the latest. Raises BadRequest or RequestTooLarge when it can never run
    here.
    """
    max_tokens = sequence.sampling.max_tokens
    if max_tokens <= sequence.num_output:
        raise BadRequest(
            f"max_tokens is {max_tokens}, but {sequence.num_output} output tokens exist; ask for more", "max_tokens"
        )
    if sequence.num_tokens >= limits.max_len:
        raise RequestTooLarge(
            f"the prompt has {sequence.num_tokens} tokens, this node takes {limits.max_len} with the output; shorten "
            "it or raise --max-len"
        )
    max_total = min(sequence.num_prompt + max_tokens, limits.max_len)
    most = sequence.num_tokens if sequence.remote else max_total - 1
    if pool.pages_for(most) > pool.num_pages:
        raise RequestTooLarge(
            f"the request may need KV for {most} tokens, this node's pool holds {pool.num_pages * pool.page_tokens}; "
            "shorten the prompt, lower max_tokens, or give the node more KV memory"
        )
    return max_total
