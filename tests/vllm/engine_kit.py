"""Engines of a tiny random model for tests: ours, and one with vLLM's stock connector to show what it gets wrong."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
from msgspec import structs

from pdcluster.core.sampling import Sampling, TokenLogprobs
from pdcluster.node.vllm.engine.arguments import EngineOptions
from pdcluster.node.vllm.engine.engine import VllmEngine
from pdcluster.node.vllm.engine.interface import (
    EngineDied,
    EngineNews,
    EngineOutput,
    EngineRequest,
    EngineStep,
    Finish,
)

START_S = 400.0
BLOCK_TOKENS = 32
NUM_BLOCKS = 80
VOCAB = 331
ARGUMENTS = (
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=1024",
    f"--block-size={BLOCK_TOKENS}",
    "--max-num-seqs=8",
    f"--num-gpu-blocks-override={NUM_BLOCKS}",
)
GREEDY = Sampling(max_tokens=8, seed=1, temperature=0.0, ignore_eos=True)


class PlainSampling:
    """Enough of a sampling map for greedy answers with logprobs, of a model without a tokenizer."""

    def learn(self, config: Any) -> None:
        self.vocab_size = config.model_config.get_vocab_size()

    def processors(self, config: Any) -> list[str]:
        return []

    def to_vllm(self, sampling: Sampling, num_emitted: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=sampling.logprobs,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )

    def for_prefill(self, sampling: Sampling) -> Any:
        return self.to_vllm(structs.replace(sampling, max_tokens=1, min_tokens=0), 0)

    def ending_of(self, sampling: Sampling, stop_token: int) -> Finish:
        return "stop"

    def from_vllm(self, logprobs: Mapping[int, Any], token: int, count: int, *, ranked: bool = False) -> TokenLogprobs:
        return TokenLogprobs(logprobs[token].logprob, rank=logprobs[token].rank)


class StockExtension:
    """In the place of ours where vLLM's own connector runs: nobody confirms a read there."""

    def confirmation_address(self) -> str:
        return "tcp://127.0.0.1:9"

    def num_cache_groups(self) -> tuple[int, int]:
        return 1, 1


@dataclass(slots=True)
class Answer:
    """All that one request got."""

    last: EngineOutput
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_cached: int = 0


class EngineAtHand:
    """Asks an engine one request at a time and keeps what else it tells."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.others: list[EngineNews] = []
        self._number = 0

    def key(self) -> str:
        self._number += 1
        return f"request-{self._number}#1"

    def news(self, timeout_s: float) -> list[EngineNews]:
        select.select([self.engine.news_fd], [], [], timeout_s)
        return self.engine.take()

    def run(
        self, token_ids: Sequence[int], sampling: Sampling = GREEDY, timeout_s: float = 60.0, **more: Any
    ) -> Answer:
        key = more.pop("key", None) or self.key()
        self.engine.add(EngineRequest(key, token_ids, 0, sampling, **more))
        return self.finish(key, timeout_s)

    def finish(self, key: str, timeout_s: float = 60.0) -> Answer:
        until = time.monotonic() + timeout_s
        answer = Answer(EngineOutput(key))
        while time.monotonic() < until:
            for item in self.news(1.0):
                if not isinstance(item, EngineOutput) or item.key != key:
                    self.others.append(item)
                    continue
                answer.last = item
                answer.tokens += item.tokens
                answer.logprobs += item.logprobs
                answer.first_cached = max(answer.first_cached, item.cached_tokens)
            if answer.last.finish:
                return answer
        raise AssertionError(f"{key} has no end after {timeout_s} s")

    def last_usage(self, within_s: float) -> float:
        """Of the pool, by the last step in this time. An engine that holds parked KV steps all the time."""
        usage, until = 0.0, time.monotonic() + within_s
        while (left := until - time.monotonic()) > 0:
            for item in self.news(left):
                assert not isinstance(item, EngineDied), item
                if isinstance(item, EngineStep):
                    usage = item.kv_usage
        return usage

    def wait_free(self, within_s: float) -> float:
        """Seconds until it held no block."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            if self.last_usage(0.1) == 0.0:
                return time.monotonic() - began
        raise AssertionError(f"blocks are held after {within_s} s")


def model_directory(parent: Path) -> Path:
    model = checkpoints.build_model(checkpoints.Shape("qwen3"), 1)
    model.config.max_position_embeddings = 2048
    return checkpoints.save(model, parent / "qwen3")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in checkpoints.prompt(length, VOCAB, seed)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_engine(model: Path, connector: str = "fenced", lease_s: int = 2, **more: Any) -> VllmEngine:
    stock = {"connector": "NixlConnector", "connector_module": None, "extension": "engine_kit.StockExtension"}
    options = EngineOptions(
        str(model), ARGUMENTS, side_port=free_port(), lease_s=lease_s, **(stock if connector == "stock" else {}), **more
    )
    return VllmEngine(options, PlainSampling())
