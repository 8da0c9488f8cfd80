"""Writes the Grafana dashboards from their description (deploy/grafana/panels.py). A test keeps the files equal to it.

python scripts/dashboards.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "deploy" / "grafana"))

from panels import DASHBOARDS, OURS, DashboardPlan, GraphPanel  # noqa: E402

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${source}")
# Of 24 columns.
WIDTH, HEIGHT = 6, 7
# One at a time: clusters have nodes of the same names.
CLUSTER = "cluster", "Cluster", f"label_values(up{OURS}, cluster)"
VARIABLES = tuple(
    (name, name.title(), f'label_values({metric}{{cluster=~"$cluster"}}, {label})')
    for name, metric, label in (
        ("node", "pdcluster_node_up", "node"),
        ("pool", "pdcluster_node_up", "role"),
        ("tenant", "pdcluster_rejected_requests_total", "tenant"),
    )
)


def panel_of(plan: GraphPanel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(plan.title)
        .description(plan.about)
        .unit(plan.unit)
        .min(0)
        .span(WIDTH)
        .height(HEIGHT)
        .datasource(SOURCE)
        .fill_opacity(8)
        .legend(common.VizLegendOptions().show_legend(True).display_mode(common_models.LegendDisplayMode.LIST))
    )
    for query in plan.queries:
        made = made.with_target(prometheus.Dataquery().expr(query.expr).legend_format(query.legend or "total"))
    return made


def dashboard_of(plan: DashboardPlan) -> str:
    """A dashboard's JSON."""
    made = (
        dashboard.Dashboard(plan.title)
        .uid(plan.uid)
        .tags(list(plan.tags))
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    name, label, query = CLUSTER
    made = made.with_variable(dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE))
    for name, label, query in VARIABLES:
        made = made.with_variable(
            dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE).multi(True).include_all(True).all_value(".*")
        )  # fmt: skip
    for row in plan.rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(panel_of(panel))
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(made.build())), indent=1, sort_keys=True) + "\n"


def file_of(plan: DashboardPlan) -> Path:
    return ROOT / "deploy" / "grafana" / f"{plan.uid}.json"


if __name__ == "__main__":
    for each in DASHBOARDS:
        file_of(each).write_text(dashboard_of(each))
        print(file_of(each).relative_to(ROOT))
