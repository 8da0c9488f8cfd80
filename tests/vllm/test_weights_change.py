"""vLLM takes other weights from files while it runs: the right tokens after it, no KV of before, wholly or not at all.

A token is right when transformers computes it in float32 from the directory whose weights serve.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from engine_kit import GREEDY, EngineAtHand, prompt, start_engine
from safetensors.torch import load_file, save_file
from weight_versions import greedy

from pdcluster.node.vllm.engine.interface import EngineDied, EngineNews, WeightsChange, WeightsReplaced
from pdcluster.node.vllm.engine.weight_files import weight_files_digest

LEASE_S = 2
TIMEOUT_S = 60.0
PROMPT = prompt(100, 7)


def model_of(folder: Path, seed: int, *, tied: bool) -> Path:
    model = checkpoints.build_model(checkpoints.Shape("qwen3", tied=tied), seed)
    model.config.max_position_embeddings = 2048
    return checkpoints.save(model, folder)


class Pair:
    """P, whose weights change, and D."""

    def __init__(self, folder: Path, *, tied: bool, alone: bool) -> None:
        self.versions = {name: model_of(folder / name, seed, tied=tied) for seed, name in enumerate(("a", "b"), 1)}
        self.engines = []
        # One after the other: the second one's settings would reach the first one's processes.
        for _ in range(1 if alone else 2):
            self.engines.append(start_engine(self.versions["a"], "fenced", LEASE_S))
            self.engines[-1].wait_ready(400.0)
        self.prefill, self.decode = EngineAtHand(self.engines[0]), EngineAtHand(self.engines[-1])
        self.serves = self.versions["a"]

    def change(self, to: Path, *, digest: str = "", former: Path | None = None) -> EngineNews:
        """P's answer."""
        digest = digest or weight_files_digest(to, threading.Event())
        self.prefill.engine.replace_weights(WeightsChange(str(to), digest, str(former or self.serves), TIMEOUT_S))
        until = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < until:
            for news in self.prefill.news(1.0):
                if isinstance(news, EngineDied):
                    return news
                if isinstance(news, WeightsReplaced):
                    self.serves = self.serves if news.error else to
                    return news
        raise AssertionError("no answer to a change of weights")

    def is_right(self) -> None:
        answer = self.prefill.run(PROMPT)
        assert answer.tokens == greedy(self.serves, PROMPT, GREEDY.max_tokens)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("models"), tied=True, alone=False)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _versions_differ(pair: Pair) -> None:
    assert greedy(pair.versions["a"], PROMPT, 8) != greedy(pair.versions["b"], PROMPT, 8)


def test_tokens_and_caches_are_those_of_the_weights_that_serve(pair: Pair) -> None:
    for name in ("b", "a", "b", "a"):
        pair.is_right()
        assert pair.prefill.run(PROMPT).first_cached > 0
        assert pair.change(pair.versions[name]) == WeightsReplaced()
        first = pair.prefill.run(PROMPT)
        assert first.first_cached == 0, "KV of other weights was used"
        assert first.tokens == greedy(pair.versions[name], PROMPT, GREEDY.max_tokens)


def test_a_change_waits_for_parked_kv_and_what_named_it_is_void(pair: Pair) -> None:
    parked = pair.prefill.run(PROMPT, parks=True, fence="f1").last.reference
    read = pair.decode.run(PROMPT, reference=parked, fence="f1", salt="s1")
    assert read.tokens == greedy(pair.versions["a"], PROMPT, GREEDY.max_tokens)
    held = pair.prefill.run(PROMPT, parks=True, fence="f2")
    began = time.monotonic()
    assert pair.change(pair.versions["b"]) == WeightsReplaced()
    assert time.monotonic() - began > LEASE_S / 2, "nobody waited for the parked KV"
    late = pair.decode.run(PROMPT, reference=held.last.reference, fence="f2", salt="s2")
    assert late.last.finish == "error" and late.last.is_failed_read and not late.tokens
    again = pair.prefill.run(PROMPT, parks=True, fence="f2")
    late = pair.decode.run(PROMPT, reference=held.last.reference, fence="f2", salt="s3")
    assert late.last.finish == "error" and not late.tokens, "an old reference reads new KV"
    pair.prefill.engine.release(again.last.key)
    assert pair.change(pair.versions["a"]) == WeightsReplaced()
    pair.is_right()


def test_files_that_cannot_be_loaded_leave_the_former_weights(pair: Pair, tmp_path: Path) -> None:
    """Also where the load fails in the middle, with some tensors read."""
    broken = Path(shutil.copytree(pair.versions["b"], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    name = sorted(name for name in tensors if name.endswith("k_proj.weight"))[-1]
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    news = pair.change(broken)
    assert isinstance(news, WeightsReplaced) and "serves the former ones" in news.error
    pair.is_right()
    assert pair.change(pair.versions["b"]) == WeightsReplaced()
    pair.is_right()
    assert pair.change(pair.versions["a"]) == WeightsReplaced()
    pair.is_right()


def test_files_that_changed_since_the_order_are_refused(pair: Pair) -> None:
    other = weight_files_digest(pair.versions["a"], threading.Event())
    news = pair.change(pair.versions["b"], digest=other)
    assert isinstance(news, WeightsReplaced) and "changed since they were checked" in news.error
    pair.is_right()


def test_an_untied_output_layer_changes_too(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tied=False, alone=True)
    try:
        for name in ("b", "a"):
            assert pair.change(pair.versions[name]) == WeightsReplaced()
            pair.is_right()
    finally:
        pair.close()


def test_an_engine_that_has_neither_ends(pair: Pair, tmp_path: Path) -> None:
    """Last, for it ends P."""
    news = pair.change(tmp_path / "nothing", digest="0" * 32, former=pair.versions["b"])
    assert isinstance(news, EngineDied) and "are others by now" in news.reason
