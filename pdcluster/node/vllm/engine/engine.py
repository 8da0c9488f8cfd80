"""vLLM's AsyncLLM on a thread of its own, behind `ServingEngine`.

The node's thread queues commands for the engine's asyncio loop, and takes news from a list. One eventfd wakes the node,
once for all that came since it last took. Requests carry ids of our own inside vLLM, since theirs come from outside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from pdcluster.core.bounds import MAX_DIMENSIONS
from pdcluster.core.errors import BadRequest, ConfigError, ModelError, PdclusterError, ProtocolError
from pdcluster.core.messages import Pooling
from pdcluster.core.sampling import Sampling, TokenLogprobs
from pdcluster.node.vllm.engine.adapters import EngineAdapters
from pdcluster.node.vllm.engine.arguments import EngineOptions, parse_engine_arguments, set_engine_environment
from pdcluster.node.vllm.engine.interface import (
    AdapterLoaded,
    EngineDied,
    EngineFacts,
    EngineNews,
    EngineOutput,
    EngineRequest,
    EngineStep,
    Finish,
    WeightsChange,
    WeightsReplaced,
)
from pdcluster.node.vllm.engine.parent_death import kill_marked, mark_children, marked_processes, watched_processes
from pdcluster.node.vllm.engine.reference import Reference, check_reference, decode_reference, encode_reference
from pdcluster.node.vllm.engine.weights import EngineWeights, WeightsLost
from pdcluster.processes.tasks import watched

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

# Finished prefill legs whose KV can be released by key. Those beyond wait for their lease.
MAX_PARKED: Final = 1 << 14
# Steps and cache events that nobody took. A gap in the sequence of cache events tells their reader.
MAX_UNREAD: Final = 1 << 14
# An engine that waits for a read, its own or a peer's, makes steps without work all the time.
IDLE_STEP_S: Final = 0.02
_RPC_TIMEOUT_S: Final = 30.0
_FINISHES: Final[Mapping[str, Finish]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "error": "error",
    "repetition": "error",
}


class SamplingMap(Protocol):
    """How our sampling becomes vLLM's, and its logprobs ours. Called on the engine's thread."""

    # Before any request.
    def learn(self, config: Any) -> None: ...

    # Names of the logits processors that this configuration of vLLM can run.
    def processors(self, config: Any) -> list[str]: ...

    # Raises BadRequest for what vLLM cannot do.
    def to_vllm(self, sampling: Sampling, num_emitted: int) -> SamplingParams: ...

    # Of a leg that computes a prompt alone.
    def for_prefill(self, sampling: Sampling) -> SamplingParams: ...

    # Why an answer ended that vLLM stopped at a token.
    def ending_of(self, sampling: Sampling, stop_token: int) -> Finish: ...

    # Of one position: vLLM's dict from token to Logprob, whose first entry is the token itself.
    def from_vllm(
        self, logprobs: Mapping[int, Any], token: int, count: int, *, ranked: bool = False
    ) -> TokenLogprobs: ...


class EngineStartError(PdclusterError):
    """vLLM did not start. The message says what it was doing and why it stopped."""

    code = "engine_start"


@dataclass(slots=True)
class _Running:
    """A request inside vLLM."""

    request: EngineRequest
    # Inside vLLM.
    id: str
    is_added: bool = False
    is_aborted: bool = False


class EngineNewsQueue:
    """News from the engine's thread to the node's, which one eventfd wakes. Only steps may be dropped."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._news: list[EngineNews] = []
        self._is_ended = False

    def put(self, news: Sequence[EngineNews]) -> None:
        with self._lock:
            if self._is_ended or not news:
                return
            self._is_ended = isinstance(news[-1], EngineDied)
            if not self._news:
                os.eventfd_write(self.fd, 1)
            if len(self._news) >= MAX_UNREAD:
                news = [item for item in news if not isinstance(item, EngineStep)]
            self._news += news

    def take(self) -> list[EngineNews]:
        with self._lock:
            taken, self._news = self._news, []
            if taken:
                os.eventfd_read(self.fd)
            return taken

    def close(self) -> None:
        with self._lock:
            self._is_ended = True
            self._news = []
            os.close(self.fd)


class StepFilter:
    """Leaves out most steps that had no work and changed nothing: each would wake the node."""

    def __init__(self) -> None:
        self._last: EngineStep | None = None

    def is_news(self, step: EngineStep) -> bool:
        last, self._last = self._last, step
        if last is None or step.had_work or step.at_s - last.at_s >= IDLE_STEP_S:
            return True
        if step != replace(last, at_s=step.at_s):
            return True
        self._last = last
        return False


class VllmEngine:
    """Starts vLLM at once, on a thread. Wait with `wait_ready`, or poll `is_ready` and `progress`."""

    def __init__(self, options: EngineOptions, sampling_map: SamplingMap) -> None:
        self._options = options
        self._map = sampling_map
        self._queue = EngineNewsQueue()
        self._mark = secrets.token_hex(16)
        self._ready = threading.Event()
        self._failure: str | None = None
        self._facts: EngineFacts | None = None
        self._addresses: tuple[str, ...] = ()
        # KV cache groups that a reference names.
        self._transfer_groups = 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._llm: AsyncLLM
        self._adapters: EngineAdapters
        self._weights: EngineWeights
        self._closing = asyncio.Event()
        self._is_closing = False
        self._running: dict[str, _Running] = {}
        self._parked: OrderedDict[str, str] = OrderedDict()
        self._to_release: list[str] = []
        self._is_releasing = False
        self._num_requests = 0
        self._fresh: list[EngineNews] = []
        # What it is doing, for /readyz and the log.
        self.progress = "starts"
        set_engine_environment(options)
        mark_children(self._mark)
        # Processes follow the thread that starts them, so it lives as long as they do.
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the node's thread

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise RuntimeError("the engine is not ready")
        return self._facts

    @property
    def news_fd(self) -> int:
        return self._queue.fd

    @property
    def is_ready(self) -> bool:
        """Raises EngineStartError once the start has failed."""
        if self._failure is not None and self._facts is None:
            raise EngineStartError(self._failure)
        return self._ready.is_set()

    def wait_ready(self, timeout_s: float, report: Callable[[str], None] = logger.info, every_s: float = 10.0) -> None:
        """Report what it does, at every change and every so often. Raises EngineStartError, also after the timeout."""
        began, told, last = time.monotonic(), "", 0.0
        while not self._ready.wait(0.2):
            elapsed = time.monotonic() - began
            if elapsed > timeout_s:
                raise EngineStartError(f"vLLM {self.progress} and was not ready after {timeout_s:.0f} s")
            if self.progress != told or elapsed - last >= every_s:
                told, last = self.progress, elapsed
                report(f"vLLM {told} ({elapsed:.0f} s)")
        assert self.is_ready

    def add(self, request: EngineRequest) -> None:
        self._call(self._start, request)

    def abort(self, key: str) -> None:
        self._call(self._abort, key)

    def release(self, key: str) -> None:
        self._call(self._release, key)

    def load_adapter(self, number: int, name: str, path: str, known_digest: str = "") -> None:
        self._call(self._start_load, number, name, path, known_digest)

    def unload_adapter(self, number: int) -> None:
        self._call(lambda: self._adapters.unload(number))

    def replace_weights(self, change: WeightsChange) -> None:
        self._call(lambda: watched(self._replace_weights(change), f"load of the weights in {change.path}"))

    def take(self) -> list[EngineNews]:
        return self._queue.take()

    def close(self) -> None:
        """Processes that do not end by themselves in time are killed."""
        self._is_closing = True
        if self._ready.is_set():
            self._weights.stop()
        self._call(self._closing.set)
        self._thread.join(self._options.close_s if self._ready.is_set() else 0.0)
        if killed := kill_marked(self._mark):
            logger.warning("killed engine processes %s", killed)
        self._thread.join(self._options.close_s)
        self._queue.close()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the engine's loop has ended")

    # ------------------------------------------------------------ the engine's thread: life

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except PdclusterError as error:
            self._end(str(error))
        except Exception as error:
            logger.exception("vLLM %s", self.progress)
            self._end(f"vLLM {self.progress} and failed: {error or type(error).__name__}")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        arguments = self._parse()
        self._llm = self._build(arguments)
        try:
            self.progress = "says what it is"
            [(groups, self._transfer_groups), *_] = await self._llm.collective_rpc("num_cache_groups", _RPC_TIMEOUT_S)
            self._addresses = tuple(await self._llm.collective_rpc("confirmation_address", _RPC_TIMEOUT_S))
            self._map.learn(self._llm.vllm_config)
            self._check_tasks(await self._llm.get_supported_tasks())
            self._facts = self._find_facts(groups)
            self._adapters = EngineAdapters(self._llm, self._facts.max_adapters)
            self._weights = EngineWeights(self._llm, self._options.lease_s)
            self.progress = "is ready"
            self._ready.set()
            await self._watch()
        finally:
            self._llm.shutdown(timeout=self._options.close_s / 2)
            # vLLM closes its sockets in this loop's next turn, and leaves their context to the garbage collector.
            await asyncio.sleep(0)
            self._llm.engine_core.resources.ctx.destroy(linger=0)

    def _parse(self) -> AsyncEngineArgs:
        self.progress = "is imported"
        return parse_engine_arguments(self._options)

    def _build(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        self.progress = "checks its arguments"
        config = _config_of(arguments)
        if config.model_config.runner_type == "pooling":
            # It hands nothing over, and an encoder has no KV that NIXL could register.
            arguments.kv_transfer_config = None
            config = _config_of(arguments)
        config.model_config.logits_processors = self._map.processors(config) or None
        self.progress = "loads the model"
        return AsyncLLM.from_vllm_config(
            config, stat_loggers=[self._step_logger()], disable_log_stats=True, enable_log_requests=False
        )

    async def _watch(self) -> None:
        """Until the node closes it, or one of its processes ends: vLLM takes seconds to notice a dead worker."""
        handler = self._llm.output_handler
        assert handler is not None
        died = asyncio.Event()
        with watched_processes(marked_processes(self._mark), died.set):
            waits = {asyncio.create_task(self._closing.wait()), asyncio.create_task(died.wait())}
            await asyncio.wait({*waits, handler}, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        if not self._is_closing:
            # Before vLLM's own shutdown, which takes seconds too.
            self._end("a process of the engine died")

    def _end(self, reason: str) -> None:
        """Nothing of it is left, and the node learns that."""
        self._failure = self._failure or reason
        if not self._is_closing and (killed := kill_marked(self._mark)):
            logger.warning("killed engine processes %s", killed)
        self._queue.put([*self._fresh, EngineDied(reason)])
        self._ready.set()

    def _check_tasks(self, tasks: Sequence[str]) -> None:
        if self._llm.vllm_config.model_config.runner_type != "pooling":
            return
        size = self._llm.vllm_config.model_config.embedding_size
        if "embed" not in tasks:
            raise ConfigError(f"the model pools, but vLLM can do {', '.join(tasks)} with it, and embed alone is served")
        if size > MAX_DIMENSIONS:
            raise ConfigError(f"embeddings of {size} numbers; at most {MAX_DIMENSIONS} are served")

    def _find_facts(self, groups: int) -> EngineFacts:
        config = self._llm.vllm_config
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        dtype = cache.cache_dtype if cache.cache_dtype != "auto" else str(model.dtype).removeprefix("torch.")
        num_layers = model.get_num_layers(parallel)
        num_kv_heads, head_dim = model.get_total_num_kv_heads(), model.get_head_size()
        item_bytes = 1 if dtype.startswith("fp8") else 4 if dtype == "float32" else 2
        return EngineFacts(
            block_tokens=cache.block_size,
            num_blocks=_num_blocks(config),
            max_len=model.max_model_len,
            max_rows=config.scheduler_config.max_num_seqs,
            max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            vocab_size=model.get_vocab_size(),
            dtype=dtype,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            token_bytes=num_layers * num_kv_heads * head_dim * item_bytes * (1 if model.use_mla else 2),
            version=_version(),
            arithmetic=f"{str(model.dtype).removeprefix('torch.')}-{model.quantization or 'plain'}-{dtype}",
            embedding_size=model.embedding_size if model.runner_type == "pooling" else 0,
            groups=groups,
            lease_s=self._options.lease_s,
            max_adapters=config.lora_config.max_cpu_loras if config.lora_config else 0,
        )

    # ------------------------------------------------------------ the engine's thread: requests

    def _start(self, request: EngineRequest) -> None:
        if request.key in self._running:
            logger.error("the engine runs %s already", request.key)
            return
        self._num_requests += 1
        running = _Running(request, f"r{self._num_requests}")
        self._running[request.key] = running
        watched(self._generate(running), f"{request.key} in vLLM")

    def _abort(self, key: str) -> None:
        running = self._running.get(key)
        if running is None or running.is_aborted:
            return
        running.is_aborted = True
        if running.is_added:
            watched(self._abort_added(running), f"abort of {key} in vLLM")

    async def _abort_added(self, running: _Running) -> None:
        """Its prompt may be done already, without an output that would say where its KV is parked."""
        names = tuple(self._llm.output_processor.external_req_ids.get(running.id, ()))
        await self._llm.abort(running.id)
        if running.request.parks:
            self._release_requests(names)

    def _release(self, key: str) -> None:
        request = self._parked.pop(key, None)
        if request is not None:
            self._release_requests((request,))

    def _release_requests(self, names: Sequence[str]) -> None:
        """By the names that vLLM itself gave them."""
        self._to_release.extend(names)
        if not self._is_releasing:
            self._is_releasing = True
            watched(self._release_all(), "release of parked KV in vLLM")

    async def _release_all(self) -> None:
        """One call to the workers at a time, for all that were released meanwhile."""
        try:
            while self._to_release:
                requests, self._to_release = self._to_release, []
                await self._llm.collective_rpc("release_parked", _RPC_TIMEOUT_S, (requests,))
        finally:
            self._is_releasing = False

    async def _generate(self, running: _Running) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        key = running.request.key
        try:
            await self._stream(running)
        except EngineDeadError:
            logger.debug("%s ends with its engine", key)  # EngineDied tells of all of them
        except BadRequest as error:
            param = error.param or ""
            self._emit(EngineOutput(key, finish="error", error=str(error), is_bad_request=True, param=param))
        except ProtocolError as error:
            is_failed_read = bool(running.request.reference)
            self._emit(EngineOutput(key, finish="error", error=str(error), is_failed_read=is_failed_read))
        except Exception as error:
            logger.warning("vLLM refused %s: %r", key, error)
            self._emit(EngineOutput(key, finish="error", error=f"vLLM: {error}"))
        finally:
            self._running.pop(key, None)

    def _start_load(self, number: int, name: str, path: str, known_digest: str) -> None:
        watched(self._load_adapter(number, name, path, known_digest), f"load of adapter {name}")

    async def _load_adapter(self, number: int, name: str, path: str, known_digest: str) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            news = AdapterLoaded(number, await self._adapters.load(number, name, path, known_digest))
        except EngineDeadError:
            logger.debug("the load of adapter %s ends with its engine", name)  # EngineDied tells of all of them
            return
        except BadRequest as error:
            news = AdapterLoaded(number, error=str(error))
        except Exception as error:  # whatever it is, the operator waits, and the name would stay taken
            logger.exception("adapter %s", name)
            news = AdapterLoaded(number, error=f"the adapter {name} cannot be loaded: {error or type(error).__name__}")
        self._emit(news)

    async def _replace_weights(self, change: WeightsChange) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._weights.replace(change)
            self._emit(WeightsReplaced())
        except ModelError as error:
            self._emit(WeightsReplaced(str(error)))
        except WeightsLost as error:
            self._end(str(error))
        except EngineDeadError:
            logger.debug("the load of weights ends with its engine")  # EngineDied tells of it

    async def _stream(self, running: _Running) -> None:
        number = running.request.adapter
        adapter = self._adapters.begin(number)
        try:
            await self._stream_with(running, adapter)
        finally:
            if adapter is not None:
                self._adapters.end(number)

    async def _stream_with(self, running: _Running, adapter: LoRARequest | None) -> None:
        from vllm.inputs.engine import tokens_input

        request = running.request
        params = self._params(request)
        prompt = tokens_input(list(request.token_ids), cache_salt=request.salt or None)
        outputs = await self._llm.add_request(running.id, prompt, params, lora_request=adapter)
        running.is_added = True
        if running.is_aborted:
            await self._abort_added(running)
        is_finished = False
        try:
            while not is_finished:
                output = outputs.get_nowait() or await outputs.get()
                is_finished = output.finished
                self._emit(self._output_of(request, output))
        finally:
            outputs.close()
            if not is_finished:
                await self._abort_added(running)

    def _params(self, request: EngineRequest) -> SamplingParams | PoolingParams:
        if request.pooling is not None:
            return self._pooling_params(request.pooling)
        if request.parks:
            params = self._map.for_prefill(request.sampling)
        else:
            params = self._map.to_vllm(request.sampling, request.num_emitted)
        transfer = self._transfer_params(request)
        if transfer:
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
        return params

    def _pooling_params(self, pooling: Pooling) -> PoolingParams:
        from vllm import PoolingParams
        from vllm.exceptions import VLLMValidationError

        is_whole = pooling.dimensions in (0, self.facts.embedding_size)
        params = PoolingParams(task="embed", dimensions=None if is_whole else pooling.dimensions)
        try:
            params.verify(self._llm.vllm_config.model_config)
        except VLLMValidationError as error:
            way_out = f"leave it out, the model makes {self.facts.embedding_size}"
            raise BadRequest(f"dimensions is {pooling.dimensions}; {way_out} (vLLM: {error})", "dimensions") from error
        return params

    def _transfer_params(self, request: EngineRequest) -> dict[str, object]:
        from pdcluster.node.vllm.engine.connector import ADDRESSES_PARAM, FENCE_PARAM

        if request.parks:
            return {"do_remote_decode": True, "do_remote_prefill": False, FENCE_PARAM: request.fence}
        if not request.reference:
            return {}
        reference = decode_reference(request.reference)
        check_reference(reference, len(request.token_ids), self.facts.block_tokens, self._transfer_groups)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": reference.engine,
            "remote_request_id": reference.request,
            "remote_host": reference.host,
            "remote_port": reference.port,
            "remote_block_ids": [list(group) for group in reference.blocks],
            "remote_num_tokens": reference.num_tokens,
            "tp_size": reference.tp_size,
            "dcp_size": reference.dcp_size,
            "pp_size": reference.pp_size,
            FENCE_PARAM: request.fence,
            ADDRESSES_PARAM: list(reference.addresses),
        }

    # ------------------------------------------------------------ the engine's thread: outputs

    def _output_of(self, request: EngineRequest, output: Any) -> EngineOutput:
        if request.pooling is not None:
            return self._embedding_of(request, output)
        [choice] = output.outputs
        tokens = tuple(choice.token_ids)
        finish: Finish = _FINISHES[choice.finish_reason] if output.finished else ""
        if finish == "error":
            is_failed_read = choice.finish_reason != "repetition" and bool(request.reference)
            why = "its KV did not come whole" if is_failed_read else f"{choice.finish_reason}"
            return EngineOutput(
                request.key, finish="error", error=f"vLLM ended the request: {why}", is_failed_read=is_failed_read
            )
        stop_token = tokens[-1] if finish == "stop" and tokens else None
        if stop_token is not None and not request.parks:
            finish = self._map.ending_of(request.sampling, stop_token)
            if finish == "error":
                return EngineOutput(request.key, finish="error", error="the row could not follow its grammar")
        parks = request.parks and finish not in ("", "abort") and output.kv_transfer_params
        return EngineOutput(
            key=request.key,
            tokens=tokens,
            logprobs=self._logprobs(request, choice.logprobs, tokens),
            prompt_logprobs=self._prompt_logprobs(request, output.prompt_logprobs),
            finish=finish,
            stop_token=stop_token,
            reference=self._park(request.key, output.kv_transfer_params) if parks else b"",
            cached_tokens=output.num_cached_tokens or 0,
        )

    def _embedding_of(self, request: EngineRequest, output: Any) -> EngineOutput:
        """vLLM tells of an abort by an empty vector."""
        vector = output.outputs.data.float().flatten()
        if not len(vector):
            return EngineOutput(request.key, finish="abort")
        if not vector.isfinite().all():
            return EngineOutput(request.key, finish="error", error="the embedding has numbers that are not finite")
        cached_tokens = output.num_cached_tokens or 0
        return EngineOutput(
            request.key, finish="stop", vector=vector.numpy().astype("<f4").tobytes(), cached_tokens=cached_tokens
        )

    def _logprobs(self, request: EngineRequest, logprobs: Any, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        pairs = zip(logprobs or (), tokens, strict=bool(logprobs))
        count = request.sampling.logprobs or 0
        return tuple(self._map.from_vllm(position, token, count) for position, token in pairs)

    def _prompt_logprobs(self, request: EngineRequest, logprobs: Any) -> tuple[TokenLogprobs, ...]:
        """Of all prompt tokens but the first, which has none."""
        if not logprobs:
            return ()
        pairs = zip(logprobs[1:], request.token_ids[1:], strict=True)
        count = request.sampling.prompt_logprobs or 0
        return tuple(self._map.from_vllm(position, token, count, ranked=True) for position, token in pairs)

    def _park(self, key: str, params: Mapping[str, Any]) -> bytes:
        self._parked[key] = params["remote_request_id"]
        while len(self._parked) > MAX_PARKED:
            self._parked.popitem(last=False)
        return encode_reference(
            Reference(
                version=1,
                engine=params["remote_engine_id"],
                request=params["remote_request_id"],
                host=params["remote_host"],
                port=params["remote_port"],
                tp_size=params["tp_size"],
                dcp_size=params["dcp_size"],
                pp_size=params["pp_size"],
                block_tokens=self.facts.block_tokens,
                num_tokens=params["remote_num_tokens"],
                blocks=tuple(tuple(group) for group in params["remote_block_ids"]),
                addresses=self._addresses,
            )
        )

    def _emit(self, news: EngineNews) -> None:
        """All that one turn of this loop emits wakes the node once."""
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._flush)
        self._fresh.append(news)

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        self._queue.put(fresh)

    # ------------------------------------------------------------ the engine's thread: reports

    def _step_logger(self) -> Any:
        """A class of vLLM's kind of logger that emits steps."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        emit, steps = self._emit, StepFilter()

        class StepLogger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self._engine_index = engine_index
                self._pools = vllm_config.model_config.runner_type == "pooling"

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                if scheduler_stats is None:
                    return
                step = _step_of(scheduler_stats, iteration_stats, pools=self._pools)
                if steps.is_news(step):
                    emit(step)

            def log_engine_initialized(self) -> None:
                logger.debug("vLLM's engine %d reports its steps", self._engine_index)

        return StepLogger


def _step_of(scheduler: Any, iteration: Any, *, pools: bool) -> EngineStep:
    num_output = iteration.num_generation_tokens if iteration is not None else 0
    if pools and iteration is not None:
        num_output = len(iteration.time_to_first_tokens_iter)  # one of each prompt that was done
    prompt = iteration.prompt_token_stats if iteration is not None else None
    transfers = scheduler.kv_connector_stats or {}
    return EngineStep(
        at_s=time.monotonic(),
        prompt_tokens=prompt.computed if prompt is not None else 0,
        reused_tokens=prompt.local_cache_hit if prompt is not None else 0,
        output_tokens=num_output,
        running=scheduler.num_running_reqs,
        kv_usage=scheduler.kv_cache_usage,
        preemptions=iteration.num_preempted_reqs if iteration is not None else 0,
        failed_transfers=sum(transfers.get("num_failed_transfers", ())),
        expired_leases=sum(transfers.get("num_kv_expired_reqs", ())),
    )


def _config_of(arguments: AsyncEngineArgs) -> VllmConfig:
    from vllm.usage.usage_lib import UsageContext

    try:
        return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValueError as error:
        raise ConfigError(f"arguments of vLLM: {error}") from error


def _num_blocks(config: VllmConfig) -> int:
    """Of the pool. An encoder keeps no KV, so vLLM gives it one block; its rows are all that bounds it."""
    cache = config.cache_config
    if (num_blocks := int(cache.num_gpu_blocks or 0)) > 1:
        return num_blocks
    return int(config.scheduler_config.max_num_seqs * -(-config.model_config.max_model_len // cache.block_size))


def _version() -> str:
    import vllm

    return str(vllm.__version__)
