"""Several requests at a time, of tenants with bounds, in a hold queue that may be full, beside a shadow policy."""

from __future__ import annotations

import asyncio
import re

import pytest
from drawn_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from request_scene import CLUSTERS, Setting, Steps, check, play, told
from request_scripts import FIELDS, LOCAL, ONE, PROMPT, REMOTE, USUAL

from pdcluster_router.policy.predicted_seconds import Seconds

OTHERS = st.sampled_from(["ask", "ask", "ask", "turn", "turn", "report", "report", "shut"])
CROWD = st.tuples(OTHERS, st.integers(0, 11), st.tuples(st.integers(0, 11)))

SETTINGS = st.builds(
    Setting,
    has_tenants=st.booleans(),
    places=st.sampled_from([2, 4, 12]),
    hold_count=st.sampled_from([0, 1, 2, 1024]),
    hold_bytes=st.sampled_from([50, 200, 2**20]),
    ttft_s=st.sampled_from([None, None, 0.02, 0.1, 1.0]),
    policy=st.sampled_from(["product", "seconds", "round-robin"]),
    shadow=st.sampled_from(["", "seconds", "round-robin", "broken"]),
    has_cost=st.booleans(),
    choosing_s=st.sampled_from([0.0, 0.0, 0.125]),
)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[str, Steps]:
    """Usual lives of several requests, each in parts between those of the others, with something else in between now
    and then."""
    nodes = draw(st.sampled_from([*sorted(CLUSTERS), "busy"]))
    usual = USUAL.get(nodes, [LOCAL])
    num = draw(st.integers(1, 5))
    lives = [draw(st.sampled_from(usual)) for _ in range(num)]
    steps: Steps = [("ask", draw(st.integers(0, 5)), (draw(st.integers(0, 11)),)) for _ in range(num - 1)]
    places = [0] * num
    while any(place < len(life) for place, life in zip(places, lives, strict=True)):
        who, length = draw(st.integers(0, num - 1)), draw(st.integers(1, 12))
        if places[who] < len(lives[who]):
            steps += [("turn", who, ()), *lives[who][places[who] : places[who] + length]]
        elif len(steps) > 100:
            break
        places[who] += length
    for _ in range(draw(st.integers(0, 6))):
        steps.insert(draw(st.integers(0, len(steps))), draw(st.one_of(CROWD, CROWD, ONE)))
    return nodes, steps


@given(crowds(), FIELDS, SETTINGS, st.sampled_from([(), (), (), ("d0",), ("p0", "m0")]))
@settings(deadline=None, max_examples=examples(60, 400))
def test_whatever_happens_each_has_one_answer_and_nothing_is_left(
    crowd: tuple[str, Steps], fields: dict[str, object], setting: Setting, deaf: tuple[str, ...]
) -> None:
    nodes, steps = crowd
    check(told(nodes, steps, fields, deaf=deaf, setting=setting))


LARGE, SMALL, SHARED, UNKNOWN, NO_KEY = (("ask", key, (0,)) for key in (2, 1, 3, 4, 0))


def seen_of(nodes: str, steps: Steps, setting: Setting) -> list[object]:
    """What is to be seen after each step."""
    seen = told(nodes, steps, {"prompt": PROMPT}, setting=setting)
    check(seen)
    return seen


def heads(seen: object) -> list[str]:
    """Of each request's answer, "" while it has none."""
    return [told[1].partition("\r\n\r\n")[0].lower() for told in seen[0]]  # type: ignore[index]


def test_a_choice_that_fails_ends_its_request_and_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Seconds, "choose", fail)
    seen = seen_of("one node", [LARGE], Setting(policy="seconds", has_cost=True))
    assert [head[9:12] for head in heads(seen[-3])] == ["500", "500"]
    logged = [record for record in caplog.records if "the routing policy failed" in record.getMessage()]
    assert [record.exc_info[0] for record in logged if record.exc_info] == [ZeroDivisionError] * 2


@pytest.mark.parametrize(
    ("nodes", "steps", "is_once"),
    [("one node", LOCAL, True), ("two nodes", LOCAL, True), ("a pair", REMOTE, True), ("busy", LOCAL, False)],
)
@pytest.mark.parametrize("shadow", ["", "round-robin", "broken"])
def test_a_request_that_need_not_wait_is_chosen_for_once(nodes: str, steps: Steps, is_once: bool, shadow: str) -> None:
    setting = Setting(policy="seconds", has_cost=True, shadow=shadow)
    scene = asyncio.run(play(nodes, steps, {"prompt": PROMPT}, setting=setting))
    check(scene.told)
    assert (scene.num_chosen == 1) is is_once


def test_where_the_hold_queue_is_full_all_others_are_refused_at_once_and_told_when_to_come_again() -> None:
    seen = seen_of("busy", [LARGE] * 3, Setting(hold_count=2))
    first, second, *refused = heads(seen[3][1])  # type: ignore[index]
    assert first == second == "" and len(refused) == 2
    for head in refused:
        assert head.startswith("http/1.1 429") and re.search(r"\r\nretry-after: [1-9]", head)
    assert any(line == 'pdcluster_rejected_requests_total{reason="hold_count",tenant=""} 2.0' for line in seen[-2])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("nodes", "statuses"), [("one node", ["", "429"]), ("busy", ["429", "429"])])
def test_what_can_not_be_in_time_is_refused_at_once_in_its_tenants_name(nodes: str, statuses: list[str]) -> None:
    """The node has a cost, by which the first token is late, whether others wait for a node or just went to it."""
    seen = seen_of(nodes, [SMALL], Setting(has_tenants=True, ttft_s=0.001, has_cost=True))
    told = heads(seen[1][1])  # type: ignore[index]
    assert [head[9:12] for head in told] == statuses and all("\r\nretry-after: " in head for head in told if head)
    refused = {name for name, status in zip(("large", "small"), statuses, strict=True) if status}
    assert {f'pdcluster_rejected_requests_total{{reason="slo",tenant="{name}"}} 1.0' for name in refused} <= set(
        seen[-2]
    )  # type: ignore[call-overload]


def test_a_tenant_has_its_own_bounds_and_its_own_name_in_the_books() -> None:
    seen = seen_of(
        "busy", [SMALL, SMALL, SHARED, UNKNOWN, NO_KEY], Setting(has_tenants=True, places=100, hold_count=100)
    )
    last = seen[5][1]  # type: ignore[index]
    assert [head[9:12] for head in heads(last)] == ["", "", "429", "", "401", "401"]
    assert [told[4][0]["tenant"] for told in last[0] if told[4]] == ["large", "small", "shared"]


def test_when_a_node_frees_whoever_waits_goes_in_a_fair_order() -> None:
    """Of two tenants by turns, though all of one came first."""
    asked = [LARGE, LARGE, LARGE, SHARED, SHARED]
    seen = seen_of(
        "busy", [*asked, ("report", 0, (0,))], Setting(has_tenants=True, places=100, has_cost=True, policy="seconds")
    )
    (_, before), (_, after) = seen[5:7]  # type: ignore[misc]
    assert not before[5] and before[7] == 6, "all of them wait"
    assert after[5], "one of them went"


@pytest.mark.parametrize(("passed", "num_reserved"), [([], 0), ([("time", 0, ())], 1)])
def test_a_decode_node_that_just_had_no_room_is_left_alone_for_a_while(passed: Steps, num_reserved: int) -> None:
    before: Steps = [("shut", 1, ()), *passed, LARGE]
    seen = seen_of("a pair", [("gone", 0, ()), *before, *REMOTE], Setting())
    messages = [message for _, message in seen[1 + len(before)][1][5]]  # type: ignore[index]
    assert sum("Reserve(" in message and "REQUEST-1" in message for message in messages) == num_reserved


def test_a_choice_that_takes_its_time_is_told_with_it() -> None:
    (decision,) = seen_of("one node", LOCAL, Setting(choosing_s=0.25))[0][0][0][4][0]["decisions"]  # type: ignore[index]
    assert (decision["at_s"], decision["held_s"]) == (0.25, 0.25)


@pytest.mark.parametrize("shadow", ["round-robin", "broken"])
def test_a_shadow_is_told_of_each_decision_and_has_no_say(shadow: str) -> None:
    seen = seen_of("two nodes", LOCAL, Setting(shadow=shadow))
    (decision,) = seen[0][0][0][4][0]["decisions"]  # type: ignore[index]
    assert decision["policy"] == "product" and (decision["shadow"] or {}).get("policy") == (
        None if shadow == "broken" else shadow
    )
    assert heads(seen[len(LOCAL)][1])[0].startswith("http/1.1 200")  # type: ignore[index]


@pytest.mark.parametrize("nodes", sorted(USUAL))
def test_many_at_a_time_end_as_each_would_alone(nodes: str) -> None:
    """Each step of all of them before the next one of any."""
    for life in USUAL[nodes]:
        turns = [step for each in life for who in range(4) for step in (("turn", who, ()), each)]
        seen = seen_of(nodes, [("ask", 2, (who,)) for who in range(3)] + turns, Setting())
        assert [head[9:12] for head in heads(seen[-3])] == ["200"] * 4
