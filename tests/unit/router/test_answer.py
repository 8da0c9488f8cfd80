"""How an answer follows from what nodes say, whenever they say it: a line that pauses when the test says so, generations moved by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scripted_dispatcher import MODEL, ROUTE, TEXT, ScriptedDispatcher

from pdcluster.api import openai
from pdcluster.errors import NodeLost
from pdcluster_router.answer import answer
from pdcluster_router.generation import Chunk, Done, Generation, Sink, Timeline
from pdcluster_router.http_exchange import Asked, Exchange
from pdcluster_router.prepare import Terms, prepare_completion
from pdcluster_router.server import router_metrics


class Line:
    """Implements http_exchange.Line."""

    def __init__(self) -> None:
        self.is_paused = False
        self.sent = b""

    def send(self, data: bytes) -> None:
        self.sent += data

    post = send

    def end(self, exchange: Exchange) -> None:
        pass

    def abort(self) -> None:
        raise AssertionError("the line was cut")


@dataclass
class ByHand(ScriptedDispatcher):
    """Implements generation.Dispatcher and generation.Running."""

    sinks: list[Sink] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    on_start: Callable[[], object] = lambda: None
    """Happens before `start` returns."""

    def start(self, generation: Generation, sink: Sink) -> ByHand:
        self.sinks.append(sink)
        self.on_start()
        return self

    def cancel(self, reason: str) -> None:
        self.ends.append(reason)

    def finish(self, num_output: int) -> None:
        self.ends.append(f"finished with {num_output}")

    def says(self, choice: int, position: int, text: str) -> int:
        token_ids = tuple(TEXT.encode(text, add_special_tokens=False))
        self.sinks[choice].on_chunk(Chunk(position, token_ids, (), (), ROUTE))
        return position + len(token_ids)


def asked(dispatcher: ByHand, **fields: object) -> tuple[Line, Exchange]:
    line = Line()
    exchange = Exchange(line, Asked("POST", "/v1/completions", {}, True, False), "")
    request = openai.decode_completion(json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 50, **fields}).encode())
    prepared = prepare_completion(request, dispatcher, Terms("r", time.monotonic(), 128, 60.0))
    answer(exchange, prepared, dispatcher, router_metrics())
    return line, exchange


async def test_a_stop_string_that_was_left_unread_does_not_end_the_other_choices() -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=True, n=2, stop=["END"])
    line.is_paused = True
    position = dispatcher.says(0, 0, "ok END")
    dispatcher.says(0, position, " more")
    position = dispatcher.says(1, 0, "fine")
    line.is_paused = False
    assert exchange.on_resume is not None
    exchange.on_resume()
    dispatcher.sinks[1].on_done(Done("length", None, 0, 1, ROUTE, Timeline()))
    assert b'"ok ' in line.sent and b"more" not in line.sent and b"fine" in line.sent
    assert b"error" not in line.sent and line.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert dispatcher.ends == [f"finished with {len(TEXT.encode('ok END', add_special_tokens=False))}"]


async def test_a_stop_string_ends_its_generation_at_once_though_its_client_does_not_read() -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=True, stop=["END"])
    line.is_paused = True
    dispatcher.says(0, 0, "ok END")
    assert dispatcher.ends == [f"finished with {len(TEXT.encode('ok END', add_special_tokens=False))}"] and not line.sent
    line.is_paused = False
    assert exchange.on_resume is not None
    exchange.on_resume()
    assert b'"ok ' in line.sent and b'"finish_reason":"stop"' in line.sent and line.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_choice_that_fails_ends_the_others_at_once_though_their_client_does_not_read() -> None:
    dispatcher = ByHand()
    line, exchange = asked(dispatcher, stream=True, n=2)
    dispatcher.says(0, 0, "one")
    line.is_paused = True
    dispatcher.says(1, 0, "two")
    dispatcher.sinks[0].on_error(NodeLost("node n-1 is gone"))
    assert dispatcher.ends == ["node n-1 is gone"] * 2 and b"two" not in line.sent
    line.is_paused = False
    assert exchange.on_resume is not None
    exchange.on_resume()
    told = line.sent.decode()
    assert told.index("one") < told.index("two") < told.index("event: error") and "node n-1 is gone" in told


async def test_a_bug_in_starting_one_choice_ends_those_that_run_and_answers_once() -> None:
    dispatcher = ByHand()

    def fails_at_the_second() -> None:
        if len(dispatcher.sinks) == 2:
            raise RuntimeError("a bug")

    dispatcher.on_start = fails_at_the_second
    line, exchange = asked(dispatcher, n=3)
    assert line.sent.startswith(b"HTTP/1.1 500 ") and exchange.finished
    assert dispatcher.ends == ["a bug"] and len(dispatcher.sinks) == 2
    told = line.sent
    dispatcher.says(0, 0, "late")
    assert line.sent == told, "nothing comes after the answer"
