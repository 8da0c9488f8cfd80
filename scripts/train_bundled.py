"""Train the small model that pdcluster carries for its demo and tests: `python -m scripts.train_bundled --out DIR`.

Learns from the running Python's standard library alone (`bundled_corpus.py`), on one CPU thread, within a budget of CPU
minutes, and writes a Hugging Face directory of the plain Qwen3 shape: config, bf16 safetensors, tokenizer, chat
template and card. The model here exists to be trained; serving it is the engine's work. The same seed gives the same
data order but not the same weights, since the number of steps depends on the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import platform
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from string import Template

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from scripts import bundled_corpus as corpus

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
# Line breaks and runs of spaces stand alone, so that a prompt which ends in one of them is cut as the training text
# was.
WORDS = r" {2,}| ?[\p{L}_]+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}_]+|\n+|\s"
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHAT_SHARE = 0.4  # of the training windows
SYSTEM_SHARE = 0.25  # of the chats that begin with a system turn
WARMUP = 0.03  # of the budget
SAVE_EVERY_S = 180.0
CARD = Path(__file__).with_name("bundled_card.md")


@dataclass(frozen=True, slots=True)
class Shape:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Recipe:
    minutes: float
    seed: int
    window: int
    batch: int
    matrix_lr: float
    vector_lr: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What the card says about how far training came."""

    steps: int
    tokens_seen: int
    cpu_minutes: float
    train_loss: float
    held_out_loss: float
    held_out_bits_per_byte: float


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.q_norm(self.heads(self.q_proj(x))), cos, sin)
        key = rotate(self.k_norm(self.heads(self.k_proj(x))), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, self.heads(self.v_proj(x)), is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Qwen3 with tied embeddings; parameter names are those of the published checkpoints, so that saving is a plain
    copy."""

    def __init__(self, shape: Shape, window: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.cos, self.sin = rope_tables(shape, window)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed_tokens(tokens).to(self.cos.dtype)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_tables(shape: Shape, window: int) -> tuple[Tensor, Tensor]:
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(window), frequencies).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def initialise(model: Model, shape: Shape) -> None:
    """Normal 0.02, and less where a layer writes to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * shape.num_hidden_layers) ** (0.5 if writes_residual else 0.0))


@dataclass(slots=True)
class Windows:
    """Training windows: some from anywhere in the files, the others each from the start of a chat. Owns its random
    numbers."""

    files: np.ndarray
    chats: np.ndarray
    chat_starts: np.ndarray
    window: int
    random: np.random.Generator

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        rows = np.stack([self.row() for _ in range(size)]).astype(np.int64)
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])

    def row(self) -> np.ndarray:
        if self.random.random() < CHAT_SHARE:
            start = int(
                self.chat_starts[self.random.integers(np.searchsorted(self.chat_starts, len(self.chats) - self.window))]
            )
            return self.chats[start : start + self.window + 1]
        start = int(self.random.integers(len(self.files) - self.window))
        return self.files[start : start + self.window + 1]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_chat(chat: corpus.Chat, rng: Random) -> str:
    """The same text as `CHAT_TEMPLATE` gives."""
    turns = [("user", chat.question), ("assistant", chat.answer)]
    if rng.random() < SYSTEM_SHARE:
        turns.insert(0, ("system", rng.choice(corpus.SYSTEM_PROMPTS)))
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in turns)


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    return [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(texts)]


def join(sequences: list[list[int]]) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(sequences), dtype=np.uint16)


def build_windows(tokenizer: Tokenizer, files: list[str], chats: list[str], recipe: Recipe) -> Windows:
    encoded_chats = encode_all(tokenizer, chats)
    starts = np.cumsum([0] + [len(ids) for ids in encoded_chats[:-1]])
    encoded_files = join(encode_all(tokenizer, files))
    return Windows(encoded_files, join(encoded_chats), starts, recipe.window, np.random.default_rng(recipe.seed))


class Trainer:
    """Muon on the matrices, AdamW on embeddings and norms; the learning rate falls to zero over the CPU budget."""

    def __init__(self, model: Model, recipe: Recipe, *, compiled: bool) -> None:
        self.model = model
        self.recipe = recipe
        self.forward = torch.compile(model) if compiled else model
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embed_tokens")]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or name.startswith("embed_tokens")]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=recipe.vector_lr, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.base_lrs = (recipe.matrix_lr, recipe.vector_lr)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.forward(tokens, targets)

    def step(self, tokens: Tensor, targets: Tensor, done: float) -> float:
        """One update; `done` is the spent share of the budget."""
        scale = min(done / WARMUP, 1.0) * max(1.0 - done, 0.0)
        loss = self.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, base_lr in zip(self.optimizers, self.base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base_lr * scale
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, ids: np.ndarray) -> float:
        """Mean loss in nats per token over whole windows."""
        window, batch = self.recipe.window, self.recipe.batch
        rows = [ids[at : at + window + 1].astype(np.int64) for at in range(0, len(ids) - window - 1, window)]
        rows = rows[: max(len(rows) // batch, 1) * batch]
        batches = [torch.from_numpy(np.stack(rows[at : at + batch])) for at in range(0, len(rows), batch)]
        return sum(self.loss(b[:, :-1], b[:, 1:]).item() * len(b) for b in batches) / len(rows)


def train(
    trainer: Trainer, windows: Windows, deadline_s: float, stopped: list[bool]
) -> Iterator[tuple[int, float, float]]:
    """Yields (step, smoothed loss, CPU seconds) after each step until the budget is spent or someone stops it."""
    trainer.loss(*windows.batch(trainer.recipe.batch)).backward()  # compiles, outside the budget
    trainer.model.zero_grad()
    began, smoothed, spent = time.process_time(), 0.0, 0.0
    for step in itertools.count(1):
        loss = trainer.step(*windows.batch(trainer.recipe.batch), done=spent / deadline_s)
        smoothed += (loss - smoothed) * max(0.02, 1 / step)
        spent = time.process_time() - began
        yield step, smoothed, spent
        if spent >= deadline_s or stopped:
            return


def model_config(shape: Shape) -> dict[str, object]:
    values = asdict(shape)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **values,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "use_cache": True,
    }


def export_settings(out: Path, shape: Shape, tokenizer: Tokenizer) -> None:
    """Everything but weights and card."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    end_ids = [SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
    write_json(out / "config.json", model_config(shape))
    sampling = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }  # so small a model is lost in its own tail at temperature 1
    write_json(out / "generation_config.json", {"eos_token_id": end_ids, "pad_token_id": end_ids[1], **sampling})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export_weights(out: Path, model: Model) -> None:
    """Written beside the old file and moved over it, so that an interruption leaves a whole one."""
    weights = {
        f"model.{name}": parameter.detach().bfloat16().contiguous() for name, parameter in model.named_parameters()
    }
    partial = out / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")


def write_card(out: Path, model: Model, recipe: Recipe, windows: Windows, progress: Progress) -> None:
    shares = {
        "chat_share": f"{CHAT_SHARE:.0%}",
        "file_tokens": f"{len(windows.files):,}",
        "chat_tokens": f"{len(windows.chats):,}",
    }
    values: dict[str, object] = asdict(recipe) | asdict(progress) | shares
    values |= {
        "name": out.name,
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokens_seen": f"{progress.tokens_seen:,}",
        "cpu_minutes": f"{progress.cpu_minutes:.1f}",
        "train_loss": f"{progress.train_loss:.3f}",
        "held_out_loss": f"{progress.held_out_loss:.3f}",
        "held_out_bits_per_byte": f"{progress.held_out_bits_per_byte:.3f}",
        "held_out_files": ", ".join(f"`{name}`" for name in corpus.HELD_OUT),
    }
    (out / "MODEL_CARD.md").write_text(Template(CARD.read_text()).substitute(values))


def keep_freed_memory() -> None:
    """Tell glibc to reuse large buffers rather than return them to the kernel: the page faults cost a tenth of a
    step."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((-1, 2**31 - 1), (-3, 2**30)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pdcluster/bundled/pystdlib-3m"), help="directory to write")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="CPU minutes of training, on one thread (default 20)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=512, help="tokens per training row")
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--matrix-lr", type=float, default=5e-3)
    parser.add_argument("--vector-lr", type=float, default=4e-3)
    parser.add_argument(
        "--eager", action="store_true", help="no torch.compile: needs no C++ compiler, and trains about 40%% slower"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    recipe = Recipe(
        arguments.minutes, arguments.seed, arguments.window, arguments.batch, arguments.matrix_lr, arguments.vector_lr
    )
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    rng, shape, root = Random(recipe.seed), Shape(), corpus.stdlib_root()
    sources, topics = corpus.read_sources(root, held_out=False), corpus.read_topics(root)
    files = [source.text for source in sources] + list(topics.values())
    rng.shuffle(files)
    chats = [render_chat(chat, rng) for chat in corpus.build_chats(sources, topics, rng)]
    tokenizer = train_tokenizer([*files, *chats[::4]], shape.vocab_size)
    export_settings(arguments.out, shape, tokenizer)
    windows = build_windows(tokenizer, files, chats, recipe)
    print(
        f"{len(files)} texts, {len(windows.files):,} tokens; {len(chats)} chats, {len(windows.chats):,} tokens",
        flush=True,
    )

    held_out_texts = [source.text for source in corpus.read_sources(root, held_out=True)]
    held_out = join(encode_all(tokenizer, held_out_texts))
    bits_per_nat = len(held_out) / sum(len(text.encode()) for text in held_out_texts) / math.log(2)
    model = Model(shape, recipe.window)
    initialise(model, shape)
    trainer = Trainer(model, recipe, compiled=not arguments.eager)
    stopped: list[bool] = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))

    step, loss, spent, saved_at = 0, float("nan"), 0.0, 0.0
    for step, loss, spent in train(trainer, windows, recipe.minutes * 60, stopped):
        if step % 20 == 0:
            print(
                f"step {step} loss {loss:.3f} cpu {spent:.0f}s {step * recipe.batch * recipe.window / spent:.0f} tok/s",
                flush=True,
            )
        if spent - saved_at > SAVE_EVERY_S:
            export_weights(arguments.out, model)
            saved_at = spent
    held_out_loss = trainer.evaluate(held_out)
    progress = Progress(
        step, step * recipe.batch * recipe.window, spent / 60, loss, held_out_loss, held_out_loss * bits_per_nat
    )
    export_weights(arguments.out, model)
    write_card(arguments.out, model, recipe, windows, progress)
    print(f"{progress}, saved in {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
