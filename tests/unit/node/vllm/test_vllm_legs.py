"""Legs of nodes with a serving engine: who is told what, and what the engine is asked, from Prefill to Finished."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_serving_engine import answer_of, vector_of
from msgspec import structs
from serving_engine_nodes import PARKS_S, ROUTER, VllmNode, VllmNodes, card_of, work_of
from stepped_nodes import Letter

from pdcluster.bootstrap.card import MAX_ADAPTERS, Adapter
from pdcluster.core.errors import BadRequest, NodeDrains, Overloaded, PdclusterError, TransferError
from pdcluster.core.messages import (
    MODEL_PARAM,
    AdapterManaged,
    Cancel,
    Commit,
    CommitAck,
    Computed,
    Deliver,
    Delivered,
    Embedded,
    Failed,
    Fetch,
    Finished,
    Hello,
    LegTimings,
    Manage,
    ManageAdapter,
    Pooling,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    Sampling,
    Scheduled,
    TokenRow,
    Welcome,
    Work,
    pack_tokens,
)
from pdcluster.node.legs import EmittedTokens, EndedLeg, EndedLegs
from pdcluster.node.vllm.engine.interface import AdapterLoaded, EngineOutput
from pdcluster.node.vllm.engine_side import STUCK_S, EngineLost
from pdcluster.node.vllm.events import CacheEvents
from pdcluster.node.vllm.requests import fence_of
from pdcluster.transfer.backends.base import Peer


def replace_sampling(work: Work, **fields: Any) -> Work:
    return structs.replace(work, sampling=structs.replace(work.sampling, **fields))


@pytest.fixture
def nodes() -> Iterator[VllmNodes]:
    found = VllmNodes()
    yield found
    for node in found.nodes.values():
        node.control.close()
        node.engine.close()


PROMPT = list(range(1, 41))


def test_the_decode_node_makes_every_token_and_the_prefill_node_says_when_the_prompt_is_there(nodes: VllmNodes) -> None:
    nodes.hand_over("r", PROMPT)
    nodes.turn(12)
    assert nodes.tokens("r") == answer_of(PROMPT, 4)
    assert [name for name, message in nodes.heard if isinstance(message, TokenRow)] == ["d"] * 4
    kinds = [type(message) for name, message in nodes.heard if name == "p"]
    assert kinds.index(Scheduled) < kinds.index(Computed) < kinds.index(Delivered)
    (finished,) = nodes.all_of(Finished)
    assert (finished.reason, finished.num_output) == ("length", 4)
    prompt, row = nodes["p"].engine.added[0], nodes["d"].engine.added[0]
    assert prompt.parks and row.reference and prompt.fence == row.fence != ""
    for node in nodes.nodes.values():
        assert node.side.is_idle and not node.engine.running
        node.side.check_integrity()
    assert not nodes.store.parked


def test_a_local_request_runs_to_its_end_and_says_when_it_leaves_the_queue(nodes: VllmNodes) -> None:
    nodes.say("d", Prefill(work_of("r", PROMPT), remote=False))
    nodes.turn(6)
    assert nodes.tokens("r") == answer_of(PROMPT, 4) and len(nodes.all_of(Scheduled)) == 1
    assert nodes.all_of(Finished)[0].num_output == 4 and nodes["d"].side.is_idle


def test_a_replay_goes_on_behind_the_emitted_tokens(nodes: VllmNodes) -> None:
    emitted = answer_of(PROMPT, 2)
    nodes.say("d", Prefill(work_of("r", [*PROMPT, *emitted], 5, attempt=2, num_prompt=len(PROMPT)), remote=False))
    nodes.turn(6)
    rows = nodes.all_of(TokenRow)
    assert rows[0].position == 2 and nodes.tokens("r") == answer_of(PROMPT, 5)[2:]
    assert nodes["d"].engine.added[0].num_emitted == 2 and nodes.all_of(Finished)[0].num_output == 5


def test_a_reference_near_its_end_is_not_read(nodes: VllmNodes) -> None:
    nodes.delivers = False
    nodes.hand_over("r", PROMPT)
    nodes.turn(3)
    ticket = nodes.all_of(Reserved)[0].ticket
    nodes.say("d", Commit(ticket.nonce, 1, (), None, opaque=b"x", holds_s=1.0), nodes["p"].me)
    nodes.turn(2)
    (failed,) = nodes.all_of(Failed, "d")
    assert failed.code == TransferError.code and failed.retryable and not nodes["d"].engine.added


def test_a_used_reference_ends_both_legs_with_errors_that_may_be_tried_again(nodes: VllmNodes) -> None:
    nodes.delivers = False
    nodes.hand_over("r", PROMPT)
    nodes.turn(3)
    nodes.store.parked.clear()  # somebody read it
    nodes.say("p", Deliver(nodes.all_of(Reserved)[0].ticket))
    nodes.turn(6)
    by_node = {name: message for name, message in nodes.heard if isinstance(message, Failed)}
    assert by_node["d"].code == by_node["p"].code == TransferError.code
    assert by_node["d"].retryable and by_node["p"].retryable and not nodes.tokens("r")
    assert all(node.side.is_idle for node in nodes.nodes.values())


def test_a_commit_of_another_node_or_of_no_ticket_is_refused(nodes: VllmNodes) -> None:
    nodes.delivers = False
    nodes.hand_over("r", PROMPT)
    nodes.turn(2)
    nonce, stranger = nodes.all_of(Reserved)[0].ticket.nonce, Peer("x", "x-1")
    sent: list[Letter] = []
    nodes["d"].box._post = sent.append  # type: ignore[method-assign]
    for bad in (nonce, nonce + 1):
        nodes.say("d", Commit(bad, 1, (), None, opaque=b"x", holds_s=20.0), stranger)
    nodes["d"].control.turn()
    acks = [letter.message for letter in sent if isinstance(letter.message, CommitAck)]
    assert [ack.nonce for ack in acks] == [nonce, nonce + 1] and all(ack.refused for ack in acks)
    assert not nodes["d"].engine.added


def test_an_unanswered_commit_goes_again_and_a_repeated_one_changes_nothing(nodes: VllmNodes) -> None:
    nodes.hand_over("r", PROMPT, max_tokens=50)
    nodes.turn(4)
    assert len(nodes["d"].engine.added) == 1
    reference = nodes["d"].engine.added[0].reference
    ticket = nodes.all_of(Reserved)[0].ticket
    nodes.say("d", Commit(ticket.nonce, 1, (), None, opaque=reference, holds_s=20.0), nodes["p"].me)
    nodes.turn(60)
    assert len(nodes["d"].engine.added) == 1 and len(nodes.tokens("r")) == 50 and not nodes.all_of(Failed)


def test_full_parking_refuses_prompts_with_a_time_to_ask_again(nodes: VllmNodes) -> None:
    nodes.delivers = False
    for number in range(3):
        nodes.say("p", Prefill(work_of(f"r{number}", list(range(1, 600))), remote=True))
        nodes.turn(3)
    assert len(nodes.all_of(Computed)) == 2
    (refused,) = nodes.all_of(Refused)
    assert refused.request == "r2" and refused.retryable and refused.retry_after_s > 0
    assert nodes["p"].side.load().pages_parked == 2 * 19


def test_parked_kv_is_given_up_before_its_lease_and_freed_at_once(nodes: VllmNodes) -> None:
    nodes.delivers = False
    nodes.say("p", Prefill(work_of("r", PROMPT), remote=True))
    nodes.turn(2)
    assert nodes.store.parked
    nodes.now += PARKS_S
    nodes.turn(1)
    (failed,) = nodes.all_of(Failed)
    assert failed.code == Overloaded.code and failed.retryable
    assert not nodes.store.parked and nodes["p"].side.is_idle


def test_a_decode_node_that_does_not_read_in_time_is_blamed_by_name(nodes: VllmNodes) -> None:
    nodes["d"].engine.step = lambda: None  # type: ignore[method-assign]
    nodes.hand_over("r", PROMPT)
    nodes.turn(5)
    nodes.now += PARKS_S
    nodes.turn(1)
    failed = next(message for message in nodes.all_of(Failed, "p"))
    assert failed.code == TransferError.code and failed.retryable and "node d" in failed.message
    assert not nodes.store.parked and nodes["p"].side.is_idle


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_cancelled_request_leaves_nothing_in_either_engine(nodes: VllmNodes, turns: int) -> None:
    nodes.hand_over("r", PROMPT, max_tokens=50)
    nodes.turn(turns)
    for name in ("p", "d"):
        nodes.say(name, Cancel("r", 1, "the client left"))
    nodes.turn(4)
    assert all(node.side.is_idle and not node.engine.running for node in nodes.nodes.values())
    assert not nodes.store.parked


def test_an_attempt_that_comes_again_replaces_itself(nodes: VllmNodes) -> None:
    for _ in range(2):
        nodes.say("d", Prefill(work_of("r", PROMPT), remote=False))
        nodes["d"].control.turn()
    nodes.turn(8)
    assert nodes.tokens("r") == answer_of(PROMPT, 4) and len(nodes.all_of(Finished)) == 1


def test_a_fork_waits_for_its_parents_first_token(nodes: VllmNodes) -> None:
    nodes.say("d", Prefill(work_of("a", PROMPT), remote=False))
    nodes.say("d", Prefill(work_of("b", PROMPT), remote=False, fork_of="a"))
    nodes["d"].control.turn()
    assert [request.key.split("#")[0] for request in nodes["d"].engine.added] == ["a"]
    nodes.turn(10)
    assert nodes.tokens("b") == answer_of(PROMPT, 4) and len(nodes.all_of(Finished)) == 2


def test_a_node_counts_how_often_its_cache_events_were_lost(nodes: VllmNodes) -> None:
    side = nodes["p"].side
    assert side.snapshot().num_cache_gaps == 0
    side.cache.apply(CacheEvents((), is_gap=True))
    assert side.snapshot().num_cache_gaps == 1


def test_a_node_whose_engine_died_is_over(nodes: VllmNodes) -> None:
    nodes["d"].engine.die()
    with pytest.raises(EngineLost, match="killed by the test"):
        nodes["d"].control.turn()


def test_work_moves_away_when_an_operator_says_so(nodes: VllmNodes) -> None:
    nodes.say("d", Prefill(work_of("r", PROMPT, 50), remote=False))
    nodes.turn(3)
    nodes.say("d", Manage(1, cordoned=True, moves=True))
    nodes.turn(3)
    (failed,) = nodes.all_of(Failed)
    assert failed.code == NodeDrains.code and failed.retryable and not nodes["d"].engine.running
    nodes.say("d", Prefill(work_of("s", PROMPT), remote=False))
    nodes.turn(1)
    assert nodes.all_of(Refused)[0].request == "s"


def test_kv_of_a_node_that_cannot_be_read_is_left_alone_for_a_while(nodes: VllmNodes) -> None:
    nodes.delivers = False
    for number in range(3):
        nodes.say("d", Reserve(work_of(f"r{number}", PROMPT, attempt=1), nodes["p"].endpoint))
        nodes.turn(1)
        nonce = nodes.all_of(Reserved)[-1].ticket.nonce
        nodes.say("d", Commit(nonce, 1, (), None, opaque=b'"nothing"', holds_s=20.0), nodes["p"].me)
        nodes.turn(2)
    nodes.say("d", Reserve(work_of("r3", PROMPT, attempt=1), nodes["p"].endpoint))
    nodes.turn(1)
    assert "could not be read" in nodes.all_of(Refused)[-1].reason
    nodes.now += 2.0
    nodes.say("d", Reserve(work_of("r4", PROMPT, attempt=1), nodes["p"].endpoint))
    nodes.turn(1)
    assert nodes.all_of(Reserved)[-1].request == "r4"


def test_a_router_that_connects_anew_hears_again_that_the_prompt_is_there(nodes: VllmNodes) -> None:
    nodes.delivers = False
    nodes.say("p", Prefill(work_of("r", PROMPT), remote=True))
    nodes.turn(3)
    nodes.heard.clear()
    nodes.say("p", Hello("router", (("r", 0, 0),)))
    nodes.turn(1)
    assert [message.request for message in nodes.all_of(Computed)] == ["r"]


def test_a_full_decode_node_refuses_by_rows_and_by_blocks(nodes: VllmNodes) -> None:
    for number in range(5):
        nodes.say("d", Reserve(work_of(f"r{number}", PROMPT, attempt=1), nodes["p"].endpoint))
    nodes.delivers = False
    nodes.turn(1)
    assert "rows are taken" in nodes.all_of(Refused)[-1].reason and len(nodes.all_of(Reserved)) == 4
    for number in range(5):
        nodes.say("d", Cancel(f"r{number}", 1, "over"))
    for number in range(2):
        nodes.say("d", Reserve(work_of(f"s{number}", list(range(1, 900)), 512, attempt=1), nodes["p"].endpoint))
    nodes.say("d", Reserve(work_of("s2", list(range(1, 900)), 512, attempt=1), nodes["p"].endpoint))
    nodes.turn(1)
    assert "KV blocks" in nodes.all_of(Refused)[-1].reason


def test_what_no_node_of_this_kind_can_do_is_refused_with_the_way_out(nodes: VllmNodes) -> None:
    sampling = Sampling(max_tokens=4, seed=1, prompt_logprobs=0)
    nodes.say("p", Prefill(Work("r", 0, pack_tokens(PROMPT), 40, b"", sampling, 60.0), remote=True))
    nodes.say("p", Prefill(work_of("s", [*PROMPT, 5000]), remote=False))
    nodes.say("p", Prefill(work_of("t", [1] * 1024), remote=False))
    nodes.turn(1)
    refused = {each.request: each for each in nodes.all_of(Refused)}
    assert not any(each.retryable for each in refused.values()) and len(refused) == 3
    assert "leave prompt_logprobs out" in refused["r"].reason and "5000" in refused["s"].reason


def test_a_pull_is_declined(nodes: VllmNodes) -> None:
    nodes.delivers = False
    nodes.hand_over("r", PROMPT)
    nodes.turn(2)
    sent: list[Letter] = []
    nodes["p"].box._post = sent.append  # type: ignore[method-assign]
    nodes.say("p", Fetch(nodes.all_of(Reserved)[0].ticket, b"0" * 16), nodes["d"].me)
    nodes["p"].control.turn()
    assert "give no KV" in sent[-1].message.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("end", ["router lost", "hello", "deadline", "moves"])
def test_forks_that_end_with_their_parent_end_once(nodes: VllmNodes, end: str) -> None:
    """Whatever ends all of a router's rows at once meets the forks that their parent's end took along."""
    nodes.say("d", Prefill(work_of("a", PROMPT, 50), remote=False))
    for name in ("b", "c"):
        nodes.say("d", Prefill(work_of(name, PROMPT, 50), remote=False, fork_of="a"))
    nodes["d"].control.turn()
    if end == "router lost":
        nodes["d"].side.cancel_router(ROUTER)
    elif end == "hello":
        nodes.say("d", Hello("router"))
    elif end == "deadline":
        nodes.now += 61.0
    else:
        nodes.say("d", Manage(1, cordoned=True, moves=True))
    nodes.turn(3)
    failed = [message.request for message in nodes.all_of(Failed)]
    assert len(failed) == len(set(failed)) and nodes["d"].side.is_idle and not nodes["d"].engine.running


@pytest.mark.parametrize("leg", ["prefill", "local", "reserve"])
def test_sampling_that_vllm_cannot_do_is_refused_before_any_work(nodes: VllmNodes, leg: str) -> None:
    work = replace_sampling(work_of("r", PROMPT), temperature=2.5)
    message = Reserve(work, nodes["p"].endpoint) if leg == "reserve" else Prefill(work, remote=leg == "prefill")
    nodes.say("d", message)
    nodes.turn(1)
    (refused,) = nodes.all_of(Refused)
    assert "up to 2" in refused.reason and not refused.retryable and not nodes["d"].engine.added


@pytest.mark.parametrize("is_bad_request", [False, True])
def test_a_fault_of_the_request_says_nothing_against_the_prefill_node(nodes: VllmNodes, is_bad_request: bool) -> None:
    for number in range(4):
        nodes["d"].engine.fault = EngineOutput("", finish="error", error="no", is_bad_request=is_bad_request)
        nodes.hand_over(f"r{number}", PROMPT)
        nodes.turn(8)
    failed = nodes.all_of(Failed, "d")
    assert len(failed) == 4 and all(each.retryable is not is_bad_request for each in failed)
    assert all(each.code == (BadRequest.code if is_bad_request else PdclusterError.code) for each in failed)
    assert not [each for each in nodes.all_of(Refused) if "could not be read" in each.reason]


def test_prompts_in_the_queue_take_no_slots(nodes: VllmNodes) -> None:
    for number in range(7):
        nodes.say("d", Prefill(work_of(f"q{number}", list(range(1, 300)), 50), remote=False))
    nodes["d"].control.turn()
    load = nodes["d"].side.load()
    assert load.waiting > 0 and load.rows == load.slots_used == 7 - load.waiting


def test_batch_prompts_wait_behind_all_others_and_are_counted_apart(nodes: VllmNodes) -> None:
    for name, is_batch in (("b0", True), ("b1", True), ("b2", True), ("c0", False), ("c1", False)):
        work = structs.replace(work_of(name, list(range(1, 300)), 2), is_batch=is_batch)
        nodes.say("d", Prefill(work, remote=False))
    nodes["d"].control.turn()
    load = nodes["d"].side.load()
    assert load.waiting_tokens % 299 == load.batch_tokens % 299 == 0
    assert load.waiting_tokens + load.batch_tokens == 5 * 299
    nodes.turn(12)
    assert [request.key[:2] for request in nodes["d"].engine.added][-2:] == ["b1", "b2"]
    assert len(nodes.all_of(Finished, "d")) == 5 and nodes["d"].side.load().batch_tokens == 0


# ---------------------------------------------------------------- embeddings


def embed(name: str, tokens: list[int], dimensions: int = 0, attempt: int = 0) -> Prefill:
    return Prefill(work_of(name, tokens, attempt=attempt), remote=False, pooling=Pooling(dimensions))


def test_a_pooling_node_answers_with_the_vector_and_says_when_the_prompt_leaves_the_queue(nodes: VllmNodes) -> None:
    node = nodes.add_pooling()
    nodes.say("e", embed("r", PROMPT))
    nodes.say("e", embed("short", [7], dimensions=2))
    nodes.turn(3)
    assert [type(message) for name, message in nodes.heard if name == "e"] == [Scheduled, Scheduled, Embedded, Embedded]
    whole, cut = nodes.all_of(Embedded)
    assert (whole.request, whole.vector) == ("r", vector_of(PROMPT, 4))
    assert (cut.request, cut.vector) == ("short", vector_of([7], 2))
    assert node.side.is_idle and not node.engine.running
    node.side.check_integrity()


def test_an_embedding_may_fill_the_model_s_whole_context(nodes: VllmNodes) -> None:
    nodes.add_pooling(max_len=40)
    nodes.say("e", embed("r", PROMPT))
    nodes.say("e", embed("longer", [*PROMPT, 1]))
    nodes.turn(3)
    assert [message.request for message in nodes.all_of(Embedded)] == ["r"]
    (refused,) = nodes.all_of(Refused)
    assert not refused.retryable and refused.reason == "the prompt has 41 tokens; these nodes take 40 at most"


def test_prompts_to_embed_wait_in_the_node_s_queue_and_count_as_prompts_do(nodes: VllmNodes) -> None:
    node = nodes.add_pooling()
    for number in range(8):
        nodes.say("e", embed(f"r{number}", list(range(1, 101))))
    nodes.turn(1, steps=False)
    load = node.side.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (4, 4, 800), "four rows are what this engine has"
    nodes.say("e", embed("one more", PROMPT))
    nodes.turn(6)
    assert len(nodes.all_of(Embedded)) == 9 and node.side.load().waiting_tokens == 0


def test_a_full_queue_refuses_for_a_while(nodes: VllmNodes) -> None:
    nodes.add_pooling()
    for number in range(9):
        nodes.say("e", embed(f"r{number}", PROMPT))
    nodes.turn(1, steps=False)
    (refused,) = nodes.all_of(Refused)
    assert refused.retryable and refused.retry_after_s > 0


def test_each_kind_of_node_refuses_the_other_kind_of_work_by_name(nodes: VllmNodes) -> None:
    nodes.add_pooling()
    nodes.say("d", embed("r", PROMPT))
    nodes.say("e", Prefill(work_of("local", PROMPT), remote=False))
    nodes.say("e", Prefill(work_of("remote", PROMPT), remote=True))
    nodes.say("e", Reserve(work_of("reserve", PROMPT, attempt=1), nodes["p"].endpoint))
    nodes.turn(3)
    refused = nodes.all_of(Refused)
    assert not any(message.retryable or message.param for message in refused)
    assert {message.request: message.reason.split(":")[0] for message in refused} == {
        "r": "node d embeds nothing",
        **dict.fromkeys(
            ("local", "remote", "reserve"),
            "node e has a pooling model, which generates nothing; ask for embeddings",
        ),
    }
    assert not any(node.engine.added for node in nodes.nodes.values())


@pytest.mark.parametrize("steps", [False, True])
def test_a_cancelled_embedding_leaves_nothing_behind(nodes: VllmNodes, steps: bool) -> None:
    node = nodes.add_pooling()
    nodes.say("e", embed("r", PROMPT))
    nodes.turn(1, steps=False)
    nodes.say("e", Cancel("r", 0, "client left"))
    nodes.turn(1, steps=steps)
    nodes.turn(3)
    assert not nodes.all_of(Embedded) and not nodes.all_of(Failed) and node.engine.aborted
    assert node.side.is_idle and not node.engine.running


def test_a_router_that_lost_the_vector_gets_it_again(nodes: VllmNodes) -> None:
    nodes.add_pooling()
    nodes.say("e", embed("r", PROMPT))
    nodes.turn(3)
    nodes.heard.clear()
    nodes.say("e", Hello("router", (("r", 0, 0), ("other", 0, 0))))
    nodes.turn(1)
    assert [message.vector for message in nodes.all_of(Embedded)] == [vector_of(PROMPT, 4)]
    (welcome,) = nodes.all_of(Welcome)
    assert welcome.lost == (("other", 0),)


def test_vectors_that_are_kept_for_routers_are_bounded_by_their_numbers() -> None:
    ended = EndedLegs(capacity=100, max_numbers=10)
    for number in range(5):
        word = Embedded(f"r{number}", 0, bytes(16), LegTimings())
        ended.add(EndedLeg(ROUTER, EmittedTokens(f"r{number}", 0, 0), word))
    assert [number for number in range(5) if ended.get(f"r{number}", 0)] == [3, 4]


def test_an_engine_that_cannot_make_the_dimensions_refuses_them_as_the_client_s_fault(nodes: VllmNodes) -> None:
    node = nodes.add_pooling()
    nodes.say("e", embed("r", PROMPT, dimensions=3))
    node.engine.fault = EngineOutput("", finish="error", error="3", is_bad_request=True, param="dimensions")
    nodes.turn(3)
    (failed,) = nodes.all_of(Failed)
    assert (failed.code, failed.param, failed.retryable) == (BadRequest.code, "dimensions", False)


def test_steps_of_embeddings_are_timed_and_an_idle_engine_counts_for_nothing(nodes: VllmNodes) -> None:
    node = nodes.add_pooling()
    node.engine.now = 100.0
    for name, tokens in (("a", 40), ("b", 50)):
        nodes.say("e", embed(name, list(range(1, tokens + 1))))
    nodes.turn(1)
    nodes.turn(1, steps=False)
    nodes.now = node.engine.now = 200.0
    nodes.say("e", embed("late", list(range(1, 31))))
    nodes.turn(1)
    nodes.turn(1, steps=False)
    assert [step.tokens for step in node.timed] == [90, 30]
    assert all(0 < step.seconds < 0.1 for step in node.timed)


# ---------------------------------------------------------------- LoRA adapters


@pytest.fixture
def adapters(nodes: VllmNodes) -> VllmNodes:
    """Both nodes have the adapter "sql", loaded while they run."""
    for node in nodes.nodes.values():
        card = card_of(node)
        node.links.acceptance.models = frozenset(card.model_digests)
        node.adapters.introduce(card, {})
    for name in ("p", "d"):
        nodes.say(name, ManageAdapter(1, "sql", "files-1"))
    nodes.turn(2)
    assert nodes.all_of(AdapterManaged) == [AdapterManaged(1, "", "files-1")] * 2
    nodes.heard.clear()
    return nodes


def adapter_work(node: VllmNode, name: str = "r", adapter: str = "sql", digest: str = "files-1", **more: Any) -> Work:
    card = card_of(node, *(Adapter(adapter, digest) for _ in adapter[:1]))
    return structs.replace(work_of(name, PROMPT, **more), model=card.model_digest(adapter or "base"), adapter=adapter)


def test_a_loaded_adapter_stands_on_the_card_and_runs_both_legs(adapters: VllmNodes) -> None:
    nodes = adapters
    neighbours: Any = nodes["p"].links.neighbours
    assert neighbours.adapters == (Adapter("sql", "files-1"),)
    nodes.say("p", Prefill(adapter_work(nodes["p"]), remote=True))
    nodes.say("d", Reserve(adapter_work(nodes["d"], attempt=1), nodes["p"].endpoint))
    nodes.turn(12)
    assert nodes.tokens("r") == answer_of(PROMPT, 4)
    prompt, row = nodes["p"].engine.added[0], nodes["d"].engine.added[0]
    assert prompt.adapter in nodes["p"].engine.adapters and row.adapter in nodes["d"].engine.adapters
    assert prompt.fence == row.fence


def test_a_reference_of_one_adapter_is_none_of_another_or_of_the_base(adapters: VllmNodes) -> None:
    node = adapters["p"]
    works = [adapter_work(node), adapter_work(node, digest="files-2"), adapter_work(node, adapter="sums")]
    fences = {fence_of(work) for work in (*works, adapter_work(node, adapter=""))}
    assert len(fences) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"adapter": "sums"}, {"digest": "files-2"}],
    ids=["an adapter that is not here", "other files under its name"],
)
def test_work_for_an_adapter_that_is_not_here_is_refused_as_another_model(adapters: VllmNodes, wrong: Any) -> None:
    adapters.say("d", Prefill(adapter_work(adapters["d"], **wrong), remote=False))
    adapters.turn(2)
    (refused,) = adapters.all_of(Refused)
    assert refused.param == MODEL_PARAM and not refused.retryable and not adapters["d"].engine.added


@pytest.mark.parametrize("fields", [{"adapter": ""}, {"adapter": "sql", "model": ""}], ids=["no name", "no digest"])
def test_work_whose_adapter_and_model_do_not_agree_is_refused(adapters: VllmNodes, fields: dict[str, str]) -> None:
    adapters.say("d", Prefill(structs.replace(adapter_work(adapters["d"]), **fields), remote=False))
    adapters.turn(2)
    assert adapters.all_of(Refused)[0].param == MODEL_PARAM and not adapters["d"].engine.added


def test_loads_are_idempotent_and_other_files_under_a_name_are_refused(adapters: VllmNodes) -> None:
    engine = adapters["p"].engine
    loaded = dict(engine.adapters)
    for number, (name, path) in enumerate((("sql", "files-1"), ("sql", "files-2"), ("bad", "bad"), ("base", "x")), 2):
        adapters.say("p", ManageAdapter(number, name, path))
        adapters.turn(2)
    first, *others = adapters.all_of(AdapterManaged)
    assert first == AdapterManaged(2, "", "files-1") and all(each.error for each in others) and len(others) == 3
    assert engine.adapters == loaded
    adapters.say("p", ManageAdapter(6, "sql", "files-1"))
    adapters.say("p", ManageAdapter(7, "sql", "files-1"))
    adapters.turn(2)
    assert "is being loaded" in next(each.error for each in adapters.all_of(AdapterManaged) if each.number == 7)


def test_an_engine_that_loads_an_adapter_is_not_stuck(adapters: VllmNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = adapters["d"]
    adapters.say("d", Prefill(adapter_work(node), remote=False))
    adapters.turn(1)
    monkeypatch.setattr(node.engine, "load_adapter", lambda *_: None)
    adapters.say("d", ManageAdapter(2, "slow", "files-2"))
    adapters.turn(1, steps=False)
    adapters.now += STUCK_S + 1.0
    adapters.turn(1, steps=False)
    assert not node.side.is_stuck
    node.adapters.on_loaded(AdapterLoaded(2, error="it took too long"))
    adapters.turn(1, steps=False)
    assert not node.side.is_stuck
    adapters.now += STUCK_S + 1.0
    adapters.turn(1, steps=False)
    assert node.side.is_stuck


def test_adapters_that_are_being_loaded_count_for_the_most_that_a_card_has(adapters: VllmNodes) -> None:
    for number in range(2, MAX_ADAPTERS + 2):
        adapters.say("p", ManageAdapter(number, f"a{number}", f"files-{number}"))
    adapters.turn(3)
    refused = [each.number for each in adapters.all_of(AdapterManaged) if each.error]
    neighbours: Any = adapters["p"].links.neighbours
    assert refused == [MAX_ADAPTERS + 1] and len(neighbours.adapters) == MAX_ADAPTERS


def test_an_unloaded_adapter_takes_no_work_and_its_name_is_free(adapters: VllmNodes) -> None:
    work = adapter_work(adapters["d"])
    for number in (2, 3):
        adapters.say("d", ManageAdapter(number, "sql"))
    adapters.say("d", Prefill(work, remote=False))
    adapters.turn(2)
    assert [each.error for each in adapters.all_of(AdapterManaged)] == ["", ""]
    assert adapters.all_of(Refused)[0].param == MODEL_PARAM and not adapters["d"].engine.adapters
    adapters.say("d", ManageAdapter(4, "sql", "files-2"))
    adapters.turn(2)
    adapters.say("d", Prefill(adapter_work(adapters["d"], digest="files-2"), remote=False))
    adapters.turn(6)
    assert adapters.tokens("r") == answer_of(PROMPT, 4)


def test_a_slot_whose_adapter_is_unloaded_before_its_kv_comes_fails(adapters: VllmNodes) -> None:
    nodes = adapters
    nodes.say("d", Reserve(adapter_work(nodes["d"], attempt=1), nodes["p"].endpoint))
    nodes.turn(2)
    nodes.say("d", ManageAdapter(2, "sql"))
    nodes.turn(1)
    nodes.say("p", Prefill(adapter_work(nodes["p"]), remote=True))
    nodes.say("p", Deliver(nodes.all_of(Reserved)[0].ticket))
    nodes.turn(10)
    assert not nodes.tokens("r") and "unloaded" in nodes.all_of(Failed)[0].message
