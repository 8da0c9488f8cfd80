from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role

class KVLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "page_tokens", "dtype")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., page_tokens: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("model", "weights", "protocol", "hash_block_tokens", "layout", "arithmetic", "weight_groups", "engine")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    protocol: int
    hash_block_tokens: int
    layout: KVLayout
    arithmetic: str
    weight_groups: bytes
    engine: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., protocol: _Optional[int] = ..., hash_block_tokens: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., arithmetic: _Optional[str] = ..., weight_groups: _Optional[bytes] = ..., engine: _Optional[str] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("pulls", "parks_s", "digests", "keyed_sampling", "estimated_cost", "first_token", "embeds", "adapters")
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PARKS_S_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    KEYED_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_COST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    pulls: bool
    parks_s: float
    digests: bool
    keyed_sampling: bool
    estimated_cost: bool
    first_token: str
    embeds: bool
    adapters: int
    def __init__(self, pulls: _Optional[bool] = ..., parks_s: _Optional[float] = ..., digests: _Optional[bool] = ..., keyed_sampling: _Optional[bool] = ..., estimated_cost: _Optional[bool] = ..., first_token: _Optional[str] = ..., embeds: _Optional[bool] = ..., adapters: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class WeightsState(_message.Message):
    __slots__ = ("label", "epoch", "share", "source", "former", "digest")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    label: str
    epoch: int
    share: float
    source: str
    former: FormerWeights
    digest: str
    def __init__(self, label: _Optional[str] = ..., epoch: _Optional[int] = ..., share: _Optional[float] = ..., source: _Optional[str] = ..., former: _Optional[_Union[FormerWeights, _Mapping]] = ..., digest: _Optional[str] = ...) -> None: ...

class FormerWeights(_message.Message):
    __slots__ = ("label", "digest", "source")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    label: str
    digest: str
    source: str
    def __init__(self, label: _Optional[str] = ..., digest: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class NodeCard(_message.Message):
    __slots__ = ("node", "incarnation", "role", "address", "model", "fingerprint", "fingerprint_digest", "max_len", "vocab_size", "num_pages", "eos_ids", "tokenizer_hash", "backends", "device", "draining", "pid", "model_aliases", "version", "capabilities", "adapters", "link_key", "weights", "sleeping")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ALIASES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LINK_KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SLEEPING_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    role: Role
    address: str
    model: str
    fingerprint: Fingerprint
    fingerprint_digest: str
    max_len: int
    vocab_size: int
    num_pages: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_hash: str
    backends: _containers.RepeatedScalarFieldContainer[str]
    device: str
    draining: bool
    pid: int
    model_aliases: _containers.RepeatedScalarFieldContainer[str]
    version: str
    capabilities: Capabilities
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    link_key: str
    weights: WeightsState
    sleeping: bool
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., fingerprint_digest: _Optional[str] = ..., max_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., tokenizer_hash: _Optional[str] = ..., backends: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., draining: _Optional[bool] = ..., pid: _Optional[int] = ..., model_aliases: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., link_key: _Optional[str] = ..., weights: _Optional[_Union[WeightsState, _Mapping]] = ..., sleeping: _Optional[bool] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("card", "again")
    CARD_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    card: NodeCard
    again: bool
    def __init__(self, card: _Optional[_Union[NodeCard, _Mapping]] = ..., again: _Optional[bool] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("node", "incarnation", "role", "draining", "adapters", "weights_share")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHARE_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    role: Role
    draining: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    weights_share: float
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., draining: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., weights_share: _Optional[float] = ...) -> None: ...

class KeepAliveReply(_message.Message):
    __slots__ = ("known", "lease_s")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    known: bool
    lease_s: float
    def __init__(self, known: _Optional[bool] = ..., lease_s: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("boot", "version", "settling", "nodes")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    boot: str
    version: int
    settling: bool
    nodes: _containers.RepeatedCompositeFieldContainer[NodeCard]
    def __init__(self, boot: _Optional[str] = ..., version: _Optional[int] = ..., settling: _Optional[bool] = ..., nodes: _Optional[_Iterable[_Union[NodeCard, _Mapping]]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node", "incarnation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RoleDemand(_message.Message):
    __slots__ = ("role", "prompt_seconds", "output_tokens")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    prompt_seconds: float
    output_tokens: float
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., prompt_seconds: _Optional[float] = ..., output_tokens: _Optional[float] = ...) -> None: ...

class RouterDemand(_message.Message):
    __slots__ = ("router", "number", "roles", "held_seconds", "held")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    router: str
    number: int
    roles: _containers.RepeatedCompositeFieldContainer[RoleDemand]
    held_seconds: float
    held: int
    def __init__(self, router: _Optional[str] = ..., number: _Optional[int] = ..., roles: _Optional[_Iterable[_Union[RoleDemand, _Mapping]]] = ..., held_seconds: _Optional[float] = ..., held: _Optional[int] = ...) -> None: ...

class ShareDemandRequest(_message.Message):
    __slots__ = ("demand",)
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    demand: RouterDemand
    def __init__(self, demand: _Optional[_Union[RouterDemand, _Mapping]] = ...) -> None: ...

class ShareDemandReply(_message.Message):
    __slots__ = ("others",)
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    others: _containers.RepeatedCompositeFieldContainer[RouterDemand]
    def __init__(self, others: _Optional[_Iterable[_Union[RouterDemand, _Mapping]]] = ...) -> None: ...
