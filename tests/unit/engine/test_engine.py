"""The engine as the node sees it: launch, collect, the descriptor, errors, limits, and results that do not depend on
the batch."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from checkpoints import KERNEL_CACHE, Shape
from driver import Driver, greedy

from pdcluster.core.errors import ConfigError, DeadlineExceeded, IntegrityError, ModelError
from pdcluster.core.grammar import Grammar
from pdcluster.core.history import history_of
from pdcluster.core.messages import Sampling
from pdcluster.core.sampling import Shaping
from pdcluster.core.step import Row, StepPlan, StepResult
from pdcluster.engine.engine import NO_NUMBERS, Engine, EngineConfig
from pdcluster.engine.model.base import LayerProgress
from pdcluster.engine.sampling.constraint import MAX_IDLE_STEPS
from pdcluster.engine.worker import EngineWorker

PAGE = 8
SHAPE = Shape("qwen3", hidden_size=32, intermediate_size=48, head_dim=16, vocab_size=97, num_layers=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.build_model(SHAPE, seed=4), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model_dir: Path) -> EngineConfig:
    return EngineConfig(model_dir, KERNEL_CACHE, page_tokens=PAGE, num_pages=64)


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(config)
    engine.warmup()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With a step in one kernel call."""
    model = checkpoints.build_model(replace(SHAPE, head_dim=32, hidden_size=64, intermediate_size=96), seed=4)
    directory = checkpoints.save(model, tmp_path_factory.mktemp("model"))
    engine = Engine(EngineConfig(directory, KERNEL_CACHE, dtype="bfloat16", page_tokens=PAGE, num_pages=64))
    yield engine
    engine.close()


def row(tokens: list[int] | None = None, start: int = 0, pages: list[int] | None = None, **fields: object) -> Row:
    sampling = fields.pop("sampling", greedy(1))
    return Row(
        "a", np.array(tokens or [5, 6, 7], np.int32), start, np.array(pages or [1], np.int32), sampling, **fields
    )  # type: ignore[arg-type]


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


# ---------------------------------------------------------------- steps


def test_a_step_samples_for_the_rows_that_ask(engine: Engine) -> None:
    result = engine.step(StepPlan((row(sampling=None), row(pages=[2]), row(pages=[3], sampling=greedy(1, logprobs=2)))))
    assert [found.token is None for found in result.rows] == [True, False, False]
    assert result.rows[1].logprobs is None and result.rows[2].logprobs is not None
    assert result.rows[2].logprobs.top_ids[0] == result.rows[2].token == result.rows[1].token
    assert result.rows[2].logprobs.logprob == result.rows[2].logprobs.top_logprobs[0]
    assert result.forward_s > 0


@pytest.mark.parametrize(
    ("changes", "is_short"),
    [
        ({}, True),
        ({"logprobs": 0}, False),
        ({"min_tokens": 3}, False),
        ({"temperature": 1e-9}, False),
        ({"shaping": Shaping(biases=((3, 0.0),))}, False),
    ],
    ids=str,
)
def test_greedy_rows_take_the_best_logit_from_the_forward(
    bfloat16: Engine, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_short: bool
) -> None:
    """Unless anything else is asked for, of any row of the step; the token is the same. On CPUs without panels a prompt
    is no single call, and its token is always sampled."""
    prompts = [np.array(tokens, np.int32) for tokens in ([5, 6, 7], [9, 3], [8, 8, 2, 4])]
    alone = [
        bfloat16.step(StepPlan((row(prompt.tolist(), sampling=greedy(1, logprobs=0)),))).rows[0].token
        for prompt in prompts
    ]
    assert len(set(alone)) == 3
    sampled, sample_rows = [], bfloat16._sample_rows
    monkeypatch.setattr(bfloat16, "_sample_rows", lambda *args: (sampled.append(1), sample_rows(*args))[1])
    asked = Sampling(**{"max_tokens": 4, "seed": 0, "temperature": 0.0, **changes})
    history = history_of(asked.shaping, prompts[2], prompts[2][:0])
    changed = row(prompts[2].tolist(), pages=[3], sampling=asked, history=history)
    rows = row(prompts[0].tolist()), row(prompts[1].tolist(), pages=[2], sampling=None), changed
    first, middle, last = bfloat16.step(StepPlan(rows)).rows
    assert (first.token, middle.token, last.token) == (alone[0], None, alone[2])
    fused = bfloat16._model._fused  # type: ignore[attr-defined]
    assert bool(sampled) is not (is_short and fused is not None and fused._takes_prompts)
    assert (last.logprobs is not None) == ("logprobs" in changes)


# No node has compiled that.
LOST = greedy(2, grammar=Grammar('{"type": "regex", "pattern": "a"}'))


def test_prompt_logprobs_come_where_the_forward_finds_the_best_logit(bfloat16: Engine) -> None:
    (told,) = bfloat16.step(StepPlan((row(prompt_logprobs=1),))).rows
    assert told.token is not None and len(told.prompt_logprobs) == 2
    assert all(entry.rank is not None and entry.rank >= 1 for entry in told.prompt_logprobs)


def test_a_row_without_its_grammar_ends_where_the_forward_finds_the_best_logit_and_so_does_the_one_behind_it(
    bfloat16: Engine,
) -> None:
    bfloat16.launch(StepPlan((row(), replace(row(pages=[2], sampling=LOST), request="b"))))
    bfloat16.launch(StepPlan((row([0], 3, [1], follows=True), replace(row([0], 3, [2], follows=True), request="b"))))
    fine, ended = bfloat16.collect(30).rows
    next_fine, next_ended = bfloat16.collect(30).rows
    assert None not in (fine.token, next_fine.token) and fine.error is next_fine.error is None
    assert ended.token is next_ended.token is None and ended.error == next_ended.error is not None


@pytest.mark.parametrize(
    "changes",
    [{}, {"logprobs": 1}, {"temperature": 1.0}, {"grammar": LOST.grammar}],
    ids=["greedy", "logprobs", "drawn", "ended"],
)
@pytest.mark.parametrize("which", ["engine", "bfloat16"])
def test_a_row_whose_logits_are_no_numbers_ends_alone(
    request: pytest.FixtureRequest, which: str, changes: dict[str, Any]
) -> None:
    """And so does the step that is behind it already, while the others of both say what they say without it."""
    engine: Engine = request.getfixturevalue(which)
    sampling = Sampling(**{"max_tokens": 4, "seed": 0, "temperature": 0.0, **changes})
    engine.step(StepPlan((row(),)))
    alone = [
        engine.step(StepPlan((row([9], 3, [1]),))).rows[0].token,
        engine.step(StepPlan((row([9], 4, [1]),))).rows[0].token,
    ]
    engine.pool.tensor[2].fill_(float("nan"))
    try:
        engine.launch(StepPlan((row([9], 3, [1]), replace(row([9], 3, [2], sampling=sampling), request="b"))))
        engine.launch(
            StepPlan((row([9], 4, [1]), replace(row([0], 4, [2], sampling=sampling, follows=True), request="b")))
        )
        steps = [engine.collect(30).rows for _ in range(2)]
    finally:
        engine.pool.tensor[2].fill_(0.0)
    assert [fine.token for fine, _ in steps] == alone
    for _, ended in steps:
        assert ended.token is ended.logprobs is None and ended.error is not None
        assert (ended.error == NO_NUMBERS) is (sampling.grammar is None)


def test_what_a_grammar_left_behind_goes_though_greedy_rows_alone_are_left(bfloat16: Engine) -> None:
    bfloat16._constraints._rows["gone"] = None, bfloat16._constraints._step
    for _ in range(MAX_IDLE_STEPS):
        bfloat16.step(StepPlan((row(),)))
    assert not bfloat16._constraints


def test_the_descriptor_is_readable_from_the_end_of_a_step_until_it_is_collected(engine: Engine) -> None:
    assert not readable(engine.done_fd)
    engine.launch(StepPlan((row(),)))
    assert select.select([engine.done_fd], [], [], 30)[0]
    assert engine.collect(timeout=30).rows[0].token is not None
    assert not readable(engine.done_fd)


def test_a_bell_that_nobody_heard_says_nothing_about_the_next_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise pages whose KV is not computed yet would be taken for done, and sent."""
    engine.launch(StepPlan((row(),), milestones=(1, 2)))
    engine.collect(10)
    assert engine.layers_done == SHAPE.num_layers
    gate = threading.Event()
    forward = engine._model.forward
    monkeypatch.setattr(engine._model, "forward", lambda *args: (gate.wait(10), forward(*args))[1])
    engine.launch(StepPlan((row(),), milestones=(1,)))
    assert engine.layers_done == 0 and not readable(engine.layer_fd)
    gate.set()
    engine.collect(10)
    assert readable(engine.layer_fd)


def test_progress_advances_by_layers_and_may_live_in_shared_memory(config: EngineConfig) -> None:
    cell = ctypes.c_uint64()
    engine = Engine(config, LayerProgress(cell))
    engine.step(StepPlan((row(),)))
    engine.step(StepPlan((row(),)))
    assert engine.progress >= cell.value == 2 * SHAPE.num_layers
    engine.close()


def test_prompt_logprobs_of_chunks_join_to_those_of_the_whole(engine: Engine) -> None:
    prompt = checkpoints.prompt(150, SHAPE.vocab_size)
    whole, chunked = (
        Driver(engine).run([prompt], [greedy(1, prompt_logprobs=2)], chunk=chunk)[0].prompt_logprobs
        for chunk in (150, 11)
    )
    assert len(whole) == len(chunked) == 149
    assert [entry.logprob for entry in whole] == pytest.approx([entry.logprob for entry in chunked], abs=1e-4)
    assert all(len(entry.top_ids) == 2 for entry in whole)


def test_seeded_sampling_gives_the_same_tokens_in_any_batch_and_chunking(engine: Engine) -> None:
    prompts = [checkpoints.prompt(length, SHAPE.vocab_size) for length in (1, 7, 8, 9, 40)]
    samplings = [
        Sampling(max_tokens=20, seed=10 + i, choice=i % 2, temperature=0.9, top_p=0.95, logprobs=0)
        for i in range(len(prompts))
    ]
    alone = [
        Driver(engine).run([prompt], [sampling])[0].tokens for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    together = [job.tokens for job in Driver(engine).run(prompts, samplings, chunk=5, stagger=3)]
    assert alone == together
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)


def test_a_continuation_from_emitted_tokens_draws_what_the_first_attempt_would_have(engine: Engine) -> None:
    """After a migration the prompt is longer and the output shorter: positions, and so the random numbers, are the
    same."""
    prompt = checkpoints.prompt(12, SHAPE.vocab_size)
    sampling = Sampling(max_tokens=16, seed=3, temperature=1.0)
    whole = Driver(engine).run([prompt], [sampling])[0].tokens
    resumed = np.concatenate([prompt, np.array(whole[:6], np.int32)])
    rest = Driver(engine).run([resumed], [Sampling(max_tokens=10, seed=3, temperature=1.0)])[0].tokens
    assert whole[:6] + rest == whole


def test_min_tokens_keeps_end_tokens_out(engine: Engine) -> None:
    prompt = checkpoints.prompt(10, SHAPE.vocab_size)
    ends = tuple(range(2, 90))
    tokens = (
        Driver(engine).run([prompt], [Sampling(max_tokens=12, seed=0, min_tokens=6, stop_token_ids=ends)])[0].tokens
    )
    assert not set(tokens[:6]) & {*ends, 2}
    assert set(tokens[6:]) & set(ends)


def test_plain_torch_gives_the_same_tokens_as_the_kernels(
    engine: Engine, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    plain = Engine(config)
    monkeypatch.undo()
    prompt = checkpoints.prompt(30, SHAPE.vocab_size)
    assert (
        Driver(plain).run([prompt], [greedy(12)], chunk=9)[0].tokens
        == Driver(engine).run([prompt], [greedy(12)], chunk=9)[0].tokens
    )
    plain.close()


def test_pages_of_another_engine_continue_the_request(engine: Engine, config: EngineConfig) -> None:
    """What a transfer does: pages are copied byte by byte to other page ids of another pool."""
    prompt = checkpoints.prompt(29, SHAPE.vocab_size)
    whole = Driver(engine).run([prompt], [greedy(8)])[0].tokens
    source, target = np.array([4, 9, 2, 7, 1], np.int32), np.array([0, 3, 5, 6, 8], np.int32)
    first = engine.step(StepPlan((row(prompt.tolist(), 0, source.tolist()),))).rows[0].token
    other = Engine(config)
    size = engine.layout.page_bytes
    for old, new in zip(source, target, strict=True):
        other.pool.view[new * size : (new + 1) * size] = engine.pool.view[old * size : (old + 1) * size]
    tokens = [first]
    for length in range(29, 36):
        tokens.append(other.step(StepPlan((row([tokens[-1]], length, target.tolist()),))).rows[0].token)
    assert tokens == whole
    other.close()


# ---------------------------------------------------------------- errors


def test_an_error_in_the_step_is_raised_by_collect_and_the_engine_goes_on(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.launch(StepPlan((row([1000]),)))
    with pytest.raises(IntegrityError, match="token id 1000"):
        engine.collect(timeout=30)
    assert "failed in a step" in caplog.text
    assert not readable(engine.done_fd)
    assert engine.step(StepPlan((row(),))).rows[0].token is not None


def test_a_step_beyond_max_len_is_refused(engine: Engine) -> None:
    with pytest.raises(IntegrityError, match="do not fit"):
        engine.step(StepPlan((row([1], start=512, pages=list(range(64))),)))


def test_a_third_launch_before_collect_is_a_bug(engine: Engine) -> None:
    for _ in range(2):
        engine.launch(StepPlan((row(),)))
    with pytest.raises(IntegrityError, match="in flight"):
        engine.launch(StepPlan((row(),)))
    for _ in range(2):
        engine.collect(timeout=30)


def test_collect_without_launch_is_a_bug(engine: Engine) -> None:
    with pytest.raises(IntegrityError, match="without a launched step"):
        engine.collect()


def test_a_step_that_takes_too_long_can_be_collected_later() -> None:
    gate = threading.Event()

    def compute(plan: StepPlan) -> StepResult:
        assert gate.wait(30)
        return StepResult((), 1.0)

    worker = EngineWorker(compute, threads=1)
    worker.launch(StepPlan(()))
    with pytest.raises(DeadlineExceeded, match="not done"):
        worker.collect(timeout=0.01)
    gate.set()
    assert worker.collect(timeout=30).forward_s == 1.0
    worker.close()


def test_closing_waits_for_the_step_in_flight_and_may_be_repeated(config: EngineConfig) -> None:
    engine = Engine(config)
    descriptor = engine.done_fd
    engine.launch(StepPlan((row(),)))
    engine.close()
    engine.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    with pytest.raises(IntegrityError, match="closed"):
        engine.launch(StepPlan((row(),)))


# ---------------------------------------------------------------- configuration


def test_the_pool_is_sized_in_bytes_when_pages_are_not_given(config: EngineConfig) -> None:
    engine = Engine(replace(config, num_pages=None, kv_bytes=100_000))
    assert engine.num_pages == 100_000 // engine.layout.page_bytes == engine.pool.num_pages
    assert engine.max_len == engine.num_pages * PAGE, "no longer than the pool"
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_len": 513}, "513.*512"),
        ({"max_len": 0}, "max_len 0"),
        ({"num_pages": None, "kv_bytes": 10}, "does not hold one page"),
    ],
)
def test_limits_that_do_not_fit_the_model_are_refused(
    config: EngineConfig, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(replace(config, **changes))


def test_sequences_end_where_a_sliding_window_would_begin_to_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that has one works at the first try; who asks for more is told why not."""
    directory = checkpoints.save(
        checkpoints.build_model(replace(SHAPE, family="mistral", config={"sliding_window": 40}), seed=1), tmp_path
    )
    config = EngineConfig(directory, KERNEL_CACHE, page_tokens=PAGE, num_pages=64)
    with pytest.raises(ModelError, match=r"sliding_window 40 .*--max-len 40"):
        Engine(replace(config, max_len=41))
    for max_len in (None, 40):
        engine = Engine(replace(config, max_len=max_len))
        assert engine.max_len == 40
        engine.close()
    assert "sequences are at most 40 tokens" in caplog.text


def test_warmup_works_on_the_smallest_pool(config: EngineConfig) -> None:
    engine = Engine(replace(config, num_pages=1, max_len=1))
    before = engine.progress
    engine.warmup()
    assert engine.progress - before >= 3 * engine.config.num_layers
    engine.close()


def test_importing_the_engine_loads_no_transformers_and_compiles_nothing() -> None:
    code = (
        "import sys, pdcluster.engine.engine; print([m for m in ('transformers', 'numba', 'pandas') if m in "
        "sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_a_worker_that_stands_still_is_left_behind_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster.engine.worker.CLOSE_S", 0.2)
    gate = threading.Event()

    def compute(plan: StepPlan) -> StepResult:
        gate.wait(30)
        return StepResult((), 0.0)

    worker = EngineWorker(compute, threads=1)
    worker.launch(StepPlan((row(),)))
    worker.close()
    assert worker.is_stuck, "the process must leave without it"
    gate.set()
