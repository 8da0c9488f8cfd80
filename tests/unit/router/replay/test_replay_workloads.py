"""The generator: one (kind, size, seed) is one trace, and each kind shares what its name says."""

from itertools import pairwise

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster_router.replay.trace import Trace, TraceRequest
from pdcluster_router.replay.workloads import BLOCK_TOKENS, CODING, KINDS, generate


def _ideal_hit(trace: Trace) -> float:
    """With a cache without end."""
    seen: set[bytes] = set()
    hits = blocks = 0
    for request in trace.requests:
        hits += sum(block in seen for block in request.blocks)
        blocks += len(request.blocks)
        seen.update(request.grown)
    return hits / max(blocks, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_well_formed_and_the_same_for_the_same_seed(kind: str) -> None:
    trace = generate(kind, 300, seed=3)
    assert len(trace.requests) == 300 and trace == generate(kind, 300, seed=3) and trace != generate(kind, 300, seed=4)
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    for request in trace.requests:
        assert len(request.blocks) == request.num_tokens // trace.block_tokens
        assert len(request.grown) == (request.num_tokens + request.num_output) // trace.block_tokens
        assert request.grown[: len(request.blocks)] == request.blocks


def test_kinds_share_what_they_promise() -> None:
    hits = {kind: _ideal_hit(generate(kind, 600, seed=0)) for kind in ("chat", "agent", "rag", "no-reuse")}
    assert hits["no-reuse"] == 0
    assert 0.3 < hits["rag"] < hits["chat"] < hits["agent"] < 1


def test_documents_are_asked_about_again_whole_and_in_part() -> None:
    trace = generate("documents", 600, seed=0)
    assert 0.4 < _ideal_hit(trace) < 0.65
    by_start: dict[bytes, list[int]] = {}
    for request in trace.requests:
        if request.blocks:
            by_start.setdefault(request.blocks[0], []).append(request.num_tokens)
    again = [lengths for lengths in by_start.values() if len(lengths) > 1]
    assert len(again) > 100, "most documents"
    assert sum(min(lengths) < 0.8 * max(lengths) for lengths in again) > 30, "some in part"


def test_a_conversation_grows_by_what_was_said() -> None:
    turns: dict[int, list[int]] = {}
    for request in generate("chat", 500, seed=0).requests:
        turns.setdefault(request.session, []).append(request.num_tokens)
    assert max(map(len, turns.values())) > 3
    assert all(lengths == sorted(lengths) for lengths in turns.values())


def _sessions(trace: Trace) -> list[list[TraceRequest]]:
    found: dict[int, list[TraceRequest]] = {}
    for request in trace.requests:
        found.setdefault(request.session, []).append(request)
    return list(found.values())


def test_a_coding_agent_keeps_its_history_until_it_is_summarized() -> None:
    followers = [pair for session in _sessions(generate("coding", 4000, seed=0)) for pair in pairwise(session)]
    kept = [after.blocks[: len(before.grown)] == before.grown for before, after in followers]
    rewritten = [pair for pair, is_kept in zip(followers, kept, strict=True) if not is_kept]
    assert 20 < len(rewritten) < 0.1 * len(followers)
    for before, after in rewritten:
        assert before.num_tokens > CODING.most_context and after.num_tokens < 0.6 * CODING.most_context
        opening = min(CODING.systems) // BLOCK_TOKENS
        assert after.blocks[:opening] == before.blocks[:opening], "the system prompt stays"
    waits = sorted(after.arrival_s - before.arrival_s for before, after in followers)
    assert waits[len(waits) // 2] < 10 and waits[-1] > 120, "tools answer soon, and people come back late"


def test_some_sub_agents_of_coding_agents_begin_with_the_whole_history() -> None:
    beyond_openings = 60
    holders: dict[bytes, set[int]] = {}
    sessions = _sessions(generate("coding", 4000, seed=0))
    for request in (each for session in sessions for each in session):
        for block in request.grown[beyond_openings : beyond_openings + 1]:
            holders.setdefault(block, set()).add(request.session)
    shared = [len(holders[block]) for s in sessions for block in s[0].blocks[beyond_openings : beyond_openings + 1]]
    assert sum(num > 1 for num in shared) > 20, "forks"
    assert sum(9_000 < session[0].num_tokens < 14_000 for session in sessions) > 20, "others begin anew"


def test_a_mix_holds_its_kinds_by_share_and_they_share_nothing_with_each_other() -> None:
    trace = generate("everything", 1000, seed=0)
    by_kind: dict[str, list[set[bytes]]] = {}
    for request in trace.requests:
        by_kind.setdefault(request.kind, []).append(set(request.blocks))
    assert {kind: len(found) for kind, found in by_kind.items()} == {
        "chat": 400,
        "agent": 300,
        "rag": 200,
        "no-reuse": 100,
    }
    chat, agent = (set().union(*by_kind[kind]) for kind in ("chat", "agent"))
    assert not chat & agent


def test_unknown_kinds_and_sizes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'talk'; use one of chat"):
        generate("talk", 10, seed=0)
    with pytest.raises(ConfigError, match="not 0"):
        generate("chat", 0, seed=0)
