"""Real nodes with a small model: the router choosing P/D per request, against every request on one node and every
request on two, paired.

The method, written down before its first run; all of it is the same for the three ways (auto, one node, two nodes):
 1. One cluster of a prefill and a decode node, a core each, up and warm for the whole run. The way is asked for with
    each request, so all three meet the same processes. No prompt comes twice, which stands for emptied caches.
 2. A round sends the same number of requests, of the same lengths at the same moments, through each way in a short turn
    of its own, one after the other; each six rounds have every order of the three ways once, in an order drawn by the
    seed. What the machine does over minutes so meets all.
 3. Rate: LOAD of what the better static way answers in a closed loop that always has OPEN requests open (`capacity`);
    auto has no part in it. Above, queues grow as long as a turn lasts; below (at 0.75 static P/D was in time with all),
    what misses is the machine's noise.
 4. Limits: TTFT_FACTOR × the unloaded first token of a prompt, TPOT_FACTOR × that of the others, medians taken at the
    start (reference: 5 and 2). Requests crowd around any one limit, and between two turns this machine's speed differs
    by a tenth, so that many would be in time by chance. So goodput is its mean over limits from 0.7 to 2 times these,
    evenly on a logarithmic scale, each request counted at each. It begins at 0.7 as no step can be faster than an
    unloaded one (1 / TPOT_FACTOR), and what is near that is noise again; beyond 2 nothing is late but what waits for
    seconds. The ratio at each limit is printed, too. A request that is refused, or late by QUIET_S, misses all limits.
 5. Judged is goodput(auto) ÷ goodput of the better static way, each summed over all rounds, by the lower 95 % bound of
    a bootstrap over rounds. The better way is chosen again in each draw, as the goal has it. Rounds of several runs are
    judged as one from their files (`pooled`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.cluster import NodePlan, cluster, random_prompt
from bench.harness.report import Row
from bench.parts.real_turns import MEAN_PROMPT, QUIET_S, Answer, Asked, Target, crowd, requests, turn, unseen
from pdcluster.core.errors import ConfigError

WAYS = ("auto", "local", "remote")
NAMES = {"auto": "auto", "local": "colocated", "remote": "static P/D"}
STATIC = ("local", "remote")
LOAD = 0.9
OPEN, CLOSED_REQUESTS = 8, 40
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0
LIMITS = (0.7, 0.83, 1.0, 1.19, 1.41, 1.68, 2.0)
# Between turns, for what nodes still free and report.
REST_S = 0.2

GOAL = 0.97

NODES = (NodePlan("p", "prefill", 0), NodePlan("d", "decode", 1))


# ---------------------------------------------------------------- what the machine can do


@dataclass(frozen=True, slots=True)
class Floor:
    """Of an idle node: seconds until a first token, more for each prompt token, and between two tokens."""

    first_s: float
    token_s: float
    next_s: float

    def ttft_s(self, num_tokens: int) -> float:
        """Short prompts are given the time of a mean one, as in the replay."""
        return self.first_s + self.token_s * max(num_tokens, MEAN_PROMPT)

    def needed(self, answer: Answer) -> tuple[float, float]:
        """How many times its limits the answer takes: of its first token, and of the others."""
        return answer.ttft_s / (TTFT_FACTOR * self.ttft_s(answer.num_tokens)), answer.tpot_s / (
            TPOT_FACTOR * self.next_s
        )


def floors(target: Target, seed: int) -> Floor:
    """Medians of requests one after the other."""
    chance = random.Random(seed)

    def alone(length: int) -> list[Answer]:
        prompts = [Asked(0.0, random_prompt(length, chance), 40) for _ in range(9)]
        return [_alone(target, prompt) for prompt in prompts][1:]

    short, long = alone(50), alone(1050)
    token_s = (_median(answer.ttft_s for answer in long) - _median(answer.ttft_s for answer in short)) / 1000
    first_s = max(_median(answer.ttft_s for answer in short) - 50 * token_s, 0.0)
    return Floor(first_s, token_s, _median(answer.tpot_s for answer in short))


def _alone(target: Target, prompt: Asked) -> Answer:
    answers = asyncio.run(turn(target, [prompt], "local"))
    if not answers:
        raise ConfigError(
            f"a prompt of {len(prompt.prompt)} tokens, alone, was refused or not answered in {QUIET_S:g} s; give a "
            "smaller model"
        )
    return answers[0]


def capacity(target: Target, seed: int) -> float:
    """Requests a second of the better static way, each taken twice in a closed loop, forth and back."""
    found: dict[str, list[float]] = {way: [] for way in STATIC}
    for number, way in enumerate((*STATIC, *reversed(STATIC))):
        asked = requests(CLOSED_REQUESTS, 1.0, f"closed {seed} {number}")
        found[way].append(asyncio.run(crowd(target, asked, way, OPEN)))
    print(
        ", ".join(
            f"{NAMES[way]} answers at most {statistics.fmean(rates):.2f} requests a second"
            for way, rates in found.items()
        ),
        flush=True,
    )
    return max(statistics.fmean(rates) for rates in found.values())


def _warm(target: Target, seed: int) -> None:
    """Until nodes have fitted their cost models, and paths their bandwidth."""
    for way in WAYS:
        asyncio.run(turn(target, requests(12, 5.0, f"warm {seed} {way}"), way))


# ---------------------------------------------------------------- rounds


@dataclass(frozen=True, slots=True)
class Turn:
    """What one way did in a round. num_good: requests in time, by LIMITS; paths: of those answered, by the nodes that
    took them; late_first, late_next: those of them that missed the limit, times 1, of the first token and of the
    others."""

    num_asked: int
    num_good: tuple[int, ...]
    paths: Counter[str]
    late_first: Counter[str] = field(default_factory=Counter)
    late_next: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> float:
        """Requests in time, the mean over LIMITS."""
        return statistics.fmean(self.num_good)


Round = dict[str, Turn]


def measure(model: Path, num_rounds: int, seconds: float, seed: int) -> Iterator[Row]:
    with cluster(model, NODES, "auto", ("--tokenizer", str(model))) as client:
        target = Target.of(client.address, client.model)
        _warm(target, seed)
        floor = floors(target, seed)
        rate = LOAD * capacity(target, seed)
        begun = time.monotonic()
        found = []
        for number, order in enumerate(orders(num_rounds, seed)):
            asked = requests(max(round(rate * seconds), 1), seconds, f"round {seed} {number}")
            found.append({way: _turn(target, floor, unseen(asked, f"{seed} {number} {way}"), way) for way in order})
            good = ", ".join(f"{NAMES[way]} {found[-1][way].good:.1f}" for way in WAYS)
            print(
                f"round {number + 1} of {num_rounds}, {time.monotonic() - begun:.0f} s: in time of {len(asked)}: "
                f"{good}",
                flush=True,
            )
    yield from figures(found, rate, seconds, seed)


def figures(found: Sequence[Round], rate: float, seconds: float, seed: int) -> Iterator[Row]:
    """What rounds of so many seconds a turn, at a rate, say."""
    for way in WAYS:
        goodputs = [each[way].good / seconds for each in found]
        case = f"real, 1 prefill + 1 decode node, {rate:.1f}/s asked; {_shares(found, way)}"
        yield Row(f"goodput {NAMES[way]}", case, statistics.fmean(goodputs), "1/s", spread=_spread(goodputs))
    for way in WAYS:
        yield from _late(found, way)
    yield from _kept(found, seed)
    yield from by_limit(found)
    yield judged(found, seed)


def orders(num_rounds: int, seed: int) -> list[tuple[str, ...]]:
    """Of the ways in each round: every order once in six rounds."""
    chance = random.Random(f"orders {seed}")
    every = list(itertools.permutations(WAYS))
    drawn = itertools.chain.from_iterable(chance.sample(every, len(every)) for _ in range(0, num_rounds, len(every)))
    return list(drawn)[:num_rounds]


def _turn(target: Target, floor: Floor, asked: Sequence[Asked], way: str) -> Turn:
    time.sleep(REST_S)
    return what_was_in_time(len(asked), floor, asyncio.run(turn(target, asked, way)))


def what_was_in_time(num_asked: int, floor: Floor, answers: Sequence[Answer]) -> Turn:
    needed = [(answer.path, *floor.needed(answer)) for answer in answers]
    num_good = tuple(sum(max(first, following) <= limit for _, first, following in needed) for limit in LIMITS)
    late_first = Counter(path for path, first, _ in needed if first > 1)
    late_next = Counter(path for path, _, following in needed if following > 1)
    return Turn(num_asked, num_good, Counter(answer.path for answer in answers), late_first, late_next)


def _shares(found: Sequence[Round], way: str) -> str:
    paths = _sum(each[way].paths for each in found)
    return ", ".join(f"{path} {number / paths.total():.0%}" for path, number in sorted(paths.items()))


def _late(found: Sequence[Round], way: str) -> Iterator[Row]:
    """By path, and by which token: says what a way loses by where it sends requests."""
    turns = [each[way] for each in found]
    for path, number in sorted(_sum(each.paths for each in turns).items()):
        first, following = (
            _sum(late)[path] / number
            for late in ([each.late_first for each in turns], [each.late_next for each in turns])
        )
        case = (
            f"real, the {number} answered by {path}: {first:.0%} late with the first token, {following:.0%} with the "
            "others"
        )
        yield Row(f"late, {NAMES[way]}", case, max(first, following), "of them, by the worse")


def _sum(counts: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counts, Counter())


# ---------------------------------------------------------------- kept and read again

IN_TIME = "in time,"


def _kept(found: Sequence[Round], seed: int) -> Iterator[Row]:
    """What `pooled` reads."""
    for number, each in enumerate(found):
        for way in WAYS:
            for limit, num_good in zip(LIMITS, each[way].num_good, strict=True):
                case = f"real, seed {seed}, round {number}{AT_LIMITS}{limit:g}"
                yield Row(
                    f"{IN_TIME} {way}", case, num_good, "requests", against="asked", against_value=each[way].num_asked
                )


AT_LIMITS = ", limits x "


def pooled(files: Sequence[Path], seed: int) -> Iterator[Row]:
    """The rounds of other runs, each with a cluster and a rate of its own, judged as one. Raises ConfigError for a file
    without whole rounds."""
    found = [each for file in files for each in _rounds_of(file)]
    for way in WAYS:
        asked = sum(each[way].num_asked for each in found)
        yield Row(
            f"in time {NAMES[way]}",
            f"real, {len(files)} runs",
            sum(each[way].good for each in found) / asked,
            "of those asked",
        )
    yield from by_limit(found)
    yield judged(found, seed)


def _rounds_of(file: Path) -> list[Round]:
    counts: dict[tuple[str, str, float], tuple[int, int]] = {}
    for row in json.loads(file.read_text()):
        what, _, way = row["metric"].rpartition(" ")
        if what == IN_TIME and way in WAYS:
            case, _, limit = row["case"].partition(AT_LIMITS)
            counts[case, way, float(limit or "nan")] = int(row["value"]), int(row["against_value"])
    cases = dict.fromkeys(case for case, _, _ in counts)
    try:
        found = [{way: _turn_of([counts[case, way, limit] for limit in LIMITS]) for way in WAYS} for case in cases]
    except KeyError as error:
        raise ConfigError(f"{file} lacks {error}; {NO_ROUNDS}") from error
    if not found:
        raise ConfigError(f"{file} has no rounds; {NO_ROUNDS}")
    return found


NO_ROUNDS = "give a file that this version's `bench.routing --real MODEL --json FILE` wrote"


def _turn_of(counts: Sequence[tuple[int, int]]) -> Turn:
    return Turn(counts[0][1], tuple(num_good for num_good, _ in counts), Counter())


# ---------------------------------------------------------------- judged

DRAWS = 10_000


def judged(found: Sequence[Round], seed: int) -> Row:
    """The ratio over all rounds, and its lower 95 % bound. One round less is drawn than there are: few rounds drawn in
    full would vary too little."""
    good = [{way: each[way].good for way in WAYS} for each in found]
    chance = random.Random(seed)
    ratios = [ratio(chance.choices(good, k=max(len(good) - 1, 1))) for _ in range(DRAWS)]
    percents = statistics.quantiles(ratios, n=20)
    low, high = percents[0], percents[-1]
    num_asked = sum(each["auto"].num_asked for each in found)
    case = (
        f"{len(found)} rounds, {num_asked} requests a way, ratio {ratio(good):.3f}, between {low:.3f} and {high:.3f} "
        "in nine of ten draws"
    )
    spread = _spread([ratio([each]) for each in good])
    return Row(
        "goodput auto, lower 95 %", case, low, "ratio", against=NAMES[_rival(good)], against_value=1.0, goal=GOAL,
        spread=spread,
    )  # fmt: skip


def by_limit(found: Sequence[Round]) -> Iterator[Row]:
    """What each limit by itself would say, and how many of all are in time at it."""
    for number, limit in enumerate(LIMITS):
        good = [{way: float(each[way].num_good[number]) for way in WAYS} for each in found]
        asked = sum(each["auto"].num_asked for each in found)
        shares = ", ".join(f"{NAMES[way]} {sum(each[way] for each in good) / asked:.0%}" for way in WAYS)
        yield Row(
            "goodput auto ÷ better static",
            f"real{AT_LIMITS}{limit:g}: {shares}",
            ratio(good),
            f"of {NAMES[_rival(good)]}",
        )


def ratio(good: Sequence[dict[str, float]]) -> float:
    """Of auto's requests in time to those of the better static way, over some rounds."""
    rival = _rival(good)
    return sum(each["auto"] for each in good) / max(sum(each[rival] for each in good), 1e-9)


def _rival(good: Sequence[dict[str, float]]) -> str:
    return max(STATIC, key=lambda way: sum(each[way] for each in good))


def _median(values: Iterator[float] | Sequence[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float]) -> float | None:
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle and len(values) > 1 else None
