"""The reading end of pulls: when one is made, what the request gets from it, and that it costs nothing but time when it
fails."""

from __future__ import annotations

import msgspec
import pytest
from fake_backend import Fault
from pulling_nodes import BLOCK, ROOT, PullingNodes, prompt_of, work_of

from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import Abort, AbortAck, Declined, Fetch, Prefill, Pull, pack_tokens
from pdcluster.kv.hashing import extend
from pdcluster.node.native import kv_fetch as fetch
from pdcluster.node.native.kv_fetch import BREAKER
from pdcluster.transfer.backends.base import WriteStatus

PROMPT = prompt_of(42)
# Tokens of its full pages.
HELD = 40


def is_held(nodes: PullingNodes, name: str = "r#0") -> bool:
    sequence = nodes["p0"].parts.scheduler.find(name)
    return sequence is not None and sequence.state is Residence.HELD


def test_a_pulled_prefix_is_not_computed_again() -> None:
    nodes = PullingNodes()
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    end = nodes.finish("r", PROMPT)
    assert (end.timings.cached_tokens, end.timings.pulled_tokens) == (HELD, HELD)
    assert nodes.pulls() == {"ok": 1} and nodes["d0"].parts.export.counters == {"acked": 1}
    assert nodes["p0"].parts.pages.num_cached >= HELD // BLOCK, "and stays cached for the next one"
    nodes.end()


def test_only_what_the_node_lacks_is_fetched() -> None:
    nodes = PullingNodes()
    nodes.cache("d0", PROMPT)
    nodes.cache("p0", PROMPT[:17])
    nodes.ask("r", PROMPT, pull="d0")
    end = nodes.finish("r", PROMPT)
    (fetch,) = nodes.fetches()
    assert (fetch.ticket.cached_tokens, fetch.ticket.num_tokens) == (16, HELD)
    assert (end.timings.cached_tokens, end.timings.pulled_tokens) == (HELD, HELD - 16)
    nodes.end()


@pytest.mark.parametrize(("held", "own", "pull_tokens"), [(20, 20, 20), (20, 24, 20), (20, 0, 3), (4, 0, 4)])
def test_nothing_is_fetched_when_nothing_would_be_saved(held: int, own: int, pull_tokens: int) -> None:
    """The holder has no more than this node, or no full page, or only the page with the prompt's last token."""
    nodes, prompt = PullingNodes(), PROMPT[: max(held, own)]
    nodes.cache("d0", prompt[:held])
    if own:
        nodes.cache("p0", prompt[:own])
    nodes.ask("r", prompt, pull="d0", pull_tokens=pull_tokens)
    nodes.finish("r", prompt)
    assert nodes.pulls() == {"needless": 1} and not nodes.fetches()
    nodes.end()


def test_a_pull_of_more_tokens_than_the_prompt_has_gives_no_page_a_name_of_its_own() -> None:
    """No text is behind the prompt yet: pages that are decoded later must get the hashes of what was decoded."""
    nodes = PullingNodes()
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, 20, pull="d0", pull_tokens=100_000)
    nodes.finish("r", PROMPT)
    text = pack_tokens([*PROMPT, *nodes.tokens["r"]])
    computed = (len(PROMPT) + 20 - 1) // BLOCK
    assert nodes["p0"].parts.pages.match_length(extend(b"", text, root=ROOT, block_tokens=BLOCK)) == computed
    assert nodes.pulls() == {"ok": 1}
    nodes.end()


def test_prompt_logprobs_need_every_token_computed() -> None:
    nodes = PullingNodes()
    nodes.cache("d0", PROMPT)
    nodes.say(
        "p0", Prefill(work_of("r", PROMPT, 2, prompt_logprobs=0), remote=False, pull=Pull(nodes["d0"].endpoint, HELD))
    )
    nodes.finish("r", PROMPT)
    assert not nodes.fetches()
    nodes.end()


def test_others_are_computed_while_a_request_waits_for_its_kv() -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=0.2))
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: is_held(nodes))
    nodes.ask("other", prompt_of(9, seed=5))
    nodes.finish("other", prompt_of(9, seed=5))
    assert is_held(nodes) and nodes["p0"].parts.scheduler.find("r#0").num_pages == 0
    assert nodes["p0"].parts.pages.num_used == HELD // BLOCK, "the pull's own"
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"ok": 1}
    nodes.end()


def test_a_page_that_was_computed_meanwhile_is_kept_once() -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=0.3))
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: is_held(nodes))
    nodes.cache("p0", PROMPT[:30])
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"ok": 1}
    assert nodes["p0"].parts.pages.num_cached == (len(PROMPT) + 2) // BLOCK, (
        "every full page once, those with output too"
    )
    nodes.end()


def test_behind_pages_that_are_forgotten_meanwhile_nothing_is_published() -> None:
    """Of the prompt's beginning, which was cached here: another row could not go on for what is in it."""
    nodes = PullingNodes(lambda _: Fault(delay_s=0.1))
    nodes.cache("d0", PROMPT)
    nodes.cache("p0", PROMPT[:9])
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: bool(nodes.fetches()))
    pages = nodes["p0"].parts.pages
    pages.forget(pages.match(work_of("r", PROMPT, 1).hashes))
    timings = nodes.finish("r", PROMPT).timings
    assert nodes.pulls() == {"ok": 1} and (timings.cached_tokens, timings.pulled_tokens) == (0, 0)
    assert pages.num_cached == (len(PROMPT) + 2) // BLOCK, "all of it was computed here"
    nodes.end()


def test_a_holder_that_has_it_no_longer_says_so_and_the_prompt_is_computed_at_once() -> None:
    nodes = PullingNodes()
    nodes.cache("d0", PROMPT[:20])
    before = nodes.now
    nodes.ask("r", PROMPT, pull="d0")
    end = nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"declined": 1} and nodes["d0"].parts.export.counters == {"gone": 1}
    assert end.timings.pulled_tokens == 0 and nodes.now - before < 0.1
    nodes.end()


@pytest.mark.parametrize("checks_permits", [True, False], ids=["fences", "cannot-fence"])
@pytest.mark.parametrize("lost", [Fetch, AbortAck])
def test_a_pull_without_an_answer_costs_its_deadline(lost: type, checks_permits: bool) -> None:
    nodes = PullingNodes(checks_permits=checks_permits)
    nodes.cache("d0", PROMPT)
    nodes.lose = lambda letter: isinstance(letter.message, Fetch | lost)
    before = nodes.now
    nodes.ask("r", PROMPT, pull="d0")
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"expired": 1} and 2.0 <= nodes.now - before < 2.2
    if not checks_permits and lost is AbortAck:
        assert nodes["p0"].parts.pages.num_quarantined == HELD // BLOCK, "nobody proved that nothing is written"
    nodes.lose = lambda letter: False
    assert any(isinstance(letter.message, Abort) for letter in nodes.seen)
    nodes.end()


def test_a_write_that_lands_after_the_deadline_changes_no_live_page() -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=6.0), checks_permits=False)
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, count=6, pull="d0")
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"expired": 1} and nodes["p0"].parts.pages.num_quarantined == HELD // BLOCK
    assert nodes["d0"].parts.export.num_pinned == HELD // BLOCK, "the source stays pinned as long"
    nodes.end()


@pytest.mark.parametrize("checks_permits", [True, False], ids=["fences", "cannot-fence"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(flip_byte=3),
        Fault(status=WriteStatus.FAILED),
        Fault(unknown_s=0.01, delay_s=0.5),
        Fault(lost_s=0.01, delay_s=0.5),
    ],
)
def test_kv_that_does_not_come_right_is_never_used_and_not_waited_for(fault: Fault, checks_permits: bool) -> None:
    nodes = PullingNodes(lambda _: fault, checks_permits=checks_permits)
    nodes.cache("d0", PROMPT)
    before = nodes.now
    nodes.ask("r", PROMPT, pull="d0")
    end = nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"failed": 1} and end.timings.cached_tokens == 0 and nodes.now - before < 0.2
    if fault.lost_s is not None and not checks_permits:
        nodes.kill("d0", told="p0")  # nothing else proves that the write is over
    nodes.end()


def test_a_chunk_that_comes_wrong_once_is_sent_again() -> None:
    faults = iter([Fault(flip_byte=3), Fault(torn_bytes=8)])
    nodes = PullingNodes(lambda _: next(faults, Fault()))
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    assert nodes.finish("r", PROMPT).timings.pulled_tokens == HELD
    assert nodes.pulls() == {"ok": 1}
    nodes.end()


@pytest.mark.parametrize("checks_permits", [True, False], ids=["fences", "cannot-fence"])
def test_a_request_that_ends_during_its_pull_gives_the_pages_back(checks_permits: bool) -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=0.5), checks_permits=checks_permits)
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: nodes["d0"].parts.export.num_pinned > 0)
    nodes.cancel("r")
    nodes.turns(2)
    assert nodes.pulls() == {"cancelled": 1} and nodes["p0"].parts.pages.num_used == 0
    nodes.end()


def test_a_newer_attempt_ends_the_pull_of_the_older_one() -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=0.1))
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: is_held(nodes))
    nodes.say("p0", Prefill(work_of("r", PROMPT, 3, attempt=1), remote=False, pull=Pull(nodes["d0"].endpoint, HELD)))
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"cancelled": 1, "ok": 1}
    nodes.end()


def test_the_death_of_the_holder_ends_the_pull_at_once() -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=1.0), checks_permits=False)
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: nodes["d0"].parts.export.num_pinned > 0)
    before = nodes.now
    nodes.kill("d0", told="p0")
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"failed": 1} and nodes.now - before < 0.2
    nodes.end()


def test_the_death_of_the_reader_frees_the_holder() -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=1.0), checks_permits=False)
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: nodes["d0"].parts.export.num_pinned > 0)
    nodes.kill("p0", told="d0")
    nodes.end()
    assert nodes["d0"].parts.export.counters == {"gave_up": 1}


def test_a_word_of_another_node_ends_no_pull() -> None:
    nodes = PullingNodes(lambda _: Fault(delay_s=0.1))
    nodes.cache("d0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: bool(nodes.fetches()))
    nonce = nodes.fetches()[0].ticket.nonce
    nodes["p0"].parts.fetch.on_declined(nodes["d1"].me, Declined(nonce, "not mine to say"))
    nodes["p0"].parts.fetch.on_declined(nodes["d0"].me, Declined(nonce + 1, "nobody's"))
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"foreign_message": 1, "ok": 1}
    nodes.end()


def test_no_pull_takes_pages_that_running_rows_may_need() -> None:
    nodes = PullingNodes(num_pages=18)
    nodes.cache("d0", PROMPT)
    nodes.ask("long", prompt_of(30, seed=7), count=20)
    nodes.until(lambda: bool(nodes.tokens.get("long")))
    nodes.ask("r", PROMPT, pull="d0")
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"no_room": 1}
    nodes.finish("long", prompt_of(30, seed=7))
    nodes.end()


def test_what_is_known_of_holders_is_bounded_and_nothing_is_kept_of_those_that_were_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "MAX_HOLDERS", 2)
    nodes = PullingNodes()
    side, holder = nodes["p0"].parts.fetch, nodes["d0"].endpoint
    nodes.cache("p0", PROMPT)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.finish("r", PROMPT)
    assert nodes.pulls() == {"needless": 1} and side.num_holders == 0
    forget_cache(nodes)
    for boot in range(4):
        gone = msgspec.structs.replace(holder, incarnation=f"boot-{boot}")
        nodes.say("p0", Prefill(work_of(f"r{boot}", PROMPT, 2), remote=False, pull=Pull(gone, HELD)))
        nodes.finish(f"r{boot}", PROMPT)
        forget_cache(nodes)
        assert side.num_holders == min(boot + 1, 2)


def test_a_holder_that_fails_again_and_again_is_left_alone_for_a_while_and_then_tried() -> None:
    nodes = PullingNodes(lambda _: Fault(flip_byte=1))
    nodes.cache("d0", PROMPT)
    for number in range(BREAKER.failures + 1):
        prompt = [*PROMPT[:24], number, *PROMPT[25:]]
        nodes.cache("d0", prompt)
        nodes.ask(f"r{number}", prompt, pull="d0")
        nodes.finish(f"r{number}", prompt)
        nodes.turns(2)
        forget_cache(nodes)
    assert nodes.pulls() == {"failed": BREAKER.failures, "avoided": 1}
    nodes.plan = lambda _: Fault()
    nodes.now += BREAKER.pause_s
    nodes.ask("later", PROMPT, pull="d0")
    nodes.finish("later", PROMPT)
    assert nodes.pulls()["ok"] == 1
    nodes.end()


def test_a_pull_that_its_own_requests_deadline_cut_says_nothing_against_the_holder() -> None:
    nodes = PullingNodes()
    nodes.cache("d0", PROMPT)
    nodes.lose = lambda letter: isinstance(letter.message, Fetch)
    for number in range(BREAKER.failures):
        hurried = msgspec.structs.replace(work_of(f"r{number}", PROMPT, 3), deadline_s=0.05)
        nodes.say("p0", Prefill(hurried, remote=False, pull=Pull(nodes["d0"].endpoint, HELD)))
        nodes.turns(60)
        forget_cache(nodes)
    assert nodes.pulls() == {"expired": BREAKER.failures}
    nodes.lose = lambda letter: False
    nodes.ask("later", PROMPT, pull="d0")
    assert nodes.finish("later", PROMPT).timings.pulled_tokens == HELD
    nodes.end()


def forget_cache(nodes: PullingNodes) -> None:
    """Evict everything that p0 has cached."""
    pages = nodes["p0"].parts.pages
    taken = pages.allocate(pages.num_available)
    assert taken is not None
    pages.release(taken)
