"""The small model of several tests, in memory and as files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import build_model, save
from small_model import MODEL
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return build_model(MODEL, seed=3)


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))
