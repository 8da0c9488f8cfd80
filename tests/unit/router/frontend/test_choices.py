"""Pieces of a choice for who waits for them, from generations moved by hand."""

from __future__ import annotations

import json
import time

import pytest
from answer_by_hand import ByHand
from scripted_dispatcher import MODEL, ROUTE, TEXT, VOCAB

from pdcluster.api.openai import requests
from pdcluster.core.errors import Cancelled, IntegrityError, ProtocolError
from pdcluster.core.messages import TokenLogprobs
from pdcluster_router.core.generation import Done, Timeline, TokenChunk
from pdcluster_router.frontend.choices import OutputChoice, pieces_of
from pdcluster_router.frontend.prepare import Terms, prepare_completion
from pdcluster_router.request import stream


def one_choice(dispatcher: ByHand, **fields: object) -> OutputChoice:
    request = requests.decode_completion(
        json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 50, **fields}).encode()
    )
    return prepare_completion(request, dispatcher, Terms("r", time.monotonic(), 128, 60.0)).choices[0]


async def test_a_stop_string_ends_its_generation_at_once_though_nobody_takes_its_pieces() -> None:
    dispatcher = ByHand()
    pieces = pieces_of(one_choice(dispatcher, stop=["END"]), dispatcher)
    position = 0
    dispatcher.on_start = lambda: dispatcher.says(0, 0, "ok")  # told before `start` returned
    assert (await anext(pieces)).text == "ok"
    position = len(TEXT.encode("ok", add_special_tokens=False))
    position = dispatcher.says(0, position, " then END")
    assert dispatcher.ends == [f"finished with {position}"]
    dispatcher.says(0, position, " more")
    dispatcher.sinks[0].on_done(Done("stop", None, 0, 1, ROUTE, Timeline()))
    assert dispatcher.ends == [f"finished with {position}"]
    assert [(piece.text, piece.finish) for piece in (await anext(pieces), await anext(pieces))] == [
        (" then ", None), ("", "stop"),
    ]  # fmt: skip
    with pytest.raises(StopAsyncIteration):
        await anext(pieces)


async def test_a_reader_that_is_too_far_behind_gets_what_waits_and_then_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "MAX_UNREAD_BYTES", 700)
    dispatcher = ByHand()
    pieces = pieces_of(one_choice(dispatcher), dispatcher)
    dispatcher.on_start = lambda: dispatcher.says(0, 0, "a")
    await anext(pieces)
    for position, text in ((1, "b"), (2, "c"), (3, "d")):
        dispatcher.says(0, position, text)
    assert dispatcher.ends == ["nobody takes its tokens"]
    assert [(await anext(pieces)).text for _ in range(2)] == ["b", "c"]
    with pytest.raises(Cancelled, match="did not read"):
        await anext(pieces)


@pytest.mark.parametrize(
    "chunk",
    [
        TokenChunk(0, (VOCAB,), (), (), ROUTE),
        TokenChunk(0, (5,), (TokenLogprobs(-0.5, (5, VOCAB), (-0.5, -1.0)),), (), ROUTE),
        TokenChunk(0, (5,), (TokenLogprobs(-0.5, (5,), (-0.5,)),), (TokenLogprobs(-0.5, (VOCAB,), (-0.5,)),), ROUTE),
    ],
    ids=["token", "alternative", "alternative in the prompt"],
)
async def test_a_token_that_the_model_does_not_have_ends_the_choice_with_an_error(chunk: TokenChunk) -> None:
    dispatcher = ByHand()
    pieces = pieces_of(one_choice(dispatcher, logprobs=2, echo=True), dispatcher)
    dispatcher.on_start = lambda: dispatcher.sinks[0].on_chunk(chunk)
    with pytest.raises(ProtocolError, match=f"token {VOCAB}, this model has ids below {VOCAB}"):
        await anext(pieces)
    assert dispatcher.ends


async def test_tokens_that_skip_a_position_end_the_choice_with_an_error() -> None:
    dispatcher = ByHand()
    pieces = pieces_of(one_choice(dispatcher), dispatcher)
    dispatcher.on_start = lambda: dispatcher.sinks[0].on_chunk(TokenChunk(1, (5,), (), (), ROUTE))
    with pytest.raises(IntegrityError, match="position 1 came after 0"):
        await anext(pieces)
    assert dispatcher.ends, "and its nodes are told"
