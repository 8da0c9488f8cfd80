"""A router without routing: the least that plain Python needs to take a completion over HTTP, send it to a node and
give its tokens back. A ceiling for the product, on the machine of the moment. `python -m bench.fakes.bare_router
--bootstrap HOST:PORT --ready-fd N` serves until it is stopped.

Real: HTTP/1.1 with keep-alive, JSON both ways, the product's link to the node (codec, digest, sequence numbers; its
sockets), one event per streamed token. Left out, which is what a router is for: choice of nodes, prefixes, hold queue,
tenants, retries, deadlines, slow and lost clients, metrics, explanations, checks of what clients and nodes say, stop
strings, characters of several tokens. One prompt of token ids, one node.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
from collections.abc import Callable
from typing import cast

import msgspec
import uvloop
import zmq

from pdcluster.api.text.model_text import TextModel
from pdcluster.bootstrap.agent import watch
from pdcluster.checkpoint import bundled
from pdcluster.core.messages import (
    AnyMessage,
    Endpoint,
    Finished,
    Prefill,
    Sampling,
    TokenRow,
    Tokens,
    Work,
    pack_tokens,
)
from pdcluster.kv.hashing import BLOCK_TOKENS, chain_root
from pdcluster.processes import ready
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.router_link import LinkState, NodeLink
from pdcluster.wire.sockets import WireSettings

DEADLINE_S = 60.0
# Of blocks that only the node names.
ROOT = chain_root(block_tokens=BLOCK_TOKENS, salt=b"", weights="bare")
LENGTH = b"content-length: "
LINE_END, HEAD_END = b"\r\n", b"\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_TAIL = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
NOT_READY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


class Asked(msgspec.Struct):
    """The part of a completion's body that is looked at; the rest is read and dropped."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False
    stream: bool = False


_decode = msgspec.json.Decoder(Asked).decode
_encode = msgspec.json.Encoder().encode


class BareRouter:
    """Belongs to the running loop."""

    def __init__(self, texts: list[str | None], model: str) -> None:
        self.texts, self.model = texts, model
        self.waiting: dict[str, BareConnection] = {}
        self._me = Peer("bare", f"bare-{secrets.token_hex(8)}")
        self._numbers = itertools.count()
        self._link: NodeLink | None = None
        self.ready = asyncio.Event()

    async def connect(self, bootstrap: str) -> None:
        """To the first node that the bootstrap knows."""
        async for snapshot in watch((bootstrap,)):
            if snapshot.nodes:
                self.link(snapshot.nodes[0].endpoint)
                return

    def link(self, endpoint: Endpoint) -> None:
        self._link = NodeLink(
            self._me, endpoint, context=zmq.Context(), on_message=self._on_message, on_state=self._on_state,
            open_attempts=lambda: (), settings=WireSettings(),
        )  # fmt: skip

    def _on_state(self, state: LinkState) -> None:
        if state is LinkState.UP:
            self.ready.set()
        else:
            self.ready.clear()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def send(self, asked: Asked, connection: BareConnection) -> str:
        request = f"bare-{next(self._numbers)}"
        self.waiting[request] = connection
        assert self._link is not None  # nobody asks before it is ready
        packed, sampling = (
            pack_tokens(asked.prompt),
            Sampling(asked.max_tokens, 1, temperature=asked.temperature, ignore_eos=asked.ignore_eos),
        )
        self._link.send(
            Prefill(Work(request, 0, packed, len(asked.prompt), b"", sampling, DEADLINE_S, ROOT), remote=False)
        )
        return request

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Tokens):
            for row in message.rows:
                self.waiting[row.request].on_row(row)
        elif isinstance(message, Finished):
            self.waiting.pop(message.request).on_finished(message)


class BareConnection(asyncio.Protocol):
    """One client, which asks again when it was answered."""

    def __init__(self, router: BareRouter) -> None:
        self._router = router
        self._buffer = b""
        self._texts: list[str] = []
        self._is_stream = False
        self._id, self._num_prompt = "", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write: Callable[[bytes], None] = cast(asyncio.Transport, transport).write

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(HEAD_END)
        if end < 0:
            return
        if self._buffer.startswith(b"GET "):
            self._buffer = b""
            self._write(READY if self._router.ready.is_set() else NOT_READY)
            return
        _, _, length = self._buffer[:end].lower().partition(LENGTH)
        whole = end + len(HEAD_END) + int(length.partition(LINE_END)[0])
        if len(self._buffer) < whole:
            return
        body, self._buffer = self._buffer[end + len(HEAD_END) : whole], self._buffer[whole:]
        asked = _decode(body)
        self._is_stream, self._texts, self._num_prompt = asked.stream, [], len(asked.prompt)
        self._id = self._router.send(asked, self)

    def on_row(self, row: TokenRow) -> None:
        texts = self._router.texts
        for token_id in row.tokens:
            text = texts[token_id] or ""
            if not self._is_stream:
                self._texts.append(text)
                continue
            head = b"" if row.position else STREAM_HEAD
            self._write(head + self._event([{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]))

    def on_finished(self, message: Finished) -> None:
        choice = {"index": 0, "text": "".join(self._texts), "logprobs": None, "finish_reason": message.reason}
        if self._is_stream:
            self._write(self._event([choice]) + STREAM_TAIL)
            return
        usage = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": message.num_output,
            "total_tokens": self._num_prompt + message.num_output,
        }
        body = _encode(
            {
                "id": self._id,
                "object": "text_completion",
                "created": 0,
                "model": self._router.model,
                "choices": [choice],
                "usage": usage,
            }
        )
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )

    def _event(self, choices: list[dict[str, object]]) -> bytes:
        data = _encode(
            {"id": self._id, "object": "text_completion", "created": 0, "model": self._router.model, "choices": choices}
        )
        return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def bare_router() -> BareRouter:
    """Not connected yet."""
    model = bundled.path()
    return BareRouter(list(TextModel.from_dir(model).pieces.texts), model.resolve().name)


async def serve(bootstrap: str, ready_fd: int) -> None:
    router = bare_router()
    await router.connect(bootstrap)
    server = await asyncio.get_running_loop().create_server(lambda: BareConnection(router), "127.0.0.1", 0)
    ready.announce(ready_fd, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fakes.bare_router")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--ready-fd", type=int, default=os.dup(1))
    chosen = parser.parse_args()
    uvloop.run(serve(chosen.bootstrap, chosen.ready_fd))


if __name__ == "__main__":
    main()
