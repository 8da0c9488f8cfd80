"""What routers say, merged into rows for people and scripts. Plain values."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, cast

from pdcluster.bootstrap.card import NATIVE, Capabilities
from pdcluster.bootstrap.card_messages import capabilities_from_proto, role_from_proto
from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.kv.layout import NATIVE_ENGINE
from pdcluster.rpc import admin_pb2 as pb
from pdcluster_router.operate.clients import AdminClients, answered, differing, joined
from pdcluster_router.operate.printing import PrintedColumn

Row = dict[str, object]


def slots_text(row: Mapping[str, object]) -> str:
    return f"{row['slots_used']}/{row['slots']}"


def kv_text(row: Mapping[str, object]) -> str:
    used = row["kv_used"]
    return f"{100 * used:.0f} %" if isinstance(used, float) else ""


def engine_text(row: Mapping[str, Any]) -> str:
    """The engine, and in which of its capabilities it differs from ours."""
    found = Capabilities(**row["capabilities"])
    said = [text for name, text in ENGINE_TEXTS if getattr(found, name) != getattr(NATIVE, name)]
    if found.parks_s:
        said.append(f"finished KV waits {found.parks_s:g} s")
    return f"{row['engine']} ({', '.join(said)})" if said else str(row["engine"])


def adapters_text(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{each['name']} ({each['digest']})" for each in row["adapters"]) or "none"


def share_text(row: Mapping[str, Any]) -> str:
    return f"{row['share']:g} %"


def label_text(row: Mapping[str, Any]) -> str:
    return str(row["weights"]["label"])


def weights_text(row: Mapping[str, Any]) -> str:
    found = row["weights"]
    return f"{found['label']} (epoch {found['epoch']}, {found['share']:g} %, digest {found['digest']})"


def age_text(row: Mapping[str, object]) -> str:
    return f"{row['age_s']:.1f} s"


# What an operator reads where a node differs from our own engine.
ENGINE_TEXTS = (
    ("pulls", "no pulls"), ("digests", "no digests of KV"), ("keyed_sampling", "a replay samples anew"),
    ("estimated_cost", "costs are estimated"), ("first_token", "the decode node makes the first token"),
    ("embeds", "embeds"), ("adapters", "takes LoRA adapters"),
)  # fmt: skip
NODE_COLUMNS = (
    PrintedColumn("NAME", "name"),
    PrintedColumn("ROLE", "role"),
    PrintedColumn("STATE", "state"),
    PrintedColumn("WAITING", "waiting", is_number=True),
    PrintedColumn("RUNNING", "running", is_number=True),
    PrintedColumn("SLOTS", "slots", is_number=True, text=slots_text),
    PrintedColumn("KV", "kv_used", is_number=True, text=kv_text),
    PrintedColumn("IN FLIGHT", "in_flight", is_number=True),
    PrintedColumn("MODEL", "model"),
    PrintedColumn("WEIGHTS", "weights", text=label_text),
    PrintedColumn("ADDRESS", "address", is_wide=True),
    PrintedColumn("DEVICE", "device", is_wide=True),
    PrintedColumn("ENGINE", "engine", is_wide=True),
    PrintedColumn("TRANSFER", "transfer", is_wide=True),
    PrintedColumn("MAX LEN", "max_len", is_wide=True, is_number=True),
    PrintedColumn("VERSION", "version", is_wide=True),
    PrintedColumn("BOOT", "incarnation", is_wide=True),
)
REQUEST_COLUMNS = (
    PrintedColumn("ID", "name"),
    PrintedColumn("STATE", "state"),
    PrintedColumn("MODE", "mode"),
    PrintedColumn("PREFILL", "prefill"),
    PrintedColumn("DECODE", "decode"),
    PrintedColumn("PROMPT", "prompt_tokens", is_number=True),
    PrintedColumn("OUTPUT", "output_tokens", is_number=True),
    PrintedColumn("AGE", "age_s", is_number=True, text=age_text),
    PrintedColumn("FIRST TOKEN", "ttft_s", is_wide=True, is_number=True),
    PrintedColumn("ATTEMPTS", "attempts", is_wide=True, is_number=True),
    PrintedColumn("MODEL", "model", is_wide=True),
    PrintedColumn("ROUTER", "router", is_wide=True),
)
ADAPTER_COLUMNS = (
    PrintedColumn("NAME", "name"),
    PrintedColumn("NODE", "node"),
    PrintedColumn("MODEL", "model"),
    PrintedColumn("DIGEST", "digest"),
)
WEIGHTS_COLUMNS = (
    PrintedColumn("NODE", "name"),
    PrintedColumn("ROLE", "role"),
    PrintedColumn("STATE", "state"),
    PrintedColumn("LABEL", "label"),
    PrintedColumn("EPOCH", "epoch", is_number=True),
    PrintedColumn("SHARE", "share", is_number=True, text=share_text),
    PrintedColumn("BEFORE", "before"),
    PrintedColumn("DIGEST", "digest"),
    PrintedColumn("SOURCE", "source", is_wide=True),
)
MODEL_COLUMNS = (
    PrintedColumn("NAME", "name"),
    PrintedColumn("NODES", "nodes", is_number=True),
    PrintedColumn("READY", "ready", is_number=True),
    PrintedColumn("MAX LEN", "max_len", is_number=True),
)
PATH_COLUMNS = (
    PrintedColumn("PEER", "peer"),
    PrintedColumn("BACKEND", "backend"),
    PrintedColumn("MB/S", "mb_per_s", is_number=True),
    PrintedColumn("BREAKER", "breaker"),
    PrintedColumn("CHOSEN", "is_chosen"),
)


def role_name(role: Any) -> str:
    return str(role_from_proto(role))


def as_dict(message: Any) -> Row:
    """Every field, 64-bit numbers as numbers."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> object:
    return value if isinstance(value, str | bool | int | float) else list(value)


def node_row(node: pb.Node) -> Row:
    load = node.load
    used = load.pages_total - load.pages_free - load.pages_cached
    return {
        "name": node.name,
        "role": role_name(node.role),
        "state": node.state,
        "waiting": load.waiting,
        "running": load.running,
        "slots_used": load.slots_used,
        "slots": load.slots,
        "kv_used": round(used / load.pages_total, 4) if load.pages_total else None,
        "in_flight": node.in_flight,
        "model": node.model,
        "models": list(node.models) or [node.model],
        "address": node.address,
        "device": node.device,
        "transfer": ",".join(node.backends),
        "max_len": node.max_len,
        "incarnation": node.incarnation,
        "version": node.version,
        "engine": node.engine or NATIVE_ENGINE,
        "capabilities": asdict(_capabilities(node)),
        "adapters": _adapter_rows(node),
        "weights": _weights_row(node),
        "load": as_dict(load),
    }


def _weights_row(node: pb.Node) -> Row:
    found = node.weights
    return {
        "label": found.label,
        "epoch": found.epoch,
        "share": found.share,
        "digest": found.digest,
        "source": found.source,
        "before": found.former.label,
    }


def _adapter_rows(node: pb.Node) -> list[Row]:
    return [{"name": each.name, "digest": each.digest} for each in node.adapters]


def _capabilities(node: pb.Node) -> Capabilities:
    return capabilities_from_proto(node.capabilities) if node.HasField("capabilities") else NATIVE


def nodes(clients: AdminClients) -> list[Row]:
    """One row per boot of a node. Requests in flight are those of all routers."""
    rows: dict[str, Row] = {}
    states: dict[str, list[tuple[str, str]]] = {}
    for told in clients.read("ListNodes", pb.ListNodesRequest()):
        for node in told.reply.nodes:
            row = rows.setdefault(node.incarnation, node_row(node) | {"in_flight": 0})
            row["in_flight"] = int(str(row["in_flight"])) + node.in_flight
            states.setdefault(node.incarnation, []).append((told.address, node.state))
    for incarnation, said in states.items():
        if difference := differing(said):
            rows[incarnation]["state"] = " or ".join(dict.fromkeys(state for _, state in said))
            rows[incarnation]["seen"] = difference
    return sorted(rows.values(), key=lambda row: (str(row["role"]), str(row["name"])))


def requests(clients: AdminClients, node: str = "") -> list[Row]:
    rows = []
    for told in clients.read("ListRequests", pb.ListRequestsRequest(node=node)):
        rows += [request_row(request) | {"router": told.address} for request in told.reply.requests]
    return sorted(rows, key=lambda row: -float(str(row["age_s"])))


def request_row(request: pb.Request) -> Row:
    return {
        "name": request.id, "state": request.state, "mode": request.mode, "prefill": request.prefill,
        "decode": request.decode, "prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens,
        "age_s": round(request.age_s, 3), "attempts": request.attempts, "model": request.model,
        "placed_s": request.placed_s if request.HasField("placed_s") else None,
        "ttft_s": request.ttft_s if request.HasField("ttft_s") else None,
    }  # fmt: skip


def weights(clients: AdminClients) -> list[Row]:
    """One row per node, those of the newest weights first."""
    rows = [{name: node[name] for name in ("name", "role", "state")} | _weights_of(node) for node in nodes(clients)]
    return sorted(rows, key=lambda row: (-cast(int, row["epoch"]), str(row["name"])))


def _weights_of(node: Row) -> Row:
    return cast("Row", node["weights"])


def adapters(clients: AdminClients) -> list[Row]:
    """One row per adapter and node."""
    rows: list[Row] = []
    for node in nodes(clients):
        own = cast("list[Row]", node["adapters"])
        rows += [adapter | {"node": node["name"], "model": node["model"]} for adapter in own]
    return sorted(rows, key=lambda row: (str(row["name"]), str(row["node"])))


def models(clients: AdminClients) -> list[Row]:
    found: dict[str, Row] = {}
    for row in nodes(clients):
        model = found.setdefault(
            str(row["model"]), {"name": row["model"], "nodes": 0, "ready": 0, "max_len": row["max_len"]}
        )
        model["nodes"] = int(str(model["nodes"])) + 1
        model["ready"] = int(str(model["ready"])) + (row["state"] == "ready")
    return list(found.values())


def names(clients: AdminClients, what: str, timeout_s: float) -> list[str]:
    """Names of nodes or policies, or ids of open requests, of the routers that answer in time.

    Raises Unreachable or TokenRefused.
    """
    if what == "nodes":
        told = clients.read("ListNodes", pb.ListNodesRequest(), timeout_s)
        found = [node.name for each in told for node in each.reply.nodes]
    elif what == "policies":
        told = clients.read("GetPolicy", pb.GetPolicyRequest(), timeout_s)
        found = [name for each in told for name in each.reply.known]
    else:
        told = clients.read("ListRequests", pb.ListRequestsRequest(), timeout_s)
        found = [request.id for each in told for request in each.reply.requests]
    return list(dict.fromkeys(found))


def chosen(rows: list[Row], names: Collection[str], labels: Mapping[str, str]) -> list[Row]:
    """The rows of these names (all without one) whose values are those of the labels. Raises PdclusterError."""
    missing = [name for name in names if not any(row["name"] == name for row in rows)]
    if missing:
        known = ", ".join(str(row["name"]) for row in rows) or "none"
        raise PdclusterError(f"there is no {', '.join(missing)}; known: {known}")
    for label in labels:
        if rows and label not in rows[0]:
            raise ConfigError(f"-l {label}=… names no column; use one of {', '.join(rows[0])}")
    return [
        row
        for row in rows
        if (not names or row["name"] in names) and all(str(row[label]) == value for label, value in labels.items())
    ]


def describe(clients: AdminClients, name: str) -> Row:
    """All that is known of a node. Requests of all routers."""
    told = clients.read("DescribeNode", pb.DescribeNodeRequest(node=name))
    found = told[0].reply
    return {
        **node_row(found.node),
        "in_flight": sum(each.reply.node.in_flight for each in told),
        "paths": [path_row(path) for path in found.paths],
        "received": [path_row(path) for path in found.received],
        "requests": joined(
            [request_row(request) | {"router": each.address} for request in each.reply.requests] for each in told
        ),
        "events": [event_row(event) for event in found.events],
        "cost": as_dict(found.cost) if found.HasField("cost") else {},
    }  # fmt: skip


def path_row(path: pb.Path) -> Row:
    return {
        "peer": path.peer, "backend": path.backend, "mb_per_s": round(path.bytes_per_s / 1e6, 1),
        "breaker": path.breaker, "is_chosen": path.is_chosen,
    }  # fmt: skip


def event_row(event: pb.Event) -> Row:
    return {
        "sequence": event.sequence, "at": event.at, "kind": event.kind, "subject": event.subject,
        "message": event.message,
    }  # fmt: skip


def events(clients: AdminClients, since: Mapping[str, int]) -> list[Row]:
    """Events of all routers by time. since: by a router's address, only those after this number."""
    told = answered(clients.ask_streams("Events", lambda address: pb.EventsRequest(since=since.get(address, 0))))
    rows = [event_row(event) | {"router": each.address} for each in told for event in each.reply]
    return sorted(rows, key=lambda row: float(str(row["at"])))


def caches(clients: AdminClients, *, digests: bool = False) -> list[Row]:
    return [
        {
            "name": node.node, "blocks": node.blocks, "is_exact": node.is_exact, "digest": node.digest,
            "router": told.address,
        }
        for told in clients.read("GetCache", pb.GetCacheRequest(digests=digests))
        for node in told.reply.nodes
    ]  # fmt: skip


def policies(clients: AdminClients) -> list[Row]:
    return [
        {
            "name": told.reply.live, "shadow": told.reply.shadow, "agreed": told.reply.shadow_agreed,
            "watched": told.reply.shadow_watched, "known": list(told.reply.known), "router": told.address,
        }
        for told in clients.read("GetPolicy", pb.GetPolicyRequest())
    ]  # fmt: skip


def statuses(clients: AdminClients, *, metrics: bool = False) -> list[Row]:
    return [
        {
            "name": told.reply.name, "status": told.reply.status, "can_serve": told.reply.can_serve,
            "reasons": list(told.reply.reasons), "version": told.reply.version, "router": told.address,
            "metrics": told.reply.metrics, "warnings": list(told.reply.warnings),
        }
        for told in clients.read("GetStatus", pb.GetStatusRequest(metrics=metrics))
    ]  # fmt: skip


def explanations(clients: AdminClients, request: str) -> list[tuple[Mapping[str, Any], str]]:
    """(record, text for people) of the routers that know the request, and the text."""
    return [
        (json.loads(record), told.reply.text if number == 0 else "")
        for told in clients.read("Explain", pb.ExplainRequest(id=request))
        for number, record in enumerate(told.reply.json)
    ]


def usage_of(record: Mapping[str, Any]) -> dict[str, object]:
    """A request's record as its client's `usage` has it, for `timeline.render`. Raises PdclusterError without one."""
    outcome = record.get("outcome")
    if outcome is None:
        error = record.get("error")
        why = f"it ended with {error}" if error else "it has not ended"
        raise PdclusterError(f"request {record.get('request')} has no timeline: {why}; use pdctl explain")
    decisions = record.get("decisions") or [{}]
    return {
        "prompt_tokens": decisions[0].get("num_tokens"),
        "completion_tokens": outcome.get("output_tokens"),
        "prompt_tokens_details": {"cached_tokens": outcome.get("cached_tokens")},
        "pdcluster": outcome,
    }
