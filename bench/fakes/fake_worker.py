"""An engine that answers at once over HTTP, as the workers of other routers look: `python -m bench.fakes.fake_worker
PORT [ROLE [TOKEN_S]]`.

Enough of SGLang's and vLLM's APIs for their routers to take it for a worker of ROLE (prefill, decode, plain). Tokens of
a stream are paced: one write each, then TOKEN_S, or with 0 a turn of the loop, in which case a router finds many of
them in one read.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "bench"}]}
INFO = {
    "model_path": "m", "served_model_name": "m", "tokenizer_path": "m", "is_generation": True, "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"], "weight_version": "default", "tp_size": 1, "dp_size": 1,
    "max_total_num_tokens": 1 << 20,
    "max_running_requests": 1024, "version": "0.5.9", "internal_states": [{}],
}  # fmt: skip
LOAD = [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
GENERATED = {
    "text": " x", "output_ids": [5],
    "meta_info": {"id": "1", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 8,
    "completion_tokens": 1, "cached_tokens": 0},
}  # fmt: skip
COMPLETED = {
    "id": "c", "object": "text_completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "text": " x", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 8, "total_tokens": 9, "completion_tokens": 1},
}  # fmt: skip
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def answer(value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


ANSWERS = {b"/generate": answer(GENERATED), b"/v1/completions": answer(COMPLETED)}
EVENTS = {
    b"/generate": chunk(b"data: " + json.dumps(GENERATED).encode() + b"\n\n"),
    b"/v1/completions": chunk(b"data: " + json.dumps(COMPLETED).encode() + b"\n\n"),
}
STREAM_TAIL = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
COUNT = re.compile(rb'"max_(?:new_)?tokens": ?(\d+)')


class Worker(asyncio.Protocol):
    def __init__(self, role: str, token_s: float) -> None:
        self._token_s = token_s
        self._buffer = b""
        self._facts = INFO | {"disaggregation_mode": role if role != "plain" else "null"}
        self._role = role
        self._streams: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (taken := self._take()) is not None:
            self._serve(*taken)

    def _take(self) -> tuple[bytes, bytes] | None:
        """The next whole request: (path, body)."""
        head, mark, rest = self._buffer.lstrip(b"\r\n").partition(b"\r\n\r\n")
        if not mark:
            return None
        if b" HTTP/1." not in head.partition(b"\r\n")[0]:
            self._transport.close()  # some routers try HTTP/2 first, to find out who speaks gRPC
            return None
        if b"transfer-encoding: chunked" in head.lower():
            body, end, rest = rest.partition(b"\r\n0\r\n\r\n")
            if not end:
                return None
        else:
            found = re.search(rb"content-length: ?(\d+)", head, re.IGNORECASE)
            size = int(found[1]) if found else 0
            if len(rest) < size:
                return None
            body, rest = rest[:size], rest[size:]
        self._buffer = rest
        return head.split(b" ", 2)[1].partition(b"?")[0], body

    def _serve(self, path: bytes, body: bytes) -> None:
        if path in ANSWERS:
            if re.search(rb'"stream": ?true', body):
                found = COUNT.search(body)
                count = int(found[1]) if found and self._role != "prefill" else 1
                stream = asyncio.ensure_future(self._stream(EVENTS[path], count))
                self._streams.add(stream)
                stream.add_done_callback(self._streams.discard)
            else:
                self._transport.write(ANSWERS[path])
        elif path == b"/v1/models":
            self._transport.write(answer(MODELS))
        elif b"load" in path:
            self._transport.write(answer(LOAD))
        else:
            self._transport.write(answer(self._facts))

    async def _stream(self, event: bytes, count: int) -> None:
        self._transport.write(STREAM_HEAD)
        for _ in range(count):
            self._transport.write(event)
            await asyncio.sleep(self._token_s)
        self._transport.write(STREAM_TAIL)


async def serve(port: int, role: str, token_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Worker(role, token_s), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    port, role, token_s = [*sys.argv[1:], *("", "plain", "0")[len(sys.argv) - 1 :]]
    uvloop.run(serve(int(port), role, float(token_s)))
