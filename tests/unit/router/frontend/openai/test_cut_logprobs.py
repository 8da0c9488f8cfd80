"""Logprobs beside a stop string: tokens of text that it cuts off are not listed, whole or in a stream, and none is told
before that is certain."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_dispatcher import MODEL, TEXT, ScriptedDispatcher, logprobs_of, says, served

from pdcluster.api.text.choice_text import ChoiceText, TextPiece
from pdcluster.api.text.stop_strings import StopMatcher

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


async def answered(
    path: str, said: str, reason: str = "eos", **fields: object
) -> tuple[str, list[str], list[Any], dict[str, Any]]:
    """Text, tokens that are listed, token ids, usage."""
    prompt: dict[str, object] = (
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        if path == CHAT
        else {"prompt": "x", "logprobs": 0}
    )
    options: dict[str, object] = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    body = {"model": MODEL, "max_tokens": 60, "return_token_ids": True, **prompt, **fields, **options}
    async with (
        served(ScriptedDispatcher(lambda _: says(said, reason))) as url,
        httpx.AsyncClient(base_url=url, timeout=None) as client,
    ):  # type: ignore[arg-type]
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")] or [reply.json()]
    choices = [event["choices"][0] for event in events if event["choices"]]
    text = "".join(
        c["text"] if path == PLAIN else (c.get("message") or c.get("delta")).get("content") or "" for c in choices
    )
    listed, seen = [], 0
    for choice in choices:
        seen += (
            len(choice["text"])
            if path == PLAIN
            else len((choice.get("message") or choice.get("delta")).get("content") or "")
        )
        logprobs = choice["logprobs"] or {}
        own = logprobs.get("tokens", []) if path == PLAIN else [entry["token"] for entry in logprobs.get("content", [])]
        assert not logprobs.get("text_offset") or max(logprobs["text_offset"]) < seen or choice["finish_reason"]
        listed += own
    return text, listed, [token for choice in choices for token in choice.get("token_ids", [])], events[-1]["usage"]


CASES = [
    ("hello STOP more", ["STOP"], "hello "),
    ("hello STOP", ["STOP"], "hello "),
    ("def greet(name)", ["eet(n"], "def gr"),
    ("def greet", ["nothing"], "def greet"),
    ("STOP", ["STOP"], ""),
    ("ab ab abc end", ["abc"], "ab ab "),
    ("gr\u00fc\u00dfe \u65e5\u672c END", ["\u672c"], "gr\u00fc\u00dfe \u65e5"),
    ("one two STO", ["STOP"], "one two STO"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("said", "stops", "kept"), CASES)
async def test_only_tokens_of_the_text_are_listed(
    path: str, stream: bool, said: str, stops: list[str], kept: str
) -> None:
    text, listed, token_ids, usage = await answered(path, said, stop=stops, stream=stream)
    assert text == kept
    tokens = TEXT.encode(said, add_special_tokens=False).tolist()
    is_cut = kept != said
    expected: list[int] = []
    for token_id in tokens:
        if len(TEXT.decode(tokens[: len(expected)]).rstrip("\ufffd")) >= len(kept) and is_cut:
            break
        expected.append(token_id)
    assert len(listed) == len(expected) + (not is_cut)  # and the end of the sequence, where it came to it
    assert len(token_ids) == usage["completion_tokens"] >= len(listed)


async def test_an_echo_is_listed_before_them() -> None:
    text, listed, _, _ = await answered(PLAIN, "hello STOP", stop=["STOP"], echo=True)
    assert text == "xhello " and "".join(listed[1:]) == "xhello "


WORDS = st.lists(st.sampled_from(["a", "b", " ", "hello", "\u65e5", "STOP"]), min_size=1, max_size=12)
STOPS = st.lists(st.sampled_from(["STOP", "b a", "\u65e5a", "aa"]), min_size=1, max_size=3)


@given(WORDS, STOPS)
def test_what_is_listed_begins_in_the_text(words: list[str], stops: list[str]) -> None:
    choice, pieces = ChoiceText(TEXT.detokenizer(), StopMatcher(stops), frozenset()), []
    for token_id in TEXT.encode("".join(words), add_special_tokens=False):
        pieces.append(TextPiece())
        choice.push(token_id, logprobs_of(token_id, 0), pieces[-1])
        if choice.stopped:
            break
    pieces.append(TextPiece())
    choice.finish(pieces[-1])
    seen = 0
    for piece in pieces:
        seen += len(piece.text)
        assert all(token.offset < seen for token in piece.scored)
    every = [token for piece in pieces for token in piece.tokens]
    assert [token for piece in pieces for token in piece.scored] == [token for token in every if token.offset < seen]
