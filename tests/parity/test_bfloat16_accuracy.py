"""In bfloat16 an engine is nearer to float32 than transformers is, on a model with outliers: its residual stream and
logits are float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.accuracy.__main__ import predict, rival_errors
from bench.accuracy.cases import Errors, Reference, make_cases, save_cases
from bench.accuracy.engine import measure
from bench.accuracy.models import made_model
from pdcluster.engine.ops.select import TorchOps

# Measured: 0.62 to 0.75. With logits and the residual stream in bfloat16 it is 0.96 to 1.05.
OF_TRANSFORMERS = 0.85


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts, and what transformers predicts in float32."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("accuracy")
    model = made_model(directory / "model")
    save_cases(
        make_cases(Tokenizer.from_file(str(model / "tokenizer.json")), num_positions=40, most_tokens=160, every=6),
        directory,
    )
    Reference(directory).write(predict(model, torch.float32, directory))
    return directory


@pytest.fixture(scope="module")
def rival(directory: Path) -> Errors:
    return rival_errors(directory / "model", directory, Reference(directory))["prompt"]


@pytest.mark.parametrize("mode", ["usual", "deterministic", "torch"])
def test_logprobs_are_nearer_to_float32_than_those_of_transformers(
    directory: Path, rival: Errors, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prompts and as rows that decode."""
    if mode == "torch":
        monkeypatch.setattr("pdcluster.engine.engine.select_ops", lambda *_: TorchOps("cpu"))
    for errors in measure(directory / "model", mode, directory):
        assert errors.logprob.mean() <= OF_TRANSFORMERS * rival.logprob.mean()
        assert errors.divergence.mean() <= OF_TRANSFORMERS * rival.divergence.mean()
