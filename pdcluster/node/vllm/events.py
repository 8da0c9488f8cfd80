"""vLLM's KV events as block hashes of ours, for reports to routers. Pure: batches in, hashes out.

vLLM names a block by a hash of its own. An event carries the block's tokens, the vLLM hash of the block before it, and
for the first block of a prompt the request's cache salt. The node sends a request's hash root as salt, in hexadecimal
digits. So our chain begins with the salt, and goes on from block to block.

1. vLLM's cache has a block in as many copies as requests computed it at the same time. Each copy is stored and removed
   by an event of its own, so copies are counted.
2. Blocks without a root of ours, with images, or behind an unknown block have no hash of ours. They are left out.
3. Lost batches cannot be made up for: everything is forgotten, and blocks that are stored later count again. A router
   then believes too little of the node, never too much for long: the next report takes the hashes back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdcluster.core.bounds import DECODE_ERRORS, Count, Positive
from pdcluster.core.errors import ProtocolError
from pdcluster.core.messages import HASH_BYTES, pack_tokens
from pdcluster.kv.hash_changes import HashChanges
from pdcluster.kv.hashing import ChainEnd

log = logging.getLogger(__name__)

# Where vLLM's engine keeps the KV that it computes with, whatever the device is called.
ENGINE_MEDIUM = "GPU"
MAX_EVENTS = 1 << 20
# An entry per block of the pool is the most that vLLM can have; beyond twice of that the books are wrong.
SLACK = 2

BlockKey = bytes | int


class BlockStored(msgspec.Struct, tag=True):
    """vLLM cached full blocks that follow `parent_block_hash`, or begin a prompt.

    extra_keys: for each block what beside tokens decides its hash.
    """

    block_hashes: Annotated[list[BlockKey], Meta(max_length=MAX_EVENTS)]
    parent_block_hash: BlockKey | None
    token_ids: Annotated[list[Count], Meta(max_length=MAX_EVENTS)]
    block_size: Positive
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: Annotated[list[BlockKey], Meta(max_length=MAX_EVENTS)]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """What vLLM publishes at the end of an engine step."""

    ts: float
    events: Annotated[list[CacheEvent], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """A batch in its order. is_gap: batches before it were lost."""

    events: tuple[CacheEvent, ...]
    is_gap: bool = False


_DECODER = msgspec.msgpack.Decoder(EventBatch)


def decode_events(payload: bytes) -> tuple[CacheEvent, ...]:
    try:
        return tuple(_DECODER.decode(payload).events)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"vLLM's KV events are not as in the pinned version: {error}") from error


class _Copies:
    """A block of vLLM's: how many copies it has, and the chain that it ends."""

    __slots__ = ("count", "end")

    def __init__(self, end: ChainEnd) -> None:
        self.end = end
        self.count = 0


class BlockHashes:
    """A node's published block hashes as vLLM's events tell them. Owned by the node loop's thread.

    block_tokens: of vLLM's blocks and of hash blocks, which must be equal.
    num_blocks: of vLLM's pool.
    num_groups: KV cache groups of the model. Hybrid models have several, whose events say nothing of whole prefixes.
    """

    def __init__(self, block_tokens: int, num_blocks: int, num_groups: int = 1) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = SLACK * num_blocks
        self._blocks: dict[BlockKey, _Copies] = {}
        self._changes = HashChanges()
        # Why nothing is reported, "" while it is.
        self.fault = f"the model has {num_groups} groups of KV caches" if num_groups > 1 else ""
        # Times that everything was forgotten because events were lost or wrong.
        self.num_gaps = 0

    @property
    def supports(self) -> bool:
        """Whether routers may rely on its reports."""
        return not self.fault

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, batch: CacheEvents) -> None:
        if batch.is_gap:
            self.num_gaps += 1
            self._forget()
        for event in batch.events:
            if self.fault:
                return
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._forget()
        if len(self._blocks) > self._max_blocks:
            log.error("vLLM's events name %d blocks, more than it has; they are forgotten", len(self._blocks))
            self.num_gaps += 1
            self._forget()

    def snapshot(self) -> bytes:
        """Every published block hash, HASH_BYTES each."""
        return b"".join(self._changes.present)

    def drain_changes(self) -> tuple[bytes, bytes]:
        """Block hashes (added, removed) since the last call, HASH_BYTES each."""
        return self._changes.drain()

    # ------------------------------------------------------------ events

    def _store(self, event: BlockStored) -> None:
        if event.medium not in (None, ENGINE_MEDIUM):
            return  # a copy that must be loaded before it serves
        if (fault := self._fault_of(event)) is not None:
            self._give_up(fault)
            return
        extra = event.extra_keys or [None] * len(event.block_hashes)
        packed = memoryview(pack_tokens(event.token_ids))
        width = len(packed) // len(event.block_hashes) if event.block_hashes else 0
        before = self._end_before(event, extra[0] if extra else None)
        for index, key in enumerate(event.block_hashes):
            known = self._blocks.get(key)
            if known is None:
                if before is None or not _is_text(extra[index], event.lora_name, is_first=before.num_blocks == 0):
                    return
                known = self._blocks[key] = _Copies(before.followed_by(packed[index * width : (index + 1) * width]))
            known.count += 1
            self._changes.add(known.end.hash)
            before = known.end

    def _fault_of(self, event: BlockStored) -> str | None:
        if event.group_idx:
            return f"vLLM has a group {event.group_idx} of KV caches"
        if event.block_size != self._block_tokens:
            return f"vLLM's blocks have {event.block_size} tokens, hash blocks {self._block_tokens}"
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return f"vLLM stored {len(event.block_hashes)} blocks with {len(event.token_ids)} tokens"
        if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
            return f"vLLM stored {len(event.block_hashes)} blocks with {len(event.extra_keys)} lists of keys"
        return None

    def _end_before(self, event: BlockStored, keys: Sequence[Any] | None) -> ChainEnd | None:
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            return None if parent is None else parent.end
        root = root_of(keys, event.lora_name)
        return None if root is None else ChainEnd(root)

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in (None, ENGINE_MEDIUM):
            return
        for key in event.block_hashes:
            if (known := self._blocks.get(key)) is None:
                continue  # one without a hash of ours, or from before a gap
            known.count -= 1
            self._changes.remove(known.end.hash)
            if not known.count:
                del self._blocks[key]

    def _forget(self) -> None:
        for known in self._blocks.values():
            self._changes.remove(known.end.hash * known.count)
        self._blocks.clear()

    def _give_up(self, fault: str) -> None:
        log.warning("no cached prefixes are reported to routers: %s", fault)
        self._forget()
        self.fault = fault


def salt_of(hash_root: bytes) -> str:
    """The cache salt that vLLM gets for a request."""
    return hash_root.hex()


def root_of(keys: Sequence[Any] | None, lora_name: str | None) -> bytes | None:
    """The hash root in a first block's keys: LoRA name, images, salt. None for a salt that is not ours."""
    salt = keys[-1] if keys and len(keys) == (1 if lora_name is None else 2) else None
    if not isinstance(salt, str) or len(salt) != 2 * HASH_BYTES:
        return None
    try:
        return bytes.fromhex(salt)
    except ValueError:
        return None


def _is_text(keys: Sequence[Any] | None, lora_name: str | None, *, is_first: bool) -> bool:
    """Whether tokens, adapter and salt say all of a block."""
    num_known = (lora_name is not None) + is_first
    return len(keys or ()) == num_known and not any(isinstance(key, list | bytes) for key in keys or ())
