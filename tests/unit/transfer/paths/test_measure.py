"""Which backend carries the next write: measured once per boot of a peer, and none that keeps failing."""

from __future__ import annotations

import itertools
import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.breaker import BreakerSettings, BreakerState
from pdcluster.transfer.paths.measure import MeasureSettings, Paths

PEER, REBORN = Peer("d0", "b1"), Peer("d0", "b2")
ORDER = ["shm", "nixl", "tcp"]
CHUNK = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Paths over backends of given speeds in bytes per second; a first write takes a second longer, to connect."""

    def __init__(self, **speeds: float) -> None:
        self.clock = Clock()
        self.speeds = speeds
        self.paths = Paths(ORDER, self.clock, measure=MeasureSettings(), breaker=BreakerSettings())
        self.used: Counter[str] = Counter()
        self.dead: set[str] = set()
        self.paths.meet(PEER, list(speeds))

    def write(self, peer: Peer = PEER, nbytes: int = CHUNK) -> str:
        name = self.paths.best(peer, list(self.speeds), nbytes)
        began = self.paths.begin(peer, name)
        seconds = nbytes / self.speeds[name] + (1.0 if not self.used[name] else 0.0)
        self.used[name] += 1
        self.clock.now += 0.01
        if name in self.dead:
            self.paths.failed(peer, name, began)
        else:
            self.paths.succeeded(peer, name, began, nbytes, seconds)
        return name

    @property
    def is_measuring(self) -> bool:
        return self.paths.is_measuring(PEER, list(self.speeds), CHUNK)


def test_a_new_pair_is_measured_once_and_then_the_fastest_carries_everything() -> None:
    rig = Rig(shm=2e9, nixl=5e9, tcp=1e9)
    while rig.is_measuring:
        rig.write()
    assert rig.used == {"shm": 4, "nixl": 4, "tcp": 4}
    assert {rig.write() for _ in range(50)} == {"nixl"}
    rig.paths.meet(REBORN, list(rig.speeds))
    assert rig.write(REBORN) == "shm", "another boot is another pair"


def test_the_time_to_connect_does_not_count() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    while rig.is_measuring:
        rig.write()
    speeds = {report.backend: report.bytes_s for report in rig.paths.report()}
    assert speeds == {"shm": pytest.approx(2e9), "tcp": pytest.approx(1e9)}


def test_measuring_is_bounded_in_bytes_whatever_the_chunks_are() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    total = 0
    while rig.is_measuring:
        rig.write(nbytes=8 << 20)
        total += 8 << 20
    assert total <= 2 * 2 * (8 << 20), "one to warm up and one that counts, each"


def test_a_backend_is_not_left_for_one_that_is_hardly_faster() -> None:
    rig = Rig(shm=1e9, tcp=1.1e9)
    while rig.is_measuring:
        rig.write()
    assert rig.write() == "shm"


def test_one_backend_alone_needs_no_measuring() -> None:
    rig = Rig(tcp=1e9)
    assert not rig.is_measuring and rig.write() == "tcp"


def test_backends_that_cannot_say_how_long_a_write_took_keep_their_order() -> None:
    rig = Rig(shm=1e9, tcp=9e9)
    for _ in range(20):
        name = rig.paths.best(PEER, ["shm", "tcp"], CHUNK)
        rig.paths.succeeded(PEER, name, rig.paths.begin(PEER, name), CHUNK, None)
    assert not rig.is_measuring and rig.paths.best(PEER, ["tcp", "shm"]) == "shm"


def test_a_backend_that_fails_while_it_is_measured_is_left_out_and_measured_later() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    rig.dead.add("shm")
    while rig.is_measuring:
        rig.write()
    assert rig.write() == "tcp"
    rig.dead.clear()
    rig.clock.now += 100
    while rig.is_measuring:
        rig.write()
    assert rig.paths.best(PEER, ["shm", "tcp"]) == "shm"


def test_a_backend_that_keeps_failing_is_left_alone_tried_once_and_taken_again_when_it_works() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    while rig.is_measuring:
        rig.write()
    rig.dead.add("shm")
    assert [rig.write() for _ in range(5)] == ["shm"] * 3 + ["tcp"] * 2
    rig.clock.now += 1.0
    assert [rig.write() for _ in range(3)] == ["shm", "tcp", "tcp"], "one probe"
    rig.clock.now += 1.0
    assert rig.write() == "tcp", "the pause has doubled"
    rig.dead.clear()
    rig.clock.now += 1.0
    assert [rig.write() for _ in range(3)] == ["shm"] * 3
    assert rig.paths.counters == {"opened": 2, "probes": 2, "closed": 1}


def test_the_report_says_what_is_used_how_fast_it_is_and_what_is_shut() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    while rig.is_measuring:
        rig.write()
    rig.dead.add("shm")
    for _ in range(3):
        rig.write()
    found = {report.backend: (report.state, report.is_chosen) for report in rig.paths.report()}
    assert found == {"shm": (BreakerState.OPEN, False), "tcp": (BreakerState.CLOSED, True)}
    rig.paths.forget(PEER)
    assert rig.paths.report() == []


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(shm=2e9, tcp=1e9)
    for _ in range(20):
        rig.write()
    assert [record.getMessage() for record in caplog.records] == [
        "KV to node d0 goes by shm (shm 2.00 GB/s, tcp 1.00 GB/s)"
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(ORDER), st.floats(1e6, 1e11), min_size=1),
    st.lists(st.tuples(st.sampled_from([*ORDER, "none"]), st.floats(0.0, 10.0), st.integers(1, 16 << 20)), max_size=60),
)
def test_there_is_always_a_choice_and_measuring_always_ends(
    speeds: dict[str, float], story: list[tuple[str, float, int]]
) -> None:
    rig = Rig(**speeds)
    for dead, later, nbytes in story:
        rig.dead = {dead}
        rig.clock.now += later
        assert rig.write(nbytes=nbytes) in speeds
    rig.dead.clear()
    rig.clock.now += 100
    for _ in range(4 * len(ORDER)):
        rig.write()
    assert not rig.is_measuring
    rates = {report.backend: report.bytes_s for report in rig.paths.report()}
    (chosen,) = {report.backend for report in rig.paths.report() if report.is_chosen}
    assert all(rates[chosen] * 1.2 >= rate for rate in rates.values())


def test_small_writes_go_by_the_nodes_order_and_measure_nothing() -> None:
    rig = Rig(shm=1e9, tcp=9e9)
    assert {rig.write(nbytes=100) for _ in range(20)} == {"shm"} and rig.is_measuring
    assert rig.write() == "shm" and rig.write() == "tcp"


def test_a_sample_that_takes_too_long_does_not_hold_up_the_others() -> None:
    rig = Rig(shm=1e9, tcp=1e9)
    stuck = rig.paths.best(PEER, ["shm", "tcp"], CHUNK)
    rig.paths.begin(PEER, stuck)
    assert rig.is_measuring
    rig.clock.now += 0.6
    while rig.is_measuring:
        assert rig.write() == "tcp"
    assert rig.paths.best(PEER, ["shm", "tcp"], CHUNK) == "tcp"


def test_the_pause_before_a_path_that_fails_is_measured_again_doubles() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    rig.dead.add("shm")
    tried = []
    for _ in range(4000):
        if rig.write() == "shm":
            tried.append(rig.clock.now)
        rig.clock.now += 0.09
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(tried)]
    assert gaps == [5, 10, 20, 40, 80, 160]


def test_the_reported_bandwidth_follows_the_writes_and_the_choice_stays_for_a_while() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    while rig.is_measuring:
        rig.write()
    rig.speeds["shm"] = 2e8
    assert {rig.write() for _ in range(20)} == {"shm"}
    (shm,) = [report for report in rig.paths.report() if report.backend == "shm"]
    assert shm.bytes_s == pytest.approx(2e8, rel=0.02) and shm.is_chosen


def minutes_of_writes(rig: Rig, minutes: float) -> Counter[str]:
    used: Counter[str] = Counter()
    until = rig.clock.now + 60 * minutes
    while rig.clock.now < until:
        used[rig.write()] += 1
        rig.clock.now += 0.19
    return used


def measured(**speeds: float) -> Rig:
    rig = Rig(**speeds)
    while rig.is_measuring:
        rig.write()
    return rig


def state(rig: Rig, name: str) -> BreakerState:
    return {report.backend: report.state for report in rig.paths.report()}[name]


def test_a_path_that_is_not_chosen_is_looked_at_again_ever_more_seldom() -> None:
    rig = measured(shm=2e9, tcp=1e9)
    assert minutes_of_writes(rig, 60)["tcp"] in range(10, 20), "after 5, 10, 20 … 300 s"
    assert rig.paths.counters["measured_again"] == 0


def test_a_path_that_was_slow_at_a_bad_moment_is_chosen_once_it_is_fast() -> None:
    rig = measured(shm=1e7, tcp=1e9)
    assert rig.write() == "tcp"
    rig.speeds["shm"] = 4e9
    minutes_of_writes(rig, 1)
    assert {rig.write() for _ in range(20)} == {"shm"} and rig.paths.counters["measured_again"] == 1


def test_the_choice_moves_when_the_chosen_path_has_become_slow() -> None:
    rig = measured(shm=2e9, tcp=1e9)
    rig.speeds["shm"] = 1e8
    assert minutes_of_writes(rig, 1)["tcp"] > 200


def test_one_slow_write_of_the_chosen_path_moves_nothing() -> None:
    rig = measured(shm=2e9, tcp=1e9)
    for _ in range(3):
        rig.clock.now += 300
        rig.speeds["shm"] = 1e7
        rig.write()
        rig.speeds["shm"] = 2e9
        assert minutes_of_writes(rig, 1)["shm"] > 250


def test_a_path_that_is_not_chosen_is_probed_when_it_is_half_open() -> None:
    rig = measured(shm=2e9, tcp=1e9)
    for _ in range(3):
        rig.paths.distrust(PEER, "tcp", rig.clock.now)
    assert state(rig, "tcp") is BreakerState.OPEN
    minutes_of_writes(rig, 1)
    assert state(rig, "tcp") is BreakerState.CLOSED
    assert (rig.paths.counters["probes"], rig.paths.counters["closed"]) == (1, 1)


def test_a_path_that_is_not_chosen_and_stays_broken_costs_ever_fewer_writes() -> None:
    rig = measured(shm=2e9, tcp=1e9)
    rig.dead.add("tcp")
    assert minutes_of_writes(rig, 60)["tcp"] in range(10, 20)
    rig.dead.clear()
    minutes_of_writes(rig, 12)
    assert state(rig, "tcp") is BreakerState.CLOSED


def test_small_writes_look_at_nothing() -> None:
    rig = measured(shm=2e9, tcp=1e9)
    rig.clock.now += 1000
    assert {rig.write(nbytes=100) for _ in range(20)} == {"shm"}


def test_the_bandwidth_of_writes_under_way_together_is_that_of_all_of_them() -> None:
    rig = Rig(tcp=1e9)
    for _ in range(4):
        rig.write()
    for _ in range(30):
        began = [rig.paths.begin(PEER, "tcp") for _ in range(4)]
        rig.clock.now += 4 * CHUNK / 1e9
        for each in began:
            rig.paths.succeeded(PEER, "tcp", each, CHUNK // 4, 4 * CHUNK / 1e9)
    (report,) = rig.paths.report()
    assert report.bytes_s == pytest.approx(CHUNK / (4 * CHUNK / 1e9), rel=0.05)


def test_answers_about_a_boot_that_was_forgotten_change_nothing() -> None:
    rig = Rig(tcp=1e9)
    began = rig.paths.begin(PEER, "tcp")
    rig.paths.forget(PEER)
    rig.paths.succeeded(PEER, "tcp", began, CHUNK, 1.0)
    rig.paths.failed(PEER, "tcp", began)
    rig.paths.ended(PEER, "tcp")
    assert rig.paths.report() == [] and not rig.paths.counters


def test_only_the_boots_met_last_are_remembered_and_each_node_is_reported_once() -> None:
    paths = Paths(ORDER, Clock(), measure=MeasureSettings(max_peers=4))
    for number in range(9):
        paths.meet(Peer(f"d{number}", "b1"), ["tcp"])
    paths.meet(Peer("d8", "b2"), ["tcp"])
    paths.meet(Peer("d7", "b1"), ["tcp"])
    assert [(report.peer.node, report.peer.incarnation) for report in paths.report()] == [
        ("d6", "b1"),
        ("d8", "b2"),
        ("d7", "b1"),
    ]
    assert [report.peer.node for report in paths.report(max_peers=1)] == ["d7"]


def test_a_path_that_its_breaker_shuts_before_it_was_measured_holds_up_no_other() -> None:
    rig = Rig(shm=2e9, tcp=1e9)
    began = [rig.paths.begin(PEER, "shm") for _ in range(3)]
    for each in began:
        rig.paths.succeeded(PEER, "shm", each, CHUNK, 0.001)
    while rig.paths.best(PEER, ["shm", "tcp"], CHUNK) == "tcp":
        rig.write()
    for each in began:
        rig.paths.distrust(PEER, "shm", each)  # what they brought did not verify
    assert rig.write() == "tcp" and not rig.is_measuring, (
        "writes by tcp would go one at a time until shm may be tried again"
    )
    rig.clock.now += BreakerSettings().pause_s
    assert rig.is_measuring and rig.write() == "shm"
