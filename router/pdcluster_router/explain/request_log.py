"""Log lines of single requests, for operators who follow one through all processes (log.requests)."""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster.telemetry.log import requests
from pdcluster_router.core.generation import OutputWeights
from pdcluster_router.explain.recorder import Record
from pdcluster_router.policy.base import DecisionRecord


def log_placed(record: Record, attempt: int, decision: DecisionRecord) -> None:
    requests.info(
        "a request was placed",
        request=record.request, client_id=record.client_id or None, trace=record.trace or None, attempt=attempt,
        mode=decision.mode, prefill=decision.prefill, decode=decision.decode, policy=decision.policy,
    )  # fmt: skip


def log_ended(
    record: Record, num_output: int, error: str | None, why: str, weights: Sequence[OutputWeights] = ()
) -> None:
    """error: code of the error that it ended with; None for a good end. weights: that made its tokens."""
    done = record.done
    seconds = (
        {} if done is None else {name: getattr(done.timeline, name) for name in ("ttft_s", "prefill_s", "decode_s")}
    )
    times = {name: round(value, 6) for name, value in seconds.items() if value is not None}
    requests.info(
        "a request ended",
        request=record.request, client_id=record.client_id or None, trace=record.trace or None,
        tenant=record.tenant or None, error=error, why=why if done is None else done.reason, tokens=num_output,
        cached=None if done is None else done.cached_tokens,
        weights=",".join(f"{each.label}:{each.first}-{each.to}" for each in weights) or None, **times,
    )  # fmt: skip
