"""An engine whose model is arithmetic: exact, and sensitive to every KV entry it should attend to.

The KV of position p is a number that depends on all tokens up to p. A token is drawn from *all* KV entries of its row,
read through the page table, so a page that was overwritten, mixed up or not filled gives another token than `reference`
does.
"""

from __future__ import annotations

import numpy as np

from pdcluster.core.messages import Sampling, TokenLogprobs, Work, pack_tokens
from pdcluster.core.step import Row, RowResult, StepPlan, StepResult
from pdcluster.kv.hashing import block_hashes, chain_root
from pdcluster.scheduler.sequence import Sequence

VOCAB = 13
EMPTY = -1
_PRIME = 1_000_003


def kv_of(tokens: list[int]) -> list[int]:
    """The right KV entry of every position."""
    entries: list[int] = []
    last = 17
    for token in tokens:
        last = (last * 31 + token * 7 + 3) % _PRIME
        entries.append(last)
    return entries


def draw(entries: list[int], choice: int = 0) -> int:
    """The model's token after these KV entries, for that choice of a prompt."""
    state = 5 + choice
    for entry in entries:
        state = (state * 131 + entry) % _PRIME
    return state % VOCAB


def prompt_logprob(entries: list[int], token: int) -> TokenLogprobs:
    return TokenLogprobs(-float((draw(entries) * 17 + token) % 101))


def reference(prompt: list[int], sampling: Sampling, *, eos: frozenset[int], max_len: int) -> tuple[list[int], str]:
    """Output tokens and finish reason of an undisturbed run."""
    tokens = list(prompt)
    while True:
        token = draw(kv_of(tokens), sampling.choice)
        tokens.append(token)
        num_output = len(tokens) - len(prompt)
        if num_output > sampling.min_tokens and token in eos and not sampling.ignore_eos:
            return tokens[len(prompt) :], "eos"
        if num_output > sampling.min_tokens and token in sampling.stop_token_ids:
            return tokens[len(prompt) :], "stop"
        if num_output == sampling.max_tokens or len(tokens) == max_len:
            return tokens[len(prompt) :], "length"


class FakeEngine:
    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.memory = np.full((num_pages, page_tokens), EMPTY, np.int64)
        # The tokens of the last step, for the step that follows it.
        self.drawn: dict[str, int | None] = {}

    def write(self, pages: list[int], start: int, entries: list[int]) -> None:
        """KV entries of positions start…, as a transfer would bring them."""
        for position, entry in enumerate(entries, start):
            self.memory[pages[position // self.page_tokens], position % self.page_tokens] = entry

    def read(self, pages: list[int], count: int) -> list[int]:
        flat: list[int] = self.memory[pages].reshape(-1)[:count].tolist()
        return flat

    def run(self, plan: StepPlan) -> StepResult:
        """All writes first, then all reads, so that two rows that share a page they should not are found out."""
        for source, target in plan.copies:
            self.memory[target] = self.memory[source]
        for row in plan.rows:
            assert len(row.tokens) >= 1
            pages = row.pages.tolist()
            last = 17 if row.start == 0 else self.read(pages, row.start)[-1]
            entries = []
            for token in [self.drawn[row.request]] if row.follows else row.tokens.tolist():
                last = (last * 31 + token * 7 + 3) % _PRIME
                entries.append(last)
            self.write(pages, row.start, entries)
        result = StepResult(tuple(self._result(row) for row in plan.rows), forward_s=0.001)
        self.drawn = {answer.request: answer.token for answer in result.rows}
        return result

    def _result(self, row: Row) -> RowResult:
        end = row.start + len(row.tokens)
        entries = self.read(row.pages.tolist(), end)
        token = None if row.sampling is None else draw(entries, row.sampling.choice)
        if row.prompt_logprobs is None:
            return RowResult(row.request, token)
        targets = row.tokens.tolist()[1:] + ([] if row.next_token is None else [row.next_token])
        found = tuple(prompt_logprob(entries[: row.start + i + 1], target) for i, target in enumerate(targets))
        return RowResult(row.request, token, prompt_logprobs=found)


def make_work(
    prompt: list[int],
    *,
    request: str = "r",
    attempt: int = 0,
    emitted: tuple[int, ...] = (),
    block_tokens: int = 4,
    is_batch: bool = False,
    **sampling: object,
) -> Work:
    """sampling: fields of Sampling; max_tokens is 4 when it is not given."""
    tokens = [*prompt, *emitted]
    chosen = Sampling(**{"max_tokens": 4, "seed": 0, **sampling})  # type: ignore[arg-type]
    root = chain_root(block_tokens=block_tokens)
    return Work(
        request,
        attempt,
        pack_tokens(tokens),
        len(prompt),
        block_hashes(tokens, block_tokens=block_tokens),
        chosen,
        60.0,
        root,
        is_batch=is_batch,
    )


def make_sequence(
    prompt: list[int],
    *,
    key: str = "r",
    remote: bool = False,
    block_tokens: int = 4,
    emitted: tuple[int, ...] = (),
    **sampling: object,
) -> Sequence:
    work = make_work(prompt, request=key.split("#")[0], emitted=emitted, block_tokens=block_tokens, **sampling)
    return Sequence(work, key=key, remote=remote, block_tokens=block_tokens)
