"""What tests ask the bundled model: openings of Python code to complete, and questions of the forms its training held.

They were picked because greedy answers to them look like Python and its documentation; what those answers claim is
often wrong. Any of them, with its answer, fits the 512 tokens the model was trained on. Nothing here sends a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: the prompt of a completion, or the user's message of a chat."""

    kind: Literal["completion", "chat"]
    text: str
    max_tokens: int


PROMPTS = (
    Prompt("chat", "Who are you?", 64),
    Prompt("completion", 'async def connect(host, port):\n    """Open a connection', 80),
    Prompt("chat", "Write a function `read_lines(path)`: Return the lines of a file.", 128),
    Prompt("completion", "    def __repr__(self):\n", 32),
    Prompt("chat", "What does `math.sqrt` do?", 48),
    Prompt("completion", "try:\n    import json\nexcept", 16),
    Prompt("chat", "Write `bisect.bisect_left`.", 128),
    Prompt("chat", "What does `os.path.join` do?", 96),
)
