"""What the connector and the engine rely on inside vLLM. A vLLM that changes one of these fails here, by its name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

SIGNATURES = {
    f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler.__init__": [
        "self",
        "vllm_config",
        "engine_id",
        "kv_cache_config",
    ],
    f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler.update_state_after_alloc": [
        "self",
        "request",
        "blocks",
        "num_external_tokens",
    ],
    f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler.build_connector_meta": ["self", "scheduler_output"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker.__init__": ["self", "vllm_config", "engine_id", "kv_cache_config"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker.start_load_kv": ["self", "metadata"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._read_blocks_for_req": ["self", "req_id", "meta"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._get_new_notifs": ["self"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._pop_done_transfers": ["self", "transfers"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._reap_expired_send_leases": ["self", "done_sending"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._handle_heartbeat": ["self", "payload"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._handle_failed_transfer": [
        "self",
        "req_id",
        "handle",
        "failed_req_ids",
        "record_failed_transfer",
    ],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker.shutdown": ["self"],
    f"{NIXL}.connector:NixlBaseConnector.__init__": ["self", "vllm_config", "role", "kv_cache_config"],
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ["self", "method", "timeout", "args", "kwargs"],
    "vllm.v1.engine.async_llm:AsyncLLM.abort": ["self", "request_id", "internal"],
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ["self", "timeout"],
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache": ["self", "reset_running_requests", "reset_connector"],
    "vllm.v1.engine.async_llm:AsyncLLM.compute_weight_checksums": ["self"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights": [
        "self",
        "weights_iterator",
        "weights_path",
        "is_checkpoint_format",
    ],
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading": [
        "self",
        "layer",
    ],
    "vllm.v1.metrics.loggers:StatLoggerBase.record": [
        "self",
        "scheduler_stats",
        "iteration_stats",
        "mm_cache_stats",
        "engine_idx",
    ],
}
# Names that a method's own text must hold: state that it keeps and that our halves read.
TEXTS = {
    f"{NIXL}.base_worker:NixlBaseConnectorWorker.__init__": [
        "_recving_metadata",
        "_recving_transfers",
        "_reqs_to_send",
        "_reqs_to_process",
        "_recv_failures",
        "consumer_notification_counts_by_req",
        "expected_consumer_notifications_by_req",
        "tp_mappings",
        "dst_num_blocks",
        "_remote_agents",
        "xfer_stats",
    ],
    f"{NIXL}.base_worker:NixlBaseConnectorWorker.get_transfer_results": [
        "self._get_new_notifs()",
        "self._pop_done_transfers(self._recving_transfers)",
        "self._recv_failures.update(newly_failed)",
        "self._reap_expired_send_leases(done_sending)",
    ],
    # The notice is the remote request's id and the number of consumers.
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._read_blocks": [
        'f"{remote_request_id}:{expected_consumers}".encode()'
    ],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker._get_new_notifs": ['msg.startswith("HB:")', 'msg.rsplit(":", 1)'],
    f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler.update_state_after_alloc": [
        "self._reqs_need_recv[request.request_id]",
        'params.get("do_remote_decode")',
    ],
    f"{NIXL}.base_scheduler:NixlBaseConnectorScheduler.build_connector_meta": ["self._reqs_need_recv.clear()"],
    # It says no while a block is in use, and forgets nothing then.
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": ["if num_used_blocks != 1", "return False"],
    # It goes on from what an earlier load began, unless that was closed.
    "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload": ["if info.can_load():"],
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing": ["info.reset()"],
    "vllm.v1.engine.output_processor:OutputProcessor.abort_requests": ["self.external_req_ids.pop(request_id, [])"],
}


def found(place: str) -> Any:
    module, _, path = place.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_the_version_is_the_pinned_one() -> None:
    import vllm

    assert vllm.__version__.startswith("0.32.")


@pytest.mark.parametrize("place", SIGNATURES)
def test_signature(place: str) -> None:
    assert list(inspect.signature(found(place)).parameters) == SIGNATURES[place]


@pytest.mark.parametrize("place", TEXTS)
def test_text(place: str) -> None:
    text = inspect.getsource(found(place))
    assert [words for words in TEXTS[place] if words not in text] == []


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("RemoteMeta", {"block_ids", "engine_id", "request_id", "host", "port"}),
        ("ReqMeta", {"local_block_ids", "remote", "awaiting_kvs"}),
    ],
)
def test_fields(name: str, fields: set[str]) -> None:
    cls = found(f"{NIXL}.metadata:{name}")
    assert fields <= {field.name for field in dataclasses.fields(cls)}
    assert not hasattr(cls, "__slots__"), "ours hang further attributes on it"


def test_an_engine_client_keeps_its_context() -> None:
    """Ours destroys it at the end."""
    assert "ctx" in {
        field.name for field in dataclasses.fields(found("vllm.v1.engine.core_client:BackgroundResources"))
    }


def test_heartbeats_carry_the_plain_request_id() -> None:
    """So they renew the lease of a request whose notices carry more."""
    text = inspect.getsource(found(f"{NIXL}.base_scheduler:NixlBaseConnectorScheduler.on_new_request"))
    assert 'params.get("remote_request_id")' in text


def test_our_half_of_the_workers_methods_clashes_with_none() -> None:
    from pdcluster.node.vllm.engine.connector import ParkingExtension

    worker = found("vllm.v1.worker.worker_base:WorkerBase")
    assert [name for name in dir(ParkingExtension) if not name.startswith("__") and hasattr(worker, name)] == []
