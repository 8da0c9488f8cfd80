"""A plain request's short way: whatever happens to it, clients, nodes, operators and books see what they would have seen of the general one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_both_ways import CLUSTERS, play, told
from scripted_dispatcher import EOS, TEXT, VOCAB

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
LETTERS = TEXT.encode("stop this, \u00e9\u4e16 \U0001f642 END", add_special_tokens=False).tolist()
TOKENS = st.lists(st.one_of(st.sampled_from(LETTERS), st.integers(0, VOCAB - 1), st.just(EOS)), min_size=1, max_size=3).map(tuple)

LOCAL = [("scheduled", 2, ()), *[("row", 0, (letter,)) for letter in LETTERS[:5]], ("finished", 0, ())]
REMOTE = [
    ("scheduled", 2, ()), ("reserved", 0, ()), ("token", 0, (LETTERS[0],)), ("again", 0, (LETTERS[0],)), ("delivered", 2, ()),
    *[("row", 0, (letter,)) for letter in LETTERS[1:5]], ("finished", 0, ()),
]  # fmt: skip
LATE = [("token", 0, (LETTERS[0],)), ("reserved", 0, ()), ("scheduled", 2, ()), ("delivered", 2, ()), ("row", 0, (LETTERS[1],)), ("finished", 0, ())]
EARLY_END = [("scheduled", 2, ()), ("token", 0, (LETTERS[0],)), ("ended early", 2, ())]
USUAL = {
    "one node": [LOCAL],
    "two nodes": [LOCAL],
    "a pair": [REMOTE, LATE, EARLY_END],
    "no slack": [REMOTE, EARLY_END],
    "two pairs": [REMOTE, EARLY_END],
}

HAPPENS = (
    "again", "early", "empty", "wrong token", "stranger", "refused", "failed", "lost", "rewelcomed", "dead", "pause", "resume", "gone", "stopping",
    "cancelled", "time", "row", "scheduled", "token", "reserved", "delivered", "finished", "ended early",
)  # fmt: skip
ONE = st.tuples(st.sampled_from(HAPPENS), st.integers(0, 11), TOKENS)

FIELDS = st.sampled_from(
    [
        {"prompt": PROMPT, "max_tokens": 20, "temperature": 0},
        {"prompt": "hello world", "ignore_eos": True, "prompt_cache_key": "talk"},
        {"prompt": PROMPT, "stop_token_ids": [LETTERS[0]], "skip_special_tokens": False},
        {"prompt": PROMPT, "stream": True},
        {"prompt": "hello", "stream": True, "stop_token_ids": LETTERS[:1], "stream_options": {"include_usage": True}},
        {"prompt": PROMPT[:1], "frequency_penalty": 0.5, "top_k": 3, "top_p": 0.5, "min_tokens": 1, "n": 1},
    ]
)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[str, list[tuple[str, int, tuple[int, ...]]]]:
    """What mostly happens, with something else in between now and then."""
    nodes = draw(st.sampled_from(sorted(CLUSTERS)))
    steps = list(draw(st.sampled_from(USUAL.get(nodes, [LOCAL]))))
    for _ in range(draw(st.integers(0, 4))):
        steps.insert(draw(st.integers(0, len(steps))), draw(ONE))
    return nodes, steps + [*steps] * draw(st.booleans())


@given(scripts(), FIELDS)
@settings(deadline=None, max_examples=150)
def test_both_ways_are_the_same_to_everybody(script: tuple[str, list[tuple[str, int, tuple[int, ...]]]], fields: dict[str, object]) -> None:
    nodes, steps = script
    general, short = (told(is_plain, nodes, steps, fields) for is_plain in (False, True))
    for ours, theirs in zip(short, general, strict=True):
        assert ours == theirs


@pytest.mark.parametrize("nodes", sorted(USUAL))
async def test_what_mostly_happens_goes_the_short_way_to_its_end(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_router.general.become", lambda plain: pytest.fail("it became general"))
    for steps in USUAL[nodes]:
        for fields in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
            scene = await play(True, nodes, steps, {"prompt": PROMPT, **fields})
            assert scene.exchange.status == 200
