"""Source pages that a library may still read, in any order of what can happen to them: nothing is final before the
library's last word."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.transfer.backends.base import Handle, WriteStatus
from pdcluster.transfer.backends.ledger import FINAL, Doorbell, Writes
from pdcluster.transfer.backends.staged.source_reads import ENDED, SourceReads

UNKNOWN_S = 10.0
# None: it raises.
SAYS = st.sampled_from([WriteStatus.PENDING, WriteStatus.UNKNOWN, WriteStatus.LOST, WriteStatus.DONE, None])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(
            st.just("settle"),
            st.integers(0, 2),
            st.sampled_from([WriteStatus.FAILED, WriteStatus.REFUSED, WriteStatus.LOST]),
        ),
        st.tuples(st.just("say"), st.integers(0, 12), SAYS),
        st.tuples(st.just("look"), st.integers(0, 2), st.none()),
        st.tuples(st.just("wait"), st.none(), st.floats(0, 2 * UNKNOWN_S)),
    ),
    max_size=40,
)


@dataclass
class Library:
    """says: of each batch, by its number; None: asked for that it raises."""

    says: dict[int, WriteStatus | None] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    error: Exception = field(default_factory=lambda: OSError("the library is out of memory"))

    def check(self, batch: int) -> WriteStatus:
        assert batch not in self.ended, "it forgot that batch with its last word"
        says = self.says[batch]
        if says is None:
            raise self.error
        if says in ENDED:
            self.ended.add(batch)
        return says


class World:
    def __init__(self) -> None:
        self.now, self.library = 0.0, Library()
        self.writes = Writes(Doorbell(), lambda: self.now)
        self.reads = SourceReads(self.library, self.writes, UNKNOWN_S, lambda: self.now)  # type: ignore[arg-type]
        self.handles = [self.writes.new() for _ in range(3)]
        self.batches: dict[Handle, list[int]] = {handle: [] for handle in self.handles}
        self.told: dict[Handle, WriteStatus] = {}
        self.answers: dict[Handle, WriteStatus] = {}

    def play(self, event: str, which: int | None, value: object) -> None:
        handle = self.handles[which] if which is not None and which < 3 else self.handles[0]
        if event == "keep" and handle not in self.told:
            assert isinstance(value, int)
            numbers = [len(self.library.says) + n for n in range(value)]
            self.library.says |= dict.fromkeys(numbers, WriteStatus.PENDING)
            self.batches[handle] += numbers
            self.reads.keep(handle, numbers, self.now)
        elif event == "settle" and handle not in self.told:
            assert isinstance(value, WriteStatus)
            self.told[handle] = value
            self.reads.settle(handle, value)
        elif event == "say" and which in self.library.says and which not in self.library.ended:
            assert value is None or isinstance(value, WriteStatus)
            self.library.says[which] = value
        elif event == "look":
            self.reads.look(handle)
        elif event == "wait":
            assert isinstance(value, float)
            self.now += value
        self.check()

    def check(self) -> None:
        for handle in self.handles:
            if handle in self.answers:
                continue
            status, left = (
                self.writes.poll(handle),
                [batch for batch in self.batches[handle] if batch not in self.library.ended],
            )
            if status in FINAL:
                assert not left and status is self.told[handle], (
                    "an answer before the library ended every batch, or not the one that was given"
                )
                self.answers[handle] = status
            elif status is WriteStatus.UNKNOWN:
                assert left and handle in self.told

    def end(self) -> None:
        self.reads.end()
        for handle in self.handles:
            if handle not in self.told:
                self.reads.settle(handle, WriteStatus.FAILED)
            assert handle in self.answers or self.writes.poll(handle) in FINAL, (
                "once the library was closed nothing is held"
            )
        assert not len(self.reads)


@given(EVENTS)
def test_no_write_is_final_while_the_library_may_read_its_source(events: list[tuple[str, int | None, object]]) -> None:
    world = World()
    for event in events:
        world.play(*event)
    world.end()


def test_what_is_not_answered_for_long_is_unknown_and_turns_final_by_the_librarys_word_alone() -> None:
    world = World()
    world.play("keep", 0, 2)
    world.play("settle", 0, WriteStatus.FAILED)
    assert world.writes.poll(world.handles[0]) is WriteStatus.PENDING
    world.now += UNKNOWN_S
    world.reads.look(world.handles[0])
    assert world.writes.poll(world.handles[0]) is WriteStatus.UNKNOWN
    world.library.says[0] = WriteStatus.LOST
    world.now += 1e9
    world.reads.look(world.handles[0])
    assert world.writes.poll(world.handles[0]) is WriteStatus.UNKNOWN, "the other batch may still read"
    world.library.says[1] = WriteStatus.DONE
    world.reads.look(world.handles[0])
    assert world.writes.poll(world.handles[0]) is WriteStatus.FAILED


@pytest.mark.parametrize("kind", [OSError, RuntimeError, MemoryError, ValueError, IndexError])
def test_an_error_of_the_library_is_no_word_and_is_told_once(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.library.error = kind("the library is out of memory")
    world.play("keep", 0, 3)
    world.play("settle", 0, WriteStatus.FAILED)
    world.library.says |= {0: WriteStatus.DONE, 1: None, 2: WriteStatus.LOST}
    for _ in range(3):
        world.play("look", 0, None)
    assert world.library.ended == {0, 2} and world.writes.poll(world.handles[0]) is WriteStatus.PENDING
    (told,) = caplog.records
    assert "out of memory" in caplog.text and "pages stay" in told.getMessage()
    world.play("wait", None, UNKNOWN_S)
    world.play("look", 0, None)
    assert world.writes.poll(world.handles[0]) is WriteStatus.UNKNOWN
    world.play("say", 1, WriteStatus.LOST)
    world.play("look", 0, None)
    assert world.answers == {world.handles[0]: WriteStatus.FAILED}
