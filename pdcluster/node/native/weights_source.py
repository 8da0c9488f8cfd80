"""Where a node's weights come from, and whether others may take their place while it serves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from pdcluster.checkpoint.gguf import is_gguf
from pdcluster.checkpoint.held_files import HeldFiles, is_settled, weight_files
from pdcluster.checkpoint.inspection import check_model_files, check_tokenizer
from pdcluster.checkpoint.weight_image import WeightImage, open_image
from pdcluster.core.errors import ConfigError, ModelError
from pdcluster.core.weights import WeightTensor
from pdcluster.engine.engine import Engine
from pdcluster.engine.model.config import ModelConfig, read_config
from pdcluster.engine.model.weights import expected_tensors
from pdcluster.node.native.engine_start import ModelFacts
from pdcluster.processes.free_memory import GIB, free_memory
from pdcluster.settings.config import NodeConfig
from pdcluster.weights.pieces import check_tensors


def held_files(config: NodeConfig, model: Path) -> HeldFiles | None:
    """Copies of the model's weight files. None where they need none: the files stay as they are, or the tensors are
    computed from them. Raises ConfigError with the numbers where memory is short.
    """
    files = weight_files(model)
    if config.map_weights or all(map(is_settled, files)):
        return None
    _check_free(_num_bytes(files), f"a copy of the weights in {model}", "or set map_weights where nobody changes files")
    return HeldFiles(files)


def hold_beside(config: NodeConfig, model: Path) -> HeldFiles | None:
    """The same for weights that are loaded beside others. While both live, the node has of each the files' bytes, and
    as much again where kernels want them laid out; pages of the new pool are first used when the old one is gone.
    """
    nbytes = 2 * _num_bytes(weight_files(model) or (model,))
    _check_free(nbytes, f"loading {model} beside the weights that serve", "or start a node of its own")
    return held_files(config, model)


def _num_bytes(files: Iterable[Path]) -> int:
    try:
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error


def _check_free(nbytes: int, what: str, way_out: str) -> None:
    free = free_memory()
    if nbytes > free.num_bytes:
        raise ConfigError(
            f"{what} takes up to {nbytes / GIB:.2f} GiB, but {free.limit} leaves {free.num_bytes / GIB:.2f} GiB; give "
            f"it more, {way_out}"
        )


def check_replacement(source: Path, serving_dir: Path, serving: ModelConfig) -> None:
    """Raises ModelError for a source that cannot be the same model with other weights. Reads no weights."""
    check_model_files(source, needs_tokenizer=False)
    check_config(source, serving)
    check_tokenizer(source, serving_dir)


def check_config(source: Path, serving: ModelConfig) -> None:
    """Raises ModelError where a model computes something else from the same tensors. Other nodes take the tensors and
    their own config, so these must be equal in all but the type in which tensors are stored.
    """
    found = read_config(source)
    for field in fields(ModelConfig):
        ours, theirs = getattr(serving, field.name), getattr(found, field.name)
        if ours != theirs and field.name != "stored_dtype":
            raise ModelError(
                f"{source} is another model: {field.name} is {theirs}, and {ours} here; serve it in a cluster of its "
                "own"
            )


def check_place(config: NodeConfig) -> None:
    """Raises ConfigError for a node that has no room for a second engine beside its own."""
    if config.tp > 1 and config.transfer.port is not None:
        raise ConfigError(
            f"node.transfer.port is {config.transfer.port} and node.tp is {config.tp}: ranks with other weights want "
            "the ports of those that serve; leave the port out, or start a node with these weights"
        )


def check_received(model: Path, serving: ModelConfig, tensors: Sequence[WeightTensor]) -> None:
    """Raises ModelError for tensors that are none of the model's, and ConfigError where memory is short for them."""
    if is_gguf(model):
        raise ModelError(
            f"the model {model} is a GGUF file, whose tensors are not passed on between nodes; serve its release in "
            "safetensors, or load weights from files on each machine"
        )
    check_tensors(tensors, *expected_tensors(serving))
    nbytes = 2 * sum(tensor.nbytes for tensor in tensors)
    _check_free(nbytes, "taking weights beside those that serve", "or start a node of its own")


def image_of(source: Path, held: HeldFiles | None) -> WeightImage | None:
    """The bytes of loaded weights, for nodes that lack them. None for GGUF."""
    files = weight_files(source) if held is None else held.paths
    return open_image(files) if files else None


def check_same(loaded: Engine, serving: ModelFacts, digest: str) -> None:
    """Raises ModelError where the loaded weights cannot take over, or are not those that were asked for."""
    if loaded.full_layout != serving.full_layout:
        raise ModelError(f"its KV is {loaded.full_layout}, and {serving.full_layout} here; use one dtype")
    if digest and loaded.weights_digest != digest:
        raise ModelError(
            f"the weights have the digest {loaded.weights_digest}, and {digest} was loaded elsewhere under that label; "
            "the files differ, or are not whole"
        )
