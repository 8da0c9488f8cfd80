"""Reading one call copies each character a few times, however many pieces it comes in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdcluster.api.tools.calls import CallReader, CallRules


class Piece(str):
    """Text that counts what is copied to put it behind other text."""

    copied = 0

    def __radd__(self, before: str) -> str:
        Piece.copied += len(before)
        return Piece(f"{before}{self:s}")

    def __iter__(self) -> Iterator[Piece]:  # type: ignore[override]
        return (Piece(character) for character in str.__str__(self))

    def __getitem__(self, key: object) -> Piece:
        return Piece(super().__getitem__(key))  # type: ignore[index]


LONG = "x" * 5_000


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": "' + LONG + '"}, "name": "add"}',
        '{"name": "add", "arguments": "{\\"a\\": \\"' + LONG + '\\"}"}',
        '{"' + LONG,
    ],
    ids=["arguments first", "arguments as text", "a long key"],
)
def test_what_comes_in_many_pieces_is_not_copied_with_each(text):
    Piece.copied = 0
    reader, arguments = CallReader(0, CallRules(lambda: "id", lambda name: name == "add")), ""
    for character in text:
        deltas, rest = reader.feed(Piece(character))
        assert not rest
        arguments += "".join(delta.arguments for delta in deltas)
    if reader.is_done:
        assert arguments == '{"a": "' + LONG + '"}'
    else:
        assert not arguments and reader.raw == text
    assert Piece.copied <= 8 * len(text)
