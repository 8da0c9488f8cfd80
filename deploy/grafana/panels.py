"""What the Grafana dashboards show. `scripts/dashboards.py` makes their JSON from this, and tests check every query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

NODE = 'node=~"$node",role=~"$pool"'
PROCESS = 'process=~"$node"'
# Every program exports process_*.
OURS = '{component=~"router|node|bootstrap"}'
SERIES = re.compile(r"\b((?:pdcluster|process)_\w+)(\{?)")


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the name of its lines. What it reads is of the chosen cluster."""

    written: str
    legend: str = ""

    @property
    def expr(self) -> str:
        return SERIES.sub(lambda found: f'{found[1]}{{cluster=~"$cluster"{"," if found[2] else "}"}', self.written)


@dataclass(frozen=True)
class GraphPanel:
    """One graph. unit: as Grafana calls it. is_stacked: the lines add up."""

    title: str
    about: str
    queries: Sequence[Query]
    unit: str = "short"
    is_stacked: bool = False


@dataclass(frozen=True)
class PanelRow:
    title: str
    panels: Sequence[GraphPanel]


@dataclass(frozen=True)
class DashboardPlan:
    uid: str
    title: str
    rows: Sequence[PanelRow]
    tags: Sequence[str] = field(default=("pdcluster",))


def quantiles(metric: str, by: str = "", where: str = "") -> list[Query]:
    """p50, p90 and p99 of a histogram; by: a label whose values are apart."""
    labels = f"le, {by}" if by else "le"
    name = f" {{{{{by}}}}}" if by else ""
    return [
        Query(
            f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{where}[$__rate_interval])))",
            f"p{number}{name}",
        )
        for share, number in ((0.5, 50), (0.9, 90), (0.99, 99))
    ]


def rate(metric: str, *by: str, where: str = "") -> Query:
    """A counter's rate, summed over all but these labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    total = f"sum by ({', '.join(by)})" if by else "sum"
    return Query(f"{total} (rate({metric}{where}[$__rate_interval]))", legend)


def most(metric: str, *by: str) -> Query:
    """The rate of a counter of nodes, which all routers report alike."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return Query(f"max by ({', '.join(by)}) (rate({metric}[$__rate_interval]))", legend)


def part(of: str, whole: str, legend: str, by: str = "") -> Query:
    """One counter's rate as a share of another's. by: a label whose values are apart."""
    total = f"sum by ({by}) " if by else "sum"
    return Query(f"{total}(rate({of}[$__rate_interval])) / {total}(rate({whole}[$__rate_interval]))", legend)


BANDWIDTH = "pdcluster_node_transfer_bandwidth_bytes_per_second"
OF_NODE = 'node=~"$node"'
HITS = "pdcluster_decision_hit_tokens_total"
OVERVIEW = DashboardPlan(
    "pdcluster-overview",
    "pdcluster / overview",
    (
        PanelRow(
            "What clients see",
            (
                GraphPanel(
                    "Time to first token",
                    "From a request's arrival.",
                    quantiles("pdcluster_time_to_first_token_seconds"),
                    "s",
                ),
                GraphPanel(
                    "Time to second token",
                    "With a transfer of KV between the two.",
                    quantiles("pdcluster_time_to_second_token_seconds"),
                    "s",
                ),
                GraphPanel(
                    "Time per output token",
                    "Mean of one choice.",
                    quantiles("pdcluster_time_per_output_token_seconds"),
                    "s",
                ),
                GraphPanel(
                    "Whole requests", "From arrival to the last byte.", quantiles("pdcluster_request_seconds"), "s"
                ),
            ),
        ),
        PanelRow(
            "Traffic",
            (
                GraphPanel(
                    "Requests",
                    "499: the client left.",
                    [rate("pdcluster_http_requests_total", "endpoint", "status")],
                    "reqps",
                ),
                GraphPanel(
                    "gRPC calls", "By status code.", [rate("pdcluster_grpc_requests_total", "method", "code")], "reqps"
                ),
                GraphPanel(
                    "Tokens",
                    "Prompt tokens of requests that got a first token, and output.",
                    [
                        Query("sum(rate(pdcluster_prompt_tokens_total[$__rate_interval]))", "prompt"),
                        Query("sum(rate(pdcluster_cached_prompt_tokens_total[$__rate_interval]))", "of it cached"),
                        Query("sum(rate(pdcluster_output_tokens_total[$__rate_interval]))", "output"),
                    ],
                    "short",
                ),
                GraphPanel("Errors", "By code.", [rate("pdcluster_errors_total", "code")], "reqps"),
            ),
        ),
        PanelRow(
            "State",
            (
                GraphPanel(
                    "Nodes",
                    "With a link and a report, by role.",
                    [Query("count by (role) (max by (node, role) (pdcluster_node_up))", "{{role}}")],
                ),
                GraphPanel(
                    "Open requests",
                    "At the routers, and held there.",
                    [
                        Query("sum(pdcluster_http_requests_open)", "open"),
                        Query("sum(pdcluster_held_requests)", "held"),
                    ],
                ),
                GraphPanel(
                    "Registered nodes", "At each bootstrap.", [Query("pdcluster_bootstrap_nodes", "{{process}}")]
                ),
                GraphPanel(
                    "Memory of processes",
                    "Resident.",
                    [Query(f"process_resident_memory_bytes{OURS}", "{{process}} {{worker}}")],
                    "bytes",
                ),
            ),
        ),
    ),
)

POOLS = DashboardPlan(
    "pdcluster-pools",
    "pdcluster / prefill and decode pools",
    (
        PanelRow(
            "Size",
            (
                GraphPanel(
                    "Saturation",
                    "Predicted work of a role's nodes in what they can do within the service level; 1 is full.",
                    [Query('max by (role) (pdcluster_pool_saturation{role=~"$pool"})', "{{role}}")],
                ),
                GraphPanel(
                    "Nodes and wanted nodes",
                    "Wanted: what the predicted work needs. Autoscaling follows it.",
                    [
                        Query('max by (role) (pdcluster_pool_wanted_nodes{role=~"$pool"})', "{{role}} wanted"),
                        Query(
                            'count by (role) (max by (node, role) (pdcluster_node_up{role=~"$pool"}))', "{{role}} nodes"
                        ),
                    ],
                ),
            ),
        ),
        PanelRow(
            "Load",
            (
                GraphPanel(
                    "Waiting",
                    "Requests in nodes' queues.",
                    [Query(f"max by (node, role) (pdcluster_node_waiting{{{NODE}}})", "{{node}}")],
                ),
                GraphPanel(
                    "Running",
                    "Rows of nodes' batches.",
                    [Query(f"max by (node, role) (pdcluster_node_running{{{NODE}}})", "{{node}}")],
                ),
                GraphPanel(
                    "Slots used",
                    "Rows and reservations.",
                    [Query(f"max by (node, role) (pdcluster_node_slots_used{{{NODE}}})", "{{node}}")],
                ),
                GraphPanel(
                    "In flight",
                    "Requests of all routers on the node.",
                    [Query(f"sum by (node) (pdcluster_node_in_flight{{{NODE}}})", "{{node}}")],
                ),
            ),
        ),
        PanelRow(
            "KV and speed",
            (
                GraphPanel(
                    "KV pages",
                    "Pinned and parked ones are also in another state.",
                    [
                        Query(
                            f"sum by (state) (max by (node, state) (pdcluster_node_kv_pages{{{NODE}}}))", "{{state}}"
                        ),
                    ],
                ),
                GraphPanel(
                    "Predicted prompt of 512 tokens",
                    "By each node's own model: slow nodes stand out.",
                    [
                        Query(
                            f'max by (node) (pdcluster_node_predicted_seconds{{{NODE},half="prefill",figure="value"}})',
                            "{{node}}",
                        ),
                    ],
                    "s",
                ),
                GraphPanel(
                    "Predicted decode step",
                    "One row of 512 tokens.",
                    [
                        Query(
                            f'max by (node) (pdcluster_node_predicted_seconds{{{NODE},half="decode",figure="value"}})',
                            "{{node}}",
                        ),
                    ],
                    "s",
                ),
                GraphPanel(
                    "Doubt of the models",
                    "Share by which a prediction may be wrong.",
                    [
                        Query(f"max by (node, half) (pdcluster_node_cost_doubt_ratio{{{NODE}}})", "{{node}} {{half}}"),
                        Query(
                            f"max by (node, half) (pdcluster_node_cost_spread_ratio{{{NODE}}})",
                            "{{node}} {{half}} spread",
                        ),
                    ],
                    "percentunit",
                ),
            ),
        ),
        PanelRow(
            "Queues",
            (
                GraphPanel("Wait for prefill", "In a node's queue.", quantiles("pdcluster_prefill_queue_seconds"), "s"),
                GraphPanel(
                    "Steps behind the models",
                    "A model of few steps says little.",
                    [
                        Query(f"max by (node, half) (pdcluster_node_cost_samples{{{NODE}}})", "{{node}} {{half}}"),
                    ],
                ),
            ),
        ),
    ),
)

TRANSFER = DashboardPlan(
    "pdcluster-transfer",
    "pdcluster / KV transfer",
    (
        PanelRow(
            "Requests",
            (
                GraphPanel(
                    "Transfer time",
                    "First write submitted to last one done.",
                    quantiles("pdcluster_kv_transfer_seconds", "backend"),
                    "s",
                ),
                GraphPanel(
                    "KV moved",
                    "For requests that ended well.",
                    [rate("pdcluster_kv_transfer_bytes_total", "backend")],
                    "Bps",
                ),
            ),
        ),
        PanelRow(
            "Paths",
            (
                GraphPanel(
                    "Bandwidth",
                    "Of each node to its peers, as measured.",
                    [
                        Query(
                            f"max by (node, peer, backend) ({BANDWIDTH}{{{OF_NODE}}})",
                            "{{node}} → {{peer}} {{backend}}",
                        ),
                    ],
                    "Bps",
                ),
                GraphPanel(
                    "Bytes written",
                    "By the nodes' own count. Nodes with vLLM count none: vLLM reads.",
                    [rate("pdcluster_engine_transfer_bytes_total", "process", "peer", "backend")],
                    "Bps",
                ),
                GraphPanel(
                    "Time in writes",
                    "Seconds of writes a second, side by side. Nodes with vLLM count none.",
                    [rate("pdcluster_engine_transfer_seconds_total", "process", "peer")],
                    "short",
                ),
                GraphPanel(
                    "Breakers",
                    "0 closed, 1 half open, 2 open.",
                    [
                        Query(
                            'max by (node, peer, backend) (pdcluster_node_transfer_breaker_state{node=~"$node"})',
                            "{{node}} → {{peer}} {{backend}}",
                        ),
                    ],
                ),
                GraphPanel(
                    "Chosen paths",
                    "1: the next writes go by it.",
                    [
                        Query(
                            'max by (node, peer, backend) (pdcluster_node_transfer_path_chosen{node=~"$node"})',
                            "{{node}} → {{peer}} {{backend}}",
                        ),
                    ],
                ),
            ),
        ),
        PanelRow(
            "Trouble",
            (
                GraphPanel(
                    "Failed writes",
                    "By reason.",
                    [most("pdcluster_node_transfer_failed_writes_total", "node", "reason")],
                    "cps",
                ),
                GraphPanel(
                    "Chunks written again",
                    "By reason.",
                    [most("pdcluster_node_transfer_resent_chunks_total", "node", "reason")],
                    "cps",
                ),
                GraphPanel(
                    "Pulls of cached KV",
                    "By result.",
                    [most("pdcluster_node_transfer_pulls_total", "node", "reason")],
                    "cps",
                ),
            ),
        ),
    ),
)

ROUTING = DashboardPlan(
    "pdcluster-routing",
    "pdcluster / routing and cache",
    (
        PanelRow(
            "Decisions",
            (
                GraphPanel(
                    "Cached tokens found",
                    "Of those that the best node held, and that an ideal cache would hold.",
                    [
                        part(f'{HITS}{{kind="achieved"}}', f'{HITS}{{kind="reachable"}}', "of reachable"),
                        part(f'{HITS}{{kind="achieved"}}', f'{HITS}{{kind="ideal"}}', "of ideal"),
                    ],
                    "percentunit",
                ),
                GraphPanel(
                    "Regret",
                    "First token, beyond the best other candidate's estimate.",
                    quantiles("pdcluster_decision_regret_seconds"),
                    "s",
                ),
                GraphPanel(
                    "Prediction error",
                    "Of the time to first token.",
                    quantiles("pdcluster_ttft_prediction_error_seconds", "direction"),
                    "s",
                ),
                GraphPanel(
                    "Shadow policy",
                    "Decisions by agreement.",
                    [rate("pdcluster_shadow_decisions_total", "policy", "choice")],
                    "cps",
                ),
            ),
        ),
        PanelRow(
            "Modes and attempts",
            (
                GraphPanel(
                    "Choices by mode",
                    "remote: prefill and decode on two nodes.",
                    [rate("pdcluster_choices_total", "mode")],
                    "cps",
                ),
                GraphPanel(
                    "Attempts per choice",
                    "More than 1: retries.",
                    [
                        part("pdcluster_attempts_total", "pdcluster_choices_total", "attempts"),
                    ],
                ),
            ),
        ),
        PanelRow(
            "Prefix index",
            (
                GraphPanel(
                    "Entries",
                    "(block, node) pairs, and sets of holders.",
                    [
                        Query("max(pdcluster_index_entries)", "entries"),
                        Query("max(pdcluster_index_holder_sets)", "holder sets"),
                    ],
                ),
                GraphPanel("Memory", "Of the index.", [Query("sum(pdcluster_index_bytes)", "bytes")], "bytes"),
                GraphPanel(
                    "News of caches",
                    "Deltas, snapshots, gaps and drops.",
                    [
                        Query("sum(rate(pdcluster_cache_deltas_total[$__rate_interval]))", "deltas"),
                        Query("sum(rate(pdcluster_cache_snapshots_total[$__rate_interval]))", "snapshots"),
                        Query("sum(rate(pdcluster_cache_gaps_total[$__rate_interval]))", "gaps"),
                        Query("sum(rate(pdcluster_index_dropped_total[$__rate_interval]))", "dropped"),
                    ],
                    "cps",
                ),
                GraphPanel(
                    "Expectations",
                    "Blocks expected of requests under way, and how expectations ended.",
                    [
                        Query("sum(pdcluster_cache_expected)", "expected"),
                        rate("pdcluster_cache_expectations_total", "outcome"),
                    ],
                ),
            ),
        ),
    ),
)

REQUESTS = DashboardPlan(
    "pdcluster-requests",
    "pdcluster / requests and tenants",
    (
        PanelRow(
            "Shape",
            (
                GraphPanel("Prompt length", "Tokens.", quantiles("pdcluster_prompt_length_tokens")),
                GraphPanel(
                    "Output length", "Tokens of choices that ended well.", quantiles("pdcluster_output_length_tokens")
                ),
                GraphPanel("Ends", "By finish reason.", [rate("pdcluster_choices_total", "finish")], "cps"),
                GraphPanel("Clients that left", "Before the end.", [rate("pdcluster_client_disconnects_total")], "cps"),
            ),
        ),
        PanelRow(
            "Waiting and refusals",
            (
                GraphPanel(
                    "Held requests",
                    "Waiting in the routers for a node.",
                    [Query("sum(pdcluster_held_requests)", "held")],
                ),
                GraphPanel(
                    "Wait of held requests",
                    "By how it ended.",
                    quantiles("pdcluster_hold_wait_seconds", "outcome"),
                    "s",
                ),
                GraphPanel(
                    "Refused requests",
                    "By tenant and reason.",
                    [rate("pdcluster_rejected_requests_total", "tenant", "reason", where='{tenant=~"$tenant"}')],
                    "cps",
                ),
                GraphPanel(
                    "Refused connections",
                    "For want of open files.",
                    [rate("pdcluster_http_connections_refused_total")],
                    "cps",
                ),
            ),
        ),
    ),
)

ENGINE = DashboardPlan(
    "pdcluster-engine",
    "pdcluster / engine",
    (
        PanelRow(
            "Steps",
            (
                GraphPanel(
                    "Step time",
                    "By what the step computed.",
                    quantiles("pdcluster_engine_step_seconds", "phase", f"{{{PROCESS}}}"),
                    "s",
                ),
                GraphPanel(
                    "Tokens computed",
                    "By phase.",
                    [rate("pdcluster_engine_tokens_total", "process", "phase", where=f"{{{PROCESS}}}")],
                    "short",
                ),
                GraphPanel(
                    "Prompt tokens found cached",
                    "Of those of prompts that began.",
                    [
                        part(
                            f"pdcluster_engine_cached_tokens_total{{{PROCESS}}}",
                            f"pdcluster_engine_prompt_tokens_total{{{PROCESS}}}",
                            "{{process}}",
                            "process",
                        ),
                    ],
                    "percentunit",
                ),
                GraphPanel(
                    "Preemptions",
                    "Rows that gave their pages back.",
                    [rate("pdcluster_engine_preemptions_total", "process", where=f"{{{PROCESS}}}")],
                    "cps",
                ),
            ),
        ),
        PanelRow(
            "Load",
            (
                GraphPanel(
                    "Requests",
                    "Waiting and running.",
                    [Query(f"pdcluster_engine_requests{{{PROCESS}}}", "{{process}} {{state}}")],
                ),
                GraphPanel(
                    "Waiting prompt tokens",
                    "Still to compute.",
                    [Query(f"pdcluster_engine_waiting_tokens{{{PROCESS}}}", "{{process}}")],
                ),
                GraphPanel(
                    "Rows", "Used and free.", [Query(f"pdcluster_engine_slots{{{PROCESS}}}", "{{process}} {{state}}")]
                ),
                GraphPanel(
                    "KV pages",
                    "By state.",
                    [Query(f"sum by (state) (pdcluster_engine_kv_pages{{{PROCESS}}})", "{{state}}")],
                ),
            ),
        ),
        PanelRow(
            "Hand-over",
            (
                GraphPanel(
                    "Parked KV",
                    "Finished prompts that wait for their decode node, as a share of the pool.",
                    [
                        Query(
                            f'sum by (process) (pdcluster_engine_kv_pages{{{PROCESS},state="parked"}})'
                            f' / sum by (process) (pdcluster_engine_kv_pages{{{PROCESS},state=~"used|free|cached"}})',
                            "{{process}}",
                        )
                    ],
                    "percentunit",
                ),
                GraphPanel(
                    "Failed transfers",
                    "By reason. With vLLM: read, KV of a peer that could not be read; lease, KV that nobody read.",
                    [rate("pdcluster_engine_failed_transfers_total", "process", "reason", where=f"{{{PROCESS}}}")],
                    "cps",
                ),
                GraphPanel(
                    "Steps",
                    "Of the engine, a second.",
                    [rate("pdcluster_engine_step_seconds_count", "process", where=f"{{{PROCESS}}}")],
                    "cps",
                ),
                GraphPanel(
                    "Start",
                    "From the node's start to its first turn; vLLM takes a minute or more.",
                    [Query(f"pdcluster_engine_start_seconds{{{PROCESS}}}", "{{process}}")],
                    "s",
                ),
            ),
        ),
        PanelRow(
            "Health",
            (
                GraphPanel(
                    "Engine stands",
                    "Time without progress on its step.",
                    [Query(f"pdcluster_engine_stood_seconds{{{PROCESS}}}", "{{process}}")],
                    "s",
                ),
                GraphPanel(
                    "Age of the loop's turn",
                    "A loop turns ten times a second.",
                    [Query(f"pdcluster_engine_loop_age_seconds{{{PROCESS}}}", "{{process}}")],
                    "s",
                ),
                GraphPanel(
                    "Takes work",
                    "0: cordoned, draining or stuck.",
                    [Query(f"pdcluster_engine_takes_work{{{PROCESS}}}", "{{process}}")],
                ),
                GraphPanel(
                    "CPU",
                    "Cores in use.",
                    [Query(f"rate(process_cpu_seconds_total{OURS}[$__rate_interval])", "{{process}} {{worker}}")],
                    "short",
                ),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, POOLS, TRANSFER, ROUTING, REQUESTS, ENGINE)

# Exported and on no panel, with the reason.
NOT_SHOWN = {
    "pdcluster_engine_info": "names, no number: the node, its model and its engine",
    "pdcluster_worker_warm_seconds": "said once at a worker's start",
    "pdcluster_worker_restarts_total": "an event, shown by pdctl events",
    "pdcluster_worker_up": "an event, shown by pdctl events",
    "pdcluster_bootstrap_changes_total": "an event, shown by pdctl events",
    "pdcluster_node_transfer_paths_left_out": "0 but in clusters of more than 1,000 measured paths",
    "pdcluster_build_info": "versions, which pdctl status and get nodes -o wide show",
}
