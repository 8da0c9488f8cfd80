"""When a Commit comes before its chunks: it is looked at once, and what arrives later, or never, still decides."""

from __future__ import annotations

import pytest
from transfer_harness import Pair

from pdcluster.transfer import reader
from pdcluster.transfer.fake import Fault

PAGES, SOURCE, TOKENS = [10, 11, 30, 31], [3, 4, 5, 20], 16


def is_intact(pair: Pair) -> bool:
    return all(pair.source.page(source) == pair.target.page(target) for source, target in zip(SOURCE, PAGES, strict=True))


def test_a_commit_is_looked_at_once_however_often_the_reader_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    plain = reader.covers_all
    monkeypatch.setattr(reader, "covers_all", lambda shape, ticket, commit: looks.append(commit.round) or plain(shape, ticket, commit))
    pair = Pair(lambda stamp: Fault(arrival_s=0.5 * stamp.chunk))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    for _ in range(20):
        pair.run(0.05)
    assert looks == [0] and len(pair.landed) == 1 and is_intact(pair)
    pair.reader.check_integrity()


def test_a_chunk_whose_stamp_never_comes_is_asked_for_again_and_its_second_commit_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    plain = reader.covers_all
    monkeypatch.setattr(reader, "covers_all", lambda shape, ticket, commit: looks.append(commit.round) or plain(shape, ticket, commit))
    pair = Pair(lambda stamp: Fault(arrivals=0 if (stamp.chunk, stamp.trial) == (1, 1) else 1))
    pair.send_all(pair.open(PAGES, TOKENS), SOURCE)
    pair.run(5.0)
    assert looks == [0, 1] and pair.writer.counters["resent_chunks"] == 1 and len(pair.landed) == 1 and is_intact(pair)
