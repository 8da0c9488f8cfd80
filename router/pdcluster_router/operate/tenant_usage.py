"""What tenants used, from the counters of routers: since each router's start, all routers and workers together."""

from __future__ import annotations

from collections.abc import Mapping

from pdcluster_router.operate import rates, reading
from pdcluster_router.operate.clients import AdminClients
from pdcluster_router.operate.printing import PrintedColumn
from pdcluster_router.operate.reading import Row

REQUESTS, TOKENS = "pdcluster_tenant_requests_total", "pdcluster_tenant_tokens_total"
REJECTED = "pdcluster_rejected_requests_total"
KINDS = ("prompt", "cached", "completion")
# How a cluster without tenants counts everybody.
EVERYBODY = "everybody"

TENANT_COLUMNS = (
    PrintedColumn("NAME", "name"),
    PrintedColumn("REQUESTS", "requests", is_number=True),
    PrintedColumn("REFUSED", "refused", is_number=True),
    *(PrintedColumn(f"{kind.upper()} TOKENS", f"{kind}_tokens", is_number=True) for kind in KINDS),
)


def tenants(clients: AdminClients) -> list[Row]:
    """One row for each that used something or was refused, by name."""
    statuses = reading.statuses(clients, metrics=True)
    return rows_of({str(status["router"]): rates.samples_of(str(status["metrics"])) for status in statuses})


def rows_of(scrapes: Mapping[str, rates.Samples]) -> list[Row]:
    samples = rates.added(scrapes)
    requests, refused = (rates.by_label(samples, name, "tenant") for name in (REQUESTS, REJECTED))
    tokens = {kind: rates.by_label(samples, TOKENS, "tenant", kind=kind) for kind in KINDS}
    return [
        {
            "name": name or EVERYBODY,
            "requests": int(requests.get(name, 0)),
            "refused": int(refused.get(name, 0)),
            **{f"{kind}_tokens": int(tokens[kind].get(name, 0)) for kind in KINDS},
        }
        for name in sorted({*requests, *refused})
    ]
