"""What a reader asks of ranks that digest later, each in its own process: a bounded part of a prompt at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transfer_harness import PAGE_BYTES, QUICK, Pair

from pdcluster.transfer.layout.runs import SpanTable
from pdcluster.transfer.layout.spans import digest
from pdcluster.transfer.protocol.rank_memory import Answers, PendingAnswer
from pdcluster.transfer.protocol.reader import Reader

PAGES = list(range(16))


class SlowRanks:
    """Digests when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[PendingAnswer, SpanTable]] = []
        self.num_asked = 0

    def begin_digest(self, rank: int, spans: SpanTable) -> PendingAnswer:
        self.asked.append((PendingAnswer(), spans))
        self.num_asked += 1
        return self.asked[-1][0]

    def mark(self) -> Answers:
        return ()

    @property
    def num_bytes(self) -> int:
        return sum(spans.nbytes for _, spans in self.asked)

    def answer(self, memory: np.ndarray) -> None:
        answer, spans = self.asked.pop(0)
        answer.value = digest(memoryview(memory), spans)


@pytest.fixture
def ranks() -> SlowRanks:
    return SlowRanks()


@pytest.fixture
def pair(ranks: SlowRanks) -> Iterator[Pair]:
    class SlowReader(Reader):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, ranks=ranks, **named)

    pair = Pair(reader_class=SlowReader)
    yield pair
    pair.close()


def test_of_a_long_prompt_a_rank_has_a_bounded_part_to_digest_at_a_time(pair: Pair, ranks: SlowRanks) -> None:
    pair.send_all(pair.open(PAGES, 64), PAGES)
    pair.run(1.0)
    while not pair.landed:
        assert 0 < ranks.num_bytes <= QUICK.verify_bytes
        pair.step()
        due = pair.reader.next_deadline()
        assert due is not None and due > pair.clock.now, "the loop would turn and turn until the rank answers"
        ranks.answer(pair.target.memory)
        pair.step()
    assert ranks.num_asked * QUICK.chunk_bytes == len(PAGES) * PAGE_BYTES


def test_what_a_rank_still_digests_of_a_ticket_that_failed_holds_up_no_other(pair: Pair, ranks: SlowRanks) -> None:
    ticket = pair.open(PAGES, 64)
    pair.send_all(ticket, PAGES)
    pair.run(1.0)
    pair.reader.abort(ticket.nonce, "no more")
    pair.run(1.0)
    ranks.asked.clear()
    pair.send_all(pair.open(PAGES[:2], 8), PAGES[:2])
    pair.run(1.0)
    ranks.answer(pair.target.memory)
    pair.run(1.0)
    assert len(pair.landed) == 1
