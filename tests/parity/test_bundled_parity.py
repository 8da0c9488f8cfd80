"""The engine gives the bundled model's tokens as transformers gives them: trained weights and real prompts, where
test_families has random ones."""

from collections.abc import Iterator

import checkpoints
import numpy as np
import pytest
import torch
from bundled_prompts import PROMPTS, Prompt
from checkpoints import KERNEL_CACHE
from driver import Driver, greedy
from transformers import AutoModelForCausalLM, PreTrainedModel

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint import bundled
from pdcluster.engine.engine import Engine, EngineConfig

NUM_TOKENS = 24
GAP = 1e-3


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(bundled.path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(EngineConfig(bundled.path(), KERNEL_CACHE, dtype="float32", num_pages=64))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel.from_dir(bundled.path())


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.text[:24])
def test_greedy_tokens_equal_those_of_transformers(
    reference: PreTrainedModel, engine: Engine, text_model: TextModel, prompt: Prompt
) -> None:
    text = text_model.render_chat([{"role": "user", "content": prompt.text}]) if prompt.kind == "chat" else prompt.text
    ids = np.array(text_model.encode(text, add_special_tokens=False), np.int32)
    expected = checkpoints.greedy(reference, ids, NUM_TOKENS)
    assert expected.least_gap >= GAP, (
        "the reference itself hesitates on this prompt; choose fewer tokens or another prompt"
    )
    (job,) = Driver(engine).run([ids], [greedy(NUM_TOKENS)], chunk=13)
    assert job.tokens == expected.tokens
