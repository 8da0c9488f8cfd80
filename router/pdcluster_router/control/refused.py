"""Calls of vLLM and SGLang that have no meaning here, each with the reason and the way out."""

from __future__ import annotations

from pdcluster_router.control.parameters import PUSH_INSTEAD

NO_GROUP = f"there are no groups of NCCL, so nothing is to be set up; {PUSH_INSTEAD}"
NO_PICKLE = f"tensors that come pickled run code of whoever sends them; {PUSH_INSTEAD}"
NO_RENAMING = "a label stays with its weights; give weight_version when you load them"
NOT_READ_BACK = "weights are not read back; /get_weight_version says their digests"
CANCEL_INSTEAD = "use pdctl cancel for some requests, or /pause?mode=abort and /resume for all"

REFUSED: dict[str, str] = {
    # vLLM's
    "/init_weight_transfer_engine": NO_GROUP,
    "/get_world_size": NO_GROUP,
    "/start_draft_weight_update": "nodes have no draft model; use /start_weight_update",
    "/weight_checker": NOT_READ_BACK,
    "/abort_requests": CANCEL_INSTEAD,
    "/reset_mm_cache": "nodes take text only and have no such cache",
    "/reset_encoder_cache": "nodes take text only and have no such cache",
    "/collective_rpc": "nobody runs code in nodes; use the calls of this table in docs/weights.md",
    # SGLang's
    "/update_weights_from_tensor": NO_PICKLE,
    "/update_weights_from_ipc": NO_PICKLE,
    "/update_weights_from_distributed": NO_GROUP,
    "/init_weights_update_group": NO_GROUP,
    "/destroy_weights_update_group": NO_GROUP,
    "/init_weights_send_group_for_remote_instance": NO_GROUP,
    "/send_weights_to_remote_instance": NO_GROUP,
    "/get_weights_by_name": NOT_READ_BACK,
    "/weights_checker": NOT_READ_BACK,
    "/abort_request": CANCEL_INSTEAD,
    # both
    "/update_weight_version": NO_RENAMING,
}
