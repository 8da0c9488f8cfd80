"""vLLM's own command-line arguments, checked by vLLM's own parser, and those that the node sets itself."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pdcluster.core.errors import ConfigError
from pdcluster.core.sampling import MAX_LOGPROBS
from pdcluster.settings.config import change_environment

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

CONNECTOR: Final = "FencedNixlConnector"
CONNECTOR_MODULE: Final = "pdcluster.node.vllm.engine.connector"
EXTENSION: Final = f"{CONNECTOR_MODULE}.ParkingExtension"
DEFAULT_LEASE_S: Final = 30
# That vLLM keeps in memory, where its arguments do not say it.
DEFAULT_ADAPTERS: Final = 16
_WILDCARD_HOSTS: Final = frozenset({"", "*", "0.0.0.0", "::"})

# Fields of vLLM's arguments that the node owns, and what to do instead.
_RESERVED: Final = {
    "model": "give the model to the node",
    "kv_transfer_config": "the node sets it; give it the lease and the side channel",
    "kv_events_config": "the node sets it",
    "worker_extension_cls": "the node sets it",
    "logits_processors": "the node sets its own",
    "data_parallel_size": "start one node per replica",
    "pipeline_parallel_size": "NIXL reads from one pipeline stage only; use tensor parallelism",
    "disable_log_stats": "the node's load report needs the statistics",
    "stream_interval": "the node streams each token",
    "max_num_queued_reqs": "the node and the router keep the queues",
    "max_num_queued_tokens": "the node and the router keep the queues",
    "headless": "the node starts the whole engine",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a node's engine is started with."""

    # A directory or a name, as vLLM takes it. Both ends of a transfer must give the same.
    model: str
    # vLLM's own, such as ("--max-model-len", "4096").
    arguments: tuple[str, ...] = ()
    # Where engines exchange what a read needs: an address that peers reach, and a free port.
    side_host: str = "127.0.0.1"
    side_port: int = 5600
    lease_s: int = DEFAULT_LEASE_S
    # Values of vLLM's KVEventsConfig; None: changes of the prefix cache are not published.
    events: Mapping[str, object] | None = None
    # LoRA adapters are loaded right after the start.
    has_adapters: bool = False
    # Its processes get as long to end by themselves.
    close_s: float = 10.0
    connector: str = CONNECTOR
    # None for a connector of vLLM's own.
    connector_module: str | None = CONNECTOR_MODULE
    extension: str = EXTENSION


def set_engine_environment(options: EngineOptions) -> None:
    """What vLLM reads from the environment only. Before the first import of vllm."""
    change_environment(
        {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": options.side_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(options.side_port),
            # Children start afresh: our threads and sockets are not copied into them.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
        }
    )


def parse_engine_arguments(options: EngineOptions) -> AsyncEngineArgs:
    """vLLM's arguments with the node's. Raises ConfigError with what vLLM says of a bad one."""
    _check_options(options)
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser = _parser()
    defaults = parser.parse_args([])
    try:
        namespace = parser.parse_args(list(options.arguments))
        _refuse_reserved(namespace, defaults)
        namespace.model = options.model
        given = AsyncEngineArgs.from_cli_args(namespace)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"arguments of vLLM: {error}") from error
    given.kv_transfer_config = transfer_config(options)
    given.worker_extension_cls = options.extension
    if given.max_logprobs == defaults.max_logprobs:
        given.max_logprobs = MAX_LOGPROBS
    given.enable_lora = given.enable_lora or options.has_adapters
    if given.enable_lora and given.max_cpu_loras is None:
        given.max_cpu_loras = max(given.max_loras, DEFAULT_ADAPTERS)
    if options.events is not None:
        given.kv_events_config = _events_config(options.events)
    return given


def transfer_config(options: EngineOptions) -> Any:
    """Any node may be told to prefill or to decode, so each can do both."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=options.connector,
        kv_connector_module_path=options.connector_module,
        kv_role="kv_both",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"kv_lease_duration": options.lease_s},
    )


def _events_config(values: Mapping[str, object]) -> Any:
    from vllm.config.kv_events import KVEventsConfig

    return KVEventsConfig(**values)


def _parser() -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class NamingParser(FlexibleArgumentParser):
        """Raises what argparse would print before it ends the process."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"arguments of vLLM: {message}")

    return AsyncEngineArgs.add_cli_args(NamingParser(prog="vllm", add_help=False))


def _check_options(options: EngineOptions) -> None:
    if options.side_host in _WILDCARD_HOSTS:
        raise ConfigError(f"side_host {options.side_host!r} is no address that peers can reach; give the node's own")
    if not 1 <= options.side_port <= 65535:
        raise ConfigError(f"side_port {options.side_port} must be 1 to 65535")
    if options.lease_s < 1:
        raise ConfigError(f"lease_s {options.lease_s} must be 1 or more")


def _refuse_reserved(given: Namespace, defaults: Namespace) -> None:
    for field, way_out in _RESERVED.items():
        if getattr(given, field, None) != getattr(defaults, field, None):
            raise ConfigError(f"--{field.replace('_', '-')} cannot be given to vLLM here: {way_out}")
