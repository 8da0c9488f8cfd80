"""Requests while what their model's name means changes, and while nodes differ in the longest request they take."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from scripted_cluster import EMPTY_LOAD, FakeCluster, ScriptedPair, make_chooser, make_node, row, settle
from version_choice import FirstVersion

from pdcluster.core import errors
from pdcluster.core import messages as m
from pdcluster.core.weights import WeightsVersion
from pdcluster.kv.hashing import chain_root, extend
from pdcluster.rpc.status import status_of
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import Done, Generation, ModelInfo, TenantPriority, TokenChunk
from pdcluster_router.core.job import HashChain
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.policy.base import Force
from pdcluster_router.queueing.hold_queue import HoldLimits
from pdcluster_router.queueing.pauses import PauseMode
from pdcluster_router.request.dispatcher import Dispatch, DispatchSettings

WAIT_S = 20.0
PROMPT = array("i", range(10))
EOS_A, EOS_B = 999, 998
A = ModelInfo("m", 1, 4096, 5000, (EOS_A,), "digest-a", text="text-a")
B = ModelInfo("m", 2, 4096, 5000, (EOS_B,), "digest-b", text="text-b")


class Served(FirstVersion):
    """What the router knows of models, as the test says."""

    def __init__(self, *infos: ModelInfo) -> None:
        self.infos = infos

    def models(self) -> tuple[ModelInfo, ...]:
        return self.infos

    def text(self, model: str) -> object:
        raise errors.UnknownModel(model)

    def chain(self, model: str, salt: bytes, weights: str | None = None) -> HashChain:
        return HashChain(chain_root(block_tokens=4, salt=salt, weights=weights or ""), 4)


class Heard:
    """Implements generation.Sink."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: Done | Exception | None = None

    def on_chunk(self, chunk: TokenChunk) -> None:
        assert self.end is None and chunk.position == len(self.tokens)
        self.tokens += chunk.token_ids

    def fast_token_path(self) -> None:
        return None

    def on_done(self, done: Done) -> None:
        assert self.end is None
        self.end = done

    def on_error(self, error: Exception) -> None:
        assert self.end is None
        self.end = error

    async def ended(self) -> Done | Exception:
        async with asyncio.timeout(WAIT_S):
            while self.end is None:
                await asyncio.sleep(0.002)
        return self.end


class Bench:
    """A router over nodes that answer by script. age_s: how long a request may wait. count: how many may."""

    def __init__(
        self,
        *nodes: NodeView,
        models: Served | None = None,
        age_s: float = 5.0,
        force: Force = "auto",
        count: int = 100,
        is_shared: bool = False,
    ) -> None:
        self.models = models or Served(A)
        self.cluster = FakeCluster(list(nodes))
        settings = DispatchSettings(
            retries=1,
            hold_s=1.0,
            stages=StageDeadlines(handshake_s=1.0, hold_s=0.01),
            hold=HoldLimits(count, age_s=age_s, is_shared=is_shared),
        )
        self.dispatch = Dispatch(self.cluster, self.models, make_chooser(self.cluster, force=force), settings)  # type: ignore[arg-type]

    def replay_by_default(self) -> None:
        shared = self.dispatch.shared
        settings = dataclasses.replace(shared.settings, weights_change="replay")
        self.dispatch.shared = dataclasses.replace(shared, settings=settings)

    def start(self, request: str = "r1", prepared: ModelInfo = A, max_tokens: int = 6, **changes: object) -> Heard:
        heard = Heard()
        sampling = m.Sampling(max_tokens=max_tokens, seed=1)
        generation = Generation(request, prepared.id, PROMPT, sampling, 10.0, served=prepared)
        self.dispatch.start(replace(generation, **changes), heard)  # type: ignore[type-var]
        return heard

    def become(self, *nodes: NodeView) -> None:
        """Other nodes are there."""
        self.cluster.nodes[:] = nodes
        self.dispatch.waiting.poke()

    def asked(self, node: str) -> list[m.Work]:
        return [message.work for message in self.cluster.sent_to(node, m.Prefill)]  # type: ignore[attr-defined]


def of(info: ModelInfo, name: str, role: m.Role = "mixed", max_len: int = 4096) -> NodeView:
    return replace(make_node(name, role), models=frozenset({info.digest}), max_len=max_len)


def serving(bench: Bench, node: str, end: m.FinishReason = "eos", num_tokens: int = 6) -> None:
    """The node answers local requests with 100, 101, … up to so many tokens of the whole request."""

    def serve(message: m.NodeMessage, answer: Callable[[object], None]) -> None:
        if isinstance(message, m.Prefill):
            work = message.work
            first = len(work.token_ids) // 4 - work.num_prompt
            answer(row(work, first, tuple(range(100 + first, 100 + num_tokens))))
            answer(m.Finished(work.request, work.attempt, end, num_tokens, m.LegTimings()))

    bench.cluster.handlers[node] = serve


def says(bench: Bench, node: NodeView, *tokens: int) -> None:
    work = bench.asked(node.name)[-1]
    bench.cluster.ledger.deliver(work.request, node.incarnation, row(work, tokens[0] - 100, tokens))


# ---------------------------------------------------------------- what a name means


async def test_work_carries_the_digest_of_what_it_was_prepared_for() -> None:
    bench = Bench(of(A, "a"))
    serving(bench, "a")
    heard = bench.start()
    assert isinstance(await heard.ended(), Done) and [work.model for work in bench.asked("a")] == [A.digest]


async def test_a_request_that_waits_for_its_model_is_refused_by_name_once_another_has_its_name() -> None:
    bench = Bench()
    heard = bench.start()
    bench.become(of(B, "b"))
    await asyncio.sleep(0.1)
    assert heard.end is None, "the text of the other model is not loaded yet"
    bench.models.infos = (B,)
    error = await heard.ended()
    assert isinstance(error, errors.ModelChanged) and "'m'" in str(error) and not bench.cluster.sent
    assert error.http_status == 503 and status_of(error).name == "UNAVAILABLE"
    assert bench.cluster.ledger.num_requests() == 0 and bench.dispatch.waiting.num_held == 0


async def test_a_request_whose_name_nobody_carries_any_more_is_refused() -> None:
    bench = Bench()
    heard = bench.start()
    bench.models.infos = (replace(B, id="m2"),)
    bench.become(of(B, "b"))
    error = await heard.ended()
    assert isinstance(error, errors.ModelChanged) and "m2" in str(error) and not bench.cluster.sent


async def test_a_request_waits_for_nodes_of_its_own_model_while_there_are_none() -> None:
    bench = Bench()
    serving(bench, "a2")
    heard = bench.start()
    await asyncio.sleep(0.05)
    assert heard.end is None
    bench.become(of(A, "a2"))
    assert isinstance(await heard.ended(), Done) and heard.tokens == [*range(100, 106)]


async def test_a_request_that_was_prepared_before_its_model_was_replaced_never_starts() -> None:
    bench = Bench(of(B, "b"), models=Served(B))
    assert isinstance(await bench.start().ended(), errors.ModelChanged) and not bench.cluster.sent


async def test_a_stream_goes_on_with_its_own_model_or_not_at_all() -> None:
    bench = Bench(of(A, "a"))
    heard, other = bench.start(), bench.start("r2")
    a, b = bench.cluster.nodes[0], of(B, "b")
    for request in ("r1", "r2"):
        work = next(work for work in bench.asked("a") if work.request == request)
        bench.cluster.ledger.deliver(request, a.incarnation, row(work, 0, (100, 101)))
    bench.become(a, b)
    bench.cluster.kill(a)
    await asyncio.sleep(0.1)
    assert heard.end is None and not bench.asked("b"), "the text of B is not loaded, A may come back"
    serving(bench, "a2")
    bench.become(b, of(A, "a2"))
    assert isinstance(await heard.ended(), Done) and isinstance(await other.ended(), Done)
    assert heard.tokens == other.tokens == [*range(100, 106)] and not bench.asked("b")


async def test_a_stream_whose_model_was_replaced_ends_with_an_error_of_its_own() -> None:
    bench = Bench(of(A, "a"))
    heard = bench.start()
    says(bench, bench.cluster.nodes[0], 100, 101)
    bench.models.infos = (B,)
    bench.become(bench.cluster.nodes[0], of(B, "b"))
    assert heard.end is None, "its node serves on"
    bench.cluster.kill(bench.cluster.nodes[0])
    assert isinstance(await heard.ended(), errors.ModelChanged) and heard.tokens == [100, 101]
    assert not bench.asked("b")


async def test_an_answer_ends_by_the_end_tokens_of_its_own_model() -> None:
    """Its node's last word was lost."""
    bench = Bench(of(A, "a"))
    heard = bench.start()
    says(bench, bench.cluster.nodes[0], 100, 101)
    work = bench.asked("a")[0]
    bench.cluster.ledger.deliver("r1", "a-boot", row(work, 2, (EOS_A,)))
    bench.models.infos = (B,)
    bench.cluster.kill(bench.cluster.nodes[0])
    done = await heard.ended()
    assert isinstance(done, Done) and (done.reason, done.stop_token) == ("eos", EOS_A)


async def test_what_a_node_refuses_because_of_its_model_is_no_fault_of_the_client() -> None:
    bench = Bench(of(A, "a"))

    def refuse(message: m.NodeMessage, answer: Callable[[object], None]) -> None:
        if isinstance(message, m.Prefill):
            key = message.work.request, message.work.attempt
            answer(m.Refused(*key, "prefill", "node a does not serve it", 0.0, False, m.MODEL_PARAM))

    bench.cluster.handlers["a"] = refuse
    error = await bench.start().ended()
    assert isinstance(error, errors.ModelChanged) and "node a does not serve it" in str(error)


# ---------------------------------------------------------------- unequal nodes

SMALL, LARGE = 14, 40
UNEQUAL = Served(replace(A, max_len=LARGE))


def unequal(**changes: object) -> Bench:
    """A small node with nothing to do, and a large one that serves others."""
    large = replace(of(A, "large", max_len=LARGE), in_flight=3)
    bench = Bench(of(A, "small", max_len=SMALL), large, models=Served(*UNEQUAL.infos), **changes)  # type: ignore[arg-type]
    serving(bench, "small", "length", SMALL - len(PROMPT))
    serving(bench, "large", "eos", 20)
    return bench


async def test_at_a_nodes_own_limit_a_request_without_a_length_moves_to_a_larger_node() -> None:
    bench = unequal()
    heard = bench.start(max_tokens=LARGE - len(PROMPT), is_open_ended=True, prepared=UNEQUAL.infos[0])
    done = await heard.ended()
    assert isinstance(done, Done) and (done.reason, done.attempts, done.route.decode) == ("eos", 2, "large")
    assert heard.tokens == [*range(100, 120)]
    (moved,) = bench.asked("large")
    assert m.unpack_tokens(moved.token_ids) == [*PROMPT, *range(100, 104)] and moved.num_prompt == len(PROMPT)
    assert not bench.cluster.sent_to("small", m.Cancel)


async def test_a_length_that_was_asked_for_goes_only_where_it_fits() -> None:
    bench = unequal()
    heard = bench.start(max_tokens=SMALL - len(PROMPT) + 1, prepared=UNEQUAL.infos[0])
    await heard.ended()
    assert not bench.asked("small") and len(bench.asked("large")) == 1
    await bench.start("r2", max_tokens=SMALL - len(PROMPT), prepared=UNEQUAL.infos[0]).ended()
    assert len(bench.asked("small")) == 1


async def test_the_largest_nodes_limit_ends_a_request_by_its_length() -> None:
    bench = unequal()
    serving(bench, "large", "length", LARGE - len(PROMPT))
    heard = bench.start(max_tokens=10_000, is_open_ended=True, prepared=UNEQUAL.infos[0])
    done = await heard.ended()
    assert isinstance(done, Done) and done.reason == "length" and len(heard.tokens) == LARGE - len(PROMPT)


async def test_a_node_that_ends_a_request_early_by_its_length_is_believed() -> None:
    bench = unequal()
    serving(bench, "small", "length", 2)
    heard = bench.start(max_tokens=20, is_open_ended=True, prepared=UNEQUAL.infos[0])
    done = await heard.ended()
    assert isinstance(done, Done) and (done.reason, done.attempts) == ("length", 1) and heard.tokens == [100, 101]


@pytest.mark.parametrize("fate", ["takes no work", "is gone"])
async def test_a_request_that_no_larger_node_takes_ends_by_its_length_and_not_with_an_error(fate: str) -> None:
    bench = unequal(age_s=0.3)
    small, large = bench.cluster.nodes
    bench.become(small, replace(large, load=replace(EMPTY_LOAD, draining=True)))
    heard = bench.start(max_tokens=20, is_open_ended=True, prepared=UNEQUAL.infos[0])
    await asyncio.sleep(0.1)
    assert heard.tokens == [*range(100, 104)] and heard.end is None, "it waits for the larger node"
    if fate == "is gone":
        bench.models.infos = (replace(A, max_len=SMALL),)
        bench.become(small)
    done = await heard.ended()
    assert isinstance(done, Done) and (done.reason, done.route.decode) == ("length", "small")
    assert heard.tokens == [*range(100, 104)] and bench.cluster.ledger.num_requests() == 0


@pytest.mark.parametrize("num_sent", [2, 8])
async def test_a_stream_outlives_the_only_node_that_its_length_fits(num_sent: int) -> None:
    """It goes on as far as nodes take it, which may be where it is."""
    bench = unequal()
    bench.cluster.handlers.pop("large")
    small, large = bench.cluster.nodes
    heard = bench.start(max_tokens=20, prepared=UNEQUAL.infos[0])
    says(bench, large, *range(100, 100 + num_sent))
    bench.models.infos = (replace(A, max_len=SMALL),)
    bench.become(small, large)
    bench.cluster.kill(large)
    done = await heard.ended()
    assert isinstance(done, Done) and done.reason == "length"
    assert heard.tokens == [*range(100, 100 + max(num_sent, 4))]


async def test_a_length_that_fits_no_node_any_more_is_refused_before_its_first_token() -> None:
    bench = unequal()
    bench.become(bench.cluster.nodes[0])
    heard = bench.start(max_tokens=20, prepared=UNEQUAL.infos[0])
    await settle()
    assert heard.end is None, "the large node is listed and may come back"
    bench.models.infos = (replace(A, max_len=SMALL),)
    error = await heard.ended()
    assert isinstance(error, errors.ContextTooLong) and f"length is {SMALL} tokens" in str(error)
    assert not bench.cluster.sent


async def test_a_prompt_that_fills_its_prefill_node_goes_on_elsewhere() -> None:
    """The prefill node ends it with the first token."""
    nodes = of(A, "p0", "prefill", len(PROMPT) + 1), of(A, "d0", "decode", LARGE)
    bench = Bench(*nodes, models=Served(*UNEQUAL.infos))
    pair = ScriptedPair(bench.cluster, *bench.cluster.nodes, num_tokens=6)
    pair.install()
    ended: list[str] = []

    def prefill(message: m.NodeMessage, answer: Callable[[object], None]) -> None:
        if isinstance(message, m.Prefill):
            ended.append(message.work.request)
            answer(row(message.work, 0, (100,)))
            answer(m.Finished(message.work.request, message.work.attempt, "length", 1, m.LegTimings()))

    bench.cluster.handlers["p0"] = prefill
    heard = bench.start(max_tokens=20, prepared=UNEQUAL.infos[0], is_open_ended=True)
    done = await heard.ended()
    assert isinstance(done, Done) and heard.tokens == [*range(100, 106)] and done.route.mode == "local"
    assert ended == ["r1"]


@pytest.mark.parametrize("small", ["prefill", "decode"])
async def test_mode_remote_names_the_limit_of_the_role_that_a_request_does_not_fit(small: m.Role) -> None:
    sizes = {"prefill": LARGE, "decode": LARGE, small: len(PROMPT)}
    nodes = of(A, "p0", "prefill", sizes["prefill"]), of(A, "d0", "decode", sizes["decode"])
    bench = Bench(*nodes, models=Served(*UNEQUAL.infos))
    error = await bench.start(mode="remote", prepared=UNEQUAL.infos[0]).ended()
    assert isinstance(error, errors.ContextTooLong) and error.http_status == 400
    assert f"length is {len(PROMPT)} tokens" in str(error) and f"no {small} node takes more" in str(error)
    assert not bench.cluster.sent


# ---------------------------------------------------------------- versions of the weights

OLD = WeightsVersion("v1", 1, "w1")
NEW = WeightsVersion("v2", 2, "w2")
V1 = replace(A, weights=OLD)
V2 = replace(A, digest="digest-a2", weights=NEW, max_len=4000)


class Versions(Served):
    """successors: as nodes take work now."""

    def successor(self, model: str, digest: str, mode: Force | None) -> ModelInfo | None:
        others = [info for info in self.infos if info.digest != digest]
        return others[0] if others and self.moves else None

    moves = True


def ranges(done: Done | Exception) -> list[tuple[str, int, int]]:
    assert isinstance(done, Done)
    return [(each.label, each.first, each.to) for each in done.weights]


async def test_a_request_stays_with_its_version_while_nodes_of_others_are_there() -> None:
    bench = Bench(of(V1, "old"), of(V2, "new"), models=Versions(V2, V1))
    for node in ("old", "new"):
        serving(bench, node)
    for prepared, node in ((V1, "old"), (V2, "new")):
        done = await bench.start(node, prepared=prepared, weights_change="replay").ended()
        assert ranges(done) == [(prepared.weights.label, 0, 6)]
        assert [(work.request, work.model) for work in bench.asked(node)] == [(node, prepared.digest)]


async def test_a_version_names_kv_by_its_own_weights() -> None:
    bench = Bench(of(V1, "old"), of(V2, "new"), models=Versions(V2, V1))
    bench.start("r1", prepared=V1)
    bench.start("r2", prepared=V2)
    (one,), (other,) = bench.asked("old"), bench.asked("new")
    assert one.hash_root == Versions().chain("m", b"", "w1").root != other.hash_root and one.hashes != other.hashes


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_whose_version_is_gone_waits_as_without_nodes_and_is_refused_by_name(has_begun: bool) -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1), age_s=0.3)
    old, new = bench.cluster.nodes[0], of(V2, "new")
    if not has_begun:
        bench.become()
    heard = bench.start(prepared=V1, names_weights=not has_begun)
    if has_begun:
        says(bench, old, 100, 101)
    bench.models.infos = (V2,)
    bench.become(old, new) if has_begun else bench.become(new)
    if has_begun:
        bench.cluster.kill(old)
    await asyncio.sleep(0.1)
    assert heard.end is None, "it may wait"
    error = await heard.ended()
    assert isinstance(error, errors.Unavailable) and error.http_status == 503 and not bench.asked("new")
    for part in ("v1 (epoch 1)", "weights_change=replay", "v2 (epoch 2)"):
        assert part in str(error)
    assert bench.cluster.ledger.num_requests() == 0 and bench.dispatch.waiting.num_held == 0


async def test_a_request_goes_on_when_a_node_of_its_version_returns() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V2, V1))
    heard = bench.start(prepared=V1)
    says(bench, bench.cluster.nodes[0], 100, 101)
    bench.models.infos = (V2,)
    bench.become(bench.cluster.nodes[0], of(V2, "new"))
    bench.cluster.kill(bench.cluster.nodes[0])
    await asyncio.sleep(0.1)
    serving(bench, "again")
    bench.models.infos = (V2, V1)
    bench.become(of(V2, "new"), of(V1, "again"))
    assert ranges(await heard.ended()) == [("v1", 0, 6)] and heard.tokens == [*range(100, 106)]


@pytest.mark.parametrize("allowed_by", ["the request", "the router"])
async def test_a_request_that_may_is_replayed_on_the_newest_version_at_once(allowed_by: str) -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    changes: dict[str, object] = {"weights_change": "replay"} if allowed_by == "the request" else {}
    if allowed_by == "the router":
        bench.replay_by_default()
    heard = bench.start(prepared=V1, **changes)
    old = bench.cluster.nodes[0]
    says(bench, old, 100, 101, 102)
    serving(bench, "new")
    bench.models.infos = (V2,)
    bench.become(old, of(V2, "new"))
    assert heard.end is None and not bench.asked("new"), "its node serves on"
    bench.become(replace(old, load=replace(EMPTY_LOAD, draining=True)), of(V2, "new"))
    bench.cluster.ledger.deliver("r1", old.incarnation, m.Failed("r1", 0, errors.NodeDrains.code, "new weights", True))
    done = await heard.ended()
    assert heard.tokens == [*range(100, 106)] and ranges(done) == [("v1", 0, 3), ("v2", 3, 6)]
    (work,) = bench.asked("new")
    assert work.model == V2.digest and m.unpack_tokens(work.token_ids) == [*PROMPT, 100, 101, 102]
    chain = bench.models.chain("m", b"", "w2")
    assert work.hash_root == chain.root
    assert work.hashes == extend(b"", work.token_ids, root=chain.root, block_tokens=chain.block_tokens)


async def test_a_replay_without_a_token_belongs_to_the_new_version_alone() -> None:
    bench = Bench(of(V2, "new"), models=Versions(V2))
    serving(bench, "new")
    done = await bench.start(prepared=V1, weights_change="replay").ended()
    assert ranges(done) == [("v2", 0, 6)]


async def test_the_request_says_more_than_the_router() -> None:
    bench = Bench(of(V2, "new"), models=Versions(V2), age_s=0.1)
    bench.replay_by_default()
    assert isinstance(await bench.start(prepared=V1, weights_change="fail").ended(), errors.Unavailable)


async def test_a_request_waits_while_no_other_version_has_nodes_either() -> None:
    models = Versions(V2)
    models.moves = False
    bench = Bench(models=models)
    serving(bench, "new")
    heard = bench.start(prepared=V1, weights_change="replay")
    await asyncio.sleep(0.1)
    assert heard.end is None
    models.moves = True
    bench.become(of(V2, "new"))
    assert ranges(await heard.ended()) == [("v2", 0, 6)]


async def test_a_request_that_the_new_version_cannot_hold_stays_with_its_own() -> None:
    small = replace(V2, max_len=len(PROMPT))
    bench = Bench(of(small, "new"), models=Versions(small), age_s=0.1)
    assert isinstance(await bench.start(prepared=V1, weights_change="replay").ended(), errors.Unavailable)


async def test_the_first_token_of_a_prefill_node_belongs_to_the_version_of_its_attempt() -> None:
    bench = Bench(of(V1, "p1", "prefill"), of(V1, "d1", "decode"), models=Versions(V1))
    pair = ScriptedPair(bench.cluster, *bench.cluster.nodes, num_tokens=6, die_at={"d1": "after_commit"})
    pair.install()

    def killed(node: NodeView, reason: str = "") -> None:
        """Both nodes load other weights."""
        bench.models.infos = (V2,)
        serving(bench, "m2")
        bench.cluster.nodes.append(of(V2, "m2"))
        for each in ("p1", "d1"):
            bench.cluster.dead.add(each)
            bench.cluster.ledger.lose_node(f"{each}-boot", "it left")

    bench.cluster.kill = killed  # type: ignore[method-assign]
    heard = bench.start(prepared=V1, weights_change="replay")
    assert ranges(await heard.ended()) == [("v1", 0, 1), ("v2", 1, 6)] and heard.tokens == [*range(100, 106)]


async def test_a_fork_whose_parent_runs_with_other_weights_shares_no_kv() -> None:
    bench = Bench(of(V1, "old"), of(V2, "new"), models=Versions(V2, V1))
    bench.start("r-0", prepared=V1, leads=True)
    says(bench, bench.cluster.nodes[0], 100)
    serving(bench, "new")
    done = await bench.start("r-1", prepared=V2, parent="r-0").ended()
    assert ranges(done) == [("v2", 0, 6)]
    assert [message.fork_of for message in bench.cluster.sent_to("new", m.Prefill)] == [None]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- all requests end with what they have


async def test_all_requests_end_with_the_tokens_they_have() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    begun, silent = bench.start("r1", prepared=V1), bench.start("r2", prepared=V1)
    says_to(bench, "r1", 100, 101, 102)
    bench.cluster.nodes.clear()
    parked = bench.start("r3", prepared=V1)
    assert bench.dispatch.abort_all() == 3 and bench.dispatch.abort_all() == 0
    ends = [heard.end for heard in (begun, silent, parked)]
    assert [end.reason for end in ends if isinstance(end, Done)] == ["abort"] * 3
    assert begun.tokens == [100, 101, 102] and not silent.tokens and not parked.tokens
    assert [ranges(end) for end in ends if isinstance(end, Done)] == [[("v1", 0, 3)], [], []]
    assert {message.request for message in bench.cluster.sent_to("old", m.Cancel)} == {"r1", "r2"}  # type: ignore[attr-defined]
    assert bench.cluster.ledger.num_requests() == 0 and bench.dispatch.waiting.num_held == 0


async def test_forks_that_end_so_are_not_placed_when_their_parent_ends() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    parent, fork = bench.start("r-0", prepared=V1, leads=True), bench.start("r-1", prepared=V1, parent="r-0")
    bench.dispatch.abort_all()
    assert len(bench.asked("old")) == 1 and isinstance(parent.end, Done) and isinstance(fork.end, Done)


async def test_an_answer_that_is_all_there_ends_as_it_would() -> None:
    bench = Bench(of(V1, "p0", "prefill"), of(V1, "d0", "decode"), models=Versions(V1), force="remote")
    pair = ScriptedPair(bench.cluster, *bench.cluster.nodes, num_tokens=6)
    pair.install()
    heard = bench.start(prepared=V1)
    bench.dispatch.abort_all()
    done = await heard.ended()
    assert isinstance(done, Done) and done.reason == "length"


def says_to(bench: Bench, request: str, *tokens: int) -> None:
    work = next(work for work in bench.asked("old") if work.request == request)
    bench.cluster.ledger.deliver(request, "old-boot", row(work, tokens[0] - 100, tokens))


async def test_a_request_without_a_token_goes_to_the_newest_version_unless_it_named_its_own() -> None:
    bench = Bench(of(V2, "new"), models=Versions(V2))
    serving(bench, "new")
    assert ranges(await bench.start(prepared=V1).ended()) == [("v2", 0, 6)]


# ---------------------------------------------------------------- pauses


async def paused(bench: Bench, mode: PauseMode, longest_s: float = 10.0) -> asyncio.Task[int]:
    """A pause that has begun."""
    task = asyncio.create_task(bench.dispatch.pause(mode, longest_s))
    await asyncio.sleep(0)
    return task


async def test_requests_that_are_kept_go_on_with_what_they_have_and_new_ones_wait() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    heard = bench.start(prepared=V1)
    says(bench, bench.cluster.nodes[0], 100, 101)
    pausing = await paused(bench, "keep")
    assert await pausing == 1 and bench.dispatch.is_paused
    (cancel,) = bench.cluster.sent_to("old", m.Cancel)  # type: ignore[attr-defined]
    assert cancel.request == "r1"
    fresh = bench.start("r2", prepared=V1)
    serving(bench, "old")
    await asyncio.sleep(0.1)
    assert heard.end is fresh.end is None and len(bench.asked("old")) == 1
    assert bench.dispatch.resume() and not bench.dispatch.resume()
    assert ranges(await heard.ended()) == [("v1", 0, 6)] and heard.tokens == [*range(100, 106)]
    assert ranges(await fresh.ended()) == [("v1", 0, 6)]


async def test_kept_requests_go_on_with_the_weights_that_a_trainer_brought() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    heard = bench.start(prepared=V1)
    says(bench, bench.cluster.nodes[0], 100, 101)
    await (await paused(bench, "keep"))
    bench.models.infos = (V2,)
    serving(bench, "new")
    bench.become(of(V2, "new"))
    await asyncio.sleep(0.05)
    assert not bench.asked("new")
    bench.dispatch.resume()
    assert ranges(await heard.ended()) == [("v1", 0, 2), ("v2", 2, 6)] and heard.tokens == [*range(100, 106)]


async def test_a_pause_that_waits_is_there_once_nothing_runs() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    heard = bench.start(prepared=V1)
    pausing = await paused(bench, "wait")
    await asyncio.sleep(0.05)
    assert not pausing.done()
    says(bench, bench.cluster.nodes[0], *range(100, 106))
    finished = m.Finished("r1", 0, "length", 6, m.LegTimings())
    bench.cluster.ledger.deliver("r1", bench.cluster.nodes[0].incarnation, finished)
    assert await pausing == 1 and isinstance(heard.end, Done)


async def test_a_pause_that_aborts_ends_all_with_what_they_have() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    heard = bench.start(prepared=V1)
    says(bench, bench.cluster.nodes[0], 100)
    assert await (await paused(bench, "abort")) == 1
    assert isinstance(heard.end, Done) and (heard.end.reason, heard.tokens) == ("abort", [100])


async def test_a_pause_counts_for_no_waiting_time_and_no_deadline() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1), age_s=0.2)
    await (await paused(bench, "keep"))
    heard = bench.start(prepared=V1, deadline_s=0.3)
    await asyncio.sleep(0.5)
    assert heard.end is None
    serving(bench, "old")
    bench.dispatch.resume()
    assert isinstance(await heard.ended(), Done)


async def test_a_pause_whose_maker_is_gone_ends_by_itself() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    serving(bench, "old")
    await (await paused(bench, "keep", longest_s=0.1))
    assert isinstance(await bench.start(prepared=V1).ended(), Done) and not bench.dispatch.is_paused


async def test_a_pause_that_ends_while_requests_run_says_so() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1))
    bench.start(prepared=V1)
    with pytest.raises(errors.DeadlineExceeded, match="requests still ran when the pause ended"):
        await bench.dispatch.pause("wait", 0.1)


async def test_what_is_held_in_a_pause_is_bounded() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1), count=1)
    await (await paused(bench, "keep"))
    bench.start("r1", prepared=V1)
    refused = bench.start("r2", prepared=V1)
    assert isinstance(refused.end, errors.Unavailable) and "no more may" in str(refused.end)


async def test_a_pause_spends_no_time_on_requests_whose_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1), age_s=0.05)
    await (await paused(bench, "keep"))
    bench.start(prepared=V1)
    await asyncio.sleep(0.1)
    looks = 0
    look = bench.dispatch.waiting._release_all

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await look()

    monkeypatch.setattr(bench.dispatch.waiting, "_release_all", counted)
    await asyncio.sleep(0.3)
    assert looks < 60


async def test_requests_come_back_from_a_pause_whatever_the_bounds_are_by_then() -> None:
    """A tenant's part of the queue shrinks when others come."""
    bench = Bench(of(V1, "old"), models=Versions(V1), count=40, is_shared=True)
    await (await paused(bench, "keep"))
    asked = [
        bench.start(f"{tenant}{number}", prepared=V1, standing=TenantPriority(tenant))
        for tenant in "abcd"
        for number in range(20)
    ]
    serving(bench, "old")
    held = [each for each in asked if each.end is None]
    assert len(held) > 35
    bench.dispatch.resume()
    for each in held:
        assert isinstance(await each.ended(), Done)


async def test_what_waited_beside_a_pause_goes_on_with_other_weights_too() -> None:
    """It had tokens and lost its node before the pause."""
    bench = Bench(of(V1, "old"), models=Versions(V1))
    heard = bench.start(prepared=V1)
    old = bench.cluster.nodes[0]
    says(bench, old, 100, 101)
    bench.become()
    bench.cluster.kill(old)
    await asyncio.sleep(0.05)
    await (await paused(bench, "keep"))
    bench.models.infos = (V2,)
    serving(bench, "new")
    bench.become(of(V2, "new"))
    bench.dispatch.resume()
    assert ranges(await heard.ended()) == [("v1", 0, 2), ("v2", 2, 6)]


@pytest.mark.parametrize("changes", [{"weights_change": "fail"}, {"names_weights": True}])
async def test_a_pause_changes_no_weights_of_who_wants_none_changed(changes: dict[str, object]) -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1), age_s=0.2)
    heard = bench.start(prepared=V1, **changes)
    says(bench, bench.cluster.nodes[0], 100, 101)
    await (await paused(bench, "keep"))
    bench.models.infos = (V2,)
    serving(bench, "new")
    bench.become(of(V2, "new"))
    bench.dispatch.resume()
    assert isinstance(await heard.ended(), errors.Unavailable) and not bench.asked("new")


async def test_a_pause_allows_one_change_and_no_later_one() -> None:
    bench = Bench(of(V1, "old"), models=Versions(V1), age_s=0.2)
    heard = bench.start(prepared=V1)
    says(bench, bench.cluster.nodes[0], 100, 101)
    await (await paused(bench, "keep"))
    bench.dispatch.resume()
    async with asyncio.timeout(WAIT_S):
        while len(bench.asked("old")) < 2:
            await asyncio.sleep(0.002)
    bench.models.infos = (V2,)
    bench.become(bench.cluster.nodes[0], of(V2, "new"))
    bench.cluster.kill(bench.cluster.nodes[0])
    assert isinstance(await heard.ended(), errors.Unavailable) and not bench.asked("new")
