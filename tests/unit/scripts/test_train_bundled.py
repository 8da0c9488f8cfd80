"""The training script on a model and a text of a few lines: it learns, cuts its windows right and leaves a directory
that loads."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from scripts import train_bundled as training
from scripts.bundled_corpus import Chat

SHAPE = training.Shape(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)
RECIPE = training.Recipe(minutes=1.0, seed=0, window=16, batch=4, matrix_lr=0.02, vector_lr=0.02)
TEXT = "def twice(x):\n    return x + x\n\n\n" * 12
CHATS = [training.render_chat(Chat(f"What is {n}?", f"It is {n}."), Random(n)) for n in range(40)]


@pytest.fixture
def windows() -> training.Windows:
    tokenizer = training.train_tokenizer([TEXT, *CHATS], SHAPE.vocab_size)
    return training.build_windows(tokenizer, [TEXT], CHATS, RECIPE)


@pytest.fixture
def model() -> training.Model:
    torch.manual_seed(0)
    model = training.Model(SHAPE, RECIPE.window)
    training.initialise(model, SHAPE)
    return model


def test_targets_are_the_tokens_one_later(windows: training.Windows) -> None:
    tokens, targets = windows.batch(8)
    assert tokens.shape == targets.shape == (8, RECIPE.window)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_window_is_from_the_files_or_begins_a_chat(windows: training.Windows) -> None:
    rows = [windows.row() for _ in range(200)]
    im_start = training.SPECIAL_TOKENS.index(training.IM_START)
    chats = [row for row in rows if row[0] == im_start]
    assert 40 < len(chats) < 120  # CHAT_SHARE of them, give or take five standard deviations
    assert all(len(row) == RECIPE.window + 1 for row in rows)


def test_the_same_seed_draws_the_same_windows(windows: training.Windows) -> None:
    again = training.Windows(
        windows.files, windows.chats, windows.chat_starts, windows.window, np.random.default_rng(RECIPE.seed)
    )
    assert all(np.array_equal(windows.row(), again.row()) for _ in range(20))


def test_a_prompt_that_ends_in_a_line_break_is_cut_as_training_text_is() -> None:
    tokenizer = training.train_tokenizer([TEXT], SHAPE.vocab_size)
    whole = tokenizer.encode(TEXT).tokens
    for end in ("def twice(x):\n", "def twice(x):\n    ", "def twice(x):\n    return"):
        head = tokenizer.encode(end).tokens
        assert whole[: len(head)] == head


def test_training_lowers_the_loss(model: training.Model, windows: training.Windows) -> None:
    trainer = training.Trainer(model, RECIPE, compiled=False)
    before = trainer.evaluate(windows.files)
    for step in range(30):
        trainer.step(*windows.batch(RECIPE.batch), done=0.03 + step / 60)
    assert before > np.log(SHAPE.vocab_size) - 1
    assert trainer.evaluate(windows.files) < before / 2


def test_the_learning_rate_rises_then_falls_to_zero(model: training.Model, windows: training.Windows) -> None:
    trainer = training.Trainer(model, RECIPE, compiled=False)
    rates = []
    for done in (0.0, training.WARMUP, 0.5, 1.0, 1.1):
        trainer.step(*windows.batch(RECIPE.batch), done=done)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[-2] == rates[-1] == 0
    assert rates[1] > rates[2] > 0


def test_someone_who_stops_it_gets_what_was_trained_so_far(model: training.Model, windows: training.Windows) -> None:
    trainer = training.Trainer(model, RECIPE, compiled=False)
    stopped: list[bool] = []
    steps = []
    for step, _loss, _spent in training.train(trainer, windows, 60.0, stopped):
        steps.append(step)
        if step == 3:
            stopped.append(True)
    assert steps == [1, 2, 3]


def test_saved_weights_replace_older_ones_whole(model: training.Model, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"older")
    training.export_weights(tmp_path, model)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").stat().st_size > 1000


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_script_writes_a_directory_that_transformers_loads(tmp_path: Path) -> None:
    options = ["--minutes", "0.02", "--window", "64", "--batch", "2", "--eager"]
    command = [sys.executable, "-m", "scripts.train_bundled", "--out", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.to_dict()["vocab_size"] == json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert "$" not in (tmp_path / "MODEL_CARD.md").read_text()
