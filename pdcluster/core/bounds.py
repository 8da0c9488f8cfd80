"""Bounds of plain values in messages. msgspec checks them while it decodes. Rules between two values are checked after
decoding.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, MsgspecError

# What msgspec raises for bytes that are no value of a type. Text that is no UTF-8 is a ValueError.
DECODE_ERRORS = (MsgspecError, ValueError, OverflowError, RecursionError)

MAX_ID_CHARS = 128
MAX_TEXT_CHARS = 16 << 10
MAX_SECONDS = 1e9
MAX_BYTES_S = 1e15
MAX_ITEMS = 1 << 20
MAX_RANKS = 512
MAX_PATHS = 1024
MAX_REASONS = 64
MAX_MEDIA = 64
# Of one medium, in a ticket.
MAX_ADVERT_BYTES = 64 << 10
# Of a Commit: a reference names a few ids and the blocks of a prompt.
MAX_OPAQUE_BYTES = 1 << 20
# Numbers of an embedding, of 4 bytes each.
MAX_DIMENSIONS = 1 << 16
MAX_VECTOR_BYTES = 4 * MAX_DIMENSIONS
INT31 = (1 << 31) - 1
UINT63 = (1 << 63) - 1

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
# "" for none.
AdapterName = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Count = Annotated[int, Meta(ge=0, le=INT31)]
Dimensions = Annotated[int, Meta(ge=0, le=MAX_DIMENSIONS)]
Positive = Annotated[int, Meta(ge=1, le=INT31)]
BigCount = Annotated[int, Meta(ge=0, le=UINT63)]
Number = Annotated[int, Meta(ge=1, le=UINT63)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
SecondsLeft = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
Percent = Annotated[float, Meta(ge=0.0, le=100.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
BytesPerSecond = Annotated[float, Meta(ge=0.0, le=MAX_BYTES_S)]
# Of 64 bits: msgpack knows no larger ones.
Unsigned = Annotated[int, Meta(ge=0)]
NumRanks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Advert = tuple[Id, Annotated[bytes, Meta(max_length=MAX_ADVERT_BYTES)]]
Adverts = Annotated[tuple[Advert, ...], Meta(max_length=MAX_MEDIA)]
Reasons = Annotated[tuple[tuple[Id, BigCount], ...], Meta(max_length=MAX_REASONS)]
