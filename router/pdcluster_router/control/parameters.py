"""What trainers say: the parameters of each call, in vLLM's or SGLang's words, and their rules.

1. They come in the query, as a JSON object, or in both, each once.
2. Names that nobody knows are refused. So are values that would mix weights, need pickle, or mean nothing here.
3. What is only about memory of CUDA (torch_empty_cache, recapture_cuda_graph) is taken and has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from pdcluster.core.errors import BadRequest
from pdcluster_router.queueing.pauses import USUAL_PAUSE_S, PauseMode, check_pause, pause_mode

P = TypeVar("P", bound="Parameters")

MAX_QUERY_FIELDS = 32
# Parameters that a query may repeat.
LISTS = ("tags",)
# What a node may take to end its work, unless the trainer says so: as for `pdctl weights load`.
USUAL_FINISH_S = 600.0
PUSH_INSTEAD = (
    "push tensors with pdcluster.weights.publisher.Publisher to the Admin address, or write them to a directory for "
    "/update_weights_from_disk"
)
# What names parts of memory. Nodes release and wake whole.
ALL_PARTS = {"weights", "kv_cache"}
KNOWN_PARTS = ALL_PARTS | {"cuda_graph"}


class Unsupported(BadRequest):
    """A name that vLLM or SGLang knows, with a meaning that a cluster must not have."""

    code = "unsupported"


class Conflict(BadRequest):
    """The call comes at a wrong time."""

    code = "conflict"
    http_status = 409


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Of a call without any."""

    def check(self) -> None:
        """Raises BadRequest for values that mean nothing here."""


class PauseParameters(Parameters, frozen=True):
    """vLLM's. max_pause_s: after which the pause ends by itself."""

    mode: str = "abort"
    wait_for_inflight_requests: bool = False
    clear_cache: bool = True
    max_pause_s: float = USUAL_PAUSE_S

    def check(self) -> None:
        _refuse_kept_cache("clear_cache", self.clear_cache)
        if self.wait_for_inflight_requests and self.mode == "keep":
            raise BadRequest("wait_for_inflight_requests is mode=wait, and mode is keep; say one", "mode")

    @property
    def pause_mode(self) -> PauseMode:
        return "wait" if self.wait_for_inflight_requests else pause_mode(self.mode)


class PauseGenerationParameters(Parameters, frozen=True):
    """SGLang's."""

    mode: str = "abort"
    max_pause_s: float = USUAL_PAUSE_S

    @property
    def pause_mode(self) -> PauseMode:
        if self.mode == "abort":
            return "abort"
        if self.mode == "retract":
            return "keep"
        if self.mode == "in_place":
            raise Unsupported(
                "mode in_place keeps KV of the old weights under new ones; use retract, which computes it anew", "mode"
            )
        raise BadRequest(f"mode is {self.mode[:100]!r}, allowed are abort, retract", "mode")


class ContinueParameters(Parameters, frozen=True):
    torch_empty_cache: bool = True


class FlushParameters(Parameters, frozen=True):
    """SGLang's. timeout: how long to wait for running requests."""

    timeout: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class ResetCacheParameters(Parameters, frozen=True):
    """vLLM's."""

    reset_running_requests: bool = False
    reset_external: bool = False

    def check(self) -> None:
        if self.reset_running_requests:
            raise Unsupported("reset_running_requests is refused: /pause?mode=keep takes requests off their nodes",
                              "reset_running_requests")  # fmt: skip
        if self.reset_external:
            raise Unsupported("reset_external is refused: nodes keep KV nowhere else", "reset_external")


class SleepParameters(Parameters, frozen=True):
    """vLLM's. level: 1 and 2 give all memory back. finish_s: for what runs for other routers."""

    level: int = 1
    mode: str = "abort"
    max_pause_s: float = USUAL_PAUSE_S
    finish_s: float = 0.0

    def check(self) -> None:
        if self.level == 0:
            raise Unsupported("level 0 pauses and frees nothing; use /pause", "level")
        if self.level not in (1, 2):
            raise BadRequest(f"level is {self.level}, allowed are 1 and 2", "level")


class WakeParameters(Parameters, frozen=True):
    tags: list[str] | None = None

    def check(self) -> None:
        _check_parts(self.tags, "sleep and wake whole")


class ReleaseParameters(Parameters, frozen=True):
    """SGLang's."""

    tags: list[str] | None = None
    max_pause_s: float = USUAL_PAUSE_S
    finish_s: float = 0.0

    def check(self) -> None:
        _check_parts(self.tags, "release all or nothing")


class DiskSource(Parameters, frozen=True):
    """Where weights come from: a directory or GGUF file on the nodes' machines, or ORG/NAME of a hub."""

    model_path: Annotated[str, msgspec.Meta(min_length=1)]
    load_format: str | None = None

    def check(self) -> None:
        if self.load_format not in (None, "auto"):
            raise Unsupported(
                f"load_format {self.load_format[:100]!r} is refused: files say their own format; leave it out",
                "load_format",
            )


class DiskUpdate(DiskSource, frozen=True):
    """SGLang's. finish_s, release_first: as of `pdctl weights load`."""

    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    is_async: bool = False
    keep_pause: bool = False
    token_step: int = 0
    manifest: Any = None
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    finish_s: float = USUAL_FINISH_S
    release_first: bool = False

    def check(self) -> None:
        super().check()
        _refuse_kept_cache("flush_cache", self.flush_cache)
        if self.is_async:
            raise Unsupported("is_async is refused: the answer comes when all nodes serve the weights", "is_async")
        if self.keep_pause:
            raise Unsupported(
                "keep_pause is refused: pause first with /pause_generation; an update never ends that pause",
                "keep_pause",
            )
        if self.token_step:
            raise Unsupported("token_step is refused: answers name weight_version; put the step there", "token_step")
        if self.manifest is not None:
            raise Unsupported("manifest is refused: nodes compute and compare digests themselves", "manifest")


class StartUpdate(Parameters, frozen=True):
    """vLLM's. is_checkpoint_format: of version 0.22."""

    is_checkpoint_format: bool = True
    max_pause_s: float = USUAL_PAUSE_S

    def check(self) -> None:
        if not self.is_checkpoint_format:
            raise Unsupported(
                "is_checkpoint_format=false is refused: weights come as in checkpoints of Hugging Face",
                "is_checkpoint_format",
            )
        check_pause(self.max_pause_s)


class GivenUpdate(Parameters, frozen=True):
    """vLLM's."""

    update_info: dict[str, Any]

    @property
    def source(self) -> DiskSource:
        """Raises BadRequest for tensors of NCCL and CUDA IPC."""
        if "model_path" not in self.update_info:
            names = ", ".join(sorted(self.update_info))[:200] or "nothing"
            raise Unsupported(
                f"update_info has {names}, and takes model_path and load_format: NCCL and CUDA IPC carry no weights "
                f"here; {PUSH_INSTEAD}",
                "update_info",
            )
        return checked(self.update_info, DiskSource, "update_info")


class FinishUpdate(Parameters, frozen=True):
    """vLLM's."""

    weight_version: str | None = None
    finish_s: float = USUAL_FINISH_S
    release_first: bool = False


def _refuse_kept_cache(name: str, is_flushed: bool) -> None:
    if not is_flushed:
        raise Unsupported(
            f"{name}=false is refused: it would use KV of former weights under new ones; leave it out, nodes keep KV "
            "of weights that serve",
            name,
        )


def _check_parts(tags: list[str] | None, how: str) -> None:
    if tags is None:
        return
    unknown = sorted(set(tags) - KNOWN_PARTS)
    if unknown:
        raise BadRequest(f"tags has {unknown[0][:100]!r}, known are {', '.join(sorted(KNOWN_PARTS))}", "tags")
    if not set(tags) >= ALL_PARTS:
        raise Unsupported(
            f"tags {', '.join(tags) or 'of nothing'} alone are refused: nodes {how}; leave tags out. Weights that are "
            "loaded while nodes sleep wake them",
            "tags",
        )


def given(query: bytes, body: bytes) -> dict[str, Any]:
    """Rule 1. Raises BadRequest."""
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
    except ValueError as error:
        raise BadRequest(f"the query is no form: {error}") from error
    try:
        found: Any = msgspec.json.decode(body) if body.strip() else None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict | None):
        raise BadRequest("the body must be a JSON object")
    in_query: dict[str, Any] = {}
    for name, value in pairs:
        if name in LISTS:
            in_query.setdefault(name, []).append(value)
        elif name in in_query:
            raise _repeated(name)
        else:
            in_query[name] = value
    for name in in_query.keys() & (found or {}).keys():
        raise _repeated(name)
    return in_query | (found or {})


def _repeated(name: str) -> BadRequest:
    return BadRequest(f"{name[:100]!r} comes twice; send it once, in the query or in the body", name[:100])


def checked(found: Mapping[str, Any], kind: type[P], what: str) -> P:
    """Rule 2. what: the call, or the object that is read. Raises BadRequest."""
    known = kind.__struct_fields__
    for name in found:
        if name not in known:
            raise BadRequest(f"{what} has no {name[:100]!r}; it takes {', '.join(known) or 'nothing'}", name[:100])
    try:
        made = msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{what}: {error}") from error
    made.check()
    return made
