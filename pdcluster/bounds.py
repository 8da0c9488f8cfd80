"""What a plain value in a message may be, said once: msgspec checks these while it decodes. Not here: what depends on two values (`wire.codec`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_ID_CHARS = 128
MAX_TEXT_CHARS = 16 << 10
MAX_SECONDS = 1e9
INT31 = (1 << 31) - 1
UINT63 = (1 << 63) - 1

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Count = Annotated[int, Meta(ge=0, le=INT31)]
Positive = Annotated[int, Meta(ge=1, le=INT31)]
BigCount = Annotated[int, Meta(ge=0, le=UINT63)]
Number = Annotated[int, Meta(ge=1, le=UINT63)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
SecondsLeft = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
