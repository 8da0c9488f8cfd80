"""More of a stream has a short way to its client: it says the same bytes as the long one, whatever comes of which size,
and whoever reads when."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from answer_by_hand import ByHand, asked
from hypothesis import given
from hypothesis import strategies as st
from scripted_dispatcher import EOS, ROUTE, TEXT, VOCAB

from pdcluster.core.errors import NodeLost
from pdcluster_router.core.generation import Done, Timeline, TokenChunk
from pdcluster_router.frontend.choices import OutputChoice
from pdcluster_router.http.errors import ClientLeft

LETTERS = TEXT.encode("stop this, \u00e9\u4e16 \U0001f642 END", add_special_tokens=False)
TOKENS = st.one_of(st.sampled_from([*LETTERS]), st.integers(0, VOCAB - 1), st.just(EOS))
ROWS = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)
STEPS = st.lists(st.one_of(ROWS, ROWS, ROWS, st.sampled_from(["pause", "resume"])), max_size=30)
FIELDS: list[dict[str, object]] = [
    {},
    {},
    {"n": 2},
    {"stop": ["s", "END"]},
    {"stop_token_ids": [LETTERS[0], LETTERS[-1]]},
    {"skip_special_tokens": False},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True}},
]
ENDS = st.sampled_from(["done", "error", "left", "wrong token"])


@dataclass(frozen=True)
class Told:
    """What became of a request, but for moments and names."""

    sent: bytes
    ends: list[str]
    is_finished: bool
    is_cut: bool


@dataclass
class Player:
    """Says a script to the choices of one answer, in turns where there are several."""

    is_short: bool
    num_short: int = 0

    def tell(self, steps: list[tuple[int, ...] | str], end: str, **fields: object) -> Told:
        return asyncio.run(self._tell(steps, end, fields))

    async def _tell(self, steps: list[tuple[int, ...] | str], end: str, fields: dict[str, object]) -> Told:
        dispatcher = ByHand()
        line, exchange = asked(dispatcher, **{"stream": True, **fields})  # type: ignore[arg-type]
        self._positions = [0] * len(dispatcher.sinks)
        for number, step in enumerate([*steps, "resume"]):
            if isinstance(step, tuple):
                self._say(dispatcher, number % len(dispatcher.sinks), step)
                continue
            line.is_paused = step == "pause"
            if not line.is_paused and exchange.on_resume is not None:
                exchange.on_resume()
        self._end(dispatcher, exchange.on_gone, end)
        sent = re.sub(rb'"created":\d+|"(ttft|ttst|decode)_s":[0-9.e-]+', b"", line.sent.partition(b"\r\n\r\n")[2])
        return Told(sent, dispatcher.ends, exchange.finished, line.is_cut)

    def _say(self, dispatcher: ByHand, choice: int, token_ids: tuple[int, ...]) -> None:
        position, sink = self._positions[choice], dispatcher.sinks[choice]
        self._positions[choice] += len(token_ids)
        take = sink.fast_token_path() if self.is_short and position >= 2 else None
        if take is not None and take(position, token_ids):
            self.num_short += 1
        else:
            sink.on_chunk(TokenChunk(position, token_ids, (), (), ROUTE))

    def _end(self, dispatcher: ByHand, on_gone: object, end: str) -> None:
        if end == "wrong token":
            self._say(dispatcher, 0, (TEXT.vocab_size + (1 << 20),))
        elif end == "left" and callable(on_gone):
            on_gone(ClientLeft("the client closed its connection"))
        for sink, position in zip(dispatcher.sinks, self._positions, strict=True):
            if end == "error" or not position:
                sink.on_error(NodeLost("node d-1 is gone"))
            else:
                sink.on_done(Done("length", None, 0, 1, ROUTE, Timeline(ttft_s=0.1, ttst_s=0.2)))


@given(
    steps=STEPS,
    end=ENDS,
    is_chat=st.booleans(),
    is_http_1_0=st.booleans(),
    fields=st.sampled_from(FIELDS),
)
def test_both_ways_say_the_same(
    steps: list[tuple[int, ...] | str], end: str, is_chat: bool, is_http_1_0: bool, fields: dict[str, object]
) -> None:
    long, short = (
        Player(is_short).tell(steps, end, is_chat=is_chat, is_http_1_0=is_http_1_0, **fields)
        for is_short in (False, True)
    )
    assert short == long


@given(steps=STEPS, end=ENDS, is_chat=st.booleans(), fields=st.sampled_from(FIELDS[:-1]))
def test_a_whole_answer_says_the_same_whether_its_tokens_are_kept_or_told(
    steps: list[tuple[int, ...] | str], end: str, is_chat: bool, fields: dict[str, object]
) -> None:
    kept = Player(is_short=True).tell(steps, end, is_chat=is_chat, stream=False, **fields)
    with patch.object(OutputChoice, "is_text_only", False):
        told = Player(is_short=False).tell(steps, end, is_chat=is_chat, stream=False, **fields)
    assert kept == told


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_plain_stream_goes_the_short_way_from_its_third_token_on(is_chat: bool, fields: dict[str, object]) -> None:
    player = Player(is_short=True)
    told = player.tell([(token_id,) for token_id in LETTERS], "done", is_chat=is_chat, **fields)
    assert player.num_short == len(LETTERS) - 2
    assert told.is_finished and told.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("fields", [{"stop": ["END"]}, {"return_token_ids": True}, {"logprobs": 1}, {"n": 2}])
async def test_a_stream_that_needs_more_than_text_is_not_taken(fields: dict[str, object]) -> None:
    dispatcher = ByHand()
    asked(dispatcher, stream=True, **fields)  # type: ignore[arg-type]
    sink = dispatcher.sinks[-1]
    if "logprobs" not in fields:
        sink.on_chunk(TokenChunk(0, tuple(LETTERS[:2]), (), (), ROUTE))
    assert sink.fast_token_path() is None


async def test_a_whole_answer_keeps_its_tokens_by_the_short_way() -> None:
    dispatcher = ByHand()
    asked(dispatcher)
    dispatcher.sinks[0].on_chunk(TokenChunk(0, tuple(LETTERS[:2]), (), (), ROUTE))
    take = dispatcher.sinks[0].fast_token_path()
    assert take is not None and take(2, (LETTERS[2],))
    assert not take(2, (LETTERS[2],)) and not take(3, (VOCAB,)) and not take(3, tuple(LETTERS[:2]))


async def test_a_client_that_does_not_read_takes_the_long_way() -> None:
    dispatcher = ByHand()
    line, _ = asked(dispatcher, stream=True)
    dispatcher.sinks[0].on_chunk(TokenChunk(0, tuple(LETTERS[:2]), (), (), ROUTE))
    take = dispatcher.sinks[0].fast_token_path()
    assert take is not None
    line.is_paused = True
    assert dispatcher.sinks[0].fast_token_path() is None and not take(2, (LETTERS[2],))
    line.is_paused = False
    assert dispatcher.sinks[0].fast_token_path() is not None and take(2, (LETTERS[2],))


async def test_a_client_that_did_not_read_at_first_gets_the_rest_the_short_way() -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=True)
    sink = dispatcher.sinks[0]
    line.is_paused = True
    sink.on_chunk(TokenChunk(0, tuple(LETTERS[:2]), (), (), ROUTE))
    assert sink.fast_token_path() is None
    line.is_paused = False
    assert exchange.on_resume is not None
    exchange.on_resume()
    take = sink.fast_token_path()
    assert take is not None and take(2, (LETTERS[2],))


@pytest.mark.parametrize("is_known", [False, True])
async def test_no_token_is_said_twice_or_out_of_its_place(is_known: bool) -> None:
    dispatcher = ByHand()
    line, _ = asked(dispatcher, stream=True)
    sink, (first, second, *_) = dispatcher.sinks[0], LETTERS
    sink.on_chunk(TokenChunk(0, (first, first), (), (), ROUTE))
    take = sink.fast_token_path()
    assert take is not None
    if not is_known:
        TEXT.pieces.said.clear()
    before = line.sent
    assert (
        not any(take(position, (second,)) for position in (0, 1, 3, 4))
        and not take(2, (second, second))
        and not take(2, ())
    )
    assert line.sent == before
    assert take(2, (second,)) and not take(2, (second,)) and line.sent != before
