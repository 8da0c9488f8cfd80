"""When the reader believes the digest that a medium took on arrival, and when it reads the pages again (R2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_backend import Fault
from msgspec.structs import replace
from transfer_harness import Pair, take_digests

from pdcluster.transfer.backends.base import Arrival

PAGES, SOURCE, TOKENS = [10, 11, 30, 31], [3, 4, 5, 20], 16


def transfer_with_a_byte_changed_after_arrival(pair: Pair) -> bool:
    """Was the KV intact in the end? The byte is changed once, when everything arrived and before Commit is there."""
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.poll()
    pair.poll()
    assert pair.writer.is_idle() is False and pair.target.page(PAGES[0]) == pair.source.page(SOURCE[0])
    pair.target.memory[PAGES[0] * 64 + 5] ^= 1
    pair.run(2.0)
    assert len(pair.landed) == 1
    return all(
        pair.source.page(source) == pair.target.page(target) for source, target in zip(SOURCE, PAGES, strict=True)
    )


def test_a_digest_of_the_only_arrival_counts_and_the_pages_are_not_read_again() -> None:
    pair = Pair()
    take_digests(pair)
    assert not transfer_with_a_byte_changed_after_arrival(pair), (
        "nobody looked again; R1 and the medium promise that nobody writes"
    )
    assert pair.reader.counters["digest_mismatch"] == 0


def test_a_digest_on_arrival_that_is_wrong_makes_the_chunk_go_again() -> None:
    pair = Pair(lambda stamp: Fault(flip_byte=3) if stamp.chunk == 0 and stamp.trial == 1 else Fault())
    take_digests(pair)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.run(2.0)
    assert (
        len(pair.landed) == 1
        and pair.writer.counters["resent_chunks"] == 1
        and pair.reader.counters["digest_mismatch"] == 1
    )
    assert all(
        pair.source.page(source) == pair.target.page(target) for source, target in zip(SOURCE, PAGES, strict=True)
    )


SPOILED: dict[str, Callable[[Arrival], Arrival]] = {
    "none": lambda arrival: replace(arrival, digest=None),
    "of another try": lambda arrival: replace(arrival, stamp=replace(arrival.stamp, trial=0)),
    "of other places": lambda arrival: replace(
        arrival, spans=tuple((offset + 64, nbytes) for offset, nbytes in arrival.spans)
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_digest_that_does_not_hold_is_taken_again(what: str) -> None:
    pair = Pair()
    take_digests(pair, SPOILED[what])
    assert transfer_with_a_byte_changed_after_arrival(pair)
    assert pair.reader.counters["digest_mismatch"] == 1


def test_after_a_second_arrival_every_chunk_is_read_again() -> None:
    pair = Pair(lambda stamp: Fault(arrivals=2) if stamp.chunk == 1 else Fault())
    take_digests(pair)
    assert transfer_with_a_byte_changed_after_arrival(pair)
    assert pair.reader.counters["duplicate_arrival"] >= 1 and pair.reader.counters["digest_mismatch"] == 1


def test_a_chunk_that_landed_in_the_place_of_another_makes_every_chunk_be_read_again() -> None:
    """The other's own digest was right when it was taken."""
    pair = Pair()
    take_digests(pair, lambda arrival: SPOILED["of other places"](arrival) if arrival.stamp.chunk == 1 else arrival)
    ticket = pair.open(PAGES, TOKENS)
    pair.send_all(ticket, SOURCE)
    pair.poll()
    pair.poll()
    pair.target.memory[PAGES[0] * 64 + 5] ^= 1  # chunk 0, by what chunk 1 brought
    pair.run(2.0)
    assert len(pair.landed) == 1 and pair.reader.counters["digest_mismatch"] == 1
    assert all(
        pair.source.page(source) == pair.target.page(target) for source, target in zip(SOURCE, PAGES, strict=True)
    )
