"""Splits a model's reasoning from its answer as the text comes: `<think>…</think>` before the answer.

Some templates open the mark in the prompt, so the output begins inside. White space around the marks is dropped. How
the text is cut into pieces changes nothing: what may become a mark is held back.
"""

from __future__ import annotations

from typing import NamedTuple

from pdcluster.api.tools.markers import END_THINK, THINK
from pdcluster.api.tools.partial_marks import begins, keep_for, without_mark


class Split(NamedTuple):
    reasoning: str
    content: str


class ReasoningSplitter:
    __slots__ = ("_held", "_state")

    def __init__(self, *, is_open: bool) -> None:
        """is_open: the prompt ends inside the mark."""
        self._held = ""
        self._state = "lead" if is_open else "start"

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within the reasoning, its marks or the space behind them."""
        return self._state not in ("start", "answer")

    def feed(self, text: str) -> Split:
        """What is certain now."""
        self._held += text
        reasoning = content = ""
        while True:
            state = self._state
            if state == "start":
                self._start()
            elif state == "lead":
                self._skip_space("thinking")
            elif state == "thinking":
                reasoning += self._think()
            elif state == "gap":
                self._skip_space("answer")
            else:
                content, self._held = content + self._held, ""
            if self._state == state:
                return Split(reasoning, content)

    def flush(self, *, is_cut: bool = False) -> Split:
        """The end: text held back is text. is_cut: the tokens ran out, so the beginning of a mark is dropped."""
        held, self._held = self._held, ""
        if self._state in ("start", "answer"):
            return Split("", "" if is_cut and self._state == "start" and held.strip() else held)
        if is_cut:
            held = without_mark(held, END_THINK)
        return Split(held.rstrip() if self._state == "thinking" else "", "")

    def _start(self) -> None:
        """Only white space may precede the mark."""
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._state = text[len(THINK) :], "lead"
        elif not begins(THINK, text):
            self._state = "answer"

    def _skip_space(self, following: str) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._state = following

    def _think(self) -> str:
        before, mark, after = self._held.partition(END_THINK)
        if mark:
            self._held, self._state = after, "gap"
            return before.rstrip()
        text = before[: len(before) - keep_for(before, END_THINK)]
        self._held = before[len(text) :]
        return text


def is_left_open(prompt: str) -> bool:
    """Whether a rendered prompt ends inside the mark."""
    return prompt.rstrip().endswith(THINK)


def knows_reasoning(template: str) -> bool:
    """Whether a model's chat template contains the mark."""
    return END_THINK in template
