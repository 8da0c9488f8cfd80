"""Checkpoints that transformers and pdcluster read alike, for `bench.accuracy`: the user's own, one out of a GGUF file,
or a made one."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pdcluster.checkpoint.gguf import open_gguf
from pdcluster.engine.model.gguf_weights import gguf_tensors

NUM_PROSE = 20
PROGRAMS = (
    "argparse.py",
    "ast.py",
    "asyncio/tasks.py",
    "calendar.py",
    "codecs.py",
    "csv.py",
    "dataclasses.py",
    "decimal.py",
    "difflib.py",
    "fractions.py",
    "heapq.py",
    "tarfile.py",
)
LANGUAGES = (
    "Bonjour, je m'appelle Claire et j'habite à Lyon depuis dix ans. Le matin, je prends le métro pour aller au "
    "travail. ",
    "Der schnelle braune Fuchs springt über den faulen Hund, und niemand wundert sich darüber. Übung macht den "
    "Meister. ",
    "Mi casa es tu casa. El tren sale a las ocho y media de la mañana desde el andén número tres. ",
    "今日はとても良い天気です。东京是日本的首都。Привет, как дела? 🌍🚀 naïve café résumé. ",
)
CHATS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    (
        "Write a haiku about the sea.",
        "Waves whisper softly,\nSalt and wind on weathered stone,\nThe tide breathes in, out.",
    ),
    (
        "How do I reverse a list in Python?",
        "Use reversed() or list.reverse():\n```python\nxs = [1, 2, 3]\nxs.reverse()\nprint(xs)\n```",
    ),
    ("Explain photosynthesis simply.", "Plants use sunlight, water and carbon dioxide to make sugar and oxygen."),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare around the year 1600."),
    ("List three primary colors.", "1. Red\n2. Blue\n3. Yellow"),
)
CHAT = (
    "<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
)


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each."""
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))
    yield from ((f"prose: {name}", topics[name]) for name in longest[:NUM_PROSE])
    library = Path(sysconfig.get_path("stdlib"))
    yield from (
        (f"program: {name}", (library / name).read_text(encoding="utf-8"))
        for name in PROGRAMS
        if (library / name).exists()
    )
    yield "table", "\n".join(f"{i:4d} {i * i:8d} {i**3:12d} {1 / i:.6f}" for i in range(1, 400))
    items = ",\n".join(
        f'{{"id": {i}, "name": "user{i}", "tags": ["a", "b"], "score": {i * 0.37 % 5:.2f}}}' for i in range(200)
    )
    yield "json", f'{{"items": [{items}]}}'
    yield "repetition", "The quick brown fox jumps over the lazy dog. " * 120
    yield from ((f"language {index}", text * 8) for index, text in enumerate(LANGUAGES))
    yield from ((f"chat: {question}", CHAT.format(question, answer)) for question, answer in CHATS)


VOCABULARY = 4096
# Channels of the residual stream that are larger than the others, and by how much. Norms make them small again, as in
# real models.
OUTLIERS, OUTLIER_GAIN = 4, 24.0
# Of the last norm: logits are as large as real ones, 10 to 20.
LOGIT_GAIN = 6.0


def readable_model(model: Path, directory: Path) -> Path:
    """A directory that holds `model`: itself, or what a GGUF file says, in bfloat16, below `directory`."""
    return from_gguf(model, directory / "from-gguf") if model.is_file() else model


def from_gguf(file: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Hugging Face directory of what the file says."""
    target.mkdir(parents=True, exist_ok=True)
    opened = open_gguf(file)
    for name, content in opened.text_files.items():
        (target / name).write_bytes(content)
    save_file(gguf_tensors(opened, dtype), target / "model.safetensors", metadata={"format": "pt"})
    return target


def made_model(target: Path) -> Path:
    """A Llama of 4 layers whose residual stream has outliers. Its weights are drawn; its tokenizer is trained on the
    texts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    network: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in network.model.layers:
            layer.mlp.down_proj.weight[:OUTLIERS] *= OUTLIER_GAIN
            layer.self_attn.o_proj.weight[:OUTLIERS] *= OUTLIER_GAIN
            layer.input_layernorm.weight[:OUTLIERS] /= OUTLIER_GAIN
            layer.post_attention_layernorm.weight[:OUTLIERS] /= OUTLIER_GAIN
        network.model.norm.weight *= LOGIT_GAIN
        network.model.norm.weight[:OUTLIERS] /= OUTLIER_GAIN
    network.to(torch.bfloat16).save_pretrained(target)
    _made_tokenizer().save_pretrained(target)
    return target


def _made_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for _, text in texts()), trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
