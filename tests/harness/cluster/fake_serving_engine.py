"""A serving engine with vLLM's rules and no model: a test lets it step. A reference serves once, for its own prompt, and
while the holder keeps it; else its reader's request ends with an error, as with the fenced connector."""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass, field, replace

from pdcluster.node.vllm.engine.interface import (
    AdapterLoaded,
    EngineDied,
    EngineFacts,
    EngineNews,
    EngineOutput,
    EngineRequest,
    EngineStep,
    WeightsChange,
    WeightsReplaced,
)

VOCAB = 1000
FACTS = EngineFacts(
    block_tokens=32,
    num_blocks=64,
    max_len=1024,
    max_rows=4,
    max_batched_tokens=256,
    vocab_size=VOCAB,
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    token_bytes=16,
    version="0.32.0",
    arithmetic="float32",
    embedding_size=0,
    groups=1,
    lease_s=30,
)


def answer_of(tokens: list[int], count: int, weights: str = "") -> list[int]:
    """What the engine says after these tokens: each token follows from all before it, and from the weights."""
    said = list(tokens)
    for _ in range(count):
        said.append((sum(said) * 31 + len(said) + zlib.crc32(weights.encode())) % VOCAB)
    return said[len(tokens) :]


def vector_of(tokens: list[int], size: int) -> bytes:
    """What the engine embeds these tokens as."""
    return struct.pack(f"<{size}f", *answer_of(tokens, size))


@dataclass(slots=True)
class Running:
    request: EngineRequest
    said: list[int] = field(default_factory=list)
    is_aborted: bool = False


class ParkedStore:
    """KV that the engines of a cluster keep for each other. parked: its fence by reference. made_with: the weights."""

    def __init__(self) -> None:
        self.parked: dict[str, str] = {}
        self.made_with: dict[str, str] = {}


class FakeServingEngine:
    def __init__(self, name: str, store: ParkedStore, facts: EngineFacts = FACTS) -> None:
        self.name, self.store, self.facts = name, store, facts
        self.running: dict[str, Running] = {}
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.now = 0.0
        # Digests by number.
        self.adapters: dict[int, str] = {}
        # In the place of a vector, and of the first token of a row whose KV came.
        self.fault: EngineOutput | None = None
        # What it was asked to serve, and the digest of what it serves.
        self.changes: list[WeightsChange] = []
        self.weights = ""
        # Keys of rows that read KV of other weights.
        self.mixed: list[str] = []
        self._change: WeightsChange | None = None
        self._news: list[EngineNews] = []

    def add(self, request: EngineRequest) -> None:
        assert request.key not in self.running, f"{request.key} runs already"
        self.added.append(request)
        self.running[request.key] = Running(request)

    def abort(self, key: str) -> None:
        self.aborted.append(key)
        if key in self.running:
            self.running[key].is_aborted = True

    def release(self, key: str) -> None:
        self.released.append(key)
        self.store.parked.pop(key, None)

    def load_adapter(self, number: int, name: str, path: str, known_digest: str = "") -> None:
        """A test's path is the digest of its files, or begins with "bad"."""
        if path.startswith("bad") or known_digest not in ("", path):
            self._news.append(AdapterLoaded(number, error=f"{path} cannot be loaded"))
            return
        if not known_digest:
            self.adapters[number] = path
        self._news.append(AdapterLoaded(number, path))

    def unload_adapter(self, number: int) -> None:
        self.adapters.pop(number, None)

    def replace_weights(self, change: WeightsChange) -> None:
        """A step answers, once nothing of this engine's is parked. A test's path may begin with "bad"; then the former
        path may be "gone"."""
        assert not self.running, "something runs"
        self.changes.append(change)
        self._change = change

    def take(self) -> list[EngineNews]:
        taken, self._news = self._news, []
        return taken

    def close(self) -> None:
        os.close(self.news_fd)

    # ------------------------------------------------------------ what a test does

    def step(self) -> None:
        """One token of each request, or its end."""
        self._replace()
        outputs = [self._advance(running) for running in list(self.running.values())]
        self.now += 0.01
        num_prompt = sum(len(self.running[each.key].request.token_ids) for each in outputs if self._is_first(each))
        num_output = sum(len(each.tokens) + bool(each.vector) for each in outputs)
        self._news.append(EngineStep(self.now, num_prompt, 0, num_output, len(outputs), 0.0, 0, 0, 0))
        self._news += outputs
        for output in outputs:
            if output.finish:
                del self.running[output.key]

    @property
    def parked(self) -> list[str]:
        """References to KV that this engine holds."""
        own = {request.key for request in self.added}
        return [key for key in self.store.parked if key in own]

    def _replace(self) -> None:
        if self._change is None or self.parked:
            return
        change, self._change = self._change, None
        if not change.path.startswith("bad"):
            self.weights = change.digest
            self._news.append(WeightsReplaced())
        elif change.former.startswith("gone"):
            self._news.append(EngineDied(f"{change.path} cannot be loaded, and {change.former} cannot, either"))
        else:
            self._news.append(WeightsReplaced(f"{change.path} cannot be loaded"))

    def die(self) -> None:
        self._news.append(EngineDied("killed by the test"))

    def _is_first(self, output: EngineOutput) -> bool:
        running = self.running[output.key]
        if output.vector:
            return True
        return len(running.said) == 1 and not running.request.reference

    def _advance(self, running: Running) -> EngineOutput:
        request = running.request
        if running.is_aborted:
            return EngineOutput(request.key, finish="abort")
        if request.adapter and request.adapter not in self.adapters and not running.said:
            return EngineOutput(request.key, finish="error", error="the adapter was unloaded", is_bad_request=True)
        if self.fault is not None and request.pooling is not None:
            return replace(self.fault, key=request.key)
        if request.pooling is not None:
            size = request.pooling.dimensions or self.facts.embedding_size
            return EngineOutput(request.key, finish="stop", vector=vector_of([*request.token_ids], size))
        if request.reference and not running.said and not self._reads(request):
            return EngineOutput(request.key, finish="error", error="the read was not confirmed", is_failed_read=True)
        if self.fault is not None and request.reference:
            return replace(self.fault, key=request.key)
        running.said += answer_of([*request.token_ids, *running.said], 1, self.weights)
        output = EngineOutput(request.key, tokens=(running.said[-1],))
        if request.parks:
            self.store.parked[request.key] = request.fence
            self.store.made_with[request.key] = self.weights
            return replace(output, finish="length", reference=json.dumps(request.key).encode())
        if request.num_emitted + len(running.said) >= request.sampling.max_tokens:
            return replace(output, finish="length")
        return output

    def _reads(self, request: EngineRequest) -> bool:
        reference = json.loads(request.reference)
        is_confirmed = self.store.parked.pop(reference, None) == request.fence
        if is_confirmed and self.store.made_with[reference] != self.weights:
            self.mixed.append(request.key)
        return is_confirmed
