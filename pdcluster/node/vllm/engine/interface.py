"""What a node's legs ask of a serving engine, and what it answers. Imports no vllm: a fake engine speaks it too.

Rules:
1. One thread owns a `ServingEngine` and calls all its methods. None of them waits for the engine, but `close`.
2. Each added key gets outputs of which exactly the last has a `finish`, unless the engine dies first.
3. `EngineDied` comes once, and nothing comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pdcluster.core.messages import Pooling
from pdcluster.core.sampling import Sampling, TokenLogprobs

Finish = Literal["", "stop", "length", "eos", "error", "abort"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One leg of an attempt, as the engine runs it."""

    # "request#attempt" and a number of its own, never used again.
    key: str
    # The prompt, and behind it the tokens that earlier attempts emitted.
    token_ids: Sequence[int]
    # How many of the last ones those are.
    num_emitted: int
    sampling: Sampling
    # Separates prefix caches; "" for none.
    salt: str = ""
    # A LoRA adapter, by the number that it was loaded with; 0 for none.
    adapter: int = 0
    # A prefill leg: one token, and the KV waits for a decode node. The last output's reference names it.
    parks: bool = False
    # Hex of the digest of (request, prompt tokens) that both ends of a reference compute.
    fence: str = ""
    # A decode leg: Commit.opaque.
    reference: bytes = b""
    # An embedding is wanted, and no token. Its last output has the vector.
    pooling: Pooling | None = None
    # It gives way to all other prompts that wait.
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one request got since its previous output."""

    key: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # "" while the request runs on.
    finish: Finish = ""
    stop_token: int | None = None
    # Of "error": why.
    error: str = ""
    # Of "error": no node with this engine can run the request; `param` names the field at fault.
    is_bad_request: bool = False
    param: str = ""
    # Of "error": the KV that the reference names could not be read.
    is_failed_read: bool = False
    # Of a finished prefill leg: encoded, bounded. Empty if nothing is parked.
    reference: bytes = b""
    cached_tokens: int = 0
    # Packed little-endian float32, all finite.
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of the engine, as its statistics tell it."""

    # Monotonic seconds at its end.
    at_s: float
    # Prompt tokens whose prefill ended in this step, computed here; those taken from the cache or a peer.
    prompt_tokens: int
    reused_tokens: int
    # An embedding counts as one.
    output_tokens: int
    running: int
    # Of the pool's blocks, 0 to 1. Parked KV counts.
    kv_usage: float
    preemptions: int
    # Reads of a peer's KV that failed, and leases of parked KV that ended unread.
    failed_transfers: int
    expired_leases: int

    @property
    def had_work(self) -> bool:
        """Also where something is counted that only this step tells."""
        counts = (self.prompt_tokens, self.reused_tokens, self.output_tokens, self.running)
        return any((*counts, self.preemptions, self.failed_transfers, self.expired_leases))


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine is gone for good, and so are its processes. The node must end."""

    reason: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """The answer to `load_adapter`."""

    number: int
    # Of its files.
    digest: str = ""
    # Why it was not loaded; "" where it was.
    error: str = ""


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """Weights of the same model that take the place of those that serve."""

    # Directory of the checkpoint.
    path: str
    # Of its files (`weight_files_digest`). Others are refused.
    digest: str
    # Directory of the weights that serve. They are loaded again where the others cannot be.
    former: str
    # For one load.
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WeightsReplaced:
    """The answer to `replace_weights`."""

    # Why the former weights serve on; "" where the new ones serve.
    error: str = ""


EngineNews = EngineOutput | EngineStep | EngineDied | AdapterLoaded | WeightsReplaced


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is true of an engine from its start to its end."""

    block_tokens: int
    num_blocks: int
    max_len: int
    max_rows: int
    max_batched_tokens: int
    vocab_size: int
    # Of the KV cache.
    dtype: str
    num_layers: int
    # With MLA or hybrid models these two serve to count bytes only.
    num_kv_heads: int
    head_dim: int
    # Bytes of KV per token over all layers and ranks, by the numbers above.
    token_bytes: int
    # Of vLLM.
    version: str
    # What else decides the bits of KV: types and quantization.
    arithmetic: str
    # Numbers of the embeddings of a pooling model, which generates nothing; 0: it generates.
    embedding_size: int
    # Number of KV cache groups.
    groups: int
    # How long parked KV waits for its reader.
    lease_s: int
    # LoRA adapters that it can have; 0: none.
    max_adapters: int = 0


class ServingEngine(Protocol):
    """An engine that owns its scheduler and its pages."""

    @property
    def facts(self) -> EngineFacts: ...

    # Readable while `take` has something.
    @property
    def news_fd(self) -> int: ...

    def add(self, request: EngineRequest) -> None: ...

    # The request still gets its last output: "abort", or what came first. Unknown keys are ignored.
    def abort(self, key: str) -> None: ...

    # Frees the parked KV of a finished prefill leg at once. Unknown keys are ignored.
    def release(self, key: str) -> None: ...

    # AdapterLoaded answers. number: above 0, never used before with these weights.
    # known_digest: of the adapter that has this name; then
    # the files are only compared with it.
    def load_adapter(self, number: int, name: str, path: str, known_digest: str = "") -> None: ...

    # Requests that it has begun go on. Later ones with this number end with an error. Unknown numbers are ignored.
    def unload_adapter(self, number: int) -> None: ...

    # WeightsReplaced answers. Nothing may run, and no adapter be loaded. First it waits until no KV is in use or
    # parked, and empties the prefix cache. Where neither the new nor the former weights can be had, the engine dies.
    def replace_weights(self, change: WeightsChange) -> None: ...

    # Everything since the previous call, oldest first. Clears news_fd.
    def take(self) -> list[EngineNews]: ...

    # Ends the engine and its processes, within seconds.
    def close(self) -> None: ...
