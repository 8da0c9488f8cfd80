"""One kernel family's errors for `bench.accuracy`, in a process of its own: numba compiles for one CPU in each.

    python -m bench.accuracy.engine MODE MODEL DIRECTORY      MODE: usual, torch, deterministic, int8 or w8a8_int8

Every text goes through as chunks of a prompt; its last tokens then once more as rows that decode, of several texts
together. Errors of both are written to DIRECTORY/MODE.npz.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from bench.accuracy.cases import Case, Errors, Floats, Reference, join, load_cases
from pdcluster.core.messages import Sampling
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.model.base import ForwardOutput
from pdcluster.engine.model.batch import build_batch
from pdcluster.engine.ops.select import TorchOps

CACHE = Path.home() / ".cache" / "pdcluster"
PAGE_TOKENS, CHUNK, ROWS = 32, 512, 12
GREEDY = Sampling(max_tokens=1, seed=0, temperature=0.0)
MODES = ("usual", "torch", "deterministic", "int8", "w8a8_int8")


class Predictor:
    """An engine that tells all logits; holds the KV of ROWS texts."""

    def __init__(self, model: Path, mode: str, most_tokens: int) -> None:
        self._pages = most_tokens // PAGE_TOKENS + 1
        self._engine = Engine(
            EngineConfig(
                model,
                CACHE,
                dtype="bfloat16",
                page_tokens=PAGE_TOKENS,
                num_pages=ROWS * self._pages,
                deterministic=mode == "deterministic",
                quantization="int8" if mode == "int8" else "w8a8_int8" if mode == "w8a8_int8" else "none",
            )
        )

    def prompt(self, case: Case, row: int) -> Floats:
        """Logprobs of the case's positions; its KV stays in the pages of that row."""
        found = []
        for begin in range(0, len(case.ids), CHUNK):
            end = min(begin + CHUNK, len(case.ids))
            hidden = self._forward([self._row(case, row, begin, end)]).hidden()
            wanted = [position - begin for position in case.positions if begin <= position < end]
            for first in range(0, len(wanted), CHUNK // 4):
                with torch.inference_mode():
                    found.append(_logprobs(self._engine._model.logits(hidden[wanted[first : first + CHUNK // 4]])))
        return np.concatenate(found)

    def decode(self, cases: Sequence[Case], step: int) -> Floats:
        """Logprobs behind the step-th of the last positions of each case, in the order of cases; case i lies in the
        pages of row i."""
        places = [case.positions[len(case.positions) - case.tail + step] for case in cases]
        rows = [
            self._row(case, row, place, place + 1) for row, (case, place) in enumerate(zip(cases, places, strict=True))
        ]
        return _logprobs(self._forward(rows, list(range(len(rows)))).logits())

    def close(self) -> None:
        self._engine.close()

    def _row(self, case: Case, row: int, begin: int, end: int) -> Row:
        pages = np.arange(row * self._pages, (row + 1) * self._pages, dtype=np.int32)
        return Row(case.name, np.array(case.ids[begin:end], np.int32), begin, pages, GREEDY)

    def _forward(self, rows: Sequence[Row], wanted: Sequence[int] = ()) -> ForwardOutput:
        engine = self._engine
        engine._progress.begin(())
        with torch.inference_mode():
            return engine._model.forward(
                build_batch(StepPlan(tuple(rows)), engine._limits, "cpu"), engine._progress, wanted
            )


def _logprobs(logits: torch.Tensor) -> Floats:
    return logits.float().log_softmax(dim=-1).numpy()


def measure(model: Path, mode: str, directory: Path) -> tuple[Errors, Errors]:
    """Errors as a prompt, and as rows that decode."""
    cases, reference = load_cases(directory), Reference(directory)
    predictor = Predictor(model, mode, max(len(case.ids) for case in cases))
    prompts, decodes = [], []
    for group in _groups(cases):
        for row, case in enumerate(group):
            prompts.append(reference.errors_of(case, range(len(case.positions)), predictor.prompt(case, row)))
        decodes += list(_decoded(predictor, reference, group))
    predictor.close()
    return join(prompts), join(decodes)


def _groups(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Those with the same number of last tokens together, so that all of a group decode side by side."""
    ordered = sorted(cases, key=lambda case: case.tail)
    for tail in sorted({case.tail for case in ordered}):
        alike = [case for case in ordered if case.tail == tail]
        for begin in range(0, len(alike), ROWS):
            yield alike[begin : begin + ROWS]


def _decoded(predictor: Predictor, reference: Reference, group: Sequence[Case]) -> Iterator[Errors]:
    for step in range(group[0].tail):
        logprobs = predictor.decode(group, step)
        for row, case in enumerate(group):
            yield reference.errors_of(case, [len(case.positions) - case.tail + step], logprobs[row : row + 1])


def main(mode: str, model: str, directory: str) -> None:
    if mode == "torch":
        setattr(import_module("pdcluster.engine.engine"), "select_ops", lambda *_: TorchOps("cpu"))  # noqa: B010
    prompt, decode = measure(Path(model), mode, Path(directory))
    arrays = {
        f"{kind}_{name}": getattr(errors, name)
        for kind, errors in (("prompt", prompt), ("decode", decode))
        for name in ("logprob", "divergence", "is_equal")
    }
    np.savez(Path(directory) / "errors.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
