"""A labelled, seeded generator of traces: conversations, agents, retrieval, and traffic that shares nothing.

One random.Random(seed) gives all numbers, so a (kind, size, seed) names one trace on every machine. Lengths are
lognormal by median and spread. Sessions arrive as a Poisson process. Inside a session the next request comes a thinking
time after the last answer. It models shapes, not any one service.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import exp, log, pi, sin

from pdcluster.core.errors import ConfigError
from pdcluster_router.replay.trace import BlockChain, Blocks, Trace, TraceRequest, in_order

BLOCK_TOKENS = 512
# Seconds per token of an answer, which space the turns of a session.
ANSWER_TOKEN_S = 0.03


@dataclass(frozen=True, slots=True)
class Length:
    """Lognormal number of tokens, clipped."""

    median: float
    spread: float
    most: int = 120_000

    def draw(self, chance: random.Random) -> int:
        return max(1, min(self.most, round(exp(chance.gauss(log(self.median), self.spread)))))


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations whose prompt is everything before.

    systems: lengths of the shared openings, chosen by Zipf.
    turns: mean number.
    """

    kind: str
    systems: Sequence[int]
    turns: float
    most_turns: int
    said: Length
    answer: Length
    think_s: float


CHAT = Sessions("chat", (900, 1800, 600, 2400, 1300), 5, 30, Length(250, 1.2, 40_000), Length(220, 0.8, 2000), 40.0)
AGENT = Sessions("agent", (7200, 9800, 5200), 14, 60, Length(900, 1.1, 30_000), Length(90, 0.9, 2000), 2.5)
MOST_CONTEXT = 120_000


class _Text:
    """A growing text, as numbers of full blocks. The rest of the last block is unfinished."""

    def __init__(self, chain: BlockChain, names: Iterator[int]) -> None:
        self._chain, self._names = chain, names
        self.blocks: Blocks = ()
        self.num_tokens = 0

    def add(self, num_tokens: int, shared: int | None = None) -> None:
        """Add tokens.

        shared: number of a text that others contain in the same place; None for a unique one.
        """
        self.num_tokens += num_tokens
        missing = self.num_tokens // BLOCK_TOKENS - len(self.blocks)
        contents = [next(self._names) if shared is None else -(shared * 4096 + index + 1) for index in range(missing)]
        self.blocks = self._chain.extend(self.blocks, contents)


def sessions(shape: Sessions, num_requests: int, chance: random.Random, rate: float = 1.0) -> list[TraceRequest]:
    """num_requests of a running stream of sessions.

    rate: requests a second.
    """
    chain, names = BlockChain(), _numbers()
    found: list[TraceRequest] = []
    opened_s, session = 0.0, 0
    while len(found) < 2 * num_requests + 200:
        opened_s += chance.expovariate(rate / shape.turns)
        found += _session(shape, session, opened_s, chance, _Text(chain, names))
        session += 1
    return _steady(found, opened_s, num_requests)


def _session(
    shape: Sessions, session: int, opened_s: float, chance: random.Random, text: _Text
) -> Iterator[TraceRequest]:
    which = _zipf(len(shape.systems), chance)
    text.add(shape.systems[which], shared=which)
    now_s = opened_s
    for _ in range(shape.most_turns):
        text.add(shape.said.draw(chance))
        if text.num_tokens > MOST_CONTEXT:
            return
        prompt, num_tokens, num_output = text.blocks, text.num_tokens, shape.answer.draw(chance)
        text.add(num_output)
        yield TraceRequest(now_s, num_tokens, num_output, prompt, text.blocks, shape.kind, session)
        if chance.random() < 1 / shape.turns:
            return
        now_s += num_output * ANSWER_TOKEN_S + chance.expovariate(1 / shape.think_s)


def chat(num_requests: int, chance: random.Random) -> list[TraceRequest]:
    return sessions(CHAT, num_requests, chance)


def agent(num_requests: int, chance: random.Random) -> list[TraceRequest]:
    return sessions(AGENT, num_requests, chance)


def rag(num_requests: int, chance: random.Random) -> list[TraceRequest]:
    """Questions behind popular documents: 300 of them, by Zipf, one to three in a prompt, the most popular first."""
    chain, names = BlockChain(), _numbers()
    documents = [Length(4000, 0.8, 30_000).draw(chance) for _ in range(300)]
    found, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += chance.expovariate(1.0)
        text = _Text(chain, names)
        text.add(512, shared=1_000_000)
        for document in sorted({_zipf(len(documents), chance) for _ in range(chance.randint(1, 3))}):
            text.add(documents[document], shared=document)
        text.add(Length(120, 0.7).draw(chance))
        prompt_blocks, num_tokens, num_output = text.blocks, text.num_tokens, Length(200, 0.7, 2000).draw(chance)
        text.add(num_output)
        found.append(TraceRequest(now_s, num_tokens, num_output, prompt_blocks, text.blocks, "rag"))
    return found


def documents(num_requests: int, chance: random.Random) -> list[TraceRequest]:
    """Questions behind long documents, more than caches hold. Two in five bring a new one. The others ask about one of
    the last 200, one in five of those about a part from its beginning.
    """
    chain, names = BlockChain(), _numbers()
    lengths: list[int] = []
    found, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += chance.expovariate(1.0)
        if not lengths or chance.random() < 0.4:
            lengths.append(Length(14_000, 0.9).draw(chance))
            document, part = len(lengths) - 1, 1.0
        else:
            document, part = chance.randrange(max(len(lengths) - 200, 0), len(lengths)), min(5 * chance.random(), 1.0)
        text = _Text(chain, names)
        text.add(max(int(lengths[document] * part), 1), shared=document)
        text.add(Length(500, 0.7).draw(chance))
        blocks, num_tokens, num_output = text.blocks, text.num_tokens, Length(100, 0.8, 2000).draw(chance)
        text.add(num_output)
        found.append(TraceRequest(now_s, num_tokens, num_output, blocks, text.blocks, "documents"))
    return found


def unrelated(
    kind: str, prompt: Length, answer: Length, num_requests: int, chance: random.Random
) -> list[TraceRequest]:
    """Prompts that share nothing."""
    chain, names = BlockChain(), _numbers()
    found, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += chance.expovariate(1.0)
        text = _Text(chain, names)
        text.add(prompt.draw(chance))
        blocks, num_tokens, num_output = text.blocks, text.num_tokens, answer.draw(chance)
        text.add(num_output)
        found.append(TraceRequest(now_s, num_tokens, num_output, blocks, text.blocks, kind))
    return found


def day(num_requests: int, chance: random.Random) -> list[TraceRequest]:
    """Conversations over one day, as long as the same requests would take at an even rate: a quiet night, a long noon,
    and bursts, in which BURST times as many come as usual for a hundredth of the day.
    """
    found = chat(num_requests, chance)
    begin, span_s = found[0].arrival_s, max(found[-1].arrival_s - found[0].arrival_s, 1e-9)
    bursts = sorted(chance.random() for _ in range(NUM_BURSTS))
    steps = 2000
    rates = [
        (NIGHT + (1 - NIGHT) * sin(pi * step / steps) ** 2)
        * (BURST if any(0 <= step / steps - at < 0.01 for at in bursts) else 1.0)
        for step in range(steps)
    ]
    sums = [0.0, *accumulate(rates)]
    warped = []
    for r in found:
        share = (r.arrival_s - begin) / span_s * sums[-1]
        step = min(bisect_right(sums, share) - 1, steps - 1)
        inside = (share - sums[step]) / rates[step]
        warped.append(replace(r, arrival_s=(step + inside) / steps * span_s))
    return warped


def mixed(parts: Sequence[tuple[str, float]], num_requests: int, chance: random.Random) -> list[TraceRequest]:
    """Several kinds at once, by shares. Each keeps its own contents and is stretched to the whole span."""
    found: list[TraceRequest] = []
    for number, (kind, share) in enumerate(parts):
        own = KINDS[kind](round(num_requests * share), chance)
        stretch = num_requests / max(own[-1].arrival_s, 1e-9)
        chain = BlockChain()
        named = {
            name: chain.extend((), [number, position])[-1]
            for position, name in enumerate(dict.fromkeys(n for r in own for n in r.grown))
        }
        for r in own:
            blocks, grown = tuple(named[n] for n in r.blocks), tuple(named[n] for n in r.grown)
            session = r.session if r.session < 0 else r.session * len(parts) + number
            found.append(replace(r, arrival_s=r.arrival_s * stretch, blocks=blocks, grown=grown, session=session))
    return found


def _steady(found: list[TraceRequest], closed_s: float, num_requests: int) -> list[TraceRequest]:
    """The last num_requests before the last session opened, when the stream is steady."""
    before = sorted((r for r in found if r.arrival_s <= closed_s), key=lambda r: r.arrival_s)
    return before[-num_requests:]


def _zipf(count: int, chance: random.Random) -> int:
    """A number below count, small ones far more often."""
    return min(count - 1, int(count ** chance.random()) - 1)


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


NIGHT, BURST, NUM_BURSTS = 0.15, 3.0, 8

Make = Callable[[int, random.Random], list[TraceRequest]]

KINDS: Mapping[str, Make] = {
    "chat": chat,
    "agent": agent,
    "rag": rag,
    "day": day,
    "documents": documents,
    "no-reuse": partial(unrelated, "no-reuse", Length(3500, 1.1), Length(280, 0.9, 3000)),
    "prefill-heavy": partial(unrelated, "prefill-heavy", Length(9000, 0.7), Length(60, 0.8, 1000)),
    "decode-heavy": partial(unrelated, "decode-heavy", Length(300, 0.8), Length(900, 0.6, 4000)),
    "balanced": partial(unrelated, "balanced", Length(3000, 0.9), Length(400, 0.7, 3000)),
    "everything": partial(mixed, (("chat", 0.4), ("agent", 0.3), ("rag", 0.2), ("no-reuse", 0.1))),
}


def generate(kind: str, num_requests: int, seed: int) -> Trace:
    """Raises ConfigError for an unknown kind."""
    make = KINDS.get(kind)
    if make is None:
        raise ConfigError(f"no workload is called {kind!r}; use one of {', '.join(KINDS)}")
    if num_requests < 1:
        raise ConfigError(f"a workload has at least one request, not {num_requests}")
    return in_order(kind, BLOCK_TOKENS, make(num_requests, random.Random(seed)))
