"""The ceiling that routers are measured against says what the product says, so that it is no cheaper than the work:
whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from bench.rivals.routers import Placed
from bench.router import PACE_S, bare, ours

NUM_PROMPT, NUM_OUTPUT = 128, 5


@pytest.fixture(scope="module")
def routers() -> Iterator[tuple[Placed, Placed]]:
    with ours(("mixed",), PACE_S) as (product, bootstrap), bare(bootstrap) as ceiling:
        yield product, ceiling


def answer(placed: Placed, *, stream: bool) -> httpx.Response:
    with httpx.Client(base_url=f"http://{placed.address}", timeout=30) as client:
        ask = placed.ask(NUM_PROMPT, NUM_OUTPUT, stream=stream)
        first = client.post(ask.path, content=ask.body, headers={"content-type": "application/json"})
        second = client.post(
            ask.path, content=ask.body, headers={"content-type": "application/json"}
        )  # of the same connection
    assert (first.status_code, second.status_code) == (200, 200)
    assert len(texts(first)) == len(texts(second)) == (NUM_OUTPUT + 1 if stream else 1)
    return second


def texts(reply: httpx.Response) -> list[str]:
    """Of each event, or of the whole answer."""
    if reply.headers["content-type"] == "application/json":
        return [reply.json()["choices"][0]["text"]]
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]


def test_whole_answers_are_alike(routers: tuple[Placed, Placed]) -> None:
    product, ceiling = (answer(placed, stream=False).json() for placed in routers)
    assert ceiling["choices"] == product["choices"]
    assert ceiling["usage"].items() <= product["usage"].items()
    assert len(ceiling["choices"][0]["text"]) >= NUM_OUTPUT


def test_streams_are_alike(routers: tuple[Placed, Placed]) -> None:
    product, ceiling = (texts(answer(placed, stream=True)) for placed in routers)
    assert ceiling == product
    assert all(ceiling[:NUM_OUTPUT])
