"""Prompts for tests of the bundled model suit it: short enough for it, and its chat answers end by themselves."""

import pytest
import torch
from bundled_prompts import PROMPTS, Prompt

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint import bundled
from pdcluster.checkpoint.text_files import read_text_files

TRAINED_WINDOW = 512
CHATS = [prompt for prompt in PROMPTS if prompt.kind == "chat"]


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel(read_text_files(bundled.path()))


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(bundled.path(), dtype=torch.float32).eval()


def token_ids(text_model: TextModel, prompt: Prompt) -> list[int]:
    rendered = (
        text_model.render_chat([{"role": "user", "content": prompt.text}]) if prompt.kind == "chat" else prompt.text
    )
    return list(text_model.encode(rendered, add_special_tokens=False))


def test_there_are_completions_and_chats_and_no_prompt_twice() -> None:
    assert 6 <= len(PROMPTS) <= 8
    assert {prompt.kind for prompt in PROMPTS} == {"completion", "chat"}
    assert len({prompt.text for prompt in PROMPTS}) == len(PROMPTS)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.text[:24])
def test_prompt_and_answer_fit_what_the_model_was_trained_on(text_model: TextModel, prompt: Prompt) -> None:
    assert len(token_ids(text_model, prompt)) + prompt.max_tokens <= TRAINED_WINDOW


@pytest.mark.parametrize("prompt", CHATS, ids=lambda prompt: prompt.text[:24])
def test_a_greedy_chat_answer_ends_by_itself(reference: torch.nn.Module, text_model: TextModel, prompt: Prompt) -> None:
    ids = torch.tensor([token_ids(text_model, prompt)])
    settings = {"max_new_tokens": prompt.max_tokens, "do_sample": False, "temperature": None, "top_p": None}
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[operator]
    assert out[0, -1].item() in text_model.eos_token_ids
    assert out.shape[1] - ids.shape[1] > 4
