"""The engine: one model, its KV pool and a worker thread that computes one step at a time. The scheduler decides which
rows run.

launch(plan) ──▶ worker: batch → forward → logits → sample ──▶ done_fd readable ──▶ collect() → StepResult

`launch` and `collect` belong to one thread, the node's loop. Between the two it is free, as the worker holds the GIL
only between kernels. A second step may be launched behind the running one. Its rows go on with the tokens that the
first one draws (`following`). The loop takes in the first one's results meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pdcluster.core.errors import ConfigError, IntegrityError, ModelError
from pdcluster.core.messages import Sampling, TokenLogprobs
from pdcluster.core.step import Row, RowError, RowResult, StepPlan, StepResult
from pdcluster.engine.compiling import compilations
from pdcluster.engine.decoder import Decoder
from pdcluster.engine.model.base import CausalModel, ForwardOutput, LayerProgress
from pdcluster.engine.model.batch import Batch, PlanLimits, RowSpan, build_batch
from pdcluster.engine.model.collective import Alone, Collective, InOrder
from pdcluster.engine.model.config import ModelConfig, read_config
from pdcluster.engine.model.shard import cut, share_of
from pdcluster.engine.model.weights import DTypeChoice, load_weights
from pdcluster.engine.ops.batch_invariant import invariant_ops
from pdcluster.engine.ops.quantized import Quantization, int8_ops
from pdcluster.engine.ops.select import Ops, select_ops
from pdcluster.engine.sampling.constraint import Constraints, unbound
from pdcluster.engine.sampling.grammar import Grammars, vocabulary_of
from pdcluster.engine.sampling.penalties import SamplingRow
from pdcluster.engine.sampling.sampler import logprobs_alone, sample, sample_alone, token_logprobs
from pdcluster.engine.worker import EngineWorker
from pdcluster.kv.layout import DType, KVLayout
from pdcluster.kv.pool import KVPool
from pdcluster.processes.free_memory import check_memory

# What a step hands to the next step: the tokens that it drew, before anybody outside the engine knows them. It draws
# nothing itself.


@dataclass(frozen=True, slots=True)
class HandoffRows:
    """By index of a plan's rows: the tokens that they go on with, and why some got none. Those compute on token 0 in
    pages of their own, draw nothing, and end."""

    tokens: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[int, RowError] = field(default_factory=dict)

    def with_output(self, index: int, row: Row) -> Row:
        """The row whose output has its token, where anything looks at that."""
        if row.output is None or index not in self.tokens:
            return row
        return replace(row, output=np.append(row.output, np.int32(self.tokens[index])))


NOTHING_FED = HandoffRows()


class TokenHandoff:
    """Used by the engine's worker thread alone."""

    def __init__(self) -> None:
        self._drawn: dict[str, RowResult] | None = {}

    def begin(self, plan: StepPlan) -> HandoffRows:
        """A step starts; until `end` it counts as one that failed. Raises ModelError when it follows one that did."""
        drawn, self._drawn = self._drawn, None
        forks = [(index, row.request) for index, row in enumerate(plan.rows) if row.follows]
        if not forks:
            return NOTHING_FED
        if drawn is None:
            raise ModelError("the step failed whose tokens this one was to go on with")
        results = [(index, drawn[request]) for index, request in forks]
        tokens = {index: 0 if result.token is None else result.token for index, result in results}
        return HandoffRows(tokens, {index: result.error for index, result in results if result.error is not None})

    def end(self, plan: StepPlan, results: tuple[RowResult, ...]) -> None:
        """The step is done. Histories grow here, and not where its results are taken in: the next step may have begun
        by then."""
        for row, result in zip(plan.rows, results, strict=True):
            if row.history is not None and result.token is not None:
                row.history.add(result.token)
        self._drawn = {result.request: result for result in results}


log = logging.getLogger(__name__)

Sampled: TypeAlias = tuple[int | None, TokenLogprobs | None, RowError | None]
NOTHING: Sampled = None, None, None

# Another node may have better ones.
NO_NUMBERS = RowError(
    "the model gives no numbers here (NaN or infinite logits); its weights or this machine may be damaged",
    retryable=True,
    spoils_kv=True,
)

# Prompt positions whose logits exist at the same time.
LOGPROB_BLOCK = 128


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """num_pages or kv_bytes sizes the pool. num_pages wins. kv_bytes is shared by all ranks.
    max_len: None is what the model and the pool allow.
    cache_dir: keeps compiled kernels.
    deterministic: a request's tokens are the same bits whatever else is computed.
    quantization: of the weights.
    weights_files: copies of the model's weight files; none: they are mapped from model_dir.
    populates: every page of the pool is touched now, and not when it is first used.
    text_dir: has the tokenizer; None: model_dir.
    """

    model_dir: Path
    cache_dir: Path
    dtype: DTypeChoice = "auto"
    device: str = "cpu"
    page_tokens: int = 32
    num_pages: int | None = None
    kv_bytes: int = 1 << 28
    max_len: int | None = None
    threads: int = 1
    deterministic: bool = False
    quantization: Quantization = "none"
    weights_files: tuple[Path, ...] = ()
    populates: bool = True
    text_dir: Path | None = None


class Engine:
    """launch, collect, step, warmup and close from one thread. progress and the attributes from any.

    group: the ranks of a tensor-parallel engine. Each rank is an Engine over its share of heads, in a process of its
    own. All must be given the same plans in the same order. Rank 0 alone draws tokens, and its result counts.
    layout: that of this rank's pool.
    full_layout: with the heads of all ranks.
    """

    def __init__(
        self, config: EngineConfig, progress: LayerProgress | None = None, group: Collective | None = None
    ) -> None:
        torch.set_num_threads(config.threads)
        group = Alone() if group is None else InOrder(group) if config.deterministic else group
        self._sample_rows, self._logprobs = (
            (sample_alone, logprobs_alone) if config.deterministic else (sample, token_logprobs)
        )
        self.config: ModelConfig = read_config(config.model_dir)
        share = share_of(self.config, group.rank, group.size)
        whole = load_weights(
            config.model_dir, self.config, config.dtype, config.device, config.threads, config.weights_files
        )
        self.weights_digest, self.weight_groups = whole.digest.whole, whole.digest.groups
        weights = cut(whole, self.config, share)
        self.full_layout: KVLayout = self.config.kv_layout(config.page_tokens, weights.dtype)
        self.layout: KVLayout = replace(self.full_layout, num_kv_heads=share.num_kv_heads)
        self.num_pages = config.num_pages or config.kv_bytes // (self.layout.page_bytes * group.size)
        if config.populates:
            _check_capacity(self.num_pages, self.layout, config.device)
        self.max_len = _max_len(config.max_len, self.config, self.num_pages * config.page_tokens)
        self.pool = KVPool(self.layout, self.num_pages, config.device, populates=config.populates)
        self._ops = _ops_of(config, weights.dtype)
        self._model: CausalModel = Decoder(self.config, weights, self.pool.tensor, self._ops, share, group)
        self._group = group
        self._device = config.device
        self._limits = PlanLimits(self.config.vocab_size, self.num_pages, config.page_tokens, self.max_len)
        self._progress = progress or LayerProgress()
        self.grammars = Grammars(
            lambda: vocabulary_of(
                config.text_dir or config.model_dir, self.config.vocab_size, self.config.eos_token_ids
            )
        )
        self._constraints = Constraints(self.grammars, self.config.eos_token_ids)
        self._following = TokenHandoff()
        # Blocks of prompt logprobs since start.
        self._num_blocks = 0
        self._compilations = compilations()
        self._worker = EngineWorker(self._compute, config.threads)
        self._is_closed = False
        log.info(
            "engine: %s, %s on %s (%s), %d pages",
            self.config.architecture,
            weights.dtype,
            config.device,
            self._ops.name,
            self.num_pages,
        )

    @property
    def progress(self) -> int:
        """It grows with every layer, compilation and block of prompt logprobs. It stands still when nothing runs or the
        worker is stuck."""
        return self._progress.value + self._num_blocks + self._compilations.num_begun

    @property
    def is_compiling(self) -> bool:
        return self._compilations.num_running > 0

    @property
    def done_fd(self) -> int:
        """Readable from the end of a launched step until it is collected, and on while another one is done, too."""
        return self._worker.done_fd

    @property
    def layer_fd(self) -> int:
        """Readable when one of the running plan's milestones is reached. Whoever waits for it clears it."""
        return self._progress.milestone_fd

    @property
    def layers_done(self) -> int:
        """Layers of the launched step whose KV is in the pool, 0 from `launch` on.

        A device that computes behind the host's back signals no milestone, and this counts submitted layers. It says
        nothing of a step launched behind another, which has no milestones.
        """
        return self._progress.layers_done

    def launch(self, plan: StepPlan) -> None:
        """Start a step, or queue it behind the one that runs; raises IntegrityError when two were not collected."""
        self._worker.require_place()
        if self._worker.num_in_flight and plan.milestones:
            raise IntegrityError("a step with milestones was launched behind another; collect that first")
        if not self._worker.num_in_flight:
            self._progress.begin(plan.milestones if self._device == "cpu" else ())
        self._worker.launch(plan)

    def collect(self, timeout: float | None = None) -> StepResult:
        """The oldest launched step's result, or what it raised; DeadlineExceeded when it is not done after `timeout`
        seconds (it goes on)."""
        return self._worker.collect(timeout)

    def step(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    def warmup(self) -> None:
        """Run the shapes a first request meets, so that it pays for no first touch. Leaves junk in pages: call it
        before serving."""
        for plan in self.warmup_plans():
            self.step(plan)

    def warmup_plans(self) -> Iterator[StepPlan]:
        tokens = min(64, self.max_len, self.num_pages * self.layout.page_tokens)
        pages = np.arange(self.layout.num_pages(tokens), dtype=np.int32)
        ids = np.zeros(tokens, np.int32)
        sampling = Sampling(max_tokens=1, seed=0)
        yield StepPlan((Row("warmup", ids, 0, pages, sampling),))
        for _ in range(2):
            yield StepPlan((Row("warmup", ids[:1], tokens - 1, pages, sampling),))

    def close(self) -> None:
        """Wait for a running step, stop the worker, give up the pool. Idempotent. What a stuck worker may use stays."""
        self._worker.close()
        if self._worker.is_stuck or self._is_closed:
            return
        self._constraints.close()
        self.grammars.close()
        self._group.close()
        self._ops.close()
        self._progress.close()
        self.pool.close()
        self._is_closed = True
        del self._model, self._ops  # with the weights, whoever still holds the engine

    @property
    def num_stuck(self) -> int:
        """Threads that compute on after close: stuck ones, and ones within a library that lets nobody end them. The
        interpreter must not be taken down around them.
        """
        return self.grammars.num_computing + self._constraints.num_late + self._worker.is_stuck

    def _compute(self, plan: StepPlan) -> StepResult:
        """On the worker thread."""
        begin = time.perf_counter()
        fed = self._following.begin(plan)
        batch = build_batch(plan, self._limits, self._device, fed.tokens)
        self.pool.copy(plan.copies)
        drawing = [index for index, row in enumerate(plan.rows) if row.sampling is not None and index not in fed.errors]
        ends = batch.begins.tolist()
        computed = self._model.forward(batch, self._progress, [ends[index + 1] - 1 for index in drawing])
        if computed.best is not None and not fed.errors and not self._constraints and all(map(_takes_best, plan.rows)):
            rows = _best(plan, drawing, computed.best.tolist())
        else:
            rows = self._rows(plan, batch, computed, drawing, fed)
        self._following.end(plan, rows)
        return StepResult(rows, time.perf_counter() - begin)

    def _rows(
        self, plan: StepPlan, batch: Batch, computed: ForwardOutput, drawing: list[int], fed: HandoffRows
    ) -> tuple[RowResult, ...]:
        prompt = [self._prompt_logprobs(row, computed, span) for row, span in zip(plan.rows, batch.spans, strict=True)]
        sampled: dict[int, Sampled] = {index: (None, None, error) for index, error in fed.errors.items()}
        if drawing:
            sampled |= self._sample(plan, batch, computed.logits(), drawing, fed)
        outputs = [sampled.get(index, NOTHING) for index in range(len(plan.rows))]
        return tuple(
            RowResult(row.request, out[0], out[1], found, out[2])
            for row, out, found in zip(plan.rows, outputs, prompt, strict=True)
        )

    def _sample(
        self, plan: StepPlan, batch: Batch, logits: Tensor, drawing: list[int], fed: HandoffRows = NOTHING_FED
    ) -> dict[int, Sampled]:
        """Token and logprobs, or why there are none, by index of the rows that sample."""
        if self._group.rank:
            return {}
        rows = [plan.rows[index] for index in drawing]
        samplings = [row.sampling for row in rows if row.sampling is not None]
        lengths = batch.lengths.tolist()
        choices = [
            SamplingRow(sampling, lengths[index], row.output_index, row.history)
            for index, row, sampling in zip(drawing, rows, samplings, strict=True)
        ]
        masks, dead = self._constraints.of_step(
            [fed.with_output(index, row) for index, row in zip(drawing, rows, strict=True)]
        )
        free = [
            replace(choice, sampling=unbound(choice.sampling)) if place in masks else choice
            for place, choice in enumerate(choices)
        ]
        tokens: list[int | None] = self._sample_rows(logits, free, self.config.eos_token_ids, masks)
        dead |= {place: NO_NUMBERS for place, token in enumerate(tokens) if token is None and place not in dead}
        asked = [
            (place, token, sampling.logprobs)
            for place, (token, sampling) in enumerate(zip(tokens, samplings, strict=True))
            if token is not None and sampling.logprobs is not None
        ]
        logprobs: dict[int, TokenLogprobs] = {}
        if asked:
            places = [place for place, _, _ in asked]
            found = self._logprobs(logits[places], [token for _, token, _ in asked], [count for _, _, count in asked])
            logprobs = dict(zip(places, found, strict=True))
        return {
            index: (None, None, dead[place]) if place in dead else (tokens[place], logprobs.get(place), None)
            for place, index in enumerate(drawing)
        }

    def _prompt_logprobs(self, row: Row, computed: ForwardOutput, span: RowSpan) -> tuple[TokenLogprobs, ...]:
        if row.prompt_logprobs is None:
            return ()
        hidden = computed.hidden()[span.begin : span.end]
        targets = row.tokens[1:].tolist() + ([] if row.next_token is None else [row.next_token])
        found: list[TokenLogprobs] = []
        for begin, end in _blocks(len(targets), LOGPROB_BLOCK):
            logits = self._model.logits(hidden[begin:end])
            self._num_blocks += 1
            if not self._group.rank:
                counts = [row.prompt_logprobs] * (end - begin)
                found += self._logprobs(logits, targets[begin:end], counts, ranked=True)
        return tuple(found)


def _ops_of(config: EngineConfig, dtype: DType) -> Ops:
    if config.quantization != "none":
        if config.deterministic:
            raise ConfigError(
                f"quantization {config.quantization} is not supported with deterministic; leave one of them out"
            )
        return int8_ops(config.quantization, config.device, dtype, config.threads, config.cache_dir)
    if config.deterministic:
        return invariant_ops(config.device, dtype, config.threads, config.cache_dir)
    return select_ops(config.device, dtype, config.threads, config.cache_dir)


def _takes_best(row: Row) -> bool:
    """Whether nothing but its logits decides what the row says, and nothing else is asked for."""
    if row.prompt_logprobs is not None or row.history is not None:
        return False
    sampling = row.sampling
    if sampling is None:
        return True
    return (
        sampling.temperature <= 0
        and sampling.logprobs is None
        and sampling.grammar is None
        and row.output_index >= sampling.min_tokens
    )


def _best(plan: StepPlan, drawing: list[int], best: list[int]) -> tuple[RowResult, ...]:
    """best: of each row that draws, less than 0 where its logits are no numbers."""
    if len(drawing) == len(plan.rows) and min(best) >= 0:
        return tuple(RowResult(row.request, token) for row, token in zip(plan.rows, best, strict=True))
    tokens = dict(zip(drawing, best, strict=True))
    return tuple(
        RowResult(row.request, None, error=NO_NUMBERS)
        if tokens.get(index, 0) < 0
        else RowResult(row.request, tokens.get(index))
        for index, row in enumerate(plan.rows)
    )


def _blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def _max_len(wanted: int | None, config: ModelConfig, pool_tokens: int) -> int:
    """The longest sequence served, checked against what the model computes right; not chosen: what the model and the
    pool allow."""
    if wanted is None:
        return _longest(config, pool_tokens)
    max_len = wanted
    if not 1 <= max_len <= config.max_position_embeddings:
        raise ConfigError(
            f"max_len {max_len} is not in 1…{config.max_position_embeddings}, which is what the model was made for; "
            "lower --max-len"
        )
    if config.sliding_window is not None and max_len > config.sliding_window:
        raise ModelError(
            f"config.json: sliding_window {config.sliding_window} is not supported for sequences beyond it; serve "
            "the model with "
            f"--max-len {config.sliding_window}, up to which the window changes nothing"
        )
    return max_len


def _longest(config: ModelConfig, pool_tokens: int) -> int:
    """What the model was made for and the pool holds. With a sliding window: what fits into it, where it changes
    nothing.
    """
    longest = min(config.max_position_embeddings, pool_tokens)
    if config.sliding_window is None or config.sliding_window >= longest:
        return longest
    log.warning(
        "sequences are at most %d tokens: beyond its sliding window this model is not supported", config.sliding_window
    )
    return config.sliding_window


def _check_capacity(num_pages: int, layout: KVLayout, device: str) -> None:
    if num_pages < 1:
        raise ConfigError(
            f"the KV memory does not hold one page of {layout.page_bytes} bytes; raise kv_bytes or lower page_tokens"
        )
    if device == "cpu":
        check_memory(num_pages * layout.page_bytes)
