"""The process of a node that runs vLLM: its start, card and capabilities."""

from __future__ import annotations

import logging
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from pdcluster.bootstrap.card import MAX_ADAPTERS, Adapter, Capabilities, NodeCard, check_adapters
from pdcluster.checkpoint.end_tokens import eos_token_ids
from pdcluster.checkpoint.text_files import read_text_files
from pdcluster.checkpoint.weight_image import WeightImage
from pdcluster.core.address import format_address
from pdcluster.core.awake_clock import AwakeClock
from pdcluster.core.errors import ConfigError, ModelError
from pdcluster.core.messages import PROTOCOL_VERSION, Endpoint, Pooling, PrepareWeights
from pdcluster.core.sampling import Sampling
from pdcluster.core.version import VERSION
from pdcluster.core.weights import WeightsVersion
from pdcluster.kv.layout import Fingerprint, KVLayout, KVType
from pdcluster.node.acceptance import Acceptance
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.control import NodeLinks
from pdcluster.node.legs import EndedLegs
from pdcluster.node.outbox import Outbox
from pdcluster.node.parking import ParkedKV
from pdcluster.node.reports.leg_records import LegRecorder
from pdcluster.node.server import NextBoot, NodeProcess, OpenedEngine, link_settings, new_incarnation, serve
from pdcluster.node.vllm.adapters import AdapterBook
from pdcluster.node.vllm.decode_rows import DecodeRows
from pdcluster.node.vllm.engine.arguments import EngineOptions
from pdcluster.node.vllm.engine.engine import VllmEngine
from pdcluster.node.vllm.engine.interface import (
    AdapterLoaded,
    EngineDied,
    EngineFacts,
    EngineNews,
    EngineOutput,
    EngineRequest,
    ServingEngine,
)
from pdcluster.node.vllm.engine.weight_files import weight_files_digest
from pdcluster.node.vllm.engine_side import EngineLost, VllmParts, VllmSide
from pdcluster.node.vllm.event_stream import EventStream
from pdcluster.node.vllm.parked_prompts import MEDIUM, SHORTEST_HOLD_S, ParkedPrompts
from pdcluster.node.vllm.requests import EngineQueue
from pdcluster.node.vllm.sampling.sampling_map import VllmSampling
from pdcluster.node.vllm.weights_change import CheckedWeights, WeightsReplacement, check_weights
from pdcluster.processes.listening import reserved_port
from pdcluster.settings.config import NodeConfig
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Hub

logger = logging.getLogger(__name__)

ENGINE = "vllm"
# KV is given up so long before vLLM's lease ends, so that no reader starts at its end.
LEASE_MARGIN_S = 5.0
# Time for a decode node to begin its read.
LEAST_PARKING_S = 2 * SHORTEST_HOLD_S
WARM_TOKENS, WARM_S = 16, 600.0


def run(config: NodeConfig) -> int:
    """Serve until a signal. Returns 0 after a drain. Raises EngineLost when vLLM died."""
    check(config)
    return serve(config, open_vllm)


def check(config: NodeConfig) -> None:
    """Refuse at once what a node with vLLM cannot do."""
    if find_spec("vllm") is None:
        raise ConfigError("node.engine is vllm, but vllm is not installed; pip install 'pdcluster[vllm]'")
    for name, is_set, way_out in (
        ("deterministic", config.deterministic, "leave it out; vLLM makes no such promise"),
        ("quantization", config.quantization != "none", "give vLLM its own --quantization"),
        ("tp", config.tp > 1, "give vLLM its own --tensor-parallel-size"),
        ("scheduler.look_ahead", config.scheduler.look_ahead, "leave it out; vLLM schedules for itself"),
    ):
        if is_set:
            raise ConfigError(f"node.engine is vllm and node.{name} is set; {way_out}")
    if parks_s_of(config) < LEAST_PARKING_S:
        raise ConfigError(
            f"finished KV would wait {parks_s_of(config):g} s for a decode node, too short to hand it over; set "
            f"node.vllm.lease_s to {LEASE_MARGIN_S + LEAST_PARKING_S:g} or more and node.transfer.parking_s to "
            f"{LEAST_PARKING_S:g} or more"
        )


@dataclass(frozen=True, slots=True)
class KeptEngine:
    """vLLM's engine, and what belongs to it. The boots of a node share it, one after the other.

    stack: closes all of it.
    """

    engine: ServingEngine
    events: EventStream
    check_sampling: Callable[[Sampling, int], None]
    eos: tuple[int, ...]
    stack: ExitStack

    def leave(self, weights: WeightsReplacement) -> None:
        """A boot ends, whose replacement that is. The next boot has the engine where it got other weights."""
        if not weights.is_done:
            self.stack.close()

    def free(self, weights: WeightsReplacement) -> None:
        """The next boot does not begin."""
        if weights.is_done:
            self.stack.close()


def open_vllm(process: NodeProcess) -> OpenedEngine:
    """Start vLLM and build the node. The health port says what vLLM does meanwhile."""
    config = process.config
    with ExitStack() as starting:
        kept, digest = _start(process, starting.enter_context(ExitStack()))
        engine = kept.engine
        check_role(config, engine.facts)
        if config.warmup:
            _tell_progress(process, "vLLM answers a first prompt")
            warm_up(engine)
        numbers, adapters = load_adapters(
            engine, config.vllm.adapters, lambda name: _tell_progress(process, f"vLLM loads the adapter {name}")
        )
        weights = CheckedWeights(WeightsVersion(digest=digest()), process.model_dir)
        starting.pop_all()  # the boots close it from now on
    return open_around(kept, weights, process, numbers, adapters)


def _start(process: NodeProcess, stack: ExitStack) -> tuple[KeptEngine, Callable[[], str]]:
    """Start vLLM. Returns how to wait for the digest of its weights, too. stack: closes all."""
    config = process.config
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdcluster-"))
    events = EventStream(Path(folder))
    stack.callback(events.close)
    eos = eos_token_ids(read_text_files(process.model_dir))
    sampling = VllmSampling(process.model_dir, eos)
    # Where the port is taken meanwhile, vLLM waits for its listener for ever.
    side_port = reserve_side_port(config, stack)
    engine = VllmEngine(_options(config, process.model_dir, events, side_port), sampling)
    stack.callback(engine.close)
    reader, stop = ThreadPoolExecutor(1), threading.Event()
    stack.callback(reader.shutdown)
    stack.callback(stop.set)
    weights = reader.submit(weight_files_digest, process.model_dir, stop)
    engine.wait_ready(config.vllm.start_s, lambda progress: _tell_progress(process, progress))
    return KeptEngine(engine, events, sampling.check, eos, stack), weights.result


def open_around(
    kept: KeptEngine,
    weights: CheckedWeights,
    process: NodeProcess,
    numbers: Mapping[str, int],
    adapters: tuple[Adapter, ...],
) -> OpenedEngine:
    """Build a boot's node around the engine, which has these weights and adapters."""
    config, engine = process.config, kept.engine
    replacement = WeightsReplacement(engine, weights.directory, config.vllm.start_s)
    process.engine_stack.callback(kept.leave, replacement)
    stop = threading.Event()
    process.engine_stack.callback(stop.set)
    parts = assemble(process, engine, kept.events, kept.check_sampling, replacement)
    side = VllmSide(parts, clock=process.clock, on_step=process.health.step if config.health else None)
    card = card_of(process, engine.facts, parts.links, kept.eos, weights.version)
    card = replace(card, adapters=adapters)
    check_adapters(adapters, (card.model, *card.model_aliases))
    parts.adapters.introduce(card, numbers)
    return OpenedEngine(parts.links, side, card, partial(prepare, process, kept, parts, stop))


def prepare(
    process: NodeProcess,
    kept: KeptEngine,
    parts: VllmParts,
    stop: threading.Event,
    message: PrepareWeights,
    image: WeightImage | None,
) -> NextBoot:
    """Check that files can take the place of the weights that serve. vLLM reads them when nothing runs any more.

    Raises ModelError for a source that cannot.
    """
    assert image is None  # this node takes none
    replacement = parts.weights
    if reason := parts.adapters.refusal_of_weights():
        raise ModelError(reason)
    pools = kept.engine.facts.embedding_size > 0
    weights = check_weights(message, replacement.serving, process.model_dir, pools=pools, stop=stop)
    me = Peer(process.me.node, new_incarnation())
    return NextBoot(
        weights.version,
        me,
        partial(_open_next, kept, weights),
        partial(kept.free, replacement),
        message.source,
        broken=parts.adapters.refusal_of_weights,
        replace=partial(replacement.advance, weights),
    )


def _open_next(kept: KeptEngine, weights: CheckedWeights, process: NodeProcess) -> OpenedEngine:
    """The engine has the weights. Its first answer also has it publish that its cache is empty."""
    try:
        warm_up(kept.engine)
    except EngineLost:
        kept.stack.close()
        raise
    return open_around(kept, weights, process, {}, ())


def check_role(config: NodeConfig, facts: EngineFacts) -> None:
    """Raises ConfigError for a pooling model in a role that only generation has."""
    if facts.embedding_size and config.role != "mixed":
        raise ConfigError(
            f"node.role is {config.role}, but a pooling model embeds a prompt on one node and hands nothing over; set "
            "it to mixed"
        )


def _tell_progress(process: NodeProcess, progress: str) -> None:
    process.health.stage = progress
    logger.info("%s", progress)


def warm_up(engine: ServingEngine) -> None:
    """Let vLLM answer a short prompt, so that no client waits for what it compiles at its first. Raises EngineLost."""
    pooling = Pooling() if engine.facts.embedding_size else None
    sampling = Sampling(max_tokens=2, seed=0, temperature=0.0)
    engine.add(EngineRequest("warm-up", [0] * WARM_TOKENS, 0, sampling, pooling=pooling))
    last = _await_news(
        engine, "its first prompt", WARM_S, lambda news: isinstance(news, EngineOutput) and bool(news.finish)
    )
    assert isinstance(last, EngineOutput)
    if last.finish == "error":
        raise EngineLost(f"vLLM could not answer its first prompt: {last.error}")


def _await_news(
    engine: ServingEngine, cause: str, timeout_s: float, is_wanted: Callable[[EngineNews], bool]
) -> EngineNews:
    """The first wanted news of an engine that nobody else listens to. Raises EngineLost."""
    ready = select.poll()
    ready.register(engine.news_fd, select.POLLIN)
    until = time.monotonic() + timeout_s
    while (left_s := until - time.monotonic()) > 0:
        ready.poll(left_s * 1000)
        batch = engine.take()
        if batch and isinstance(batch[-1], EngineDied):  # nothing comes behind it, and it comes once
            raise EngineLost(f"vLLM died with {cause}: {batch[-1].reason}")
        if (wanted := next(filter(is_wanted, batch), None)) is not None:
            return wanted
    raise EngineLost(f"vLLM did not answer {cause} within {timeout_s:g} s")


def load_adapters(
    engine: ServingEngine, adapters: Sequence[str], report: Callable[[str], None]
) -> tuple[dict[str, int], tuple[Adapter, ...]]:
    """Load what the node's settings name, before it serves. Returns their numbers in the engine, and the adapters."""
    numbers, found = {}, []
    for number, each in enumerate(adapters, 1):
        name, _, path = each.partition("=")
        report(name)
        engine.load_adapter(number, name, str(Path(path).expanduser().absolute()))
        loaded = _await_news(engine, "loading an adapter", WARM_S, lambda news: isinstance(news, AdapterLoaded))
        assert isinstance(loaded, AdapterLoaded)
        if loaded.error:
            raise ConfigError(f"node.vllm.adapters {name}: {loaded.error}")
        numbers[name] = number
        found.append(Adapter(name, loaded.digest))
    return numbers, tuple(found)


def reserve_side_port(config: NodeConfig, stack: ExitStack) -> int:
    """The port of NIXL's side channel, kept as long as the stack. Raises ConfigError where it is taken."""
    host, wanted = config.transfer_host(), config.vllm.side_port or 0
    try:
        return stack.enter_context(reserved_port(host, wanted))
    except OSError as error:
        raise ConfigError(
            f"NIXL's side channel cannot listen on {format_address(host, wanted)}: {error.strerror}; set "
            "node.vllm.side_port to a free port, or leave it out"
        ) from error


def _options(config: NodeConfig, model_dir: Path, events: EventStream, side_port: int) -> EngineOptions:
    args = config.vllm.args
    if config.max_len is not None:
        args = ("--max-model-len", str(config.max_len), *args)
    if config.dtype != "auto":
        args = ("--dtype", config.dtype, *args)
    return EngineOptions(
        str(model_dir),
        args,
        side_host=config.transfer_host(),
        side_port=side_port,
        lease_s=round(config.vllm.lease_s),
        events=events.config,
        has_adapters=bool(config.vllm.adapters),
    )


def assemble(
    process: NodeProcess,
    engine: ServingEngine,
    events: EventStream | None,
    check_sampling: Callable[[Sampling, int], None],
    weights: WeightsReplacement,
) -> VllmParts:
    """Build all that the side needs. The hub is bound; nothing was sent."""
    config, clock, facts = process.config, process.clock, engine.facts
    outbox, ended = Outbox(), EndedLegs()
    hub = Hub(
        process.me, listen=config.listen, context=process.context, settings=link_settings(process),
        clock=AwakeClock(config.heartbeat_s / 2, clock),
    )  # fmt: skip
    standing = NodeAvailability(process.role, process.agent, is_cordoned=process.is_cordoned)
    links = NodeLinks(
        process.me, standing, Acceptance(process.me.node, standing, outbox), hub, outbox, ended, process.files,
        process.agent,
    )  # fmt: skip
    records = LegRecorder(process.me.node, process.spans)
    limit = max(int(facts.num_blocks * config.transfer.parking_percent / 100), 1)
    parking = ParkedKV(limit, clock, parks_s_of(config))
    adapters = AdapterBook(engine, links)
    queue = EngineQueue(engine, config.scheduler.max_waiting, clock, adapters.number_of)
    me = Endpoint(process.me.node, process.me.incarnation, hub.address, ((MEDIUM, b""),), hub.link_key)
    return VllmParts(
        links=links,
        engine=engine,
        queue=queue,
        prompts=ParkedPrompts(queue, outbox, ended, records, parking, clock),
        rows=DecodeRows(me, facts, queue, outbox, ended, records, clock),
        parking=parking,
        events=events,
        check_sampling=check_sampling,
        adapters=adapters,
        weights=weights,
    )


def parks_s_of(config: NodeConfig) -> float:
    """How long finished KV waits for a decode node: less than vLLM's lease, which nothing but a reader renews."""
    return min(config.transfer.parking_s, round(config.vllm.lease_s) - LEASE_MARGIN_S)


def _dtype_of(facts: EngineFacts) -> KVType:
    """Of the KV cache, as cards say it."""
    return "fp8" if facts.dtype.startswith("fp8") else cast(KVType, facts.dtype)


def card_of(
    process: NodeProcess, facts: EngineFacts, links: NodeLinks, eos: tuple[int, ...], weights: WeightsVersion
) -> NodeCard:
    config, me = process.config, process.me
    model, *aliases = process.names
    layout = KVLayout(facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.block_tokens, _dtype_of(facts))
    return NodeCard(
        node=me.node,
        incarnation=me.incarnation,
        role=process.role,
        address=links.hub.address,
        model=model,
        fingerprint=Fingerprint(
            model,
            weights.digest,
            PROTOCOL_VERSION,
            facts.block_tokens,
            layout,
            f"vllm-{facts.version}-{facts.arithmetic}",
            engine=ENGINE,
        ),
        max_len=facts.max_len,
        vocab_size=facts.vocab_size,
        num_pages=facts.num_blocks,
        eos_ids=eos,
        tokenizer_hash=process.files.digest,
        backends=(MEDIUM,),
        device=config.device,
        pid=os.getpid(),
        model_aliases=tuple(aliases),
        version=VERSION,
        link_key=links.hub.link_key,
        draining=process.is_cordoned,
        weights_label=weights.label,
        weights_epoch=weights.epoch,
        weights_share=process.weights_share,
        weights_source=process.weights_source,
        weights_former=process.weights_former,
        capabilities=Capabilities(
            pulls=False,
            parks_s=parks_s_of(config),
            digests=False,
            keyed_sampling=False,
            estimated_cost=True,
            first_token="decode",
            embeds=facts.embedding_size > 0,
            adapters=min(facts.max_adapters, MAX_ADAPTERS),
        ),
    )
