"""What a node's health port says: probes, and the node's own metrics.

The node loop writes, the port's threads read. Every value is replaced whole, so no lock is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from pdcluster.core.messages import Load
from pdcluster.core.version import VERSION
from pdcluster.cost.fit import Step
from pdcluster.telemetry.health import Probes, Pulse, Verdict, alive, exposition_of, process_registry
from pdcluster.telemetry.metrics import SECONDS
from pdcluster.telemetry.tally import Spread, Tally
from pdcluster.transfer.paths.measure import PathTotal

# How often the loop replaces the snapshot.
SHOW_S = 0.25


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The node at one moment. The counters are since its start.

    stood_s: how long the engine has made no progress with the step that it has; 0 without one.
    prompt_tokens, cached_tokens: of sequences that began, and those of them that were cached.
    num_cache_gaps: how often vLLM's events of its cache were lost. Routers then know of none of its cached blocks.
    """

    load: Load
    stood_s: float
    is_draining: bool
    is_cordoned: bool
    num_preemptions: int
    prompt_tokens: int
    cached_tokens: int
    paths: tuple[PathTotal, ...]
    num_cache_gaps: int = 0
    is_sleeping: bool = False


class Registration(Protocol):
    """Where the node is registered."""

    @property
    def num_registered(self) -> int: ...


class NodeHealth:
    """Probes of one node.

    stage: what it does before its loop runs; "" from then on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.pulse = Pulse(clock)
        self.stage = "starting"
        self.snapshot: NodeSnapshot | None = None
        self.registration: Registration | None = None
        self.identity: dict[str, str] = {}
        self._clock = clock
        self._next_at = 0.0
        self._began_at = clock()
        # From its start to its loop's first turn; None before that.
        self.start_s: float | None = None
        registry = process_registry()
        registry.register(EngineCollector(self))
        self._steps = Spread(
            "pdcluster_engine_step_seconds", "One step of the engine, by what it computed.", ("phase",),
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._tokens = Tally(
            "pdcluster_engine_tokens", "Tokens computed, of prompts and of decode rows.", ("phase",), registry=registry
        )
        self.probes = Probes(self.live, self.ready, exposition_of(registry))

    # ------------------------------------------------------------ the loop writes

    def turn(self, snapshot: Callable[[], NodeSnapshot]) -> None:
        """The loop turned. It is asked for a snapshot now and then."""
        self.pulse.beat()
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + SHOW_S
            self.start_s = self.start_s if self.start_s is not None else now - self._began_at
            self.snapshot = snapshot()
            self.stage = ""

    def step(self, step: Step) -> None:
        """A step ended."""
        phase = "mixed" if step.tokens and step.rows else "prefill" if step.tokens else "decode"
        self._steps.labels(phase).observe(step.seconds)
        self._tokens.labels("prefill").value += step.tokens
        self._tokens.labels("decode").value += step.rows

    # ------------------------------------------------------------ threads read

    def live(self) -> Verdict:
        """Fails when a restart is the only help: the loop stands, or the engine is stuck."""
        snapshot = self.snapshot
        if self.stage or snapshot is None:
            return alive([], stage=self.stage)
        problems = self.pulse.problems()
        if snapshot.load.stuck:
            problems.append(f"the engine made no progress for {snapshot.stood_s:.1f} s")
        return alive(problems, loop_age_s=round(self.pulse.age_s, 3), engine_stood_s=round(snapshot.stood_s, 3))

    def ready(self) -> Verdict:
        """Fails while the node takes no work for a reason of its own. A cordon and sleep are wishes of operators."""
        snapshot, registration = self.snapshot, self.registration
        if self.stage or snapshot is None or registration is None:
            return Verdict(False, "starting", [self.stage or "the main loop has not turned yet"], self.identity)
        load, num_registered = snapshot.load, registration.num_registered
        reasons = self.pulse.problems()
        if snapshot.is_draining:
            reasons.append("the node drains: it is about to end")
        if load.stuck:
            reasons.append(f"the engine made no progress for {snapshot.stood_s:.1f} s")
        if not num_registered:
            reasons.append("no bootstrap has this node; see that one of node.bootstrap can be reached")
        state = "sleeping" if snapshot.is_sleeping else "cordoned" if snapshot.is_cordoned else "ready"
        facts = self.identity | {
            "role": load.role, "bootstraps": num_registered, "waiting": load.waiting, "running": load.running,
        }  # fmt: skip
        return Verdict(not reasons, "not ready" if reasons else state, reasons, facts)


class EngineCollector(Collector):
    """The node's own view, from its last snapshot. Names begin with pdcluster_engine_; routers show nodes as
    pdcluster_node_."""

    def __init__(self, health: NodeHealth) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        health, snapshot = self._health, self._health.snapshot
        yield InfoMetricFamily("pdcluster_engine", "The node.", value={"version": VERSION, **health.identity})
        yield GaugeMetricFamily(
            "pdcluster_engine_loop_age_seconds", "Since the main loop's last turn.", value=health.pulse.age_s
        )
        if snapshot is None or health.start_s is None:
            return
        load = snapshot.load
        yield GaugeMetricFamily(
            "pdcluster_engine_start_seconds", "From the node's start to its first turn.", value=health.start_s
        )
        yield GaugeMetricFamily(
            "pdcluster_engine_stood_seconds",
            "How long the engine has made no progress with its step.",
            value=snapshot.stood_s,
        )
        yield GaugeMetricFamily(
            "pdcluster_engine_takes_work", "1 while the node takes new work.", value=float(not load.draining)
        )
        requests = GaugeMetricFamily("pdcluster_engine_requests", "Requests by state.", labels=["state"])
        requests.add_metric(["waiting"], load.waiting)
        requests.add_metric(["running"], load.running)
        yield requests
        yield GaugeMetricFamily(
            "pdcluster_engine_waiting_tokens",
            "Prompt tokens, not of batch, still to compute.",
            value=load.waiting_tokens,
        )
        yield GaugeMetricFamily(
            "pdcluster_engine_batch_tokens",
            "Prompt tokens of batch requests still to compute.",
            value=load.batch_tokens,
        )
        yield GaugeMetricFamily("pdcluster_engine_batch_rows", "Rows of batch requests.", value=load.batch_rows)
        slots = GaugeMetricFamily("pdcluster_engine_slots", "Rows of the batch.", labels=["state"])
        slots.add_metric(["used"], load.slots_used)
        slots.add_metric(["free"], load.slots - load.slots_used)
        yield slots
        pages = GaugeMetricFamily(
            "pdcluster_engine_kv_pages",
            "KV pages by state. Pinned and parked ones are also in another state.",
            labels=["state"],
        )
        for state, count in load.pages_by_state().items():
            pages.add_metric([state], count)
        yield pages
        yield from _counters(snapshot)


def _counters(snapshot: NodeSnapshot) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "pdcluster_engine_preemptions",
        "Rows that gave their pages back and were computed again.",
        value=snapshot.num_preemptions,
    )
    yield CounterMetricFamily(
        "pdcluster_engine_prompt_tokens", "Tokens of prompts that began here.", value=snapshot.prompt_tokens
    )
    yield CounterMetricFamily(
        "pdcluster_engine_cached_tokens", "Those that were in the prefix cache.", value=snapshot.cached_tokens
    )
    yield CounterMetricFamily(
        "pdcluster_engine_cache_gaps",
        "Times that a vLLM engine's cache events were lost; routers then know of none of its cached blocks.",
        value=snapshot.num_cache_gaps,
    )
    failed = CounterMetricFamily(
        "pdcluster_engine_failed_transfers",
        "KV of a peer that could not be had, or that nobody took, by reason. With vLLM: read, lease.",
        labels=["reason"],
    )
    for reason, count in snapshot.load.failed_writes:
        failed.add_metric([reason], count)
    yield failed
    moved = CounterMetricFamily(
        "pdcluster_engine_transfer_bytes", "KV bytes written to other nodes.", labels=["peer", "backend"]
    )
    seconds = CounterMetricFamily(
        "pdcluster_engine_transfer_seconds", "Time that these writes took, side by side.", labels=["peer", "backend"]
    )
    for total in snapshot.paths:
        moved.add_metric([total.peer, total.backend], total.num_bytes)
        seconds.add_metric([total.peer, total.backend], total.seconds)
    yield moved
    yield seconds
