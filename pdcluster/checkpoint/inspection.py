"""Looks at a model's directory before anything is loaded: whether all files are there and whole. Reads names, sizes and
headers only.

It names the fault and the way out. The readers check what the files say.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from pdcluster.core.errors import ModelError
from pdcluster.core.weights import KIND_BYTES

POINTER = b"version https://git-lfs"
# A git-lfs pointer is about 130 bytes.
POINTER_BYTES = 1024
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
# As the safetensors library has it.
MAX_HEADER_BYTES = 100 << 20
# What tensors may be stored as, in the words of safetensors.
STORED_TYPES = tuple(KIND_BYTES)
# Buffers that early Llama checkpoints carry; they follow from the config.
OBSOLETE = ".rotary_emb.inv_freq"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
TOKENIZER = "tokenizer.json"
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "tokenizer.tiktoken")
SAVE_AGAIN = (
    "load it with transformers and save it again: model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR)"
)


def check_model_files(model: Path, *, needs_tokenizer: bool = True) -> None:
    """Raises ModelError. A file other than .gguf is refused. A GGUF file is left to its reader."""
    if not model.is_dir():
        _check_file(model)
        return
    names = set(os.listdir(model))
    _check_links(model, names)
    _check_kind(model, names)
    _check_pointers(model, names)
    for shard in _shards(model, names):
        _check_whole(shard)
    if needs_tokenizer and "tokenizer.json" not in names:
        found = sorted(names.intersection(SLOW_TOKENIZERS))
        what = f"it has {found[0]}, which only slow tokenizers read" if found else "nothing can turn text into tokens"
        way_out = (
            "make one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or give the router "
            "--tokenizer DIR"
        )
        raise ModelError(f"{model} has no tokenizer.json; {what}: {way_out}")


def check_tokenizer(source: Path, serving: Path) -> None:
    """Raises ModelError where other weights of a model come with another tokenizer than the one that serves."""
    own, other = serving / TOKENIZER, source / TOKENIZER
    if own.is_file() and other.is_file() and own.read_bytes() != other.read_bytes():
        raise ModelError(
            f"{other} is another tokenizer than the one that serves; leave the file out if the tokens are the same"
        )


def _check_file(model: Path) -> None:
    if not model.exists():
        what = "is a link to what does not exist" if model.is_symlink() else "does not exist"
        raise ModelError(
            f"the model {model} {what}; give a Hugging Face directory, a GGUF file, or a repository's name such as "
            "ORG/NAME"
        )
    if model.suffix.lower() != ".gguf":
        raise ModelError(
            f"the model {model} is a file; give its directory ({model.parent}), or a file that ends in .gguf"
        )
    if model.stat().st_size < POINTER_BYTES and model.read_bytes().startswith(POINTER):
        raise ModelError(f"{model} is a git-lfs pointer, not the file itself; run git lfs pull in {model.parent}")


def _check_links(model: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        path = model / name
        if path.is_symlink() and not path.exists():
            raise ModelError(f"{path} is a link to {os.readlink(path)}, which does not exist; download the model again")


def _check_kind(model: Path, names: set[str]) -> None:
    """Whether it is a model of transformers at all."""
    if "adapter_config.json" in names and not names.intersection((INDEX, SINGLE)):
        way_out = "merge it into its model: peft's merge_and_unload(), then save_pretrained(DIR)"
        raise ModelError(f"{model} is a LoRA adapter, which is not served; {way_out}")
    if "config.json" in names:
        return
    if "model_index.json" in names:
        raise ModelError(f"{model} is a diffusers pipeline (model_index.json); only language models are served")
    if {"refs", "snapshots"} <= names:
        raise ModelError(
            f"{model} is a repository in the hub's cache; give the directory below {model / 'snapshots'}, or the "
            "repository's name"
        )
    if "params.json" in names:
        raise ModelError(
            f"{model} has params.json, but no config.json: it is in its maker's own format; take the release for "
            "transformers"
        )
    files = sorted(name for name in names if name.endswith(".gguf"))
    if files:
        raise ModelError(f"{model} has no config.json, but GGUF files; give one of them: {model / files[0]}")
    what = "is empty" if not names else "has no config.json"
    raise ModelError(f"{model} {what}; give a Hugging Face model directory, or leave it out to use the bundled model")


def _check_pointers(model: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        path = model / name
        if (
            name.endswith((".json", ".safetensors", ".jinja"))
            and path.is_file()
            and path.stat().st_size < POINTER_BYTES
        ):
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise ModelError(f"{path} is a git-lfs pointer, not the file itself; run git lfs pull in {model}")


def _shards(model: Path, names: set[str]) -> list[Path]:
    if INDEX in names:
        return [model / name for name in _indexed(model / INDEX, names)]
    if SINGLE in names:
        return [model / SINGLE]
    others = sorted(name for name in names if name.endswith(OTHER_WEIGHTS))
    if others:
        raise ModelError(f"{model} has its weights as {others[0]}, but only safetensors are served; {SAVE_AGAIN}")
    named = sorted(name for name in names if name.endswith(".safetensors"))
    if named:
        raise ModelError(
            f"{model} has {named[0]}, but neither {SINGLE} nor {INDEX}; download the model again, or {SAVE_AGAIN}"
        )
    raise ModelError(f"{model} has no weights ({SINGLE} or {INDEX}); download the model again")


def named_shards(index: Path) -> list[str]:
    """The safetensors files that an index names: plain names, which are neither paths nor patterns. Raises
    ModelError."""
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        strange = [name for name in shards if SHARD.fullmatch(name) is None]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is no valid safetensors index: {error!r}; download it again") from error
    if strange:
        raise ModelError(
            f"{index} names {strange[0]!r:.200}, which is no name of a safetensors file; download it again"
        )
    return shards


def _indexed(index: Path, names: set[str]) -> list[str]:
    shards = named_shards(index)
    missing = [name for name in shards if name not in names]
    if missing:
        many = f"{len(missing)} of {len(shards)} are missing"
        raise ModelError(f"{index} names {missing[0]}, which is not in {index.parent} ({many}); download it again")
    return shards


def _check_whole(shard: Path) -> None:
    """A safetensors file begins with its header's size and the header. The header says how many bytes follow."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{shard} is no safetensors file, or was cut ({size} bytes); download it again")
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            kinds = {name: str(entry["dtype"]) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ModelError(f"{shard} has a broken header ({type(error).__name__}); download it again") from error
    needed = 8 + header_bytes + max(ends, default=0)
    if size != needed:
        raise ModelError(
            f"{shard} has {size} bytes, but its header says {needed}: the download was cut or mixed up; download it "
            "again"
        )
    for name, kind in kinds.items():
        check_stored_type(shard, name, kind)


def check_stored_type(shard: Path, name: str, kind: str) -> None:
    """Raises ModelError for a tensor of another type, such as F8_E4M3. kind: in the words of safetensors."""
    if kind not in STORED_TYPES and not name.endswith(OBSOLETE):
        raise ModelError(
            f"{shard}: tensor {name} is stored as {kind}, but only {', '.join(STORED_TYPES)} are served; take the "
            "model's bfloat16 release, or a GGUF file; --quantization int8 quantises when it is loaded"
        )
