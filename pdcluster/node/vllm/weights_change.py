"""Other weights for a node with vLLM: which may take the place of those that serve, and the change itself.

vLLM has no room for two sets of weights. So a load only checks files. The change itself comes when nothing runs: vLLM
reads the files into the weights that it has. Its processes are kept, and the node's next boot begins.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from safetensors import safe_open

from pdcluster.checkpoint.end_tokens import eos_token_ids
from pdcluster.checkpoint.held_files import weight_files
from pdcluster.checkpoint.hub import local_model
from pdcluster.checkpoint.inspection import INDEX, check_model_files, check_tokenizer
from pdcluster.checkpoint.text_files import read_text_files
from pdcluster.core.errors import ModelError
from pdcluster.core.messages import PrepareWeights
from pdcluster.core.weights import WeightsVersion
from pdcluster.node.vllm.engine.interface import ServingEngine, WeightsChange, WeightsReplaced
from pdcluster.node.vllm.engine.weight_files import ReadingStopped, weight_files_digest

# What may differ between checkpoints of one model: who wrote them, and the type in which they are stored.
FREE_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"})
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Files that may take over."""

    version: WeightsVersion
    directory: Path


def check_weights(
    message: PrepareWeights, serving: Path, start: Path, *, pools: bool, stop: threading.Event
) -> CheckedWeights:
    """Raises ModelError for a source that is not the same model, or has another digest than was asked for.

    serving: directory of the weights that serve; start: of the model that the node was started with.
    stop: ends the reading of large files.
    """
    if pools:
        raise ModelError("a pooling model's weights are not changed while vLLM runs; start a node with them")
    found = local_model(Path(message.source)).absolute() if message.source else start
    check_same_model(found, serving)
    try:
        digest = weight_files_digest(found, stop)
    except ReadingStopped:
        raise ModelError(f"reading {found} was stopped: the node ends") from None
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    wanted = message.version.digest
    if wanted and digest != wanted:
        raise ModelError(
            f"the files in {found} have the digest {digest}, and {wanted} was loaded elsewhere under that label; the "
            "files differ, or are not whole"
        )
    return CheckedWeights(replace(message.version, digest=digest), found)


def check_same_model(source: Path, serving: Path) -> None:
    """Raises ModelError. Reads names, shapes and text, but no weights: vLLM would leave out a tensor that is not there,
    and go on with the one that it has.
    """
    check_model_files(source, needs_tokenizer=False)
    ours, theirs = _settings(serving), _settings(source)
    for key in sorted((ours.keys() | theirs.keys()) - FREE_KEYS):
        if ours.get(key) != theirs.get(key):
            raise _other_model(source, f"{key} is {_shown(theirs.get(key))}, and {_shown(ours.get(key))} here")
    own, other = eos_token_ids(read_text_files(serving)), eos_token_ids(read_text_files(source))
    if own != other:
        raise _other_model(source, f"its end tokens are {other}, and {own} here")
    check_tokenizer(source, serving)
    shapes, found = _shapes(serving), _shapes(source)
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise _other_model(
                source, f"its tensor {name} is {_shown(found.get(name))}, and {_shown(shapes.get(name))} here"
            )


def _other_model(source: Path, what: str) -> ModelError:
    return ModelError(f"{source} is another model: {what}; serve it in a cluster of its own")


def _shown(value: object) -> str:
    return "missing" if value is None else str(value)[:MAX_SHOWN]


def _shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors. Raises ModelError for formats other than safetensors, which vLLM does not read again."""
    files = weight_files(model)
    if not files:
        raise ModelError(f"{model} is a GGUF file, whose weights vLLM reads at its start only; start a node with it")
    if not (model / INDEX).exists():
        files = tuple(sorted(model.glob("*.safetensors")))  # as vLLM does
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "np") as tensors:
            names: list[str] = tensors.keys()
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    return found


def _settings(model: Path) -> dict[str, Any]:
    """Of config.json, with the defaults of what it leaves out, where transformers knows the model."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        raw: dict[str, Any] = json.loads((model / "config.json").read_bytes())
        if raw.get("model_type") not in CONFIG_MAPPING or "auto_map" in raw:
            return raw
        found: dict[str, Any] = AutoConfig.from_pretrained(model, local_files_only=True).to_dict()
    except Exception as error:  # of whatever kind transformers has for what it cannot use
        raise ModelError(f"{model / 'config.json'} cannot be read: {error}") from error
    return found


class WeightsReplacement:
    """One boot's change of its weights. Owned by the node loop's thread.

    timeout_s: for one load.
    """

    def __init__(self, engine: ServingEngine, serving: Path, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self.serving = serving
        self._is_running = False
        self._answer: WeightsReplaced | None = None
        # The engine has other weights than those of this boot, and belongs to the next one.
        self.is_done = False

    def advance(self, weights: CheckedWeights) -> str | None:
        """Implements weights_loader.PreparedBoot.replace."""
        if self.is_done:
            return ""
        if self._answer is not None:
            answer, self._answer, self._is_running = self._answer, None, False
            self.is_done = not answer.error
            return answer.error
        if not self._is_running:
            self._is_running = True
            self._engine.replace_weights(
                WeightsChange(str(weights.directory), weights.version.digest, str(self.serving), self._timeout_s)
            )
        return None

    def on_replaced(self, news: WeightsReplaced) -> None:
        """The engine answered."""
        self._answer = news
