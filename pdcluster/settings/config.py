"""Every setting of every process: what it is called, what it may be, where its value came from. The only module that
reads the environment.

One frozen dataclass per part, one key per field. A key is its section and path, and has the same name in all three
sources:

    node.transfer.deadline_s     --transfer-deadline-s 20     PDCLUSTER_NODE_TRANSFER_DEADLINE_S=20s     [node.transfer]
deadline_s = 20

Flags win over the environment, that over the TOML file (--config FILE or PDCLUSTER_CONFIG), that over the defaults. A
key nobody knows is an error that names the nearest one. Nothing is read at import time, and nothing here opens a model,
a socket or a log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar, cast

from pdcluster.core.address import is_wildcard, parse_address
from pdcluster.core.errors import ConfigError
from pdcluster.core.messages import Role
from pdcluster.settings.keys import Key, Section, built, joined, key, keys_below, parsed
from pdcluster.settings.kinds import (
    adapter_paths,
    address,
    address_or_none,
    addresses,
    boolean,
    choice,
    collector_or_none,
    cores,
    devices,
    duration,
    host_names,
    integer,
    label,
    model_names,
    model_path,
    origins,
    own_host,
    path,
    size,
    text,
    words,
)
from pdcluster.settings.security import SecurityConfig, read_token
from pdcluster.settings.sources import CACHE_VARIABLE, FILE_VARIABLE, from_environment, from_file, from_flags
from pdcluster.settings.surfaces import (
    SECRET_OF,
    Exposure,
    api_warning,
    bootstrap_warning,
    check_exposures,
    exposure_warnings,
    surface_names,
)

BackendName = Literal["auto", "shm", "tcp", "mooncake", "nixl"]
Mode = Literal["auto", "remote", "local"]
Fallback = Literal["deny", "on-failure", "conditional"]
WeightsChange = Literal["fail", "replay"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]

INSECURE_HELP = f"surfaces that may be open beyond loopback without a cluster key or a token: {', '.join(SECRET_OF)}"


def backend(raw: object) -> BackendName:
    if raw in ("cuda_ipc", "nvlink"):
        raise ValueError(f"{raw} is not built yet; use auto, shm, tcp, mooncake or nixl")
    return cast(BackendName, choice("auto", "shm", "tcp", "mooncake", "nixl")(raw))


# ---------------------------------------------------------------- parts


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: LogLevel = key("info", choice("debug", "info", "warning", "error"), "least severe level that is logged")
    format: LogFormat = key("auto", choice("auto", "text", "json"), "text or json; auto: text on a terminal")
    requests: bool = key(False, boolean, "log where each request goes and how it ends, whatever log.level says")


@dataclass(frozen=True, slots=True)
class UpLogConfig(LogConfig):
    """Quieter, so that the line which says that a cluster is ready stands out."""

    level: LogLevel = key(
        "warning", choice("debug", "info", "warning", "error"), "least severe level that up and its processes log"
    )


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where spans of sampled requests go. Who began the trace decides which are sampled."""

    otlp: str | None = key(
        None,
        collector_or_none,
        "OTLP/gRPC address of a trace collector, such as http://127.0.0.1:4317; none: no tracing",
        flag="otlp",
    )


@dataclass(frozen=True, slots=True)
class RouterTracingConfig(TracingConfig):
    sample_percent: int = key(
        100, integer(0, 100), "share of requests that are traced, of those whose caller sends no traceparent"
    )


@dataclass(frozen=True, slots=True)
class KVConfig:
    """The paged KV pool of a node."""

    memory_bytes: int | None = key(
        None, size(2**20), "memory of the KV pool; default: 1 GiB, or half of the free memory where that is less"
    )
    page_tokens: int = key(32, integer(1, 1024), "tokens of one page")
    hash_block_tokens: int = key(
        32, integer(1, 1024), "tokens one prefix hash covers; equal on every node of a cluster"
    )

    def __post_init__(self) -> None:
        if self.page_tokens % self.hash_block_tokens:  # a page that is cached whole needs a hash that covers it whole
            raise ConfigError(
                f"kv.page_tokens {self.page_tokens} is no multiple of kv.hash_block_tokens {self.hash_block_tokens}; "
                "use one"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    token_budget: int = key(512, integer(1, 2**20), "most tokens computed in one step")
    max_rows: int = key(64, integer(1, 4096), "most requests in the running batch")
    max_waiting: int = key(1024, integer(1, 2**20), "most requests waiting for the batch")
    look_ahead: bool = key(
        False,
        boolean,
        "plan the next step of decodes while one runs; measured slower on two cores, not run on a GPU; tp 1 only",
    )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How KV moves between nodes."""

    backend: BackendName = key("auto", backend, "auto, shm, tcp, mooncake or nixl", flag="transfer")
    host: str | None = key(
        None, own_host, "host that the transfer engine listens on and tells its peers; default: that of --listen"
    )
    port: int | None = key(
        None,
        integer(1, 65535),
        "port that tcp listens on, for firewalls; rank N takes the Nth after it; default: a free one",
    )
    deadline_s: float = key(30.0, duration(0.001), "longest wait for the answer to a ticket's Commit")
    retries: int = key(3, integer(0, 100), "times a chunk is written again before its ticket fails")
    window_bytes: int = key(64 * 2**20, size(4096), "most bytes in flight to one peer")
    chunk_bytes: int = key(
        16 * 2**20, size(4096, 2**30), "aimed size of one chunk; no medium takes more than 1 GiB at once"
    )
    devices: tuple[str, ...] = key(
        (), devices, "RDMA devices for mooncake or nixl, such as mlx5_0,mlx5_1; not run on hardware"
    )
    gid_index: int | None = key(
        None, integer(0, 255), "GID index of those devices; default: the library's choice; not run on hardware"
    )
    rails: int | None = key(
        None, integer(1, 64), "over how many of those devices nixl spreads one write; not run on hardware"
    )
    staging_bytes: int = key(64 * 2**20, size(2**16), "staging ring of media that cannot fence cheaply")
    digests: Literal["always", "never"] = key(
        "always", choice("always", "never"), "whether chunks carry digests of their bytes"
    )
    seal: Literal["always", "never"] = key(
        "always",
        choice("always", "never"),
        "with a cluster key: encrypt KV over tcp; never: faster, and whoever is on the network can read prompts of it",
    )
    pull_s: float = key(
        2.0,
        duration(0.001),
        "how long a prompt may wait for KV that another node has cached, before it is computed here",
    )
    parking_s: float = key(
        60.0, duration(0.001), "how long a prefill node keeps finished KV for which no decode node has room"
    )
    parking_percent: int = key(
        50, integer(1, 100), "share of the KV pool in which finished KV may wait before new remote prefills are refused"
    )


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """A node whose engine is vLLM."""

    args: tuple[str, ...] = key(
        (), words, "vLLM's own arguments, such as --max-model-len 4096; the command takes them behind --, too"
    )
    lease_s: float = key(30.0, duration(2.0), "how long vLLM keeps a finished prompt's KV for its decode node")
    side_port: int | None = key(
        None, integer(1, 65535), "port of NIXL's side channel, for firewalls; default: a free one"
    )
    start_s: float = key(1800.0, duration(1.0), "longest wait for vLLM to start")
    adapters: tuple[str, ...] = key(
        (), adapter_paths, "LoRA adapters to load before the node serves: NAME=DIRECTORY[,NAME=DIRECTORY]"
    )


@dataclass(frozen=True, slots=True)
class NodeConfig(Section):
    """One engine process."""

    role: Role = key(
        "mixed", choice("prefill", "decode", "mixed"), "what the node is scheduled for: prefill, decode or mixed"
    )
    name: str | None = key(None, label, "the node's name; default: role and a random suffix")
    bootstrap: tuple[str, ...] = key(("127.0.0.1:8998",), addresses, "HOST:PORT[,HOST:PORT] of the bootstrap service")
    listen: str = key("127.0.0.1:0", address, "HOST:PORT the node listens on; port 0 takes a free one")
    advertise: str | None = key(None, own_host, "host that others reach this node by; default: the host of --listen")
    model: Path | None = key(
        None, model_path, "Hugging Face model directory, GGUF file or ORG/NAME[@REVISION]; default: the bundled model"
    )
    served_model_name: tuple[str, ...] | None = key(
        None, model_names, "the model's names in the API, the first one first; default: its own"
    )
    engine: Literal["native", "vllm"] = key(
        "native", choice("native", "vllm"), "native: pdcluster's own, on CPUs; vllm: GPUs and every model of vLLM's"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", choice("auto", "float32", "bfloat16"), "auto: the stored type; bfloat16 for float16"
    )
    quantization: Literal["none", "int8", "w8a8_int8"] = key(
        "none", choice("none", "int8", "w8a8_int8"), "8-bit weights, or w8a8: activations too"
    )
    device: Literal["cpu", "cuda"] = key("cpu", choice("cpu", "cuda"), "cpu or cuda")
    tp: int = key(1, integer(1, 64), "ranks that share the model's heads (tensor parallel), each a process of its own")
    threads: int | None = key(
        None, integer(1, 1024), "compute threads of one rank; default: its share of the cores the node may use"
    )
    cores: tuple[int, ...] = key((), cores, "CPU cores the node is pinned to, such as 0,2 or 4-7; default: not pinned")
    max_len: int | None = key(
        None, integer(1, 2**24), "longest prompt plus output in tokens; default: what the model and the KV pool allow"
    )
    deterministic: bool = key(
        False,
        boolean,
        "the same tokens, bit for bit, whatever else is computed and wherever; bfloat16 on cpu, on every node",
    )
    map_weights: bool = key(
        False,
        boolean,
        "map weights from their files, so that a machine's nodes share memory; nobody may change these while they "
        "serve. default: serve a copy; files of the hub's cache are always mapped",
    )
    warmup: bool = key(True, boolean, "run a short prompt before reporting ready")
    lease_s: float = key(3.0, duration(0.1), "a router or peer not heard of for this long is gone")
    heartbeat_s: float = key(1.0, duration(0.01), "how often the node renews its leases")
    report_s: float = key(0.05, duration(0.001), "least time between two load reports")
    drain_s: float = key(
        30.0, duration(), "on SIGTERM: longest time for running work to finish; then it moves to other nodes"
    )
    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    health: str | None = key(None, address_or_none, "HOST:PORT of /livez, /readyz and /metrics; none: no such port")
    security: SecurityConfig = field(default_factory=SecurityConfig)
    insecure: tuple[str, ...] = key((), surface_names, INSECURE_HELP)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    log: LogConfig = field(default_factory=LogConfig)
    ready_fd: int | None = key(None, integer(0), "file descriptor that gets one JSON line when ready", flag_only=True)

    def __post_init__(self) -> None:
        _check_heartbeat(self.heartbeat_s, self.lease_s)
        check_exposures(self.exposures(), self.insecure)

    def warnings(self) -> Iterator[str]:
        yield from exposure_warnings(self.exposures())
        yield from bootstrap_warning("node", self.bootstrap, has_key=self.security.has_key)

    def exposures(self) -> Iterator[Exposure]:
        """What others connect to, of what needs a secret."""
        yield Exposure("links", "node.listen", self.listen, self.security.has_key)
        if self.engine != "native" or self.transfer.backend != "shm":
            host = self._transfer_host or parse_address(self.listen)[0]
            yield Exposure("kv", "node.transfer.host", host, self.security.has_key)

    @property
    def _transfer_host(self) -> str | None:
        listens = parse_address(self.listen)[0]
        return self.transfer.host or (self.advertise if is_wildcard(listens) else listens)

    def transfer_host(self) -> str:
        """Where the transfer engine listens, and what its peers are told. Raises ConfigError."""
        found = self._transfer_host
        if found is None:
            raise ConfigError(
                f"node.listen {self.listen} is no address that others connect to; set node.advertise to one that is"
            )
        return found


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Deadlines of the stages of one attempt."""

    queue_s: float = key(120.0, duration(0.001), "longest wait for a node to schedule the prompt")
    handshake_s: float = key(5.0, duration(0.001), "longest wait for a node's answer to a message")
    transfer_s: float = key(30.0, duration(0.001), "longest wait from the first token to the decode node's first frame")
    liveness_s: float = key(30.0, duration(0.001), "longest silence of a request that should be streaming")


@dataclass(frozen=True, slots=True)
class HoldConfig:
    """Requests that wait in the router because every node has enough to do."""

    requests: int = key(1024, integer(1, 2**20), "most requests that wait in the router for a node")
    memory_bytes: int = key(256 * 2**20, size(1024), "memory of the prompts that wait")
    age_s: float = key(60.0, duration(0.001), "longest wait for a node")
    patience_s: float = key(
        30.0, duration(0.001), "a request is due after 5 times its prompt's time, but after this at the latest"
    )
    backlog_s: float = key(
        0.25,
        duration(0.001),
        "prompt work that may wait on a node, at most a quarter of slo.ttft_s; then requests wait here",
    )
    floor_percent: int = key(
        5, integer(0, 100), "share of the work that less urgent requests get while more urgent ones wait"
    )


@dataclass(frozen=True, slots=True)
class SloConfig:
    """What is promised to accepted requests."""

    ttft_s: float | None = key(
        None,
        duration(0.001),
        "refuse requests whose first token is predicted later than this; default: none is refused",
    )
    margin_percent: int = key(10, integer(0, 1000), "by how much predictions are taken to be too short")


@dataclass(frozen=True, slots=True)
class RouterConfig(Section):
    """One router process."""

    name: str | None = key(None, label, "the router's name; default: router and a random suffix")
    http: str = key("127.0.0.1:8000", address, "HOST:PORT of the OpenAI API")
    workers: int = key(1, integer(1, 64), "router processes that share the ports, each a whole router")
    spare: bool = key(
        True,
        boolean,
        "with several workers: keep one more process, loaded and idle (some 50 MiB), that replaces a worker at once",
    )
    worker: str | None = key(None, text, "which of the workers this is; set by their supervisor", flag_only=True)
    grpc: str | None = key(
        cast("str | None", "127.0.0.1:50051"), address_or_none, "HOST:PORT of the gRPC API; none: no gRPC"
    )
    admin: str | None = key(
        cast("str | None", "127.0.0.1:50052"), address_or_none, "HOST:PORT of the Admin service; none: no Admin service"
    )
    tls_cert: Path | None = key(
        None,
        path,
        "PEM file: the certificate of HTTP, gRPC, Admin, console and control, then its issuers'; default: no TLS",
    )
    tls_key: Path | None = key(None, path, "PEM file with its private key, which others must not read")
    admin_token_file: Path | None = key(
        None, path, "file with the token that Admin calls must carry; needed beyond loopback"
    )
    console: str | None = key(
        None, address_or_none, "HOST:PORT of a page for operators; none: no page; changes there need the admin token"
    )
    console_hosts: tuple[str, ...] = key(
        (), host_names, "names by which browsers reach that page, besides localhost and addresses"
    )
    control: str | None = key(
        None,
        address_or_none,
        "HOST:PORT of HTTP calls for trainers: pauses, weights, sleep, with the admin token; none: no such calls",
    )
    http_hosts: tuple[str, ...] = key(
        (),
        host_names,
        "on loopback without tenants: names by which clients may reach the API, besides localhost; those of trainers "
        "for router.control, where there is no admin token",
    )
    bootstrap: tuple[str, ...] = key(("127.0.0.1:8998",), addresses, "HOST:PORT[,HOST:PORT] of the bootstrap service")
    tokenizer: Path | None = key(
        None, path, "directory with tokenizer.json and the chat template; default: asked from a node"
    )
    tool_format: str = key(
        "auto",
        choice("auto", "none", "hermes", "llama", "mistral"),
        "how the model calls tools; auto: as its template shows",
    )
    reasoning: str = key(
        "auto", choice("auto", "none", "think"), "how the model marks its thoughts; auto: as its template shows"
    )
    user_control_tokens: str = key(
        "parse",
        choice("parse", "refuse"),
        "special tokens in what users and tools say: read as tokens, or refused with 400",
    )
    mode: Mode = key(
        "auto",
        choice("auto", "remote", "local"),
        "remote: prefill and decode on two nodes, local: on one; auto chooses per request",
    )
    policy: str = key("seconds", text, "routing policy, with parameters: seconds, kv-cost:weight=2, …")
    shadow_policy: str | None = key(None, text, "second policy, whose choices are recorded beside, without effect")
    fallback: Fallback = key(
        "conditional",
        choice("deny", "on-failure", "conditional"),
        "one node for a request though nodes have roles: never, when a pool is gone, or when sooner",
    )
    weights_change: WeightsChange = key(
        "fail",
        choice("fail", "replay"),
        "requests whose weights no node has any more: end with an error, or go on with the newest; requests may say it",
    )
    itl_s: float | None = key(
        None, duration(0.0001), "pace between tokens that running requests keep; default: twice that of one alone"
    )
    auto_roles: bool = key(
        False, boolean, "change nodes' roles by what waits for them; on one router of a cluster only"
    )
    scaler: str | None = key(
        None, address_or_none, "HOST:PORT of KEDA's external scaler, which tells how many nodes pools need; none: none"
    )
    scaler_token_file: Path | None = key(
        None, path, "file with the token that KEDA's triggers must carry as tokenFromEnv; needed beyond loopback"
    )
    from_zero: bool = key(
        False,
        boolean,
        "requests wait for the first node (hold.age_s), and the router is ready without one: pools may scale to zero",
    )
    tenants: Path | None = key(
        None, path, "TOML or JSON file of tenants and their API keys; default: everyone is one tenant, without keys"
    )
    max_requests: int = key(1024, integer(1, 2**20), "most requests accepted at a time")
    max_body_bytes: int = key(
        8 * 2**20,
        size(1024),
        "largest request body; what it may be made of is bounded besides (100,000 strings and keys)",
    )
    arriving_bytes: int | None = key(
        None,
        size(1024),
        "memory of HTTP's bodies that have not arrived whole, and as much of gRPC's; no tenant gets all; default: 8 "
        "times max_body_bytes",
    )
    cors_origins: tuple[str, ...] = key(
        (), origins, "origins of web pages that may use the API, such as https://app.example.com; *: all; default: none"
    )
    deadline_s: float = key(600.0, duration(0.001), "longest time of one request")
    retry_budget: int = key(3, integer(0, 100), "attempts after the first one")
    pull: Literal["always", "never"] = key(
        "always", choice("always", "never"), "whether a node first fetches cached KV that another one holds"
    )
    pull_min_tokens: int = key(64, integer(1, 2**24), "least tokens that need not be computed for a pull to be made")
    index_blocks: int = key(
        2**24, integer(1024, 2**32), "most distinct cached blocks known of all nodes; each takes at most 62 bytes here"
    )
    lease_s: float = key(3.0, duration(0.1), "a node not heard of for this long is gone")
    heartbeat_s: float = key(1.0, duration(0.01), "how often the router renews its leases")
    drain_s: float = key(30.0, duration(), "on SIGTERM: longest time for open requests to finish")
    stages: StageConfig = field(default_factory=StageConfig)
    hold: HoldConfig = field(default_factory=HoldConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    health: str | None = key(None, address_or_none, "HOST:PORT of /livez, /readyz and /metrics; none: no such port")
    security: SecurityConfig = field(default_factory=SecurityConfig)
    insecure: tuple[str, ...] = key((), surface_names, INSECURE_HELP)
    tracing: RouterTracingConfig = field(default_factory=RouterTracingConfig)
    log: LogConfig = field(default_factory=LogConfig)
    ready_fd: int | None = key(None, integer(0), "file descriptor that gets one JSON line when ready", flag_only=True)

    def __post_init__(self) -> None:
        _check_heartbeat(self.heartbeat_s, self.lease_s)
        check_exposures(self.exposures(), self.insecure)
        if self.arriving_bytes is not None and self.arriving_bytes < 2 * self.max_body_bytes:
            raise ConfigError(
                f"router.arriving_bytes {self.arriving_bytes} has no room for two bodies of router.max_body_bytes "
                f"{self.max_body_bytes}; raise it to twice that, or lower router.max_body_bytes"
            )
        if self.console is not None and self.admin is None:
            raise ConfigError("router.console shows what the Admin service knows, and router.admin is none; set it too")
        whole_pair("router", self.tls_cert, self.tls_key)

    @property
    def tls_files(self) -> tuple[Path, Path] | None:
        return whole_pair("router", self.tls_cert, self.tls_key)

    @property
    def most_arriving_bytes(self) -> int:
        return 8 * self.max_body_bytes if self.arriving_bytes is None else self.arriving_bytes

    def warnings(self) -> Iterator[str]:
        yield from exposure_warnings(self.exposures())
        yield from bootstrap_warning("router", self.bootstrap, has_key=self.security.has_key)
        api = {"router.http": self.http, "router.grpc": self.grpc}
        if warning := api_warning(api, has_tenants=self.tenants is not None):
            yield warning

    def exposures(self) -> Iterator[Exposure]:
        """What others connect to, of what needs a secret."""
        has_admin_token = self.admin_token_file is not None
        if self.admin is not None:
            yield Exposure("admin", "router.admin", self.admin, has_admin_token)
        if self.console is not None:
            yield Exposure("console", "router.console", self.console, has_admin_token)
        if self.control is not None:
            yield Exposure("control", "router.control", self.control, has_admin_token)
        if self.scaler is not None:
            yield Exposure("scaler", "router.scaler", self.scaler, self.scaler_token_file is not None)

    def admin_token(self) -> str | None:
        """Reads the file."""
        return read_token("admin", self.admin_token_file)

    def scaler_token(self) -> str | None:
        """Reads the file."""
        return read_token("scaler", self.scaler_token_file)


@dataclass(frozen=True, slots=True)
class BootstrapConfig(Section):
    """The service that knows who is alive."""

    listen: str = key("127.0.0.1:8998", address, "HOST:PORT to listen on; port 0 takes a free one")
    lease_s: float = key(3.0, duration(0.1), "a node that has not renewed its registration for this long is gone")
    max_nodes: int = key(4096, integer(1, 2**20), "most registered nodes")
    security: SecurityConfig = field(default_factory=SecurityConfig)
    insecure: tuple[str, ...] = key((), surface_names, INSECURE_HELP)
    health: str | None = key(None, address_or_none, "HOST:PORT of /livez, /readyz and /metrics; none: no such port")
    log: LogConfig = field(default_factory=LogConfig)
    ready_fd: int | None = key(None, integer(0), "file descriptor that gets one JSON line when ready", flag_only=True)

    def __post_init__(self) -> None:
        check_exposures(self.exposures(), self.insecure)

    def warnings(self) -> Iterator[str]:
        return exposure_warnings(self.exposures())

    def exposures(self) -> Iterator[Exposure]:
        """What others connect to, of what needs a secret."""
        yield Exposure("bootstrap", "bootstrap.listen", self.listen, self.security.has_key)


@dataclass(frozen=True, slots=True)
class UpConfig(Section):
    """A whole cluster on this machine. What only a child knows is set in the sections node, router and bootstrap."""

    model: Path | None = key(
        None, model_path, "Hugging Face model directory, GGUF file or ORG/NAME[@REVISION]; default: the bundled model"
    )
    served_model_name: tuple[str, ...] | None = key(
        None, model_names, "the model's names in the API; default: node.served_model_name"
    )
    prefill: int = key(1, integer(0, 64), "prefill nodes")
    decode: int = key(1, integer(0, 64), "decode nodes")
    mixed: int = key(0, integer(0, 64), "nodes that do both")
    tp: int = key(1, integer(1, 64), "ranks of every node (tensor parallel)")
    prefill_tp: int | None = key(None, integer(1, 64), "ranks of a prefill node; default: --tp")
    decode_tp: int | None = key(None, integer(1, 64), "ranks of a decode node; default: --tp")
    workers: int | None = key(None, integer(1, 64), "router processes that share the ports; default: router.workers")
    transfer: BackendName = key("auto", backend, "auto, shm, tcp, mooncake or nixl")
    http: str = key("127.0.0.1:8000", address, "HOST:PORT of the OpenAI API")
    grpc: str | None = key(
        cast("str | None", "127.0.0.1:50051"), address_or_none, "HOST:PORT of the gRPC API; none: no gRPC"
    )
    tls_cert: Path | None = key(None, path, "PEM file with the router's certificate; default: router.tls_cert")
    tls_key: Path | None = key(None, path, "PEM file with its private key; default: router.tls_key")
    device: Literal["cpu", "cuda"] = key("cpu", choice("cpu", "cuda"), "cpu or cuda")
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", choice("auto", "float32", "bfloat16"), "what nodes compute in; auto: node.dtype"
    )
    pin: bool = key(True, boolean, "pin each node to a share of the cores when there are enough")
    ready_s: float = key(
        300.0, duration(0.1), "longest time for a process to become ready; the first one compiles kernels"
    )
    drain_s: float = key(10.0, duration(), "on Ctrl-C or SIGTERM: longest time for open requests to finish")
    restarts: int = key(5, integer(0, 1000), "times one process may crash within a minute before up gives up")
    otlp: str | None = key(
        None,
        collector_or_none,
        "OTLP/gRPC address of a trace collector, such as http://127.0.0.1:4317; none: no tracing",
    )
    targets: Path | None = key(
        None, path, "file that gets all /metrics addresses, as Prometheus's file_sd_configs reads them"
    )
    cluster: str = key("up", label, "their label cluster, by which dashboards and alerts keep clusters apart")
    secure: bool = key(
        False, boolean, "make a cluster key for this run, so that other users of this machine stay outside"
    )
    insecure: tuple[str, ...] = key((), surface_names, INSECURE_HELP)
    log: UpLogConfig = field(default_factory=UpLogConfig)

    def __post_init__(self) -> None:
        if self.device == "cuda" and self.prefill + self.decode:
            raise ConfigError(
                "up.device is cuda, but KV in GPU memory cannot be moved between nodes yet; use --prefill 0 --decode "
                "0 --mixed 1"
            )
        whole_pair("up", self.tls_cert, self.tls_key)
        if self.prefill + self.decode + self.mixed == 0:
            raise ConfigError("up.prefill, up.decode and up.mixed are all 0; ask for at least one node")
        if not self.mixed and 0 in (self.prefill, self.decode):
            have, lack = ("decode", "prefill") if not self.prefill else ("prefill", "decode")
            raise ConfigError(f"up.{lack} is 0 and there are only {have} nodes; add --{lack} 1 or use --mixed N")


SECTIONS: Mapping[str, type[Section]] = {
    "node": NodeConfig,
    "router": RouterConfig,
    "bootstrap": BootstrapConfig,
    "up": UpConfig,
}
S = TypeVar("S", bound=Section)


def whole_pair(section: str, cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """A certificate's file and its key's; None without both. Raises ConfigError where one is missing."""
    if cert is not None and key is not None:
        return cert, key
    if cert is None and key is None:
        return None
    given, lacks = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
    flag = "--" + lacks.replace("_", "-")
    raise ConfigError(
        f"{section}.{given} is {cert or key}, but {section}.{lacks} is not set, and neither is of use alone; set it, "
        f"too, with {flag} FILE"
    )


def _check_heartbeat(heartbeat_s: float, lease_s: float) -> None:
    """Two heartbeats may get lost before a lease ends."""
    if heartbeat_s * 2 >= lease_s:
        raise ConfigError(
            f"heartbeat_s {heartbeat_s:g} must be less than half of lease_s {lease_s:g}; shorten it or lengthen the "
            "lease"
        )


def own_environment() -> Mapping[str, str]:
    """The environment of this process, for one that starts others with less of it."""
    return dict(os.environ)


def change_environment(values: Mapping[str, str]) -> None:
    """For libraries that take a setting from the environment only, and for the processes that they start."""
    os.environ.update(values)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class LoadedSection(Generic[S]):
    """A section's values, and for each key's path what its value is and which source set it. flags and file: what they
    were read from."""

    config: S
    values: Mapping[str, object]
    origins: Mapping[str, str]
    flags: Mapping[str, object]
    file: Path | None


def load(
    cls: type[S],
    flags: Mapping[str, object] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedSection[S]:
    """Read one section from all sources. flags: key paths (with the section) to raw values; environ defaults to the
    process's. Raises ConfigError with all that is wrong, a line each."""
    environ = os.environ if environ is None else environ
    file = _file_of(environ) if file is None else _expanded("--config", str(file))
    known = {found.path: found for section in SECTIONS.values() for found in keys(section)}
    problems: list[str] = []
    sources = {
        "flag": from_flags(flags or {}, known, problems),
        "environment": from_environment(environ, known, problems),
        f"file {file}": from_file(file, known, problems) if file else {},
    }
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for found in keys(cls):
        origins[found.path] = next((name for name, given in sources.items() if found.path in given), "default")
        values[found.path] = found.default
        if origins[found.path] != "default":
            try:
                values[found.path] = parsed(found, sources[origins[found.path]][found.path], origins[found.path])
            except ConfigError as error:
                problems.append(str(error))
    if not problems:
        return LoadedSection(built(cls, section_of(cls), values), values, origins, flags or {}, file)
    raise ConfigError(joined(problems))


def _file_of(environ: Mapping[str, str]) -> Path | None:
    given = environ.get(FILE_VARIABLE)
    return _expanded(FILE_VARIABLE, given) if given else None


def _expanded(name: str, given: str) -> Path:
    try:
        return path(given)
    except ValueError as error:
        raise ConfigError(f"{name} is {given!r}, but {error}") from error


def section_of(cls: type[Section]) -> str:
    return next(name for name, section in SECTIONS.items() if section is cls)


def keys(cls: type[Section]) -> list[Key]:
    """Every key of a section, in the order of the fields."""
    section = section_of(cls)
    return list(keys_below(cls, section))


def check_folder(name: str, file: Path | None) -> None:
    """Raises ConfigError where a file that is to be written has no folder."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(
            f"{name} {file} cannot be written: there is no folder {file.absolute().parent}; make it first"
        )


# ---------------------------------------------------------------- places


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where compiled kernels are kept between runs: PDCLUSTER_CACHE_DIR, or a folder of the user's cache directory."""
    environ = os.environ if environ is None else environ
    if own := environ.get(CACHE_VARIABLE):
        return _expanded(CACHE_VARIABLE, own)
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "pdcluster"
    except RuntimeError as error:
        raise ConfigError(
            f"this user has no home directory for compiled kernels; set {CACHE_VARIABLE} to a directory of its own"
        ) from error


# gRPC's library writes a line of its own for each handshake that fails. Before it is imported.
QUIET_GRPC: Mapping[str, str] = {"GRPC_VERBOSITY": "ERROR"}


def set_library_environment(values: Mapping[str, str]) -> None:
    """Tell a library what it only reads from the environment; a value that the user has set stays. Before the library
    is imported."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_environment(values: Mapping[str, str]) -> None:
    """Set variables that this process's own commands read later, over what the user set."""
    os.environ.update(values)


def set_for_library(names: Iterable[str]) -> list[str]:
    """Those of a library's variables that the user has set."""
    return [name for name in names if name in os.environ]
