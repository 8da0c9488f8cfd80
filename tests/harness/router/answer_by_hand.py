"""An answer whose line pauses when the test says so, and whose generations are moved by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scripted_dispatcher import MODEL, ROUTE, TEXT, ScriptedDispatcher

from pdcluster.api.openai import requests
from pdcluster_router.core.generation import Generation, Sink, TokenChunk
from pdcluster_router.frontend.prepare import Terms, prepare_chat, prepare_completion
from pdcluster_router.frontend.response import answer
from pdcluster_router.frontend.server import router_metrics
from pdcluster_router.http.exchange import Exchange, ParsedHead
from pdcluster_router.http.write_coalescing import WriteCoalescer


class Line:
    """Implements http.exchange.ClientConnection."""

    def __init__(self) -> None:
        self.is_paused = self.is_cut = False
        self.write_coalescer = WriteCoalescer()
        self._written = b""

    @property
    def sent(self) -> bytes:
        """And posted."""
        return self._written + self.write_coalescer.parts.get(self, b"")

    def write(self, data: bytes, /) -> None:
        self._written += data

    def send(self, data: bytes) -> None:
        self.write(self.write_coalescer.parts.pop(self, b"") + data)

    def post(self, data: bytes) -> None:
        self.write_coalescer.parts[self] = self.write_coalescer.parts.get(self, b"") + data

    def end(self, exchange: Exchange) -> None:
        pass

    def abort(self) -> None:
        self.is_cut = True


@dataclass
class ByHand(ScriptedDispatcher):
    """Implements generation.Dispatcher and generation.Running."""

    sinks: list[Sink] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    # Happens before `start` returns.
    on_start: Callable[[], object] = lambda: None

    def start(self, generation: Generation, sink: Sink) -> ByHand:
        self.sinks.append(sink)
        self.on_start()
        return self

    def cancel(self, reason: str) -> None:
        self.ends.append(reason)

    def finish(self, num_output: int) -> None:
        self.ends.append(f"finished with {num_output}")

    def says(self, choice: int, position: int, text: str) -> int:
        token_ids = tuple(TEXT.encode(text, add_special_tokens=False))
        self.sinks[choice].on_chunk(TokenChunk(position, token_ids, (), (), ROUTE))
        return position + len(token_ids)


def asked(
    dispatcher: ByHand, *, is_chat: bool = False, is_http_1_0: bool = False, **fields: object
) -> tuple[Line, Exchange]:
    line = Line()
    exchange = Exchange(line, ParsedHead("POST", "/v1/completions", {}, True, is_http_1_0), "")
    terms, common = Terms("r", time.monotonic(), 128, 60.0), {"model": MODEL, "max_tokens": 50, **fields}
    if is_chat:
        prepared = prepare_chat(
            requests.decode_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}], **common}).encode()),
            dispatcher,
            terms,
        )
    else:
        prepared = prepare_completion(
            requests.decode_completion(json.dumps({"prompt": "hi", **common}).encode()), dispatcher, terms
        )
    answer(exchange, prepared, dispatcher, router_metrics())
    return line, exchange
