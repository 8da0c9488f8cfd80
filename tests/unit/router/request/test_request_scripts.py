"""Whatever happens to a request, and whenever: its client has one answer, and nothing of it is left."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from request_scene import CLUSTERS, COST, CountingCluster, Scene, Setting, Steps, check, play, told
from request_scripts import FIELDS, HAPPENS, LATE, LETTERS, LOCAL, ONE, PROMPT, REMOTE, TALK, USUAL
from scripted_cluster import FakeCluster, settle
from scripted_dispatcher import EOS, TEXT, VOCAB

from pdcluster.core import messages as m
from pdcluster_router.cluster.view import ClusterView
from pdcluster_router.explain.recorder import Record
from pdcluster_router.http.exchange import Exchange


@st.composite
def scripts(draw: st.DrawFn) -> tuple[str, Steps]:
    """What mostly happens, with something else in between now and then."""
    nodes = draw(st.sampled_from(sorted(CLUSTERS)))
    steps = list(draw(st.sampled_from(USUAL.get(nodes, [LOCAL]))))
    for _ in range(draw(st.integers(0, 4))):
        steps.insert(draw(st.integers(0, len(steps))), draw(ONE))
    return nodes, steps + [*steps] * draw(st.booleans())


@given(scripts(), FIELDS, st.sampled_from([(), (), (), ("d0",), ("p0",), ("m0",), ("m0", "p0", "d1")]))
@settings(deadline=None, max_examples=150)
def test_whatever_happens_it_has_one_answer_and_nothing_is_left(
    script: tuple[str, Steps], fields: dict[str, object], deaf: tuple[str, ...]
) -> None:
    nodes, steps = script
    check(told(nodes, steps, fields, deaf=deaf))


@pytest.mark.parametrize("what", HAPPENS)
@pytest.mark.parametrize(
    ("nodes", "usual", "fields"),
    [
        ("one node", LOCAL, {}),
        ("a pair", REMOTE, {"stream": True}),
        ("a pair", LATE, {}),
        ("a pair", LATE, {"stream": True}),
    ],
    ids=["local", "remote", "late", "late stream"],
)
def test_whatever_happens_whenever_it_happens(nodes: str, usual: Steps, fields: dict[str, object], what: str) -> None:
    for place in range(len(usual) + 1):
        steps = [*usual[:place], (what, 1, (LETTERS[7], LETTERS[8])), *usual[place:]]
        check(told(nodes, steps, {"prompt": PROMPT, **fields}))


SOON, LATER, LATEST = ("time", 0, ()), ("time", 1, ()), ("time", 2, ())
# Each is looked at shortly before a clock runs out, and after it.
CLOCKS: list[tuple[str, Steps]] = [
    ("one node", [*LOCAL[:1], LATER, *LOCAL[1:3], LATEST, LATER, LATER]),
    ("one node", [*LOCAL[:3], *[LATER] * 8]),
    ("one node", [LATER] * 9),
    ("a pair", [*REMOTE[:1], LATER, SOON]),
    ("a pair", [*REMOTE[:2], LATER, REMOTE[2], LATER, *[SOON] * 5]),
    ("a pair", [*REMOTE[:3], REMOTE[4], *[LATER] * 4]),
    ("a pair", [*REMOTE[:4], *[LATER] * 4]),
]


@pytest.mark.parametrize(("nodes", "steps"), CLOCKS)
def test_a_clock_that_runs_out_is_seen_when_it_does(nodes: str, steps: Steps) -> None:
    check(told(nodes, steps, {"prompt": PROMPT}))


@pytest.mark.parametrize("reserved", [[], [("reserved", 0, ())]])
def test_an_end_that_counts_more_tokens_than_came_is_not_taken(reserved: Steps) -> None:
    steps = [LOCAL[0], *reserved, REMOTE[2], ("ended early", 9, ())]
    check(told("a pair", steps, {"prompt": PROMPT}))


@pytest.mark.parametrize("nodes", ["a pair", "two pairs"])
@pytest.mark.parametrize("deaf", ["p0", "d0", "p1", "d1"])
def test_a_node_that_takes_no_more_frames_is_passed_over_at_once(nodes: str, deaf: str) -> None:
    check(told(nodes, REMOTE, {"prompt": PROMPT}, deaf=[deaf]))


@pytest.mark.parametrize(
    ("nodes", "node", "kind"), [("one node", "m0", m.Prefill), ("a pair", "p0", m.Prefill), ("a pair", "d0", m.Reserve)]
)
async def test_no_leg_is_left_when_sending_fails_by_a_bug(nodes: str, node: str, kind: type) -> None:
    def break_down(message: m.NodeMessage, answer: object) -> None:
        if isinstance(message, kind):
            raise RuntimeError("it cannot be sent")

    scene = Scene(FakeCluster(CLUSTERS[nodes](), {node: break_down}))
    scene.ask(prompt=PROMPT)
    assert scene.exchange.status == 500 and not any(scene.look()[3].values())  # type: ignore[index]


async def test_a_node_gets_its_work_before_that_is_noted() -> None:
    seen: list[object] = []

    def look(message: m.NodeMessage, answer: object) -> None:
        if isinstance(message, m.Prefill | m.Reserve):
            seen.append([len(record.explained(has_ended=False).decisions) for record in opened])

    opened: list[Record] = []
    nodes = [msgspec.structs.replace(node, cost=COST) for node in CLUSTERS["a pair"]()]
    scene = Scene(CountingCluster(nodes, {"p0": look, "d0": look}), setting=Setting(policy="seconds"))
    explainer = scene.dispatch.shared.explainer
    open_record = explainer.open
    explainer.open = lambda *words: (opened.append(record := open_record(*words)), record)[1]  # type: ignore[method-assign,func-returns-value]
    scene.ask(prompt=PROMPT)
    assert seen == [[0], [0]] and len(opened[0].explained(has_ended=False).decisions) == 1


@dataclass
class WatchedCluster(CountingCluster):
    """Notes each view that it gives."""

    views: list[weakref.ref[ClusterView]] = field(default_factory=list)

    def view(self) -> ClusterView:
        found = super().view()
        self.views.append(weakref.ref(found))
        return found


@pytest.mark.parametrize("policy", ["product", "seconds"])
@pytest.mark.parametrize("nodes", ["one node", "a pair"])
async def test_a_request_that_runs_keeps_no_view_alive(nodes: str, policy: str) -> None:
    cluster = WatchedCluster([msgspec.structs.replace(node, cost=COST) for node in CLUSTERS[nodes]()])
    scene = Scene(cluster, setting=Setting(policy=policy))
    scene.ask(prompt=PROMPT)
    scene.step("row", 0, (LETTERS[0],))
    await settle()
    assert cluster.sent and not scene.exchange.finished and cluster.views
    gc.collect()
    assert [view() for view in cluster.views if view() is not None] == []
    scene.app.gone(scene.exchange)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "setting", [Setting(policy="seconds", ttft_s=0.26), Setting(policy="seconds", hold_count=0)], ids=["slo", "hold"]
)
async def test_the_next_request_of_a_line_is_judged_without_the_one_before_it(
    setting: Setting, is_stream: bool
) -> None:
    """Its client sent both at once, and the node has nothing else to do."""
    nodes = [msgspec.structs.replace(node, cost=COST) for node in CLUSTERS["one node"]()]
    scene = Scene(CountingCluster(nodes, {}), setting=setting)
    scene.ask(prompt=[5] * 200, max_tokens=9, stream=is_stream)
    over = scene.line.end

    def end(exchange: Exchange) -> None:
        over(exchange)
        scene.ask(prompt=[6] * 200, max_tokens=9)

    scene.line.end = end  # type: ignore[method-assign]
    for what, number, tokens in LOCAL:
        scene.step(what, number, tokens)
    await settle()
    assert len(scene.exchanges) == 2
    assert (scene.exchanges[1].status, scene.dispatch.waiting.num_held, len(scene.cluster.sent)) == (0, 0, 2)


def text_of(num_tokens: int) -> str:
    return next(
        "a" * size for size in range(1000) if len(TEXT.encode("a" * size, add_special_tokens=True)) == num_tokens
    )


# As much as there may be.
JUST: list[dict[str, object]] = [
    {"prompt": [5] * 255}, {"prompt": text_of(255)}, {"prompt": PROMPT, "max_tokens": 246}, {"prompt": PROMPT,
    "min_tokens": 6, "max_tokens": 6},
    {"prompt": [VOCAB - 1]}, {"prompt": PROMPT},
]  # fmt: skip


@pytest.mark.parametrize("fields", JUST, ids=range(len(JUST)))
async def test_what_just_fits_is_answered(fields: dict[str, object]) -> None:
    assert (await play("one node", LOCAL, fields)).exchange.status == 200


# Of two characters.
PARTS = TEXT.encode("\u4e16\U0001f642", add_special_tokens=False).tolist()
SAID: list[list[int]] = [
    PARTS, PARTS[:-1], PARTS[1:], [PARTS[0], LETTERS[0]], [VOCAB - 1, LETTERS[0]], [LETTERS[0], EOS, LETTERS[1]], [EOS],
    [*TEXT.pieces.special, LETTERS[0]], [PARTS[0], *TEXT.pieces.special, PARTS[1]],
]  # fmt: skip


@pytest.mark.parametrize("said", SAID, ids=str)
@pytest.mark.parametrize(
    "fields", [{}, {"skip_special_tokens": False}, {"ignore_eos": True}, {"stream": True}], ids=str
)
def test_whatever_is_said_is_answered(said: list[int], fields: dict[str, object]) -> None:
    steps: Steps = [LOCAL[0], *[("row", 0, (token,)) for token in said], ("finished", 0, ())]
    check(told("one node", steps, {"prompt": PROMPT, **fields}))


@pytest.mark.parametrize("nodes", sorted(USUAL))
async def test_what_mostly_happens_is_answered(nodes: str) -> None:
    for steps in USUAL[nodes]:
        for fields in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
            for asked in ({"prompt": PROMPT}, {"messages": TALK}):
                scene = await play(nodes, steps, {**asked, **fields})
                assert scene.exchange.status == 200


@pytest.mark.parametrize("fields", [{"prompt": PROMPT}, {"messages": TALK, "stream": True}])
def test_one_whose_time_is_over_is_sent_nowhere(fields: dict[str, object]) -> None:
    check(told("one node", [], fields, 0.0))


REFUSED: list[dict[str, object]] = [
    {"prompt": []}, {"prompt": ""}, {"prompt": [VOCAB]}, {"prompt": [-1]}, {"prompt": [1 << 40]},
    {"prompt": PROMPT * 30},
    {"prompt": [5] * 256}, {"prompt": text_of(256)}, {"prompt": PROMPT, "max_tokens": 247},
    {"prompt": PROMPT, "min_tokens": 9, "max_tokens": 3}, {"prompt": [*PROMPT, "a"]},
    {"prompt": PROMPT, "model": "other"}, {"prompt": PROMPT, "best_of": 2}, {"prompt": PROMPT, "suffix": "x"},
    {"prompt": PROMPT, "temperature": 3},
    {"prompt": PROMPT, "stream_options": {"include_usage": True}},
    {"prompt": PROMPT, "stream": True, "stream_options": {"include_obfuscation": True}},
    {"prompt": PROMPT, "stop_token_ids": [VOCAB]}, {"prompt": PROMPT, "prompt_logprobs": 1, "stream": True},
    {"prompt": PROMPT, "pdcluster_mode": "x"}, {"prompt": PROMPT, "stop": ""}, {"prompt": PROMPT, "nothing": 1},
]  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED)
def test_what_is_refused_is_refused_at_once(fields: dict[str, object]) -> None:
    seen = told("one node", [], fields)
    check(seen)
    assert seen[0][0][0][0] >= 400  # type: ignore[index]


@pytest.mark.parametrize(("given", "is_batch"), [(None, False), (b"batch", True), (b"interactive", False)])
async def test_a_header_makes_a_request_give_way_to_others(given: bytes | None, is_batch: bool) -> None:
    scene = Scene(FakeCluster(CLUSTERS["one node"]()))
    scene.ask(headers={} if given is None else {b"x-pdcluster-class": given}, prompt=PROMPT, priority=-3)
    ((_, message),) = scene.cluster.sent
    assert message.work.is_batch is is_batch  # type: ignore[attr-defined]


@pytest.mark.parametrize("header", [(b"x-request-deadline-s", b"5"), (b"x-pdcluster-mode", b"local")])
async def test_headers_that_ask_something_of_the_router_are_heard(header: tuple[bytes, bytes]) -> None:
    scene = Scene(FakeCluster(CLUSTERS["one node"]()))
    scene.ask(headers=dict([header]), prompt=PROMPT)
    ((_, message),) = scene.cluster.sent
    assert round(message.work.deadline_s) == (5 if b"deadline" in header[0] else 600)  # type: ignore[attr-defined]
