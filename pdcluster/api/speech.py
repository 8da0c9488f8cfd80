"""What a chat model says, taken apart as it comes: what it thinks, what it answers, which tools it calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdcluster.api.reasoning import ReasoningSplitter
from pdcluster.api.tools.calls import CallDelta, Part
from pdcluster.api.tools.parsers import Parser


class Said(NamedTuple):
    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class Speech:
    """reasoning, tools: None where the model marks none, or none were offered."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, reasoning: ReasoningSplitter | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> Said:
        """What is certain now."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
        return self._said(reasoning, text)

    def flush(self) -> Said:
        """The text ended."""
        reasoning = text = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.flush()
        said = self._said(reasoning, text)
        if self._tools is None:
            return said
        return _joined(said.reasoning, [said.text, *said.calls, *self._tools.flush()])

    def _said(self, reasoning: str, text: str) -> Said:
        if self._tools is None:
            return Said(reasoning, text)
        return _joined(reasoning, self._tools.feed(text) if text else [])


def _joined(reasoning: str, parts: Sequence[Part]) -> Said:
    text = "".join([part for part in parts if isinstance(part, str)])
    return Said(reasoning, text, tuple(part for part in parts if isinstance(part, CallDelta)))
