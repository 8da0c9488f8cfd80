"""The digest of weights: every byte of every tensor counts, how they lie in files does not, and a node whose weights
differ is refused by the names of what differs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import checkpoints
import gguf
import gguf_files
import numpy as np
import pytest
import torch
from checkpoints import Shape
from safetensors.torch import load_file, save_file

from pdcluster.bootstrap.card import NodeCard
from pdcluster.bootstrap.store import NodeStore, StoreSettings
from pdcluster.checkpoint.weights_digest import MAX_GROUP_BYTES, Digester, WeightsDigest, differing_groups, group_names
from pdcluster.core.errors import ConfigError
from pdcluster.engine.model.config import read_config
from pdcluster.engine.model.weights import load_weights
from pdcluster.kv.layout import Fingerprint

# Large enough that 64 blocks of 4 KiB would be a small part of it.
SHAPE = Shape("qwen3", hidden_size=128, intermediate_size=512, head_dim=32, vocab_size=512, num_layers=3)
SAVED = {"format": "pt"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.build_model(SHAPE, seed=1), tmp_path_factory.mktemp("original"))


def tensors_of(model_dir: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(model_dir / "model.safetensors").items()}


def with_tensors(original: Path, directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes((original / "config.json").read_bytes())
    save_file(dict(tensors), directory / "model.safetensors", metadata=SAVED)
    return directory


def digest(model: Path) -> WeightsDigest:
    return load_weights(model, read_config(model)).digest


def flip(file: Path, place: int, before: os.stat_result) -> None:
    """Turn one bit over in place, and put the file's times back."""
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def card(node: str, model: Path) -> NodeCard:
    found, config = digest(model), read_config(model)
    return NodeCard(
        node=node, incarnation="boot", role="mixed", address="127.0.0.1:4000", model="tiny",
        fingerprint=Fingerprint("tiny", found.whole, 1, 32, config.kv_layout(32, "float32"), weight_groups=found.groups),
        max_len=512, vocab_size=config.vocab_size, num_pages=64,
    )  # fmt: skip


NAMED = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "final norm",
    "lm_head.weight": "head",
    "model.layers.1.input_layernorm.weight": "layer 1 norms",
    "model.layers.1.post_attention_layernorm.weight": "layer 1 norms",
    "model.layers.2.self_attn.k_norm.weight": "layer 2 norms",
    "model.layers.0.self_attn.o_proj.weight": "layer 0 attention",
    "model.layers.2.mlp.down_proj.weight": "layer 2 feed-forward",
}


@pytest.mark.parametrize("name", ["model.layers.1.input_layernorm.weight", "lm_head.weight"])
def test_a_node_whose_checkpoint_differs_in_one_number_is_refused_by_name(
    name: str, original: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(original)
    flat = tensors[name].view(-1)
    flat[len(flat) // 2] += 1e-3
    store = NodeStore(StoreSettings())
    store.register(card("prefill-0", original))
    store.register(card("decode-0", original))
    with pytest.raises(ConfigError, match=rf"weights .* here, .* there \({NAMED[name]}\)"):
        store.register(card("decode-1", with_tensors(original, tmp_path, tensors)))


def test_every_byte_of_every_tensor_counts_whatever_the_times_of_the_file(original: Path, tmp_path: Path) -> None:
    """One bit is turned over in place: the file keeps its inode, size and times."""
    model = with_tensors(original, tmp_path, tensors_of(original))
    expected, file = digest(model), model / "model.safetensors"
    before, data = file.stat(), file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__")
    for number, (name, entry) in enumerate(header.items()):
        first, end = entry["data_offsets"]
        place = begin + (first, (first + end) // 2, end - 1)[number % 3]
        flip(file, place, before)
        (group,) = differing_groups(digest(model).groups, expected.groups, SHAPE.num_layers)
        assert group == NAMED.get(name, group)
        flip(file, place, before)
    assert digest(model) == expected


def test_how_tensors_lie_in_files_does_not_count(original: Path, tmp_path: Path) -> None:
    """One file, shards under an index, another order, other notes in the header, a frequency buffer of old models."""
    expected, tensors = digest(original), tensors_of(original)
    sharded = checkpoints.save(checkpoints.build_model(SHAPE, seed=1), tmp_path / "sharded", shard_size="300KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    moved = with_tensors(original, tmp_path / "moved", tensors)
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt", "note": "moved by a tool"})
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    old = with_tensors(original, tmp_path / "old", {**dict(reversed(tensors.items())), **extra})
    assert digest(sharded) == digest(moved) == digest(old) == expected


def test_a_tied_head_that_is_stored_twice_counts_once(tmp_path: Path) -> None:
    shape = Shape("llama", vocab_size=64, tied=True)
    once = checkpoints.save(checkpoints.build_model(shape, seed=1), tmp_path / "once")
    tensors = tensors_of(once)
    assert "lm_head.weight" not in tensors
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    twice = with_tensors(once, tmp_path / "twice", {**tensors, **copy})
    assert digest(twice) == digest(once)


def test_names_stored_types_and_shapes_count(original: Path, tmp_path: Path) -> None:
    expected, tensors = digest(original), tensors_of(original)
    norms = [f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    swapped = {**tensors, norms[0]: tensors[norms[1]], norms[1]: tensors[norms[0]]}
    assert digest(with_tensors(original, tmp_path / "swapped", swapped)).whole != expected.whole
    half = {**tensors, norms[0]: tensors[norms[0]].half()}
    found = digest(with_tensors(original, tmp_path / "half", half))
    assert differing_groups(found.groups, expected.groups, SHAPE.num_layers) == ("layer 0 norms",)
    data = np.zeros(8, np.uint8)

    def taken(name: str, kind: str, shape: tuple[int, ...]) -> WeightsDigest:
        with Digester(1) as digests:
            digests.add(name, kind, shape, data)
            return digests.result("", 1)

    others = [taken("lm_head.weight", "F32", (2,)), taken("lm_head.weight", "F32", (1, 2))]
    others += [taken("lm_head.weight", "F16", (2,)), taken("model.norm.weight", "F32", (2,))]
    assert len({each.whole for each in others}) == len(others)


def test_the_config_counts_but_not_keys_without_effect(original: Path, tmp_path: Path) -> None:
    other = with_tensors(original, tmp_path, tensors_of(original))
    checkpoints.edit_config(other, initializer_range=0.5)
    assert digest(other) == digest(original)
    checkpoints.edit_config(other, rms_norm_eps=1e-5)
    assert differing_groups(digest(other).groups, digest(original).groups, SHAPE.num_layers) == ("config.json",)


def test_every_tensor_of_a_gguf_file_counts_under_its_canonical_name(tmp_path: Path) -> None:
    """One bit is turned over in place, as above."""
    model = checkpoints.build_model(Shape("llama", vocab_size=512, hidden_size=128), seed=3)
    file = gguf_files.write(tmp_path / "one.gguf", model, "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    expected, before = digest(file), file.stat()
    for tensor in gguf.GGUFReader(file).tensors:
        flip(file, tensor.data_offset + tensor.n_bytes // 2, before)
        (group,) = differing_groups(digest(file).groups, expected.groups, 2)
        flip(file, tensor.data_offset + tensor.n_bytes // 2, before)
        layer = re.match(r"blk\.(\d)\.(\w+?)_", tensor.name)
        part = {"token_embd": "embedding", "output_norm": "final norm", "output": "head"}.get(tensor.name[:-7])
        kind = (
            "norms" if "_norm" in tensor.name else {"attn": "attention", "ffn": "feed-forward"}.get(layer and layer[2])
        )
        assert group == (part or f"layer {layer[1]} {kind}")
    assert digest(file) == expected


def test_a_gguf_file_that_was_written_over_is_read_again(tmp_path: Path) -> None:
    """Its settings too, though it keeps its inode, size and times."""
    model = checkpoints.build_model(Shape("llama", vocab_size=512, hidden_size=128), seed=3)
    file = gguf_files.write(tmp_path / "one.gguf", model, "llama")
    length, before = read_config(file).max_position_embeddings, file.stat()
    place = file.read_bytes().index(b"llama.context_length") + len("llama.context_length") + 4
    flip(file, place, before)
    assert read_config(file).max_position_embeddings == length ^ 1


def test_groups_fit_a_card_whatever_the_depth() -> None:
    for layers in (1, 28, 126, 169, 170, 171, 1000):
        names = group_names(layers)
        assert len(names) * 4 <= MAX_GROUP_BYTES and len(set(names)) == len(names)
        with Digester(1) as digests:
            for layer in range(layers):
                digests.add(f"model.layers.{layer}.input_layernorm.weight", "F32", (1,), np.full(1, layer, np.float32))
            found = digests.result("", layers)
        assert len(found.groups) == len(names) * 4
    assert "layer 7 norms" in group_names(169) and "layers 6 to 7 norms" in group_names(170)


def test_the_same_digest_with_any_number_of_threads(original: Path) -> None:
    config = read_config(original)
    assert load_weights(original, config, threads=1).digest == load_weights(original, config, threads=5).digest


def test_an_index_may_name_files_that_hold_other_tensors_too(original: Path, tmp_path: Path) -> None:
    """The index says which files there are, not which tensor lies in which."""
    sharded = checkpoints.save(checkpoints.build_model(SHAPE, seed=1), tmp_path, shard_size="300KB")
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    names = sorted(content["weight_map"])
    content["weight_map"] = {name: files[place % len(files)] for place, name in enumerate(names)}
    index.write_text(json.dumps(content))
    assert digest(sharded) == digest(original)
