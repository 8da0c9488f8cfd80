"""Figures of one replay. Arithmetic only.

TTFT counts from the scheduled arrival. TPOT is (end − first token) / (tokens − 1). A request is good when both are
within their limits. The limit of TTFT is TTFT_FACTOR times the prompt's time on an idle node without cache; short
prompts get the time of the mean prompt. The limit of TPOT is TPOT_FACTOR times an idle node's. Goodput counts good
requests per second. Refused requests are offered and not good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from pdcluster.cost.cost import NodeCost
from pdcluster_router.replay.node import SimNode
from pdcluster_router.replay.scenario import Outcome
from pdcluster_router.replay.simulation import RequestInFlight

TTFT_FACTOR = 5.0
TPOT_FACTOR = 2.0
# The longest tenth of the prompts are the long ones.
LONG_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run.

    hit: share of prompt tokens that were cached where they were computed.
    hit_oracle: of one pooled LRU.
    imbalance: largest ÷ mean busy time of the serving nodes.
    attainment: share of offered requests that were good.
    long_attainment: of the longest tenth.
    remote: share that was decoded elsewhere.
    """

    policy: str
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    goodput: float
    hit: float
    hit_oracle: float
    imbalance: float
    attainment: float
    token_goodput: float
    long_attainment: float
    remote: float
    num_requests: int
    num_refused: int


@dataclass(frozen=True, slots=True)
class ScalingFigures:
    """Figures of one rule of autoscaling.

    node_hours: of all nodes, from their start to their end.
    per_node_hour: good requests.
    """

    rule: str
    goodput: float
    attainment: float
    node_hours: float
    per_node_hour: float
    most_nodes: int
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    num_requests: int


def scaling_figures(rule: str, outcome: Outcome, slo: ReplaySlo) -> ScalingFigures:
    found = figures(rule, outcome, slo, 0.0)
    hours = outcome.node_s / 3600
    num_good = found.attainment * found.num_requests
    return ScalingFigures(
        rule, found.goodput, found.attainment, hours, num_good / hours if hours else 0.0, outcome.most_nodes,
        found.ttft_mean_s, found.ttft_p90_s, found.ttft_p99_s, found.tpot_mean_s, found.num_requests,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplaySlo:
    cost: NodeCost
    mean_tokens: float
    ttft_factor: float = TTFT_FACTOR
    tpot_factor: float = TPOT_FACTOR

    def ttft_s(self, num_tokens: int) -> float:
        return self.ttft_factor * self.cost.prefill.seconds(max(num_tokens, self.mean_tokens))

    def tpot_s(self, num_tokens: int) -> float:
        return self.tpot_factor * self.cost.decode.seconds(1, num_tokens)

    def is_good(self, flight: RequestInFlight) -> bool:
        tokens = flight.task.request.num_tokens
        return (
            flight.end == "finished" and flight.ttft_s <= self.ttft_s(tokens) and flight.tpot_s <= self.tpot_s(tokens)
        )


def figures(policy: str, outcome: Outcome, slo: ReplaySlo, hit_oracle: float) -> Figures:
    flights = outcome.flights
    served = [flight for flight in flights if flight.end == "finished"]
    good = [flight for flight in flights if slo.is_good(flight)]
    waits = sorted(flight.ttft_s for flight in served)
    tokens = sum(flight.task.request.num_tokens for flight in served)
    span_s = outcome.span_s or max((flight.end_s for flight in flights), default=0.0) or 1.0
    long = longest(flights)
    return Figures(
        policy=policy,
        ttft_mean_s=_mean(waits),
        ttft_p90_s=quantile(waits, 0.9),
        ttft_p99_s=quantile(waits, 0.99),
        tpot_mean_s=_mean([flight.tpot_s for flight in served if flight.task.request.num_output > 1]),
        goodput=len(good) / span_s,
        hit=sum(flight.task.cached_tokens for flight in served) / max(tokens, 1),
        hit_oracle=hit_oracle,
        imbalance=imbalance(outcome.nodes),
        attainment=len(good) / max(len(flights), 1),
        token_goodput=sum(flight.task.request.num_tokens + flight.task.request.num_output for flight in good) / span_s,
        long_attainment=sum(map(slo.is_good, long)) / max(len(long), 1),
        remote=sum(flight.prefill is not None for flight in served) / max(len(served), 1),
        num_requests=len(flights),
        num_refused=len(flights) - len(served),
    )


def longest(flights: Sequence[RequestInFlight]) -> list[RequestInFlight]:
    """The tenth with the longest prompts, at least one."""
    ordered = sorted(flights, key=lambda flight: flight.task.request.num_tokens, reverse=True)
    return ordered[: max(ceil(len(ordered) * LONG_SHARE), 1)]


def imbalance(nodes: Sequence[SimNode]) -> float:
    computing = [node for node in nodes if node.role != "decode"] or list(nodes)
    busy = [node.busy_s for node in computing]
    mean = _mean(busy)
    return max(busy) / mean if mean else 1.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values do not exceed; 0 for none."""
    return ordered[min(max(ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)] if ordered else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
