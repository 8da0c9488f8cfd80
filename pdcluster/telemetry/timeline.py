"""One request's timeline as text for people, from the `pdcluster` object of its final usage. Only formatting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdcluster.core.weights import BASE

WIDTH = 44
WORTH_TELLING_S = 0.005
BAR, FAINT = "█", "░"


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that took from `start` to `end`, in seconds since the request came in; from `faint` on it is drawn
    faintly."""

    name: str
    start: float
    end: float
    note: str
    faint: float | None = None


def spans_of(usage: Mapping[str, object]) -> list[TimelineSpan]:
    """What a request that ended did when; empty where nothing is known of that. usage: as for `render`."""
    route = _table(usage.get("pdcluster"))
    seconds = {
        name: float(value) for name, value in _table(route.get("timeline")).items() if isinstance(value, int | float)
    }
    return _spans(seconds, str(route.get("transfer") or "")) if seconds else []


def render(usage: Mapping[str, object]) -> list[str]:
    """The lines of one request; `usage` is OpenAI's usage object with pdcluster's route in it."""
    route = _table(usage.get("pdcluster"))
    spans = spans_of(usage)
    if not spans:
        return [_where(usage, route), "  (no timeline)"]
    whole = max([span.end for span in spans] + [1e-6])
    return [_where(usage, route), *(_line(span, whole) for span in spans)]


def _where(usage: Mapping[str, object], route: Mapping[str, object]) -> str:
    cached = str(_table(usage.get("prompt_tokens_details")).get("cached_tokens", 0)) + " cached"
    pulled = _table(route.get("timeline")).get("pulled_tokens")
    cached += f", {pulled} of them fetched from another node" if pulled else ""
    nodes = f"{route.get('prefill')} → {route.get('decode')} over {route.get('transfer')}"
    if route.get("mode") != "remote":
        nodes = f"{route.get('decode') or route.get('prefill')} alone"
    attempts = route.get("attempts") or 1
    tries = "" if attempts == 1 else f", {attempts} attempts"
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return f"  {prompt} prompt tokens ({cached}), {output} new, {nodes}{tries}{_weights(route.get('weights'))}"


def _weights(ranges: object) -> str:
    """Which weights made the output. Nothing is said of those that nodes start with, where there are no others."""
    labels = [str(_table(each).get("label")) for each in ranges] if isinstance(ranges, list) else []
    return "" if labels in ([], [BASE]) else f", weights {', then '.join(labels)}"


def _spans(seconds: Mapping[str, float], transfer: str) -> list[TimelineSpan]:
    queue, prefill, moved, exposed, decode = (
        seconds.get(f"{name}_s", 0.0) for name in ("queue", "prefill", "transfer", "exposed", "decode")
    )
    first, second, placed = seconds.get("ttft_s"), seconds.get("ttst_s"), seconds.get("placed_s", 0.0)
    queued, sampled = placed + queue, placed + queue + prefill
    spans = (
        [TimelineSpan("held, tried", 0.0, placed, "before the attempt that came to the end")]
        if placed >= WORTH_TELLING_S
        else []
    )
    spans += [TimelineSpan("queue", placed, queued, ""), TimelineSpan("prefill", queued, sampled, "")]
    if transfer:
        exposed_part = min(moved, exposed)
        end = sampled + exposed_part
        note = (
            f"{_ms(moved - exposed_part)} hidden behind prefill, {_ms(exposed_part)} exposed, "
            f"{seconds.get('transfer_bytes', 0.0) / 1e6:.2f} MB"
        )
        spans.append(TimelineSpan("KV transfer", max(0.0, end - moved), end, note, faint=sampled))
    if first is not None:
        spans.append(TimelineSpan("first token", first, first, ""))
    if second is not None:
        spans.append(TimelineSpan("second token", second, second, ""))
    if decode > 0.0:
        step = decode / max(1.0, seconds.get("decode_tokens", 0.0))
        start = (
            max(sampled, second - step) if second is not None else sampled
        )  # it includes the step of the second token
        spans.append(
            TimelineSpan("decode", start, start + decode, f"{seconds.get('decode_tokens', 0.0) / decode:.0f} tokens/s")
        )
    return spans


def _line(span: TimelineSpan, whole: float) -> str:
    first, last = (min(WIDTH - 1, int(at / whole * WIDTH)) for at in (span.start, span.end))
    border = WIDTH if span.faint is None else int(span.faint / whole * WIDTH)
    cells = "".join((FAINT if at >= border else BAR) if first <= at <= last else " " for at in range(WIDTH))
    took = span.end if span.start == span.end else span.end - span.start
    return f"    {span.name:<13}{_ms(took):>10}  {cells}  {span.note}".rstrip()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
