"""A chat model's output, split as it comes into reasoning, answer and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdcluster.api.tools.calls import Part, ToolCallDelta
from pdcluster.api.tools.parsers import Parser
from pdcluster.api.tools.reasoning import ReasoningSplitter


class Said(NamedTuple):
    """parts: text of the answer and calls, in order."""

    reasoning: str = ""
    parts: Sequence[Part] = ()

    @property
    def text(self) -> str:
        return "".join([part for part in self.parts if isinstance(part, str)])

    @property
    def calls(self) -> list[ToolCallDelta]:
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]


class Speech:
    """reasoning, tools: None where the model marks none, or none were offered."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, reasoning: ReasoningSplitter | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking

    def feed(self, text: str) -> Said:
        """What is certain now."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
        return Said(reasoning, self._parts(text))

    def flush(self, *, is_cut: bool = False) -> Said:
        """The text ended. is_cut: the tokens ran out, so a mark that had begun is no text."""
        reasoning = text = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.flush(is_cut=is_cut)
        parts = self._parts(text)
        return Said(reasoning, parts if self._tools is None else [*parts, *self._tools.flush(is_cut=is_cut)])

    def _parts(self, text: str) -> list[Part]:
        if self._tools is None:
            return [text] if text else []
        return self._tools.feed(text) if text else []
