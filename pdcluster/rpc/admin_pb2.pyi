from pdcluster.rpc import bootstrap_pb2 as _bootstrap_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "incarnation", "role", "state", "address", "model", "device", "backends", "max_len", "load", "in_flight", "version", "models", "engine", "capabilities", "adapters", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    role: _bootstrap_pb2.Role
    state: str
    address: str
    model: str
    device: str
    backends: _containers.RepeatedScalarFieldContainer[str]
    max_len: int
    load: NodeLoad
    in_flight: int
    version: str
    models: _containers.RepeatedScalarFieldContainer[str]
    engine: str
    capabilities: _bootstrap_pb2.Capabilities
    adapters: _containers.RepeatedCompositeFieldContainer[_bootstrap_pb2.Adapter]
    weights: _bootstrap_pb2.WeightsState
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[_bootstrap_pb2.Role, str]] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., device: _Optional[str] = ..., backends: _Optional[_Iterable[str]] = ..., max_len: _Optional[int] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., in_flight: _Optional[int] = ..., version: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., engine: _Optional[str] = ..., capabilities: _Optional[_Union[_bootstrap_pb2.Capabilities, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[_bootstrap_pb2.Adapter, _Mapping]]] = ..., weights: _Optional[_Union[_bootstrap_pb2.WeightsState, _Mapping]] = ...) -> None: ...

class PushedTensor(_message.Message):
    __slots__ = ("name", "kind", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenPushRequest(_message.Message):
    __slots__ = ("label", "writer", "writer_incarnation", "tensors")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WRITER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    label: str
    writer: str
    writer_incarnation: str
    tensors: _containers.RepeatedCompositeFieldContainer[PushedTensor]
    def __init__(self, label: _Optional[str] = ..., writer: _Optional[str] = ..., writer_incarnation: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[PushedTensor, _Mapping]]] = ...) -> None: ...

class MediumAdvert(_message.Message):
    __slots__ = ("name", "advert")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    name: str
    advert: bytes
    def __init__(self, name: _Optional[str] = ..., advert: _Optional[bytes] = ...) -> None: ...

class OpenPushReply(_message.Message):
    __slots__ = ("node", "epoch", "is_there", "incarnation", "nonce", "region", "starts", "adverts", "is_sealed")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_THERE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ADVERTS_FIELD_NUMBER: _ClassVar[int]
    IS_SEALED_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    is_there: bool
    incarnation: str
    nonce: int
    region: int
    starts: _containers.RepeatedScalarFieldContainer[int]
    adverts: _containers.RepeatedCompositeFieldContainer[MediumAdvert]
    is_sealed: bool
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., is_there: _Optional[bool] = ..., incarnation: _Optional[str] = ..., nonce: _Optional[int] = ..., region: _Optional[int] = ..., starts: _Optional[_Iterable[int]] = ..., adverts: _Optional[_Iterable[_Union[MediumAdvert, _Mapping]]] = ..., is_sealed: _Optional[bool] = ...) -> None: ...

class CommitPushRequest(_message.Message):
    __slots__ = ("node", "label", "epoch", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    label: str
    epoch: int
    digests: _containers.ScalarMap[str, bytes]
    def __init__(self, node: _Optional[str] = ..., label: _Optional[str] = ..., epoch: _Optional[int] = ..., digests: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class CommitPushReply(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("source", "label", "max_unavailable", "canary_percent", "finish_s", "releases_first")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MAX_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    CANARY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    FINISH_S_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIRST_FIELD_NUMBER: _ClassVar[int]
    source: str
    label: str
    max_unavailable: int
    canary_percent: float
    finish_s: float
    releases_first: bool
    def __init__(self, source: _Optional[str] = ..., label: _Optional[str] = ..., max_unavailable: _Optional[int] = ..., canary_percent: _Optional[float] = ..., finish_s: _Optional[float] = ..., releases_first: _Optional[bool] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode", "max_pause_s")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    mode: str
    max_pause_s: float
    def __init__(self, mode: _Optional[str] = ..., max_pause_s: _Optional[float] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("was_paused",)
    WAS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    was_paused: bool
    def __init__(self, was_paused: _Optional[bool] = ...) -> None: ...

class GetPauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPauseReply(_message.Message):
    __slots__ = ("is_paused",)
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    is_paused: bool
    def __init__(self, is_paused: _Optional[bool] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("mode", "max_pause_s", "finish_s")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    FINISH_S_FIELD_NUMBER: _ClassVar[int]
    mode: str
    max_pause_s: float
    finish_s: float
    def __init__(self, mode: _Optional[str] = ..., max_pause_s: _Optional[float] = ..., finish_s: _Optional[float] = ...) -> None: ...

class SleepReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class UndoWeightsRequest(_message.Message):
    __slots__ = ("finish_s",)
    FINISH_S_FIELD_NUMBER: _ClassVar[int]
    finish_s: float
    def __init__(self, finish_s: _Optional[float] = ...) -> None: ...

class RolloutProgress(_message.Message):
    __slots__ = ("node", "stage", "label", "epoch", "digest", "done", "nodes", "running", "context_tokens", "seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    stage: str
    label: str
    epoch: int
    digest: str
    done: int
    nodes: int
    running: int
    context_tokens: int
    seconds: float
    def __init__(self, node: _Optional[str] = ..., stage: _Optional[str] = ..., label: _Optional[str] = ..., epoch: _Optional[int] = ..., digest: _Optional[str] = ..., done: _Optional[int] = ..., nodes: _Optional[int] = ..., running: _Optional[int] = ..., context_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("waiting", "running", "waiting_tokens", "context_tokens", "slots", "slots_used", "pages_total", "pages_free", "pages_cached", "pages_quarantined", "pages_pinned", "pages_parked", "steps", "itl_s")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PAGES_PINNED_FIELD_NUMBER: _ClassVar[int]
    PAGES_PARKED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    waiting_tokens: int
    context_tokens: int
    slots: int
    slots_used: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_quarantined: int
    pages_pinned: int
    pages_parked: int
    steps: int
    itl_s: float
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., slots_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_quarantined: _Optional[int] = ..., pages_pinned: _Optional[int] = ..., pages_parked: _Optional[int] = ..., steps: _Optional[int] = ..., itl_s: _Optional[float] = ...) -> None: ...

class NodeCost(_message.Message):
    __slots__ = ("prefill_fixed_s", "prefill_token_s", "prefill_pair_s", "decode_fixed_s", "decode_row_s", "decode_context_s", "chunk_tokens", "prefill_samples", "decode_samples", "prefill_spread", "prefill_doubt", "prefill_root", "decode_spread", "decode_doubt", "decode_root")
    PREFILL_FIXED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIXED_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROW_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DECODE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SPREAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DOUBT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROOT_FIELD_NUMBER: _ClassVar[int]
    DECODE_SPREAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_DOUBT_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROOT_FIELD_NUMBER: _ClassVar[int]
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_fixed_s: float
    decode_row_s: float
    decode_context_s: float
    chunk_tokens: int
    prefill_samples: int
    decode_samples: int
    prefill_spread: float
    prefill_doubt: float
    prefill_root: _containers.RepeatedScalarFieldContainer[float]
    decode_spread: float
    decode_doubt: float
    decode_root: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, prefill_fixed_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., prefill_pair_s: _Optional[float] = ..., decode_fixed_s: _Optional[float] = ..., decode_row_s: _Optional[float] = ..., decode_context_s: _Optional[float] = ..., chunk_tokens: _Optional[int] = ..., prefill_samples: _Optional[int] = ..., decode_samples: _Optional[int] = ..., prefill_spread: _Optional[float] = ..., prefill_doubt: _Optional[float] = ..., prefill_root: _Optional[_Iterable[float]] = ..., decode_spread: _Optional[float] = ..., decode_doubt: _Optional[float] = ..., decode_root: _Optional[_Iterable[float]] = ...) -> None: ...

class Path(_message.Message):
    __slots__ = ("peer", "backend", "bytes_per_s", "breaker", "is_chosen")
    PEER_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    peer: str
    backend: str
    bytes_per_s: float
    breaker: str
    is_chosen: bool
    def __init__(self, peer: _Optional[str] = ..., backend: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., breaker: _Optional[str] = ..., is_chosen: _Optional[bool] = ...) -> None: ...

class DescribeNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("node", "paths", "requests", "events", "silent_workers", "cost", "received")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    node: Node
    paths: _containers.RepeatedCompositeFieldContainer[Path]
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    silent_workers: _containers.RepeatedScalarFieldContainer[str]
    cost: NodeCost
    received: _containers.RepeatedCompositeFieldContainer[Path]
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., paths: _Optional[_Iterable[_Union[Path, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., silent_workers: _Optional[_Iterable[str]] = ..., cost: _Optional[_Union[NodeCost, _Mapping]] = ..., received: _Optional[_Iterable[_Union[Path, _Mapping]]] = ...) -> None: ...

class CordonRequest(_message.Message):
    __slots__ = ("node", "cordoned")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    node: str
    cordoned: bool
    def __init__(self, node: _Optional[str] = ..., cordoned: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "deadline_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    deadline_s: float
    def __init__(self, node: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("waiting", "running", "pages_parked", "safe_to_stop", "moved")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PAGES_PARKED_FIELD_NUMBER: _ClassVar[int]
    SAFE_TO_STOP_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    pages_parked: int
    safe_to_stop: bool
    moved: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., pages_parked: _Optional[int] = ..., safe_to_stop: _Optional[bool] = ..., moved: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("node", "role")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: _bootstrap_pb2.Role
    def __init__(self, node: _Optional[str] = ..., role: _Optional[_Union[_bootstrap_pb2.Role, str]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "nodes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "nodes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    name: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeAdapter(_message.Message):
    __slots__ = ("node", "error", "digest")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    node: str
    error: str
    digest: str
    def __init__(self, node: _Optional[str] = ..., error: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class ChangeAdapterReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeAdapter]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeAdapter, _Mapping]]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "model", "state", "mode", "prefill", "decode", "prompt_tokens", "output_tokens", "attempts", "age_s", "placed_s", "ttft_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PLACED_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    state: str
    mode: str
    prefill: str
    decode: str
    prompt_tokens: int
    output_tokens: int
    attempts: int
    age_s: float
    placed_s: float
    ttft_s: float
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[str] = ..., mode: _Optional[str] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., age_s: _Optional[float] = ..., placed_s: _Optional[float] = ..., ttft_s: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ListRequestsReply(_message.Message):
    __slots__ = ("requests", "silent_workers")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    silent_workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., silent_workers: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelRequestReply(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("json", "text")
    JSON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    json: _containers.RepeatedScalarFieldContainer[str]
    text: str
    def __init__(self, json: _Optional[_Iterable[str]] = ..., text: _Optional[str] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Policy(_message.Message):
    __slots__ = ("live", "shadow", "known", "shadow_agreed", "shadow_watched")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    SHADOW_AGREED_FIELD_NUMBER: _ClassVar[int]
    SHADOW_WATCHED_FIELD_NUMBER: _ClassVar[int]
    live: str
    shadow: str
    known: _containers.RepeatedScalarFieldContainer[str]
    shadow_agreed: int
    shadow_watched: int
    def __init__(self, live: _Optional[str] = ..., shadow: _Optional[str] = ..., known: _Optional[_Iterable[str]] = ..., shadow_agreed: _Optional[int] = ..., shadow_watched: _Optional[int] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("live", "shadow", "dry_run")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    live: str
    shadow: str
    dry_run: bool
    def __init__(self, live: _Optional[str] = ..., shadow: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: bool
    def __init__(self, metrics: _Optional[bool] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("name", "version", "status", "reasons", "can_serve", "metrics", "warnings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    CAN_SERVE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    status: str
    reasons: _containers.RepeatedScalarFieldContainer[str]
    can_serve: bool
    metrics: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., status: _Optional[str] = ..., reasons: _Optional[_Iterable[str]] = ..., can_serve: _Optional[bool] = ..., metrics: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: bool
    def __init__(self, digests: _Optional[bool] = ...) -> None: ...

class CachedNode(_message.Message):
    __slots__ = ("node", "blocks", "incarnation", "is_exact", "digest")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    node: str
    blocks: int
    incarnation: str
    is_exact: bool
    digest: str
    def __init__(self, node: _Optional[str] = ..., blocks: _Optional[int] = ..., incarnation: _Optional[str] = ..., is_exact: _Optional[bool] = ..., digest: _Optional[str] = ...) -> None: ...

class CacheView(_message.Message):
    __slots__ = ("worker", "entries", "bytes", "nodes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    entries: int
    bytes: int
    nodes: _containers.RepeatedCompositeFieldContainer[CachedNode]
    def __init__(self, worker: _Optional[str] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[CachedNode, _Mapping]]] = ...) -> None: ...

class CacheReply(_message.Message):
    __slots__ = ("entries", "bytes", "nodes", "views", "silent_workers")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    SILENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    entries: int
    bytes: int
    nodes: _containers.RepeatedCompositeFieldContainer[CachedNode]
    views: _containers.RepeatedCompositeFieldContainer[CacheView]
    silent_workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entries: _Optional[int] = ..., bytes: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[CachedNode, _Mapping]]] = ..., views: _Optional[_Iterable[_Union[CacheView, _Mapping]]] = ..., silent_workers: _Optional[_Iterable[str]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("since", "follow")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    since: int
    follow: bool
    def __init__(self, since: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "at", "kind", "subject", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    at: float
    kind: str
    subject: str
    message: str
    def __init__(self, sequence: _Optional[int] = ..., at: _Optional[float] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
