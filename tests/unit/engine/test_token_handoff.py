"""A step that goes on with tokens which the step before it draws: the same tokens as one step after the other, and what
becomes of failures."""

from __future__ import annotations

import select
from collections.abc import Iterator

import checkpoints
import numpy as np
import pytest
from checkpoints import KERNEL_CACHE, Shape
from driver import Driver, greedy

from pdcluster.core.errors import IntegrityError, ModelError
from pdcluster.core.history import History, history_of
from pdcluster.core.sampling import Sampling, Shaping
from pdcluster.core.step import NOT_DRAWN_YET, Row, RowError, RowResult, StepPlan
from pdcluster.engine.engine import Engine, EngineConfig, TokenHandoff

PAGE = 8
SHAPE = Shape("qwen3", hidden_size=32, intermediate_size=48, head_dim=16, vocab_size=97, num_layers=2)
SAMPLINGS = [
    greedy(24),
    Sampling(max_tokens=24, seed=5, temperature=0.9, top_p=0.9),
    Sampling(
        max_tokens=24, seed=6, temperature=0.0, shaping=Shaping(repetition=1.7, frequency=0.8, bad_words=((3,), (4, 5)))
    ),
    Sampling(max_tokens=24, seed=7, temperature=1.0, min_tokens=9, logprobs=2),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = checkpoints.save(checkpoints.build_model(SHAPE, seed=4), tmp_path_factory.mktemp("model"))
    engine = Engine(EngineConfig(model, KERNEL_CACHE, page_tokens=PAGE, num_pages=64))
    yield engine
    engine.close()


def pages_of(place: int) -> np.ndarray:
    return np.arange(place * 6, place * 6 + 6, dtype=np.int32)


def ahead_rows(prompts: list[np.ndarray], histories: list[History | None], count: int) -> tuple[Row, ...]:
    """The rows of every prompt's output token `count`, counted from 0."""
    return tuple(
        Row(str(i), NOT_DRAWN_YET, len(prompt) + count - 1, pages_of(i), sampling, count, history=history, follows=True)
        for i, (prompt, sampling, history) in enumerate(zip(prompts, SAMPLINGS, histories, strict=True))
    )


def run_ahead(engine: Engine, prompts: list[np.ndarray]) -> list[list[int]]:
    """Every step is launched while the one before it is in flight."""
    histories = [
        history_of(sampling.shaping, prompt, prompt[:0]) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]
    first = tuple(
        Row(str(i), prompt, 0, pages_of(i), sampling, history=history)
        for i, (prompt, sampling, history) in enumerate(zip(prompts, SAMPLINGS, histories, strict=True))
    )
    engine.launch(StepPlan(first))
    found: list[list[int]] = [[] for _ in prompts]
    for count in range(1, 25):
        if count < 24:
            engine.launch(StepPlan(ahead_rows(prompts, histories, count)))
        for tokens, result in zip(found, engine.collect(30).rows, strict=True):
            assert result.token is not None
            tokens.append(result.token)
    return found


def test_steps_launched_ahead_draw_the_tokens_of_steps_taken_one_by_one(engine: Engine) -> None:
    """With penalties, bad words and min_tokens, which depend on tokens that nobody outside the engine knows yet."""
    prompts = [checkpoints.prompt(length, SHAPE.vocab_size) for length in (5, 8, 9, 17)]
    right = [job.tokens for job in Driver(engine).run(prompts, SAMPLINGS)]
    assert run_ahead(engine, prompts) == right


def test_a_history_has_every_token_once(engine: Engine) -> None:
    prompt = checkpoints.prompt(5, SHAPE.vocab_size)
    sampling = Sampling(max_tokens=9, seed=1, temperature=0.0, shaping=Shaping(presence=0.1))
    (job,) = Driver(engine).run([prompt], [sampling])
    assert job.history is not None and int(job.history.counts.sum()) == 9
    assert dict(zip(job.history.ids.tolist(), job.history.counts.tolist(), strict=True)) == {
        t: job.tokens.count(t) for t in set(job.tokens)
    }


def first_row(**fields: object) -> Row:
    return Row("0", np.array([5, 6, 7], np.int32), 0, pages_of(0), greedy(1), **fields)  # type: ignore[arg-type]


def next_row() -> Row:
    return Row("0", NOT_DRAWN_YET, 3, pages_of(0), greedy(1), 1, follows=True)


def test_what_follows_a_step_that_failed_fails_and_the_engine_goes_on(engine: Engine) -> None:
    engine.launch(StepPlan((Row("0", np.array([1000], np.int32), 0, pages_of(0), greedy(1)),)))
    engine.launch(StepPlan((next_row(),)))
    with pytest.raises(IntegrityError, match="token id 1000"):
        engine.collect(30)
    with pytest.raises(ModelError, match="was to go on with"):
        engine.collect(30)
    assert engine.step(StepPlan((first_row(),))).rows[0].token is not None


def test_done_fd_is_readable_until_both_steps_are_collected(engine: Engine) -> None:
    engine.launch(StepPlan((first_row(),)))
    engine.launch(StepPlan((next_row(),)))
    engine.collect(30)
    assert select.select([engine.done_fd], [], [], 30)[0], "the second step is done, too"
    engine.collect(30)
    assert not select.select([engine.done_fd], [], [], 0)[0]


def test_a_step_with_bells_is_not_launched_behind_another(engine: Engine) -> None:
    engine.launch(StepPlan((first_row(),)))
    with pytest.raises(IntegrityError, match="milestones"):
        engine.launch(StepPlan((next_row(),), milestones=(1,)))
    engine.collect(30)


def test_a_row_behind_one_that_could_not_go_on_gets_its_error_and_no_token() -> None:
    following, error = TokenHandoff(), RowError("the grammar allows nothing", retryable=False)
    following.begin(StepPlan((first_row(),)))
    following.end(StepPlan((first_row(),)), (RowResult("0", None, error=error),))
    fed = following.begin(StepPlan((next_row(),)))
    assert fed.tokens == {0: 0} and fed.errors == {0: error}


def test_a_grammar_is_told_of_the_token_that_its_row_goes_on_with() -> None:
    following = TokenHandoff()
    following.begin(StepPlan((first_row(),)))
    following.end(StepPlan((first_row(),)), (RowResult("0", 42),))
    fed = following.begin(StepPlan((next_row(),)))
    output = np.array([1, 2], np.int32)
    told = fed.with_output(0, Row("0", NOT_DRAWN_YET, 3, pages_of(0), output=output, follows=True)).output
    assert told is not None and told.tolist() == [1, 2, 42] and output.tolist() == [1, 2]
