"""Draws a dashboard as it stands in deploy/grafana/panels.py from what a Prometheus has, light and dark.

python scripts/picture.py --prometheus http://127.0.0.1:9090 --minutes 6

It is a picture of the panels' queries, not of Grafana. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "deploy" / "grafana"))

try:
    import matplotlib
except ImportError:
    sys.exit("matplotlib is not installed; .venv/bin/pip install matplotlib")

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402
from panels import DASHBOARDS, DashboardPlan, GraphPanel  # noqa: E402

COLUMNS, WIDTH, HEIGHT, MAX_LINES = 4, 16.0, 2.1, 8
STYLES = {"light": ("#ffffff", "#f6f7f9", "#1c2330", "#d9dde3"), "dark": ("#1a202a", "#11151c", "#e3e8ef", "#2f3846")}
SCALES = {"s": "s", "bytes": "B", "Bps": "B/s", "percentunit": "", "ops": "/s", "reqps": "/s"}
Line = tuple[str, list[float], list[float]]


def plain(expr: str) -> str:
    """A query with its dashboard variables filled in: all of everything."""
    return re.sub(r"\$(cluster|node|pool|tenant)", ".*", expr.replace("$__rate_interval", "1m"))


def lines_of(panel: GraphPanel, prometheus: str, start: float, end: float) -> list[Line]:
    """(legend, seconds since the start, values) of each line of a panel."""
    found: list[Line] = []
    for query in panel.queries:
        asked = urlencode({"query": plain(query.expr), "start": start, "end": end, "step": 5})
        with urlopen(f"{prometheus}/api/v1/query_range?{asked}", timeout=30.0) as reply:
            result = json.load(reply)["data"]["result"]
        for series in result:
            legend = re.sub(r"\{\{(\w+)\}\}", lambda match, s=series: s["metric"].get(match[1], ""), query.legend)
            points = [(moment - start, float(value)) for moment, value in series["values"]]
            points = [(moment, value) for moment, value in points if math.isfinite(value)]
            found.append((legend or "total", [each[0] for each in points], [each[1] for each in points]))
    return sorted(found, key=lambda line: -max(line[2], default=0.0))[:MAX_LINES]


def draw(plan: DashboardPlan, drawn: dict[str, list[Line]], style: str, out: Path) -> None:
    card, back, text, grid = STYLES[style]
    panels = [(row.title, panel) for row in plan.rows for panel in row.panels]
    num_rows = math.ceil(len(panels) / COLUMNS)
    figure, axes = plt.subplots(
        num_rows, COLUMNS, figsize=(WIDTH, HEIGHT * num_rows + 0.7), facecolor=back, squeeze=False, layout="constrained"
    )
    figure.suptitle(
        f"{plan.title}: the panels' queries, answered by a Prometheus (not a picture of Grafana)",
        color=text,
        fontsize=11,
    )
    for place, axis in enumerate(axes.flat):
        if place >= len(panels):
            axis.set_visible(False)
            continue
        title, panel = panels[place]
        axis.set_facecolor(card)
        axis.set_title(f"{title} · {panel.title}", color=text, fontsize=8, loc="left")
        lines = drawn[panel.title]
        if panel.is_stacked and lines:
            longest = max((moments for _, moments, _ in lines), key=len)
            known = [dict(zip(moments, values, strict=True)) for _, moments, values in lines]
            stacked = [[values.get(moment, 0.0) for moment in longest] for values in known]
            axis.stackplot(longest, stacked, labels=[legend for legend, *_ in lines], alpha=0.8)
        else:
            for legend, moments, values in lines:
                axis.plot(moments, values, label=legend, linewidth=1.2)
        if not lines:
            axis.text(0.5, 0.5, "no data", color=text, ha="center", va="center", transform=axis.transAxes, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(SCALES.get(panel.unit, panel.unit if panel.unit != "short" else ""), color=text, fontsize=7)
        axis.tick_params(colors=text, labelsize=6)
        axis.grid(color=grid, linewidth=0.5)
        for spine in axis.spines.values():
            spine.set_color(grid)
        if lines:
            shown = axis.legend(
                fontsize=5.5, ncols=2, loc="upper left", facecolor=card, edgecolor=grid, labelcolor=text
            )
            shown.get_frame().set_alpha(0.7)
    figure.savefig(out, dpi=80, facecolor=back)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=6.0, help="how far back")
    parser.add_argument("--dashboard", default="pdcluster-overview", choices=[plan.uid for plan in DASHBOARDS])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    chosen = parser.parse_args()
    plan = next(plan for plan in DASHBOARDS if plan.uid == chosen.dashboard)
    end = time.time()
    drawn = {
        panel.title: lines_of(panel, chosen.prometheus, end - 60 * chosen.minutes, end)
        for row in plan.rows
        for panel in row.panels
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    for style in STYLES:
        file = chosen.out / f"{plan.uid}-{style}.png"
        draw(plan, drawn, style, file)
        print(file)


if __name__ == "__main__":
    main()
