"""What a node says to probes, from its start to its end, and its own metrics."""

from __future__ import annotations

from msgspec.structs import replace

from pdcluster.core.messages import Load
from pdcluster.cost.fit import Step
from pdcluster.node.reports.health import NodeHealth, NodeSnapshot
from pdcluster.transfer.paths.measure import PathTotal

LOAD = Load(3, 2, 100, 50, 64, 10, 4, 1, 0, 8, 2, role="decode", failed_writes=(("lease", 2), ("read", 5)))
SNAPSHOT = NodeSnapshot(LOAD, 0.0, False, False, 1, 500, 320, (PathTotal("decode-1", "tcp", 4096, 0.5),), 2)


class Registered:
    num_registered = 1


class NodeWorld:
    def __init__(self) -> None:
        self.now = 100.0
        self.health = NodeHealth(lambda: self.now)
        self.health.registration = self.registration = Registered()
        self.health.identity = {"node": "decode-0", "model": "m", "engine": "vllm"}

    def turn(self, snapshot: NodeSnapshot) -> None:
        self.now += 1.0
        self.health.turn(lambda: snapshot)

    def text(self) -> str:
        return self.health.probes.metrics().decode()


def test_a_node_that_starts_is_alive_and_not_ready_however_long_it_loads() -> None:
    world = NodeWorld()
    world.health.stage = "loading the model"
    world.now += 3600.0
    assert world.health.live().is_good and world.health.live().facts["stage"] == "loading the model"
    assert world.health.ready().reasons == ["loading the model"] and not world.health.ready().is_good
    world.turn(SNAPSHOT)
    assert world.health.ready().is_good and world.health.ready().facts["waiting"] == 3


def test_a_node_is_not_ready_for_each_of_these_reasons_and_cordoned_is_none() -> None:
    world = NodeWorld()
    world.turn(replace_load(stuck=True, stood_s=4.0))
    assert "no progress for 4.0 s" in world.health.ready().reasons[0]
    assert not world.health.live().is_good, "only a restart helps"
    world.turn(NodeSnapshot(LOAD, 0.0, True, False, 0, 0, 0, ()))
    assert "drains" in world.health.ready().reasons[0] and world.health.live().is_good
    world.turn(NodeSnapshot(LOAD, 0.0, False, True, 0, 0, 0, ()))
    assert (world.health.ready().is_good, world.health.ready().status) == (True, "cordoned")
    world.registration.num_registered = 0
    assert "node.bootstrap" in world.health.ready().reasons[0]


def replace_load(*, stuck: bool, stood_s: float) -> NodeSnapshot:
    return NodeSnapshot(replace(LOAD, stuck=stuck), stood_s, False, False, 0, 0, 0, ())


def test_a_loop_that_stands_is_seen_by_both_probes() -> None:
    world = NodeWorld()
    world.turn(SNAPSHOT)
    world.now += 60.0
    assert not world.health.live().is_good and not world.health.ready().is_good
    world.turn(SNAPSHOT)
    assert world.health.live().is_good


def test_metrics_are_there_before_the_first_turn_and_whole_after_it() -> None:
    world = NodeWorld()
    assert "pdcluster_engine_loop_age_seconds" in world.text()
    assert "pdcluster_engine_requests" not in world.text()
    assert "pdcluster_engine_start_seconds" not in world.text()
    world.now += 90.0
    world.turn(SNAPSHOT)
    for step in (Step(8, 40.0, 0, 0, 0.02), Step(0, 0.0, 4, 200, 0.01), Step(8, 40.0, 2, 10, 0.03)):
        world.health.step(step)
    text = world.text()
    for line in (
        'pdcluster_engine_requests{state="waiting"} 3.0',
        'pdcluster_engine_slots{state="free"} 6.0',
        'pdcluster_engine_kv_pages{state="used"} 49.0',
        'pdcluster_engine_transfer_bytes_total{backend="tcp",peer="decode-1"} 4096.0',
        "pdcluster_engine_preemptions_total 1.0",
        'pdcluster_engine_failed_transfers_total{reason="lease"} 2.0',
        'pdcluster_engine_failed_transfers_total{reason="read"} 5.0',
        "pdcluster_engine_start_seconds 91.0",
        'engine="vllm"',
        "pdcluster_engine_cached_tokens_total 320.0",
        "pdcluster_engine_cache_gaps_total 2.0",
        'pdcluster_engine_step_seconds_count{phase="mixed"} 1.0',
        'pdcluster_engine_tokens_total{phase="decode"} 6.0',
        "process_resident_memory_bytes",
    ):
        assert line in text, line
    world.turn(SNAPSHOT)
    assert "pdcluster_engine_start_seconds 91.0" in world.text(), "a start is over once"
