"""Control tokens in what users and tools say: text that the tokenizer would read as a token of the template.

A template writes such tokens, for instance to begin a turn. In a user's text they can begin one, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tokenizers import Tokenizer

from pdcluster.api.text.segments import longest_of
from pdcluster.core.errors import BadRequest

# What these say is the application's, or the model's own.
TRUSTED_ROLES = frozenset(("system", "developer", "assistant"))


class ControlTokens:
    """The special tokens of a tokenizer. Immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {index: token for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        contents = {token.content for token in special.values() if token.content}
        self._pattern = re.compile(longest_of(contents)) if contents else None
        # A token that is found in normalized text may be written in other ways, which only the tokenizer knows.
        self._normalized = frozenset(index for index, token in special.items() if token.normalized)
        self._tokenizer = tokenizer

    def check(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Raises BadRequest that names the first one and its message."""
        for index, message in enumerate(messages):
            if message.get("role") in TRUSTED_ROLES:
                continue
            for text in _texts(message):
                if (token := self._first(text)) is not None:
                    raise BadRequest(
                        f"messages[{index}] holds the control token {token!r}, which this router refuses in what users "
                        "and tools say; take it out, or write it in another way",
                        f"messages[{index}]",
                    )

    def _first(self, text: str) -> str | None:
        if self._pattern is not None and (match := self._pattern.search(text)) is not None:
            return match.group()
        if self._normalized:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            found = next((index for index in ids if index in self._normalized), None)
            return None if found is None else self._tokenizer.id_to_token(found)
        return None


def _texts(message: Mapping[str, object]) -> Iterator[str]:
    """All text of a message that a template may show. Parts are also looked at together: a template joins them."""
    for name in ("content", "name", "tool_call_id"):
        value = message.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield "".join(
                part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
