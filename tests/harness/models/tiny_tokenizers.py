"""Small real tokenizers, built in memory: byte-level BPE as Llama 3 and Qwen have it, SentencePiece-like BPE with byte
fallback as Mistral has it, WordPiece as BERT has it."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "def greet(name): return 'hello ' + name",
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "Grüße aus Köln – naïve café, 10 €.",
    "日本語のテキスト и русский текст",
    "for index in range(10): print(index, end='\\n')",
] * 3

CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message must come first') }}
    {%- endif %}
    {{- '<|start|>' + message.role + '\\n' + message.content | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}"""


@cache
def byte_level_files() -> dict[str, bytes]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|bos|>", "<|eos|>", "<|start|>", "<|end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("né e")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    tokenizer.enable_truncation(4)  # as some files carry it; must not cut prompts
    config = {
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|eos|>"},
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@cache
def sentencepiece_files() -> dict[str, bytes]:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=430, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    # the trainer makes them added tokens; in real files they are plain vocabulary, which is what byte fallback needs
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in byte_tokens]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@cache
def word_piece_files() -> dict[str, bytes]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.WordPiece()
    ids = [(text, tokenizer.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    config = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def with_config(files: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    """The same files with fields of tokenizer_config.json set; None removes one."""
    config = json.loads(files["tokenizer_config.json"]) | changes
    return files | {
        "tokenizer_config.json": json.dumps(
            {name: value for name, value in config.items() if value is not None}
        ).encode()
    }
