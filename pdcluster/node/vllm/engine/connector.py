"""vLLM's NixlConnector with two additions: reads are confirmed before their KV is used, and parked KV can be freed.

vLLM loads this file by name in its scheduler and its workers. `tests/vllm/test_contract.py` pins what it relies on.
On the node that parks, the scheduler tells its workers each request's fence, and the worker keeps a `ReadBook`.
On the node that reads, a worker holds back "received" until each rank that it read from has confirmed. A refused read
is reported as a failed load: with the policy "fail" nothing is sampled or cached from its blocks, and the request ends
with an error. A prompt that the reader has in its own cache needs no confirmation, for nothing is read.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from pdcluster.node.vllm.engine.read_confirmation import (
    ConfirmationClient,
    ConfirmationServer,
    ReadBook,
    ReadNotice,
    ReadQuestion,
    parse_notice,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# Keys of ours in a request's kv_transfer_params.
FENCE_PARAM: Final = "pdcluster_fence"
ADDRESSES_PARAM: Final = "pdcluster_addresses"


@dataclass(frozen=True, slots=True)
class FencedRead:
    """What a worker needs to confirm a read."""

    reader: str
    fence: str
    # Of the holder's tensor-parallel ranks.
    addresses: tuple[str, ...]


class FencedScheduler(NixlPullConnectorScheduler):
    """Tells workers which fence a request carries. Runs in the engine's scheduler process."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._new_fences: dict[str, str] = {}

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._new_fences[request.request_id] = str(params.get(FENCE_PARAM, ""))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlConnectorMetadata:
        reads = {key: _read_of(request) for key, (request, *_) in self._reqs_need_recv.items()}
        meta = super().build_connector_meta(scheduler_output)
        meta.fenced_reads = reads
        meta.new_fences, self._new_fences = self._new_fences, {}
        return meta


def _read_of(request: Request) -> FencedRead:
    params = request.kv_transfer_params or {}
    return FencedRead(
        reader=secrets.token_hex(8),
        fence=str(params.get(FENCE_PARAM, "")),
        addresses=tuple(params.get(ADDRESSES_PARAM, ())),
    )


class FencedWorker(NixlPullConnectorWorker):
    """Confirms its reads, and keeps the books for those who read from it. One in each worker process."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._book = ReadBook()
        self._server = ConfirmationServer(self._book, envs.VLLM_NIXL_SIDE_CHANNEL_HOST)
        self._client = ConfirmationClient()
        # Released before this worker knew that they are finished.
        self._released: set[str] = set()

    @property
    def confirmation_address(self) -> str:
        return self._server.address

    def release(self, requests: list[str]) -> None:
        """Nobody may read these requests. The next step frees their blocks."""
        self._released.update(filter(self._book.release, requests))

    def shutdown(self) -> None:
        if hasattr(self, "_client"):
            self._server.close()
            self._client.close()
        super().shutdown()

    # vLLM calls these once a step, in this order.

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        for request, fence in metadata.new_fences.items():
            self._book.hold(request, fence)
        for key, meta in metadata.reqs_to_recv.items():
            meta.fenced_read = metadata.fenced_reads[key]
            meta.holder_request = meta.remote.request_id
            notice = ReadNotice(meta.holder_request, meta.fenced_read.reader, meta.fenced_read.fence)
            meta.remote.request_id = notice.name
        super().start_load_kv(metadata)
        for request in metadata.reqs_not_processed:
            self._forget(request)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if meta.remote.engine_id in self._remote_agents and not self._has_blocks_for(meta):
            logger.error("the reference of %s names blocks that its holder cannot have", req_id)
            self._handle_failed_transfer(req_id, None, self._recv_failures)
            return
        super()._read_blocks_for_req(req_id, meta)

    def _get_new_notifs(self) -> set[str]:
        done: set[str] = set()
        for notices in self.nixl_wrapper.get_new_notifs().values():
            for notice in notices:
                text = notice.decode("utf-8", "replace")
                if text.startswith("HB:"):
                    self._handle_heartbeat(text[3:])
                elif request := self._count_notice(text):
                    done.add(request)
        return done

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Requests whose reads are over, without those that still wait for their confirmation; and failed ones."""
        done, failed = super()._pop_done_transfers(transfers)
        ended = {key for key in done if key not in failed and key not in self._recv_failures}
        for key in ended:
            self._ask(key, self._recving_metadata[key])
        confirmed, refused = self._client.collect()
        for _ in refused:
            self.xfer_stats.record_failed_transfer()
        return (done - ended) | confirmed | refused, failed | refused

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        for request in self._released & self._reqs_to_send.keys():
            self.expected_consumer_notifications_by_req.pop(request, None)
            self._free(request)
            done_sending.add(request)
        held = set(self._reqs_to_send)
        super()._reap_expired_send_leases(done_sending)
        for request in held.difference(self._reqs_to_send):
            self._forget(request)

    # Ours.

    def _ask(self, key: str, meta: ReqMeta) -> None:
        read = meta.fenced_read
        ranks = self.tp_mappings[meta.remote.engine_id].all_source_ranks
        question = ReadQuestion(meta.holder_request, read.reader, read.fence)
        # A rank beyond the reference's addresses would be a handshake that contradicts the reference.
        self._client.ask(key, question, [read.addresses[rank] for rank in ranks])

    def _count_notice(self, text: str) -> str | None:
        """The request that has now been read by all its consumers."""
        notice = parse_notice(text)
        if notice is None or not self._is_good(notice):
            self.xfer_stats.record_notification_after_expiry()
            logger.warning("a read of parked KV that is not held for its reader: %.200s", text)
            return None
        request = notice.request
        self.consumer_notification_counts_by_req[request] += 1
        if self.consumer_notification_counts_by_req[request] < notice.consumers:
            return None
        self._free(request)
        return request

    def _is_good(self, notice: ReadNotice) -> bool:
        question = ReadQuestion(notice.request, notice.reader, notice.fence)
        return notice.request in self._reqs_to_process and self._book.confirm(question)

    def _free(self, request: str) -> None:
        """vLLM frees the blocks of a request that is reported as sent."""
        self.consumer_notification_counts_by_req.pop(request, None)
        self._reqs_to_process.remove(request)
        self._reqs_to_send.pop(request, None)
        self._forget(request)

    def _forget(self, request: str) -> None:
        self._book.forget(request)
        self._released.discard(request)

    def _has_blocks_for(self, meta: ReqMeta) -> bool:
        """Whether the holder can have these blocks, and enough of them: vLLM asserts that, and the worker would die."""
        engine = meta.remote.engine_id
        if any(rank >= len(meta.fenced_read.addresses) for rank in self.tp_mappings[engine].all_source_ranks):
            return False
        if not any(meta.local_block_ids):
            return True
        info = self.transfer_topo.get_engine_info(engine)
        num_blocks = self.dst_num_blocks[engine] // info.remote_physical_blocks_per_logical
        if any(block >= num_blocks for group in meta.remote.block_ids for block in group):
            return False
        if len(meta.remote.block_ids) != len(meta.local_block_ids):
            return False
        # Groups of windows and states are cut by rules of vLLM's own.
        return len(meta.local_block_ids) > 1 or len(meta.local_block_ids[0]) <= len(meta.remote.block_ids[0])


class FencedNixlConnector(NixlPullConnector):
    """What `kv_connector` names. Builds our halves in the place of vLLM's."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Not NixlPullConnector's own: it would start a NIXL agent that nobody uses.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = FencedScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = FencedWorker(vllm_config, self.engine_id, kv_cache_config)


class ParkingExtension:
    """Methods that vLLM adds to its workers, for the engine's calls to all of them (`worker_extension_cls`)."""

    def confirmation_address(self) -> str:
        """Empty where nothing is handed over."""
        return str(_worker().confirmation_address) if has_kv_transfer_group() else ""

    def num_cache_groups(self) -> tuple[int, int]:
        """All of them, and those that a reference names."""
        if not has_kv_transfer_group():
            return len(self.model_runner.kv_cache_config.kv_cache_groups), 0  # type: ignore[attr-defined]
        config = _worker().kv_cache_config
        return len(config.kv_cache_groups), len(config.transfer_groups)

    def release_parked(self, requests: list[str]) -> None:
        _worker().release(requests)

    def load_weights_from(self, path: str) -> None:
        """Read a checkpoint of the model into the weights that serve, by vLLM's own call. Where that fails in the
        middle, its books of layers are closed: otherwise the next load would add to what this one has begun.

        vLLM prepares an output layer that shares its weight with the embedding only once. On CPUs such a layer keeps
        packed weights of its own, which would stay the old ones.
        """
        worker: Any = self
        try:
            worker.reload_weights(weights_path=path)
        except Exception:
            with set_current_vllm_config(worker.vllm_config):
                finalize_layerwise_reload(worker.model_runner.get_model(), worker.vllm_config.model_config)
            raise
        for layer in worker.model_runner.get_model().modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)


def _worker() -> Any:
    return get_kv_transfer_group().connector_worker
