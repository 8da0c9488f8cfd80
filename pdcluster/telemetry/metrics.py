"""What is measured, one declaration each. Names start with pdcluster_, units are base units, counters end in _total.

A group is built on a registry by its owner. Nothing is registered at import time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdcluster.telemetry.tally import BeforeScrape, Level, Spread, Tally

# From a fast step to a long queue.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


# Choices that ended alike, equal answers, and decisions, not counted yet. Counting many at once costs little more than
# one.
MOST_NOTED = 1024

# Media that are counted by name, beyond them as "other". Nodes choose the names.
MAX_MEDIUM_LABELS = 64

# Mode (None: no first token came), finish reason (None: it did not end well) and backend of a choice.
Ending = tuple[str | None, str | None, str]

# Of a choice: tokens of its prompt and output, cached tokens, attempts. Seconds to the first and the second token, from
# token to token (None: no such token), in the queue, of the transfer. Bytes of the transfer.
Noted = tuple[int, int, int, int, float | None, float | None, float | None, float, float | None, int]

# Of a decision: seconds that its first token came later than predicted, and than at best; prompt tokens found in the
# cache, reachable, ideal.
Judged = tuple[float, float, int, int, int]


class RouterMetrics:
    """A router's front door: what clients asked, what they got, and when. Times are as the client saw them, but for
    those of the nodes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._noted: defaultdict[Ending, list[Noted]] = defaultdict(self._another_kind)
        self._media: set[str] = set()
        BeforeScrape(self._count_noted, registry=registry)

        def counter(name: str, help_text: str, *labels: str) -> Tally:
            return Tally(f"pdcluster_{name}", help_text, labels, registry=registry)

        def seconds(name: str, help_text: str, *labels: str) -> Spread:
            return Spread(f"pdcluster_{name}_seconds", help_text, labels, buckets=SECONDS, registry=registry)

        def tokens(name: str, help_text: str) -> Spread:
            return Spread(f"pdcluster_{name}_tokens", help_text, buckets=TOKENS, registry=registry)

        self.http_requests = counter(
            "http_requests",
            "HTTP requests but probes, by endpoint and status (499: the client left; of failed streams the error's).",
            "endpoint",
            "status",
        )
        self.http_requests_open = Level(
            "pdcluster_http_requests_open", "HTTP requests being worked on, but probes.", registry=registry
        )
        self.tenants = TenantMetrics(registry)
        self.grpc_requests = counter(
            "grpc_requests", "Calls of the gRPC API by method and status code.", "method", "code"
        )
        self.request_seconds = seconds("request", "From a request's arrival to its last byte.", "endpoint")
        self._answered: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self.errors = counter("errors", "Requests that ended in an error, by its code.", "code")
        self.disconnects = counter(
            "client_disconnects", "Requests whose client left or stalled before the end."
        ).labels()

        self._ignored = counter("ignored_fields", "Unknown fields of Messages that were ignored, by name.", "field")
        self._ignored_names = BoundedLabels()
        self.connections_refused = counter(
            "http_connections_refused", "Connections answered with 503, as the limit of open files allows no more."
        ).labels()

        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of choices that reached a first token, and of embeddings."
        ).labels()
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens whose KV was cached already.").labels()
        self.output_tokens = counter("output_tokens", "Output tokens of all choices.").labels()
        self.prompt_length = tokens("prompt_length", "Prompt of one choice or embedding.").labels()
        self.output_length = tokens("output_length", "Output of one choice that ended well.").labels()

        self.choices = counter("choices", "Choices that ended well, by mode and finish reason.", "mode", "finish")
        self.embeddings = counter("embeddings", "Inputs of which embeddings were made.").labels()
        self.attempts = counter(
            "attempts", "Attempts of choices that ended well; more than choices means retries."
        ).labels()
        self.ttft = seconds("time_to_first_token", "From a request's arrival to its first token.", "mode")
        self.ttst = seconds("time_to_second_token", "From a request's arrival to its second token.", "mode")
        self.tpot = seconds("time_per_output_token", "Mean time between the output tokens of one choice.", "mode")
        self.queue_seconds = seconds("prefill_queue", "Wait of a prompt in its node's queue.").labels()
        self.transfer_seconds = seconds("kv_transfer", "First KV write submitted to last one done.", "backend")
        self.transfer_bytes = counter("kv_transfer_bytes", "KV moved for choices that ended well.", "backend")

    def note(self, ending: Ending, noted: Noted) -> None:
        """A choice is over. Counted with others like it at the next scrape, or when there are many."""
        alike = self._noted[ending]
        alike.append(noted)
        if len(alike) >= MOST_NOTED:
            self._count_noted()

    def embedded(self, num_prompt: int, num_cached: int, queue_s: float) -> None:
        """An embedding was made."""
        self.embeddings.value += 1
        self.prompt_tokens.value += num_prompt
        self.prompt_length.observe_all((num_prompt,))
        self.cached_tokens.value += num_cached
        self.queue_seconds.observe_all((queue_s,))

    def ignored_fields(self, names: Sequence[str]) -> None:
        for name in names:
            self._ignored.labels(self._ignored_names.of(name)).value += 1

    def _another_kind(self) -> list[Noted]:
        """There are few, but as many as nodes have names for media."""
        if len(self._noted) >= MAX_MEDIUM_LABELS:
            self._count_noted()
        return []

    def _medium(self, backend: str) -> str:
        if backend not in self._media:
            if len(self._media) >= MAX_MEDIUM_LABELS:
                return "other"
            self._media.add(backend)
        return backend

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """An HTTP request is over, seconds after it came. Counted as choices are."""
        alike = self._answered[endpoint, status]
        alike.append(seconds)
        if len(alike) >= MOST_NOTED:
            self._count_noted()

    def _count_noted(self) -> None:
        answered, self._answered = self._answered, defaultdict(list)
        for (endpoint, status), seconds in answered.items():
            self.http_requests.labels(endpoint, str(status)).value += len(seconds)
            self.request_seconds.labels(endpoint).observe_all(seconds)
        alike = list(self._noted.items())
        self._noted.clear()
        for (mode, finish, backend), rows in alike:
            prompts, outputs, cached, attempts, ttft, ttst, tpot, queue, transfer, moved = zip(*rows, strict=True)
            self.output_tokens.value += sum(outputs)
            if mode is None:
                continue
            self.prompt_tokens.value += sum(prompts)
            self.prompt_length.observe_all(prompts)
            for spread, values in ((self.ttft, ttft), (self.ttst, ttst), (self.tpot, tpot)):
                if known := [value for value in values if value is not None]:
                    spread.labels(mode).observe_all(known)
            if finish is None:
                continue
            self.choices.labels(mode, finish).value += len(rows)
            self.output_length.observe_all(outputs)
            self.cached_tokens.value += sum(cached)
            self.attempts.value += sum(attempts)
            self.queue_seconds.observe_all(queue)
            if mode == "remote":
                medium = self._medium(backend)
                if moved_s := [seconds for seconds in transfer if seconds is not None]:
                    self.transfer_seconds.labels(medium).observe_all(moved_s)
                self.transfer_bytes.labels(medium).value += sum(moved)


MAX_LABELS = 100


class BoundedLabels:
    """Names of tenants or fields as labels. Beyond MAX_LABELS it is "other"."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        if len(self._known) < MAX_LABELS:
            self._known.add(name)
        return name if name in self._known else "other"


class TenantMetrics:
    """What tenants used."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels = BoundedLabels()
        self._requests = Tally(
            "pdcluster_tenant_requests",
            "Requests that got a token or a vector, by tenant; of embeddings each input.",
            ("tenant",),
            registry=registry,
        )
        self._tokens = Tally(
            "pdcluster_tenant_tokens",
            "Tokens by tenant and kind, as answers' usage has them: prompt, of which cached, and completion.",
            ("tenant", "kind"),
            registry=registry,
        )

    def used(self, tenant: str, num_prompt: int, num_cached: int, num_completion: int) -> None:
        """What a request took, also one that failed or was left after its first token."""
        label, tokens = self._labels.of(tenant), self._tokens
        self._requests.labels(label).value += 1
        tokens.labels(label, "prompt").value += num_prompt
        tokens.labels(label, "cached").value += num_cached
        tokens.labels(label, "completion").value += num_completion


class HoldMetrics:
    """What a router holds and refuses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.held = Gauge(
            "pdcluster_held_requests", "Requests, not batch, that wait in the router for a node.", registry=registry
        )
        self.held_batch = Gauge(
            "pdcluster_held_batch_requests", "Batch requests that wait in the router for room.", registry=registry
        )
        self.wait_seconds = Histogram(
            "pdcluster_hold_wait_seconds",
            "Wait of a request, not batch, that was held, by how it ended: placed, refused or left.",
            ("outcome",),
            buckets=SECONDS,
            registry=registry,
        )
        self.rejected = Counter(
            "pdcluster_rejected_requests_total",
            "Requests refused for want of room or time, by reason and tenant.",
            ("reason", "tenant"),
            registry=registry,
        )
        self._tenants = BoundedLabels()

    def refused(self, reason: str, tenant: str) -> None:
        self.rejected.labels(reason, self._tenants.of(tenant)).inc()


class FileMetrics:
    """What became of files that a process reads again when they change."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reloads = Counter(
            "pdcluster_file_reloads_total",
            "Changes of files that are read while the process runs, by what they hold: used, or refused and without "
            "effect.",
            ("file", "outcome"),
            registry=registry,
        )
        self._is_refused = Gauge(
            "pdcluster_file_refused",
            "1 while the latest change of a file is without effect, as it cannot be read.",
            ("file",),
            registry=registry,
        )

    def watch(self, file: str) -> None:
        self._is_refused.labels(file).set(0)
        for outcome in ("used", "refused"):
            self._reloads.labels(file, outcome)

    def read_again(self, file: str) -> None:
        self._reloads.labels(file, "used").inc()
        self._is_refused.labels(file).set(0)

    def kept(self, file: str) -> None:
        self._reloads.labels(file, "refused").inc()
        self._is_refused.labels(file).set(1)


class TlsMetrics:
    """Of the listeners of one process that speak TLS."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handshakes = Counter(
            "pdcluster_tls_handshakes_total",
            "TLS handshakes, by listener and outcome: done, failed, late, or displaced by newer ones; of gRPC begun "
            "alone.",
            ("listener", "outcome"),
            registry=registry,
        )
        for outcome in ("done", "failed", "late", "displaced"):
            self.handshakes.labels("http", outcome)
        self.not_after = Gauge(
            "pdcluster_tls_not_after_timestamp_seconds",
            "When the certificate that listeners show ends, in Unix seconds.",
            registry=registry,
        )


class WorkerMetrics:
    """Of one router process among several on one port."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.warm_seconds = Gauge(
            "pdcluster_worker_warm_seconds",
            "From a worker's first look at the bootstrap to its knowing every node and all that they hold, before it "
            "listens.",
            registry=registry,
        )


class ExplainMetrics:
    """How good the decisions were, as it turned out. Tokens of the prompt; seconds from the decision to the first
    token."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._judged: list[Judged] = []
        BeforeScrape(self._count_judged, registry=registry)
        self._regret = Spread(
            "pdcluster_decision_regret_seconds",
            "Time to first token minus the least that another candidate was estimated to take, at least 0.",
            buckets=(0.0, *SECONDS),
            registry=registry,
        ).labels()
        error = Spread(
            "pdcluster_ttft_prediction_error_seconds",
            "Difference between actual and predicted time to first token, by whether it came later or sooner.",
            ("direction",),
            buckets=SECONDS,
            registry=registry,
        )
        self._later, self._sooner = error.labels("later"), error.labels("sooner")
        hits = Tally(
            "pdcluster_decision_hit_tokens",
            "Prompt tokens found in the cache (achieved), held by the best candidate (reachable), ever seen by this "
            "router (ideal).",
            ("kind",),
            registry=registry,
        )
        self._achieved, self._reachable, self._ideal = (
            hits.labels(kind) for kind in ("achieved", "reachable", "ideal")
        )
        self.shadow_decisions = Tally(
            "pdcluster_shadow_decisions",
            "Decisions on which the shadow policy agreed (same) or not (other).",
            ("policy", "choice"),
            registry=registry,
        )

    def judged(self, found: Judged) -> None:
        """Counted with others at the next scrape, or when there are many."""
        self._judged.append(found)
        if len(self._judged) >= MOST_NOTED:
            self._count_judged()

    def _count_judged(self) -> None:
        if not self._judged:
            return
        errors, regrets, achieved, reachable, ideal = zip(*self._judged, strict=True)
        self._judged = []
        self._later.observe_all([error for error in errors if error >= 0])
        self._sooner.observe_all([-error for error in errors if error < 0])
        self._regret.observe_all(regrets)
        self._achieved.value += sum(achieved)
        self._reachable.value += sum(reachable)
        self._ideal.value += sum(ideal)
