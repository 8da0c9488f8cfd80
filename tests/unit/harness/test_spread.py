"""Tests of one file stay on one worker, those of long files go to whoever is free, and none is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import spread
from xdist.scheduler.loadfile import LoadFileScheduling

ROOT = Path(__file__).resolve().parents[3]
LONG = "tests/faults/test_fault_matrix.py"
TWO_WORKERS = SimpleNamespace(
    getvalue={"dist": "loadfile", "tx": ["2*popen"]}.__getitem__, option=SimpleNamespace(loadscopereorder=False)
)


class Worker:
    """Takes what it is given; says nothing of its own."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.given += indexes

    def shutdown(self) -> None:
        self.shutting_down = True


def shared_out(scheduler: type[LoadFileScheduling], tests: list[str], slow: set[str]) -> list[list[str]]:
    """What each of two workers ran. The second ends none of the slow ones before the first has nothing left to do."""
    sched, workers = scheduler(TWO_WORKERS), [Worker("a"), Worker("b")]
    for worker in workers:
        sched.add_node(worker)
    for worker in workers:
        sched.add_node_collection(worker, tests)
    sched.schedule()
    ran: list[list[str]] = [[], []]
    while any(len(worker.given) > len(done) for worker, done in zip(workers, ran, strict=True)):
        ready = [number for number in (0, 1) if len(workers[number].given) > len(ran[number])]
        number = next((each for each in ready if tests[workers[each].given[len(ran[each])]] not in slow), ready[0])
        index = workers[number].given[len(ran[number])]
        ran[number].append(tests[index])
        sched.mark_test_complete(workers[number], index)
    return ran


def test_the_files_that_are_spread_are_there() -> None:
    assert all((ROOT / file).is_file() for file in spread.SPREAD)


def test_a_test_of_a_spread_file_goes_alone_and_another_with_its_file() -> None:
    assert spread.unit_of(f"{LONG}::test_a[part::1]") == f"{LONG}::test_a[part::1]"
    assert spread.unit_of("tests/unit/test_fit.py::TestA::test_b") == "tests/unit/test_fit.py"


def test_a_slow_test_of_a_spread_file_leaves_the_others_to_the_free_worker() -> None:
    tests = [
        *(f"{LONG}::test_a[{part}]" for part in range(10)),
        *(f"tests/unit/test_fit.py::test_{number}" for number in range(5)),
    ]
    ran = shared_out(spread.SpreadScheduling, tests, {tests[0]})
    assert sorted(ran[0] + ran[1]) == sorted(tests)
    assert min(map(len, ran)) <= 3, "the worker of the slow one holds no more than xdist keeps ready"
    whole = shared_out(LoadFileScheduling, tests, {tests[0]})
    assert min(map(len, whole)) == 5, "by file, all ten parts wait for each other"


def test_a_file_that_is_not_spread_stays_together() -> None:
    tests = [f"tests/unit/test_{name}.py::test_{number}" for name in ("fit", "cost", "bells") for number in range(4)]
    for done in shared_out(spread.SpreadScheduling, tests, set()):
        assert [test for test in tests if spread.unit_of(test) in set(map(spread.unit_of, done))] == sorted(
            done, key=tests.index
        )


def test_other_ways_to_share_tests_out_are_xdists_own() -> None:
    assert isinstance(spread.scheduling(TWO_WORKERS, None), spread.SpreadScheduling)
    assert spread.scheduling(SimpleNamespace(getvalue={"dist": "load"}.__getitem__), None) is None
