"""What the router asks single nodes and waits for: a change of role, a drain, a file of the model card."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdcluster.core.messages import (
    AdapterManaged,
    AnyMessage,
    FetchFile,
    FileChunk,
    Manage,
    ManageAdapter,
    Managed,
    Role,
)

# Sends a message to the node of an incarnation. Raises NodeLost.
Send = Callable[[str, AnyMessage], None]


class NodeCalls:
    """Owned by the router's event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._files: dict[tuple[str, str], asyncio.Future[FileChunk]] = {}
        self._managing: dict[int, asyncio.Future[Managed]] = {}
        self._adapters: dict[int, asyncio.Future[AdapterManaged]] = {}
        self._num_managed = 0

    def on_managed(self, message: Managed) -> None:
        asked = self._managing.get(message.number)
        if asked is not None and not asked.done():
            asked.set_result(message)

    def on_adapter(self, message: AdapterManaged) -> None:
        asked = self._adapters.get(message.number)
        if asked is not None and not asked.done():
            asked.set_result(message)

    def on_chunk(self, incarnation: str, message: FileChunk) -> None:
        waiting = self._files.get((incarnation, message.name))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def manage(
        self,
        incarnation: str,
        *,
        role: Role | None = None,
        cordoned: bool | None = None,
        moves: bool = False,
        timeout_s: float,
    ) -> Managed:
        """Change a node's role, or whether it takes new work, or have it give its work to others (moves). Raises
        NodeLost or TimeoutError.
        """
        self._num_managed += 1
        number = self._num_managed
        answer: asyncio.Future[Managed] = asyncio.get_running_loop().create_future()
        self._managing[number] = answer
        try:
            self._send(incarnation, Manage(number, role, cordoned, moves))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._managing[number]

    async def manage_adapter(self, incarnation: str, name: str, path: str | None, timeout_s: float) -> AdapterManaged:
        """Have a node load an adapter, or unload it (path None). Raises NodeLost or TimeoutError."""
        self._num_managed += 1
        number = self._num_managed
        answer: asyncio.Future[AdapterManaged] = asyncio.get_running_loop().create_future()
        self._adapters[number] = answer
        try:
            self._send(incarnation, ManageAdapter(number, name, path))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._adapters[number]

    async def fetch_file(self, incarnation: str, name: str, offset: int, timeout_s: float) -> FileChunk:
        """Fetch one piece of a model card's file. Raises NodeLost or TimeoutError."""
        waiting: asyncio.Future[FileChunk] = asyncio.get_running_loop().create_future()
        self._files[incarnation, name] = waiting
        try:
            self._send(incarnation, FetchFile(name, offset))
            async with asyncio.timeout(timeout_s):
                return await waiting
        finally:
            del self._files[incarnation, name]
