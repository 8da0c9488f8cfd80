"""pdctl get tenants: what routers counted, added up over routers and workers."""

from __future__ import annotations

from pdcluster_router.operate import rates
from pdcluster_router.operate.tenant_usage import rows_of


def scrape(*lines: str) -> rates.Samples:
    return rates.samples_of("\n".join([*lines, ""]))


def test_usage_is_added_up_over_routers_and_workers() -> None:
    first = scrape(
        "# TYPE pdcluster_tenant_requests_total counter",
        'pdcluster_tenant_requests_total{tenant="acme",worker="0"} 2',
        'pdcluster_tenant_requests_total{tenant="acme",worker="1"} 3',
        "# TYPE pdcluster_tenant_tokens_total counter",
        'pdcluster_tenant_tokens_total{tenant="acme",kind="prompt",worker="0"} 10',
        'pdcluster_tenant_tokens_total{tenant="acme",kind="prompt",worker="1"} 20',
        'pdcluster_tenant_tokens_total{tenant="acme",kind="cached",worker="1"} 16',
    )
    second = scrape(
        "# TYPE pdcluster_tenant_requests_total counter",
        'pdcluster_tenant_requests_total{tenant="acme"} 1',
        "# TYPE pdcluster_tenant_tokens_total counter",
        'pdcluster_tenant_tokens_total{tenant="acme",kind="completion"} 7',
        "# TYPE pdcluster_rejected_requests_total counter",
        'pdcluster_rejected_requests_total{reason="tenant_requests",tenant="other"} 4',
    )
    assert rows_of({"a": first, "b": second}) == [
        {"name": "acme", "requests": 6, "refused": 0, "prompt_tokens": 30, "cached_tokens": 16, "completion_tokens": 7},
        {"name": "other", "requests": 0, "refused": 4, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0},
    ]


def test_without_tenants_everybody_is_one() -> None:
    found = rows_of(
        {"a": scrape("# TYPE pdcluster_tenant_requests_total counter", 'pdcluster_tenant_requests_total{tenant=""} 1')}
    )
    assert [row["name"] for row in found] == ["everybody"]
