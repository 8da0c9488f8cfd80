"""What pdctl's commands do. Each takes open clients and prints; `pdctl` has their flags."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

from pdcluster.core.errors import PdclusterError
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.telemetry import timeline
from pdcluster_router.operate import changing, reading, tenant_usage, top
from pdcluster_router.operate.clients import AdminClients, NotReached, TokenRefused, differing
from pdcluster_router.operate.printing import (
    PrintedColumn,
    PrintFormat,
    console,
    screen,
    show,
    show_data,
    table,
)

POLL_S = 0.2
POLICY_COLUMNS = (
    PrintedColumn("LIVE", "name"),
    PrintedColumn("SHADOW", "shadow"),
    PrintedColumn("AGREED", "agreed", is_number=True),
    PrintedColumn("WATCHED", "watched", is_number=True),
    PrintedColumn("ROUTER", "router"),
)
STATUS_COLUMNS = (
    PrintedColumn("ROUTER", "name"),
    PrintedColumn("STATUS", "status"),
    PrintedColumn("CAN SERVE", "can_serve"),
    PrintedColumn("VERSION", "version"),
    PrintedColumn("ADDRESS", "router"),
    PrintedColumn("WHY", "why"),
)
IS_DATA = (PrintFormat.JSON, PrintFormat.YAML)


def warn(line: str) -> None:
    console(is_error=True).print(f"warning: {line}", style="yellow", markup=False)


# ---------------------------------------------------------------- reading


def get(clients: AdminClients, what: str, output: PrintFormat, names: Sequence[str], labels: Mapping[str, str]) -> None:
    """List nodes, requests, models or tenants: those of these names, or all, whose values are those of the labels."""
    columns: Sequence[PrintedColumn]
    if what == "nodes":
        rows, columns = reading.nodes(clients), reading.NODE_COLUMNS
        for row in rows:
            if "seen" in row:
                warn(f"routers do not agree on node {row['name']}: {row['seen']}")
    elif what == "requests":
        rows, columns = reading.requests(clients), reading.REQUEST_COLUMNS
    elif what == "tenants":
        rows, columns = tenant_usage.tenants(clients), tenant_usage.TENANT_COLUMNS
    else:
        rows, columns = reading.models(clients), reading.MODEL_COLUMNS
    show(reading.chosen(rows, names, labels), columns, output)


def repeat(work: Callable[[], None], every_s: float, *, is_watching: bool) -> None:
    """Do it once, or again and again on a screen of its own until Ctrl-C."""
    if not is_watching:
        work()
        return
    with screen() as found:
        while True:
            if found.is_terminal:
                found.clear()
            work()
            time.sleep(every_s)


def weights_status(clients: AdminClients, output: PrintFormat) -> None:
    show(reading.weights(clients), reading.WEIGHTS_COLUMNS, output)


def rollout(steps: Generator[reading.Row, None, str], output: PrintFormat) -> None:
    """Show where a rollout is, on standard error, until it ends."""
    done, shown = "", ""
    while not done:
        try:
            line = changing.rollout_line(next(steps))
        except StopIteration as end:
            done = str(end.value)
        else:
            if line != shown and output is PrintFormat.TABLE:
                print(line, file=sys.stderr)
            shown = line
    print(done)


def list_adapters(clients: AdminClients, output: PrintFormat) -> None:
    show(reading.adapters(clients), reading.ADAPTER_COLUMNS, output)


def describe(clients: AdminClients, name: str, output: PrintFormat) -> None:
    found = reading.describe(clients, name)
    if output in IS_DATA:
        show_data(found, output)
        return
    if output is PrintFormat.NAME:
        print(found["name"])
        return
    out = console()
    shown = (
        "name", "role", "state", "model", "address", "device", "engine", "weights", "adapters", "transfer", "max_len",
        "version", "incarnation",
    )  # fmt: skip
    texts = found | {
        "adapters": reading.adapters_text(found),
        "weights": reading.weights_text(found),
        "engine": reading.engine_text(found), "slots": reading.slots_text(found), "kv_used": reading.kv_text(found)
    }  # fmt: skip
    for key in (*shown, "waiting", "running", "slots", "kv_used", "in_flight"):
        out.print(f"{key.replace('_', ' ') + ':':<14}{texts[key]}", markup=False)
    for title, columns, rows in (
        ("KV that it writes", reading.PATH_COLUMNS, found["paths"]),
        ("KV that it receives", reading.PATH_COLUMNS, found["received"]),
        ("requests", reading.REQUEST_COLUMNS, found["requests"]),
    ):
        out.print(f"\n{title}", style="bold")
        columns = [column for column in columns if not column.is_wide]  # type: ignore[assignment]
        out.print(table(rows, columns) if rows else "  none", soft_wrap=True)  # type: ignore[arg-type]
    out.print("\nevents", style="bold")
    for event in found["events"]:  # type: ignore[attr-defined]
        out.print(f"  {event_line(event)}", markup=False)


def describe_request(clients: AdminClients, request: str, output: PrintFormat) -> None:
    """Where an open request is now, and why it went there. One that ended has the latter only."""
    found = reading.explanations(clients, request)
    known = {record["request"] for record, _ in found}
    rows = [row for row in reading.requests(clients) if row["name"] in known]
    if output in IS_DATA:
        show_data({"requests": rows, "explanations": [record for record, _ in found]}, output)
    elif output is PrintFormat.NAME:
        print("\n".join(str(record["request"]) for record, _ in found))
    else:
        if rows:
            show(rows, reading.REQUEST_COLUMNS, PrintFormat.WIDE)
            print()
        print("\n\n".join(text for _, text in found if text))


def event_line(event: reading.Row) -> str:
    at = datetime.fromtimestamp(float(str(event["at"])), UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{at}  {event['kind']:<14} {event['subject']:<18} {event['message']}"


def status(clients: AdminClients, output: PrintFormat) -> None:
    """Prints the routers, the pools, and what is wrong."""
    rows = [row | {"why": "; ".join(row["reasons"])} for row in reading.statuses(clients)]  # type: ignore[arg-type]
    nodes = reading.nodes(clients)
    rows += [
        {
            "name": "", "status": "locked" if isinstance(error, TokenRefused) else "silent", "can_serve": False,
            "reasons": [str(error)], "version": "",
            "router": address, "metrics": "", "why": str(error), "warnings": [],
        }
        for address, error in clients.silent.items()
    ]  # fmt: skip
    problems = [f"node {node['name']} is {node['state']}" for node in nodes if node["state"] != "ready"]
    problems += [
        f"router {row['name']}: {row['why']}" if row["name"] else str(row["why"]) for row in rows if row["why"]
    ]
    told = [(str(row["router"]), str(row["version"])) for row in rows if row["version"]]
    if differs := differing(told):
        problems.append(f"routers differ in version: {differs}")
    if output in IS_DATA:
        for row in rows:
            row.pop("metrics")
        show_data({"routers": rows, "nodes": nodes, "problems": problems}, output)
        return
    show(rows, STATUS_COLUMNS, output, name="router")
    if output is PrintFormat.NAME:
        return
    out = console()
    for role in dict.fromkeys(str(node["role"]) for node in nodes):
        pool = [node for node in nodes if node["role"] == role]
        ready = sum(node["state"] == "ready" for node in pool)
        out.print(f"{role}: {ready} of {len(pool)} nodes ready", markup=False)
    for line in problems or ["nothing is wrong"]:
        out.print(line, style="yellow" if problems else "green", markup=False)
    for row in rows:
        for line in row["warnings"]:  # type: ignore[attr-defined]
            out.print(f"warning: router {row['name']}: {line}", style="yellow", markup=False)


def show_top(clients: AdminClients, every_s: float, output: PrintFormat, *, is_once: bool) -> None:
    """Live until Ctrl-C; once with is_once or where the output is data. The first look is since the routers' start."""
    if output in IS_DATA:
        show_data(top.figures(top.look(clients), None), output)
        return
    if is_once:
        console().print(top.render(top.figures(top.look(clients), None)))
        return
    with screen() as found:
        before: top.ClusterLook | None = None
        while True:
            now = top.look(clients)
            if found.is_terminal:
                found.clear()
            found.print(top.render(top.figures(now, before)))
            before = now
            time.sleep(every_s)


def events(clients: AdminClients, since: int, output: PrintFormat, *, follow: bool) -> None:
    """Events of all routers by time; with follow those of one router, until Ctrl-C."""
    if follow:
        router = clients.first()
        if len(clients.routers) > 1:
            warn(f"only events of {router.address} are followed")
        for event in router.stub.Events(pb.EventsRequest(since=since, follow=True)):
            row = reading.event_row(event)
            print(json.dumps(row) if output in IS_DATA else event_line(row), flush=True)
        return
    rows = reading.events(clients, dict.fromkeys((router.address for router in clients.routers), since))
    if output in IS_DATA:
        show_data(rows, output)
        return
    for row in rows:
        print(row["sequence"] if output is PrintFormat.NAME else event_line(row))


def cache(clients: AdminClients, output: PrintFormat, *, digests: bool) -> None:
    rows = reading.caches(clients, digests=digests)
    columns = (
        PrintedColumn("NODE", "name"),
        PrintedColumn("BLOCKS", "blocks", is_number=True),
        PrintedColumn("EXACT", "is_exact"),
        PrintedColumn("ROUTER", "router"),
        PrintedColumn("DIGEST", "digest", is_wide=not digests),
    )
    show(rows, columns, output)


def explain(clients: AdminClients, request: str, output: PrintFormat) -> None:
    found = reading.explanations(clients, request)
    if output in IS_DATA:
        show_data([record for record, _ in found], output)
    elif output is PrintFormat.NAME:
        print("\n".join(str(record["request"]) for record, _ in found))
    else:
        print("\n\n".join(text for _, text in found if text))


def trace(clients: AdminClients, request: str, output: PrintFormat) -> None:
    """The timeline of each choice of a request that ended."""
    found = [(record, reading.usage_of(record)) for record, _ in reading.explanations(clients, request)]
    if output in IS_DATA:
        show_data([{"request": record["request"], **usage} for record, usage in found], output)
        return
    for record, usage in found:
        print(record["request"])
        if output is not PrintFormat.NAME:
            print("\n".join(timeline.render(usage)))


# ---------------------------------------------------------------- changing


def drain(clients: AdminClients, nodes: Sequence[str], timeout_s: float, output: PrintFormat) -> None:
    """Drain nodes one after the other, with progress. All are cordoned first, so that none gets another's work.

    Raises NotReached when one is still at work after its deadline.
    """
    for node in nodes[1:]:
        changing.cordon(clients, node, cordoned=True)
    for node in nodes:
        drained = changing.drain(clients, node, timeout_s)
        try:
            while True:
                left = next(drained)
                print(json.dumps(left) if output in IS_DATA else changing.progress_line(node, left), flush=True)
        except StopIteration as ended:
            print(ended.value)
        except KeyboardInterrupt:
            drained.close()
            named = " ".join(nodes)
            print(f"\n{named} cordoned, and nothing more is moved; pdctl uncordon {named} ends that")
            raise


def get_policy(clients: AdminClients, output: PrintFormat) -> None:
    rows = reading.policies(clients)
    if difference := differing(
        (str(row["router"]), f"{row['name']}, shadow {row['shadow'] or 'none'}") for row in rows
    ):
        warn(f"routers have different policies: {difference}; pdctl set policy makes them equal")
    show(rows, POLICY_COLUMNS, output)


def diff_policy(clients: AdminClients, output: PrintFormat) -> None:
    """How often the shadow would have chosen otherwise."""
    rows = reading.policies(clients)
    if not any(row["shadow"] for row in rows):
        raise PdclusterError("no shadow policy watches; pdctl set policy --shadow NAME begins")
    if output in IS_DATA:
        show_data(rows, output)
        return
    for row in rows:
        watched, agreed = int(str(row["watched"])), int(str(row["agreed"]))
        told = f"{row['name']} and {row['shadow']} agreed on {agreed} of {watched} decisions"
        print(f"{told} ({100 * agreed / watched:.1f} %) at {row['router']}" if watched else f"{told} yet")


def wait(clients_of: Callable[[], AdminClients], num_nodes: int, timeout_s: float) -> None:
    """Until every router answers, would serve a request at once, and sees so many ready nodes.

    Raises NotReached, and TokenRefused at once.
    """
    until, why = time.monotonic() + timeout_s, "no router answers"
    while True:
        try:
            clients = clients_of()
            try:
                why = _why_not_ready(clients, num_nodes)
            finally:
                clients.close()
        except TokenRefused:
            raise
        except PdclusterError as error:
            why = str(error)
        if not why:
            return
        if time.monotonic() >= until:
            raise NotReached(f"not ready after {timeout_s:g} s: {why}")
        time.sleep(POLL_S)


def _why_not_ready(clients: AdminClients, num_nodes: int) -> str:
    """Why one must wait on; "" when all is ready, which is printed."""
    waiting = [row for row in reading.statuses(clients) if not row["can_serve"]]
    ready = sum(node["state"] == "ready" for node in reading.nodes(clients))
    clients.raise_silent()
    if waiting:
        reasons = [(row["router"], cast("list[str]", row["reasons"])) for row in waiting]
        return "; ".join(f"{router}: {'; '.join(told)}" for router, told in reasons)
    if ready < num_nodes:
        return f"{ready} of {num_nodes} nodes are ready"
    print(f"ready: {ready} nodes")
    return ""
