"""One router over a scripted model, and one client of it, for all examples of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
from scripted_dispatcher import MODEL, SpeakingDispatcher, served


class Router:
    def __init__(self, runner: asyncio.Runner, client: httpx.AsyncClient, dispatcher: SpeakingDispatcher) -> None:
        self.dispatcher = dispatcher
        self._runner, self._client = runner, client

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._runner.run(self._client.post(path, json=body))

    def told(self, path: str, body: dict[str, Any], **fields: Any) -> httpx.Response:
        """What is answered; anything but 200 fails."""
        reply = self.post(path, {"model": MODEL, **body, **fields})
        assert reply.status_code == 200, reply.text
        return reply

    def answered(self, path: str, body: dict[str, Any]) -> dict[str, Any] | str:
        """The events of a stream as text; else an answer, or why it was refused."""
        self.dispatcher.started.clear()
        reply = self.post(path, body)
        assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
        is_stream = reply.headers["content-type"].startswith("text/event-stream")
        told: dict[str, Any] | str = reply.text if is_stream else reply.json()
        return told


@contextmanager
def chat_router(max_len: int = 1 << 16) -> Iterator[Router]:
    """It runs in a loop of its own, while something is asked."""
    dispatcher, stack = SpeakingDispatcher(max_len=max_len), AsyncExitStack()
    with asyncio.Runner() as runner:
        url = runner.run(stack.enter_async_context(served(dispatcher)))
        client = httpx.AsyncClient(base_url=url, timeout=30, verify=False)
        runner.run(stack.enter_async_context(client))
        yield Router(runner, client, dispatcher)
        runner.run(stack.aclose())
