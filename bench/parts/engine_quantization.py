"""What weights of eight bits win and lose: steps beside bfloat16's in turns, and how well the bundled model predicts
text that it was not trained on.

Part of `python -m bench.engine --quantization`. The text are files of the running Python's standard library that were
kept out of training, cut in windows; each token is predicted from those before it in its window. Perplexity is exp of
the mean of what the right tokens' logprobs lack.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.harness.report import Row as Figure
from bench.harness.report import row
from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint import bundled
from pdcluster.core.messages import Sampling
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.ops.quantized import Quantization
from scripts.bundled_corpus import HELD_OUT

SCHEMES: tuple[Quantization, ...] = ("int8", "w8a8_int8")
WINDOW = 512
MOST_WINDOWS = 40
QUICK_WINDOWS = 8
# At most so many times bfloat16's.
PERPLEXITY_GOAL = 1.01
READ = Sampling(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=1)

Windows = list[NDArray[np.int32]]


def quality(cache_dir: Path, *, quick: bool) -> list[Figure]:
    """Perplexity and the change of single predictions, of the bundled model."""
    windows = list(held_out(QUICK_WINDOWS if quick else MOST_WINDOWS))
    config = EngineConfig(bundled.path(), cache_dir, dtype="bfloat16", num_pages=WINDOW // 32 + 1)
    exact, exact_best = read(config, windows)
    case = f"bundled model, {len(exact)} tokens of unseen text"
    figures = []
    for scheme in SCHEMES:
        found, best = read(replace(config, quantization=scheme), windows)
        figures += [
            row(
                f"perplexity, {scheme}",
                case,
                [perplexity(found)],
                "",
                against="bfloat16",
                against_value=perplexity(exact),
                better="less",
                goal=1 / PERPLEXITY_GOAL,
            ),
            row(f"logprob off by, {scheme}", f"{case}, mean", [float(np.abs(found - exact).mean())], "nat"),
            row(f"logprob off by, {scheme}", f"{case}, largest", [float(np.abs(found - exact).max())], "nat"),
            row(f"same best token, {scheme}", case, [statistics.fmean(best == exact_best)], "share"),
        ]
    return figures


def perplexity(logprobs: NDArray[np.float64]) -> float:
    return math.exp(-float(logprobs.mean()))


def read(config: EngineConfig, windows: Windows) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logprobs of the windows' tokens but the first of each, and the tokens that were most likely there."""
    engine = Engine(config)
    try:
        pages = np.arange(engine.num_pages, dtype=np.int32)
        found = []
        for window in windows:
            plan = StepPlan((Row("window", window, 0, pages, READ, prompt_logprobs=1),))
            found += list(engine.step(plan).rows[0].prompt_logprobs)
    finally:
        engine.close()
    return np.array([entry.logprob for entry in found]), np.array([entry.top_ids[0] for entry in found])


def held_out(most: int) -> Iterator[NDArray[np.int32]]:
    """The same number of windows of each file as far as there are, whole ones only."""
    text, library = TextModel.from_dir(bundled.path()), Path(sysconfig.get_path("stdlib"))
    files = [
        np.asarray(text.encode((library / name).read_text(encoding="utf-8"), add_special_tokens=False), np.int32)
        for name in HELD_OUT
    ]
    places = [(begin, number) for number, ids in enumerate(files) for begin in range(0, len(ids) - WINDOW + 1, WINDOW)]
    for begin, number in sorted(places)[:most]:
        yield files[number][begin : begin + WINDOW]
