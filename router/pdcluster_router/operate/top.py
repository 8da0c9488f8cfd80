"""pdctl top: pools, nodes, rates and latencies, again and again. What it shows is of the time since the last look."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcluster_router.operate import rates, reading
from pdcluster_router.operate.clients import AdminClients
from pdcluster_router.operate.printing import STATE_COLOURS, seconds, share

PREDICTED = "pdcluster_node_predicted_seconds"
QUANTILES = (0.5, 0.9, 0.99)
LATENCIES = (
    ("first token", "pdcluster_time_to_first_token_seconds"),
    ("between tokens", "pdcluster_time_per_output_token_seconds"),
    ("whole request", "pdcluster_request_seconds"),
)


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """The cluster at one moment. samples: by router."""

    moment: float
    nodes: list[reading.Row]
    statuses: list[reading.Row]
    samples: rates.Scrapes


def look(clients: AdminClients) -> ClusterLook:
    statuses = reading.statuses(clients, metrics=True)
    samples = {str(status["router"]): rates.samples_of(str(status.pop("metrics"))) for status in statuses}
    return ClusterLook(time.monotonic(), reading.nodes(clients), statuses, samples)


def figures(now: ClusterLook, before: ClusterLook | None) -> dict[str, Any]:
    """All that is shown, as JSON values. Without an earlier look, counters are since the routers' start."""
    whole = rates.added(now.samples)
    fresh = whole if before is None else rates.since(now.samples, before.samples)
    past_s = None if before is None else now.moment - before.moment

    def rate(name: str, **labels: str) -> float:
        value = rates.total(fresh, name, **labels)
        return round(value / past_s, 2) if past_s else value

    return {
        "routers": now.statuses,
        "since_s": past_s,
        "held": rates.total(whole, "pdcluster_held_requests"),
        "output_tokens": rate("pdcluster_output_tokens_total"),
        "prompt_tokens": rate("pdcluster_prompt_tokens_total"),
        "cached_tokens": rate("pdcluster_cached_prompt_tokens_total"),
        "requests": rate("pdcluster_choices_total"),
        "errors": rate("pdcluster_errors_total"),
        "latencies": {
            title: {f"p{share * 100:g}": rates.quantile(fresh, name, share) for share in QUANTILES}
            for title, name in LATENCIES
        },
        "nodes": _nodes(now),
    }


def _nodes(now: ClusterLook) -> list[dict[str, Any]]:
    """Nodes with what their steps take. Slow: much longer than those of its pool.

    Prompts are compared by the nodes' models, where they are computed: decode nodes know theirs from a few short ones.
    Tokens are by what rows get: a model passes over the pauses of a node
    whose cores somebody else uses.
    """
    halves = {
        half: rates.highest(now.samples, PREDICTED, "node", half=half, figure="value") for half in ("prefill", "decode")
    }
    loads = {str(node["name"]): cast("dict[str, float]", node["load"]) for node in now.nodes}
    computing = {str(node["name"]) for node in now.nodes if node["role"] != "decode"}
    measured = {
        "prefill": {name: value for name, value in halves["prefill"].items() if name in computing},
        "tokens": {name: load["itl_s"] for name, load in loads.items() if load["running"]},
    }
    pools: dict[object, set[str]] = {}
    for node in now.nodes:
        pools.setdefault(node["role"], set()).add(str(node["name"]))
    found = []
    for node in now.nodes:
        name, pool = str(node["name"]), pools[node["role"]]
        slow = [
            what
            for what, figures in measured.items()
            if name in rates.slowest({other: value for other, value in figures.items() if other in pool})
        ]
        itl_s = loads[name]["itl_s"]
        times = {"prefill_s": halves["prefill"].get(name), "step_s": halves["decode"].get(name), "itl_s": itl_s or None}
        found.append({**node, **times, "slow": slow})
    return found


def render(found: Mapping[str, Any]) -> RenderableType:
    return Group(_head(found), Text(), _pools(found["nodes"]), Text(), _node_table(found["nodes"]))


def _head(found: Mapping[str, Any]) -> RenderableType:
    per = "/s" if found["since_s"] else " since start"
    lines = Text()
    for router in found["routers"]:
        lines.append(f"{router['name']} ")
        lines.append(str(router["status"]), style=STATE_COLOURS.get(str(router["status"]), ""))
        lines.append(f" {'; '.join(router['reasons'])}   " if router["reasons"] else "   ")
    lines.append(f"held {found['held']:.0f}\n")
    lines.append(
        f"requests {found['requests']:g}{per}   output tokens {found['output_tokens']:g}{per}   prompt tokens "
        f"{found['prompt_tokens']:g}{per} ({share(found['cached_tokens'], found['prompt_tokens']) or '0 %'} cached)   "
        f"errors {found['errors']:g}{per}\n"
    )
    for title, values in found["latencies"].items():
        shown = "  ".join(f"{name} {seconds(value) or '-'}" for name, value in values.items())
        lines.append(f"{title:<15} {shown}\n")
    return lines


def _pools(nodes: list[dict[str, Any]]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("POOL", "READY", "WAITING", "RUNNING", "KV USED"):
        made.add_column(title, justify="left" if title == "POOL" else "right")
    for role in dict.fromkeys(node["role"] for node in nodes):
        pool = [node for node in nodes if node["role"] == role]
        loads = [node["load"] for node in pool]
        pages = sum(load["pages_total"] for load in loads)
        used = pages - sum(load["pages_free"] + load["pages_cached"] for load in loads)
        ready = sum(node["state"] == "ready" for node in pool)
        made.add_row(
            role, f"{ready}/{len(pool)}", str(sum(load["waiting"] for load in loads)),
            str(sum(load["running"] for load in loads)), share(used, pages),
        )  # fmt: skip
    return made


def _node_table(nodes: list[dict[str, Any]]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    titles = ("NODE", "ROLE", "STATE", "WAITING", "RUNNING", "KV", "PROMPT OF 512", "DECODE STEP", "BETWEEN TOKENS", "")
    for title in titles:
        made.add_column(title, justify="left" if title in ("NODE", "ROLE", "STATE", "") else "right")
    for node in nodes:
        made.add_row(
            str(node["name"]), str(node["role"]),
            Text(str(node["state"]), style=STATE_COLOURS.get(str(node["state"]), "")),
            str(node["waiting"]), str(node["running"]), reading.kv_text(node), _ms(node["prefill_s"]),
            _ms(node["step_s"]), _ms(node["itl_s"]),
            Text(f"slow: {', '.join(node['slow'])}" if node["slow"] else "", style="red"),
        )  # fmt: skip
    return made


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.1f} ms"
