"""What names parked KV on its way from a prefill node to a decode node. Bytes from a peer are hostile until decoded.

Knows no vllm. Whether a reference is still good is asked later, of the node that parks (`read_confirmation.py`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdcluster.core.bounds import DECODE_ERRORS, MAX_OPAQUE_BYTES, Count, NumRanks, Positive
from pdcluster.core.errors import ProtocolError

VERSION: Final = 1
MAX_GROUPS = 64
MAX_BLOCKS = 1 << 17
MAX_ADDRESSES = 512

# Engine and request ids: what vLLM makes of ours, and nothing that a notice's separators are.
_Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
_Host = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:%-]{1,253}\Z")]
_Address = Annotated[str, Meta(pattern=r"^tcp://[A-Za-z0-9_.:%\[\]-]{3,300}\Z")]


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Parked KV: which engine holds which blocks, and where to ask after reading them."""

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    # New at each start of an engine.
    engine: _Word
    request: _Word
    # Where engines exchange what a read needs.
    host: _Host
    port: Annotated[int, Meta(ge=1, le=65535)]
    tp_size: NumRanks
    dcp_size: NumRanks
    pp_size: NumRanks
    block_tokens: Positive
    num_tokens: Positive
    # Block ids per KV cache group.
    blocks: Annotated[
        tuple[Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS)], ...], Meta(min_length=1, max_length=MAX_GROUPS)
    ]
    # Where each tensor-parallel rank confirms reads.
    addresses: Annotated[tuple[_Address, ...], Meta(min_length=1, max_length=MAX_ADDRESSES)]


_decoder = msgspec.msgpack.Decoder(Reference)


def encode_reference(reference: Reference) -> bytes:
    """Raises ProtocolError for one that no peer would take."""
    data = msgspec.msgpack.encode(reference)
    decode_reference(data)
    return data


def decode_reference(data: bytes) -> Reference:
    """Raises ProtocolError."""
    if len(data) > MAX_OPAQUE_BYTES:
        raise ProtocolError(f"a reference of {len(data)} bytes; at most {MAX_OPAQUE_BYTES}")
    try:
        reference = _decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"a reference that cannot be read: {error}") from error
    if not any(reference.blocks):
        raise ProtocolError("a reference without a block")
    if len(reference.addresses) != reference.tp_size:
        raise ProtocolError(f"a reference of {reference.tp_size} ranks with {len(reference.addresses)} addresses")
    return reference


def check_reference(reference: Reference, num_tokens: int, block_tokens: int, groups: int) -> None:
    """Whether it can be the KV of this prompt on this engine: a reader of fewer blocks than it needs would stop its
    whole engine. Raises ProtocolError."""
    if reference.block_tokens != block_tokens:
        raise ProtocolError(f"KV in blocks of {reference.block_tokens} tokens; this engine has {block_tokens}")
    if len(reference.blocks) != groups:
        raise ProtocolError(f"KV of {len(reference.blocks)} cache groups; this engine has {groups}")
    if groups > 1:
        return  # windows and states keep fewer tokens and blocks, by rules of the engine
    needed = -(-num_tokens // block_tokens)
    if reference.num_tokens != num_tokens or len(reference.blocks[0]) != needed:
        raise ProtocolError(
            f"KV of {reference.num_tokens} tokens in {len(reference.blocks[0])} blocks; the prompt has {num_tokens} "
            f"in {needed}"
        )
