"""The short way of a plain request, from its decoded body to a `PlainRun`.

Plain is a completion of one prompt whose answer carries nothing but its text: no alternatives, stop strings, grammar,
echo, and nothing asked of the router itself (a mode, a deadline, a priority, a salt). Anything else, and all that would
be refused, goes the general way (`prepare`), which says what is wrong; what it made, a chat mostly, comes back if only
its text is to be told. `plain_run` takes a plain request to its end, as long as nothing happens to it but what mostly
does. Both ways say the same bytes to clients and to nodes, and leave the same in the books.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, time

from pdcluster.api.openai.requests import CompletionRequest
from pdcluster.core.errors import PdclusterError
from pdcluster.kv.hashing import extend
from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.core.generation import ModelInfo, TenantPriority
from pdcluster_router.core.job import Job
from pdcluster_router.frontend.prepare import DEADLINE, MODE, Prepared
from pdcluster_router.frontend.response import writer_of
from pdcluster_router.http.exchange import Exchange
from pdcluster_router.request.plain.plain_kind import Asked, Kind, key_of, kind_of, packed, sampling_of
from pdcluster_router.request.plain.plain_run import PlainRun
from pdcluster_router.request.plain.plain_stream import PlainStream, stream_of
from pdcluster_router.request.run import Shared, job_of
from pdcluster_router.request.timers import TimerBuckets

MAX_KINDS = 256


class Plain:
    """Owned by the router's event loop."""

    def __init__(self, shared: Shared, metrics: RouterMetrics) -> None:
        stages = shared.settings.stages
        self._shared, self._metrics = shared, metrics
        self._rounds = TimerBuckets(shared.timers, stages.local_s), TimerBuckets(shared.timers, stages.remote_s)
        self._kinds: dict[tuple[object, ...], Kind] = {}
        # The models that kinds are of.
        self._infos: Sequence[ModelInfo] = ()
        # By tenant, which do not change.
        self._standings: dict[str, TenantPriority] = {}

    def take(self, exchange: Exchange, request: CompletionRequest, deadline_s: float) -> bool:
        """Whether it goes this way; its exchange is answered then. deadline_s: from its arrival on, at most."""
        shared, headers, tenant, options = self._shared, exchange.headers, exchange.tenant, request.stream_options
        kind = self._kind_of(request)
        if kind is None or tenant is None or DEADLINE in headers or MODE in headers:
            return False
        if options is not None and (not kind.is_stream or options.include_obfuscation):
            return False
        if options is not None and options.continuous_usage_stats:
            return False
        found = packed(request, kind)
        if found is None or (sampling := sampling_of(request, kind, len(found[0]))) is None:
            return False
        prompt, token_ids = found
        try:
            chain = shared.models.chain(kind.name, tenant.salt)
        except PdclusterError:
            return False
        standing = self._standings.get(tenant.name)
        if standing is None:
            standing = self._standings[tenant.name] = tenant.standing(None)
        session, name = request.prompt_cache_key, exchange.id + "-0"
        started = shared.clock()
        left_s = deadline_s - (monotonic() - exchange.arrived)
        hashes = extend(b"", token_ids, root=chain.root, block_tokens=chain.block_tokens)
        job = Job(  # by position, which costs half; nothing was emitted, sent or refused
            name, prompt, sampling, started + (left_s if left_s > 0.0 else 0.0), chain, None,
            session if isinstance(session, str) else "",
            [], hashes, 0, 1, set(), {}, True, None, None, None, 0, token_ids,
        )  # fmt: skip
        record = shared.explainer.open(name, standing, started, exchange.client_id)
        asked = Asked(kind, int(time()), tenant.salt)
        run = PlainRun(
            shared,
            self._metrics,
            exchange,
            kind.name,
            kind.vocab_size,
            job,
            standing,
            started,
            record,
            *self._rounds,
            asked,
        )
        if kind.is_stream:
            run.stream = stream_of(run, asked, options is not None and bool(options.include_usage))
        run.start()
        return True

    def take_prepared(self, exchange: Exchange, prepared: Prepared) -> bool:
        """The same for what `prepare` made of a request, a chat perhaps, of whose answer nothing but the text changes
        with its tokens."""
        choice, shared = prepared.choices[0], self._shared
        generation = choice.generation
        sampling = generation.sampling
        if (
            len(prepared.choices) > 1
            or not choice.text.is_plain
            or sampling.logprobs is not None
            or sampling.prompt_logprobs is not None
        ):
            return False
        started = shared.clock()
        try:
            job = job_of(shared, generation, started)
        except PdclusterError:
            return False
        record = shared.explainer.open(generation.request, generation.standing, started, generation.client_id)
        stream = PlainStream(choice, writer_of(exchange, prepared))
        model, size, standing = generation.model, choice.vocab_size, generation.standing
        PlainRun(
            shared, self._metrics, exchange, model, size, job, standing, started, record, *self._rounds, None, stream
        ).start()
        return True

    def _kind_of(self, request: CompletionRequest) -> Kind | None:
        """None: it is not plain, or is refused."""
        infos = self._shared.models.models()
        if infos is not self._infos:
            self._infos = infos
            self._kinds.clear()
        key = key_of(request)
        try:
            found = self._kinds.get(key)
        except TypeError:  # lists and objects
            return None
        if found is None:
            found = kind_of(request, infos, self._shared.models.text)
            if found is not None:
                if len(self._kinds) >= MAX_KINDS:
                    self._kinds.clear()
                self._kinds[key] = found
        return found
