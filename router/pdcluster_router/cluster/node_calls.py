"""What the router asks single nodes and waits for: a change of role, a drain, a file of the model card."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, cast

from msgspec.structs import replace

from pdcluster.core.errors import NodeLost
from pdcluster.core.messages import (
    AdapterManaged,
    AnyMessage,
    FetchFile,
    FileChunk,
    Manage,
    ManageAdapter,
    Managed,
    Role,
    WeightsManaged,
    WeightsOrder,
)

# Sends a message to the node of an incarnation. Raises NodeLost.
Send = Callable[[str, AnyMessage], None]


class NodeCalls:
    """Owned by the router's event loop. Each call ends with its answer, its time, or the loss of its node."""

    def __init__(self, send: Send) -> None:
        self._send = send
        # By the node's incarnation and what its answer names: a number, or a file.
        self._calls: dict[tuple[str, int | str], asyncio.Future[Any]] = {}
        self._numbers = count(1)

    def on_answer(self, incarnation: str, message: Managed | AdapterManaged | WeightsManaged | FileChunk) -> None:
        key = message.name if isinstance(message, FileChunk) else message.number
        answer = self._calls.get((incarnation, key))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def lose_node(self, incarnation: str, reason: str) -> None:
        for (asked, _), answer in self._calls.items():
            if asked == incarnation and not answer.done():
                answer.set_exception(NodeLost(reason))

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
        number = next(self._numbers)
        return cast(Managed, await self._ask(incarnation, number, Manage(number, role, cordoned, moves), timeout_s))

    async def manage_adapter(self, incarnation: str, name: str, path: str | None, timeout_s: float) -> AdapterManaged:
        """Have a node load an adapter, or unload it (path None). Raises NodeLost or TimeoutError."""
        number = next(self._numbers)
        return cast(AdapterManaged, await self._ask(incarnation, number, ManageAdapter(number, name, path), timeout_s))

    async def manage_weights(self, incarnation: str, order: WeightsOrder, timeout_s: float) -> WeightsManaged:
        """Ask something of a node's weights. The order's number is replaced. A node that switches gives no answer, and
        is lost. Raises NodeLost or TimeoutError.
        """
        number = next(self._numbers)
        asked = await self._ask(incarnation, number, replace(order, number=number), timeout_s)
        return cast(WeightsManaged, asked)

    async def fetch_file(self, incarnation: str, name: str, offset: int, timeout_s: float) -> FileChunk:
        """Fetch one piece of a model card's file. Raises NodeLost or TimeoutError."""
        return cast(FileChunk, await self._ask(incarnation, name, FetchFile(name, offset), timeout_s))

    async def _ask(self, incarnation: str, key: int | str, message: AnyMessage, timeout_s: float) -> object:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls[incarnation, key] = answer
        try:
            self._send(incarnation, message)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._calls.pop((incarnation, key), None)
