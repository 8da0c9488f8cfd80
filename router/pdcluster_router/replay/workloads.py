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


@dataclass(frozen=True, slots=True)
class CodingAgents:
    """Sessions in which a person asks now and then, and an agent calls tools until it answers.

    systems: lengths of system prompts with tools, chosen by Zipf.
    helpers: those of sub-agents.
    projects: number of projects for each system prompt. The text of one follows the prompt in all its sessions.
    questions, calls: mean number of questions in a session, and of requests for one question.
    fork: chance that a request starts one to three sub-agents. Half of them begin with the whole history.
    helper_calls: mean number of requests of a sub-agent.
    most_context: tokens of a history that gives way to a summary.
    act_ms, idle_ms: time until a tool's result, and until the next question.
    """

    systems: Sequence[int] = (14_000, 18_500, 11_000)
    helpers: Sequence[int] = (9_000, 12_000)
    projects: int = 40
    project: Length = Length(2500, 0.5, 8000)
    questions: float = 4
    calls: float = 12
    fork: float = 0.04
    helper_calls: float = 8
    most_context: int = 100_000
    question: Length = Length(150, 1.0, 8000)
    result: Length = Length(700, 1.2, 25_000)
    answer: Length = Length(120, 0.9, 3000)
    summary: Length = Length(2500, 0.3, 6000)
    act_ms: Length = Length(1500, 1.0, 60_000)
    idle_ms: Length = Length(45_000, 1.2, 1_200_000)

    @property
    def requests(self) -> float:
        """Mean number of requests in a session, compactions aside."""
        return self.questions * self.calls * (1 + 2 * self.fork * self.helper_calls)


CODING = CodingAgents()
# Seconds after which nearly all first sessions have ended.
SETTLED_S = 3600.0
# Tokens of the request for a summary, and of the results of sub-agents.
SUMMARIZE, REPORT = 400, 1200


class _CodingStream:
    """Requests of coding agents so far. Each sub-agent is a session of its own."""

    def __init__(self, shape: CodingAgents, chance: random.Random) -> None:
        self.found: list[TraceRequest] = []
        self._shape, self._chance = shape, chance
        self._chain, self._names, self._sessions = BlockChain(), _numbers(), _numbers()
        self._projects = [shape.project.draw(chance) for _ in range(shape.projects)]

    def add_session(self, now_s: float) -> None:
        shape, chance = self._shape, self._chance
        system, project, session = _zipf(len(shape.systems), chance), chance.randrange(shape.projects), self._open()
        text = self._opening(system, project)
        for question in range(self._count(shape.questions)):
            now_s += shape.idle_ms.draw(chance) / 1000 if question else 0.0
            text.add(shape.question.draw(chance))
            for _ in range(self._count(shape.calls)):
                if text.num_tokens > shape.most_context:
                    text.add(SUMMARIZE)
                    summary = shape.summary.draw(chance)
                    now_s = self._ask(text, now_s, summary, session)
                    text = self._opening(system, project)
                    text.add(summary)
                now_s = self._ask(text, now_s, shape.answer.draw(chance), session)
                if chance.random() < shape.fork:
                    now_s = max(self._sub_agent(text, now_s) for _ in range(chance.randint(1, 3)))
                    text.add(REPORT)
                else:
                    now_s += shape.act_ms.draw(chance) / 1000
                    text.add(shape.result.draw(chance))

    def _sub_agent(self, parent: _Text, now_s: float) -> float:
        """Returns when it has ended."""
        shape, chance, session = self._shape, self._chance, self._open()
        text = _Text(self._chain, self._names)
        if chance.random() < 0.5:
            text.blocks, text.num_tokens = parent.blocks, parent.num_tokens
        else:
            which = _zipf(len(shape.helpers), chance)
            text.add(shape.helpers[which], shared=len(shape.systems) + which)
        text.add(3 * shape.question.draw(chance))
        for _ in range(self._count(shape.helper_calls)):
            if text.num_tokens > MOST_CONTEXT:
                break
            now_s = self._ask(text, now_s, shape.answer.draw(chance), session)
            now_s += shape.act_ms.draw(chance) / 1000
            text.add(shape.result.draw(chance))
        return now_s

    def _ask(self, text: _Text, now_s: float, num_output: int, session: int) -> float:
        """Returns when the answer is there."""
        prompt, num_tokens = text.blocks, text.num_tokens
        text.add(num_output)
        self.found.append(TraceRequest(now_s, num_tokens, num_output, prompt, text.blocks, "coding", session))
        return now_s + num_output * ANSWER_TOKEN_S

    def _opening(self, system: int, project: int) -> _Text:
        text = _Text(self._chain, self._names)
        text.add(self._shape.systems[system], shared=system)
        text.add(self._projects[project], shared=1000 * (system + 1) + project)
        return text

    def _count(self, mean: float) -> int:
        number = 1
        while self._chance.random() > 1 / mean:
            number += 1
        return number

    def _open(self) -> int:
        return next(self._sessions)


def coding(num_requests: int, chance: random.Random, rate: float = 1.0) -> list[TraceRequest]:
    """num_requests of a running stream of coding agents.

    rate: requests a second.
    """
    stream, opened_s = _CodingStream(CODING, chance), 0.0
    while opened_s < SETTLED_S or len(stream.found) < 2 * num_requests + 200:
        opened_s += chance.expovariate(rate / CODING.requests)
        stream.add_session(opened_s)
    return _steady(stream.found, opened_s, num_requests)


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
    "coding": coding,
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
