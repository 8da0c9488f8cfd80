"""An explanation as a table for people. Formatting only."""

from __future__ import annotations

import io
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from pdcluster_router.core.generation import BATCH_PRIORITY
from pdcluster_router.explain.records import ExplainedDecision, Explanation, Hindsight
from pdcluster_router.policy.candidates import Candidate


def text_of(explanation: Explanation, *, width: int = 140, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, no_color=not colour, highlight=False, emoji=False, markup=False
    )
    console.print(_head(explanation))
    for number, decision in enumerate(explanation.decisions):
        console.print(
            _decision_line(f"attempt {number} at {_seconds(decision.at_s)}: {decision.policy} chose", decision)
        )
        console.print(_table(decision))
        if decision.failed:
            console.print(f"  it failed: {decision.failed}")
    if (considered := explanation.considered) is not None:
        waits = "held" if explanation.error is None else "never placed"
        console.print(
            _decision_line(
                f"{waits}; scored last at {_seconds(considered.at_s)}: {considered.policy} would choose", considered
            )
        )
        console.print(_table(considered))
    if explanation.hindsight is not None:
        console.print(_hindsight_line(explanation.hindsight))
    return out.getvalue()


def _head(explanation: Explanation) -> str:
    came = datetime.fromtimestamp(explanation.arrived, UTC).isoformat(timespec="milliseconds")
    tenant = f", tenant {explanation.tenant}" if explanation.tenant else ""
    why = f" ({explanation.why})" if explanation.why else ""
    ended = f", ended with {explanation.error}{why}" if explanation.error else ""
    ttft = f", first token after {_seconds(explanation.ttft_s)}" if explanation.ttft_s is not None else ""
    name = f"{explanation.request} ({explanation.client_id})" if explanation.client_id else explanation.request
    trace = f", trace {explanation.trace}" if explanation.trace else ""
    urgency = "batch" if explanation.priority >= BATCH_PRIORITY else f"priority {explanation.priority}"
    return f"request {name}, came {came}{tenant}, {urgency}{ttft}{ended}{trace}"


def _decision_line(beginning: str, decision: ExplainedDecision) -> str:
    where = f"{decision.prefill} → {decision.decode}" if decision.prefill is not None else decision.decode
    predicted = decision.estimated_ttft_s if decision.predicted_ttft_s is None else decision.predicted_ttft_s
    line = f"{beginning} {decision.mode} {where} for {decision.num_tokens} tokens"
    if decision.pull is not None:
        line += f", {decision.pull_tokens} of them fetched from {decision.pull}"
    line += f", first token predicted after {_seconds(predicted)}{_error_bar(decision)}"
    if decision.is_estimated:
        line += " (estimated)"
    if decision.held_s >= 0.001:
        line += f", held {_seconds(decision.held_s)}"
    if decision.shadow is not None:
        shadow = decision.shadow
        other = (
            "the same"
            if shadow.agrees
            else f"{shadow.mode} {f'{shadow.prefill} → ' if shadow.prefill else ''}{shadow.decode}"
        )
        line += f"; shadow {shadow.policy}: {other}"
    return line


def _table(decision: ExplainedDecision) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "node", "leg", "cached", "first token", "cost", "terms, or why not"):
        table.add_column(name, justify="right" if name in ("cached", "first token", "cost") else "left")
    for candidate in decision.candidates:
        table.add_row(*_cells(candidate, decision))
    left_out = decision.num_candidates - len(decision.candidates)
    if left_out > 0:
        table.add_row("", f"… {left_out} more", "", "", "", "", "")
    return table


def _cells(candidate: Candidate, decision: ExplainedDecision) -> tuple[str, ...]:
    chosen = {"prefill": decision.prefill, "decode": decision.decode if decision.mode == "remote" else None}
    is_chosen = (
        chosen.get(candidate.leg, decision.decode if decision.mode == "local" else None) == candidate.node
        and not candidate.rejected_by
    )
    terms = "  ".join(f"{name} {value:.4g}" for name, value in candidate.terms.items())
    cost = "" if candidate.rejected_by else f"{candidate.cost:.4g}"
    why = f"✗ {candidate.rejected_by}" if candidate.rejected_by else terms
    return (
        "▶" if is_chosen else "",
        candidate.node,
        candidate.leg,
        str(candidate.cached_tokens),
        _estimate(candidate),
        cost,
        why,
    )


def _error_bar(decision: ExplainedDecision) -> str:
    """The error bar of the node that computes the prompt."""
    chosen = decision.prefill or decision.decode
    errors = [
        each.ttft_error_s for each in decision.candidates if each.node == chosen and each.ttft_error_s is not None
    ]
    return f" ± {_seconds(errors[0])}" if errors else ""


def _estimate(candidate: Candidate) -> str:
    return _seconds(candidate.ttft_s) + (
        f" ± {_seconds(candidate.ttft_error_s)}" if candidate.ttft_error_s is not None else ""
    )


def _hindsight_line(hindsight: Hindsight) -> str:
    late = "later" if hindsight.error_s >= 0 else "sooner"
    line = (
        f"hindsight: {_seconds(hindsight.ttft_s)} after the decision, {_seconds(abs(hindsight.error_s))} {late} than "
        "predicted"
    )
    if hindsight.best is not None:
        line += (
            f"; best other {hindsight.best} {_seconds(hindsight.best_ttft_s)}, regret {_seconds(hindsight.regret_s)}"
        )
    hit = hindsight.hit
    if hit is None:
        return line
    return f"{line}; cached tokens {hit.achieved} of {hit.reachable} reachable, {hit.ideal} ideal"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1000:.1f} ms" if value < 1.0 else f"{value:.2f} s"
