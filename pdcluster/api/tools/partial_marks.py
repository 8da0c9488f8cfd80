"""How much of a growing text must be held back because it may become a mark."""

from __future__ import annotations


def begins(mark: str, text: str) -> bool:
    """Whether text is a prefix of mark; also true for no text."""
    return mark.startswith(text)


def keep_for(text: str, *marks: str) -> int:
    """Characters at the end of text that are white space, or white space and the beginning of a mark. Both may turn out
    not to be text.
    """
    for size in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return len(text) - len(text[:-size].rstrip())
    return len(text) - len(text.rstrip())


def without_mark(text: str, *marks: str) -> str:
    """Text without the beginning of a mark at its end, and without white space before that."""
    for size in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size].rstrip()
    return text
