"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.api.text.stop_strings import StopMatcher

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher, released = StopMatcher(stops), ""
    for part in parts:
        released += matcher.feed(part)
        if matcher.matched is not None:
            return released, matcher.matched
    return released + matcher.flush(), None


def first_match(stops: list[str], text: str, num_waiting: int = 0) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends in a stop string behind the waiting part, cut before
    the longest such."""
    for end in range(num_waiting + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, LETTERS, st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=500, deadline=None)
def test_the_match_does_not_depend_on_how_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    assert run(stops, parts) == first_match(stops, text)


@given(STOPS, LETTERS)
@settings(max_examples=300, deadline=None)
def test_only_what_could_become_a_match_is_held_back(stops: list[str], text: str) -> None:
    matcher, fed, released = StopMatcher(stops), "", ""
    for letter in text:
        fed += letter
        released += matcher.feed(letter)
        if matcher.matched is not None:
            return
        held = fed[len(released) :]
        assert fed.startswith(released)
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(STOPS, LETTERS, st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_a_match_that_ends_in_text_that_waits_is_none(stops: list[str], text: str, num_waiting: int) -> None:
    matcher, released = StopMatcher(stops), ""
    for number, letter in enumerate(text):
        released += matcher.feed(letter, is_waiting=number < num_waiting)
        if matcher.matched is not None:
            break
    else:
        released += matcher.flush()
    assert (released, matcher.matched) == first_match(stops, text, num_waiting)


def test_a_stop_over_three_pieces_is_found_and_nothing_of_it_released() -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.feed("text <e"), matcher.feed("n"), matcher.feed("d> more")] == ["text ", "", ""]
    assert matcher.matched == "<end>"


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("all") == "all"
    assert matcher.flush() == ""
