"""Which weights a checkpoint holds: a digest of each tensor as it is stored, one of all of them, and short ones of
groups. By the groups a refusal names what differs.

Nothing is remembered between starts. Neither size nor times of a file prove that its bytes are the same, and digesting
them costs less than laying them out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import xxhash
from numpy.typing import NDArray

GROUP_BYTES = 4
MAX_GROUP_BYTES = 2048
WHOLE_BYTES = 16
# Memory is not read faster by more.
MOST_THREADS = 16
OUTER = ("config.json", "embedding", "final norm", "head")
PARTS = ("norms", "attention", "feed-forward")
OUTER_TENSORS = {"model.embed_tokens": 1, "model.norm": 2, "lm_head": 3}
LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)\.")


@dataclass(frozen=True, slots=True)
class WeightsDigest:
    """whole: 32 hex digits over the config and every tensor's digest. groups: GROUP_BYTES for each of `group_names`."""

    whole: str
    groups: bytes


class Digester:
    """Digests tensors on threads of its own while their pages are read. Used in a with statement by one thread; a block
    that fails leaves the rest undone.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(min(max(threads, 1), MOST_THREADS), thread_name_prefix="digest")
        self._digests: dict[str, Future[bytes]] = {}

    def __enter__(self) -> Digester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, kind: str, shape: Iterable[int], data: NDArray[Any]) -> None:
        """name: that of Hugging Face. kind: how `data`, the whole tensor, is stored."""
        self._digests[name] = self._pool.submit(_digest_of, tensor_digest(name, kind, shape), data)

    def result(self, config: str, num_layers: int) -> WeightsDigest:
        """Waits for all tensors. config: everything else that decides what is computed from them."""
        whole = hashlib.blake2b(config.encode(), digest_size=WHOLE_BYTES)
        groups = [hashlib.blake2b(digest_size=GROUP_BYTES) for _ in group_names(num_layers)]
        groups[0].update(config.encode())
        for name, digest in sorted(self._digests.items()):
            whole.update(digest.result())
            groups[_group_of(name, num_layers)].update(digest.result())
        return WeightsDigest(whole.hexdigest(), b"".join(group.digest() for group in groups))


def group_names(num_layers: int) -> list[str]:
    """What the groups of a model hold, in their order. Neighbouring layers share groups where a card would be too
    long.
    """
    step = _layers_a_group(num_layers)
    ranges = [(first, min(first + step, num_layers) - 1) for first in range(0, num_layers, step)]
    layers = [f"layer {first}" if first == last else f"layers {first} to {last}" for first, last in ranges]
    return [*OUTER, *(f"{layer} {part}" for layer in layers for part in PARTS)]


def differing_groups(ours: bytes, theirs: bytes, num_layers: int) -> tuple[str, ...]:
    """Names of the groups that differ; none where one side does not say, or says it in another form."""
    names = group_names(num_layers)
    if not len(ours) == len(theirs) == len(names) * GROUP_BYTES:
        return ()
    at = range(0, len(ours), GROUP_BYTES)
    return tuple(
        name
        for name, place in zip(names, at, strict=True)
        if ours[place : place + GROUP_BYTES] != theirs[place : place + GROUP_BYTES]
    )


def tensor_digest(name: str, kind: str, shape: Iterable[int]) -> xxhash.xxh3_128:
    """The digest of a tensor, before its bytes."""
    return xxhash.xxh3_128(f"{name}:{kind}:{','.join(map(str, shape))}:".encode())


def _digest_of(state: xxhash.xxh3_128, data: NDArray[Any]) -> bytes:
    state.update(data.data)  # without the GIL
    return state.digest()


def _layers_a_group(num_layers: int) -> int:
    most = (MAX_GROUP_BYTES // GROUP_BYTES - len(OUTER)) // len(PARTS)
    return -(-num_layers // most)


def _group_of(name: str, num_layers: int) -> int:
    found = LAYER.match(name)
    if found is None:
        return OUTER_TENSORS[name.rpartition(".")[0]]
    part = 0 if "norm" in name else 1 if found[2] == "self_attn" else 2
    return len(OUTER) + int(found[1]) // _layers_a_group(num_layers) * len(PARTS) + part
