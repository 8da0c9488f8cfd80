"""The model in the package: complete, small, readable by transformers and by our own strict readers, and trained rather
than noise."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint import bundled
from pdcluster.checkpoint.text_files import read_text_files
from pdcluster.engine.model.config import read_config
from scripts import bundled_corpus
from scripts.train_bundled import SPECIAL_TOKENS, Model, Shape, model_config, render_chat

MODEL = bundled.path()
MEGABYTES_ALLOWED = 8
FILES = {
    "MODEL_CARD.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
SAMPLES = (
    "import os\n\n\ndef f(x, *, y=1):\n    return [x] * y\n",
    "\ttabs, trailing blanks   \n\n\n and\r\nother line ends\n",
    "ünïcödé 漢字 🙂 \x00 control",
    "____dunder__ 3.14159 0xFF a+=b //= **kw",
    " ",
    "",
)
# Measured on the first 400 tokens of each, over counts from the training files: token frequencies alone cost 6.5 to 6.8
# nats per token, frequencies of token pairs 4.65 to 5.05; a uniform guess is 7.6. The model takes 3.46 to 3.55.
HELD_OUT_NATS = 4.0
HELD_OUT_MODULES = ("sched", "shelve", "cmd")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel(read_text_files(MODEL))


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(MODEL / "model.safetensors")


def loss(model: torch.nn.Module, ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(tokens).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), tokens[0, 1:]).item()


def held_out_text(module: str) -> str:
    """From this interpreter's own standard library, as nothing of it may lie in the repository."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text("utf-8")


def test_the_directory_holds_the_files_of_a_checkpoint_and_no_others() -> None:
    assert {file.name for file in MODEL.iterdir()} == FILES


def test_all_files_together_are_small_enough_for_a_package() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= MEGABYTES_ALLOWED * 1_000_000


def test_the_config_is_the_one_the_script_writes() -> None:
    assert json.loads((MODEL / "config.json").read_text()) == model_config(Shape())


def test_the_strict_reader_takes_the_config() -> None:
    config = read_config(MODEL)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 2, 64)
    assert config.max_position_embeddings >= 4096


def test_the_weights_are_finite_bf16_and_named_as_qwen3_names_them(weights: dict[str, torch.Tensor]) -> None:
    assert len(weights) == 2 + 11 * Shape().num_hidden_layers
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.3.self_attn.k_norm.weight"} <= set(weights)
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("sample", SAMPLES)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, sample: str) -> None:
    assert tokenizer.decode(tokenizer.encode(sample).ids, skip_special_tokens=False) == sample


def test_special_tokens_have_the_ids_the_config_names(tokenizer: Tokenizer, text_model: TextModel) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert set(text_model.eos_token_ids) == {0, 2}
    assert tokenizer.get_vocab_size() == Shape().vocab_size


def test_the_tokenizer_keeps_code_short(tokenizer: Tokenizer) -> None:
    text = held_out_text("sched")
    assert len(text) / len(tokenizer.encode(text).ids) > 2.2


def test_the_chat_template_renders_what_training_rendered(text_model: TextModel) -> None:
    class NoSystem:
        def random(self) -> float:
            return 1.0

    chat = bundled_corpus.Chat("What does `len` do?", "Return the number of items in a container.")
    messages = [{"role": "user", "content": chat.question}, {"role": "assistant", "content": chat.answer}]
    assert text_model.template is not None
    assert text_model.template.render(messages, add_generation_prompt=False) == render_chat(chat, NoSystem())  # type: ignore[arg-type]


def test_the_chat_template_ends_where_the_assistant_speaks(text_model: TextModel) -> None:
    assert text_model.template is not None
    rendered = text_model.template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("module", HELD_OUT_MODULES)
def test_it_predicts_code_it_never_saw_far_better_than_noise(
    reference: torch.nn.Module, tokenizer: Tokenizer, module: str
) -> None:
    assert f"{module}.py" in bundled_corpus.HELD_OUT
    assert loss(reference, tokenizer.encode(held_out_text(module)).ids[:400]) < HELD_OUT_NATS


def test_shuffling_a_text_makes_it_far_less_likely(reference: torch.nn.Module, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(held_out_text("sched")).ids[:300]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).tolist()
    assert loss(reference, [ids[at] for at in order]) > 2 * loss(reference, ids)


def test_the_script_trains_what_transformers_runs(
    reference: torch.nn.Module, weights: dict[str, torch.Tensor], tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(held_out_text("cmd")).ids[:65]
    model = Model(Shape(), window=64)
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
    model.cos, model.sin = model.cos.float(), model.sin.float()
    with torch.inference_mode():
        ours = model(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])).item()
    assert math.isclose(ours, loss(reference, ids), rel_tol=2e-3)  # the script's rotary tables are rounded to bf16


def test_it_ends_its_turn(reference: torch.nn.Module, text_model: TextModel) -> None:
    prompt = text_model.encode(
        text_model.render_chat([{"role": "user", "content": "Who are you?"}]), add_special_tokens=False
    )
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=80, do_sample=False, temperature=None, top_p=None)  # type: ignore[operator]
    assert out[0, -1].item() in text_model.eos_token_ids


def test_the_card_says_what_it_is_how_it_was_made_and_the_licence() -> None:
    card = (MODEL / "MODEL_CARD.md").read_text()
    for expected in (
        "scripts.train_bundled",
        "PSF License Agreement",
        "What it is not good for",
        "nats per token",
        "CPU minutes",
    ):
        assert expected in card
    assert "$" not in card, "a number was never filled in"
