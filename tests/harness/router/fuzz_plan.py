"""What happens in one run of the request fuzz: a router's settings, its nodes, what clients ask and what befalls nodes.

A plan is drawn from a seed, all of it before the run. So a plan can be cut down, and what is left happens as before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from pdcluster.bootstrap.card import FirstToken
from pdcluster.core.messages import Role
from pdcluster_router.core.generation import Force
from pdcluster_router.policy.base import Fallback

# Tokens of a page and of a hash block.
BLOCK = 8
VOCAB = 400


@dataclass(frozen=True)
class NodeSpec:
    """A node over all its boots.

    prompt_s, prompt_token_s: what a prompt takes, and each token of it that is not cached. step_s: from one token of a
    row to the next. hint_s: after which a full node wants to be asked again. tells_cost: reports what steps cost.
    """

    name: str
    role: Role
    max_len: int
    slots: int
    num_pages: int
    prompt_s: float = 0.01
    prompt_token_s: float = 0.001
    step_s: float = 0.05
    hint_s: float = 0.1
    tells_cost: bool = False


@dataclass(frozen=True)
class Ask:
    """One choice of a request.

    prefix: number of a prefix that several prompts share. leave_s: the client leaves so long after it came; stop_at: a stop string matches after so many tokens; leave_at: the client
    leaves in the middle of reading that token. takes_rows: has a fast token path. parent: the choice whose prompt it
    shares; leads: others share this one's. is_open_ended: it named no max_tokens. replays: it goes on with other weights
    where its own are gone.
    """

    name: str
    at: float
    num_prompt: int
    max_tokens: int
    seed: int
    deadline_s: float = 120.0
    prefix: int | None = None
    ignores_eos: bool = False
    mode: Force | None = None
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    session: str = ""
    wants_prompt_logprobs: bool = False
    takes_rows: bool = True
    leave_s: float | None = None
    stop_at: int | None = None
    leave_at: int | None = None
    parent: str | None = None
    leads: bool = False
    is_open_ended: bool = False

    @property
    def replays(self) -> bool:
        return self.seed % 5 < 2


@dataclass(frozen=True)
class Mishap:
    """Something befalls a node, or an operator does something to it. seconds: until that ends, or how much."""

    at: float
    kind: str
    node: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Rates:
    """How often a node does each thing to a leg, of 1."""

    refuse: float = 0.0
    refuse_for_ever: float = 0.0
    fail: float = 0.0
    forget: float = 0.0
    stall: float = 0.0
    break_transfer: float = 0.0
    repeat: float = 0.0
    disorder: float = 0.0
    end_late: float = 0.0

    @property
    def is_calm(self) -> bool:
        return self == Rates(repeat=self.repeat, disorder=self.disorder)


@dataclass(frozen=True)
class Plan:
    """mode, fallback: the router's own. first_token, parks_s: by the cards of all nodes. costs etc.: see DispatchSettings. heal_at: from then on nothing bad happens."""

    seed: int
    policy: str
    mode: Force
    fallback: Fallback
    ttft_s: float | None
    patience_s: float
    age_s: float
    hold_count: int
    nodes: tuple[NodeSpec, ...]
    asks: tuple[Ask, ...]
    mishaps: tuple[Mishap, ...]
    rates: Rates = field(default_factory=Rates)
    first_token: FirstToken = "prefill"
    parks_s: float = 0.0
    heal_at: float = 15.0

    def chance(self, *words: object) -> float:
        """A number below 1 that depends on the seed and the words alone."""
        digest = blake2b(repr((self.seed, *words)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    @property
    def is_calm(self) -> bool:
        """Whether nothing happens by which a request may fail."""
        return not self.mishaps and self.rates.is_calm


KINDS = (
    "die", "die", "die", "leave", "return", "cut", "cut", "mute", "lose frames", "stick", "cordon", "cordon", "role",
    "drain", "forget", "forget", "evict", "refuse", "slow", "model",
)  # fmt: skip
CALM_KINDS = ("cordon", "role", "evict", "drain")


def draw_plan(seed: int) -> Plan:
    """Any plan, or one of a kind that makes many wait."""
    rng = random.Random(seed)
    nodes = _draw_nodes(rng)
    plan = Plan(
        seed,
        policy=rng.choice(("product", "product", "product", "seconds", "seconds", "least-load", "round-robin")),
        mode=rng.choice(("auto", "auto", "auto", "auto", "remote", "remote", "local")),
        fallback=rng.choice(("conditional", "conditional", "conditional", "deny", "on-failure")),
        ttft_s=rng.choice((None, None, None, None, None, 0.5, 2.0)),
        patience_s=rng.choice((0.5, 2.0, 30.0)),
        age_s=rng.choice((20.0, 60.0)),
        hold_count=rng.choice((1024, 1024, 1024, 8)),
        nodes=nodes,
        asks=(),
        mishaps=(),
        rates=_draw_rates(rng),
    )
    plan = replace(plan, asks=tuple(_draw_asks(rng, nodes)), mishaps=tuple(_draw_mishaps(rng, nodes)))
    engine = random.Random(f"engine {seed}")  # so that what else happens is the same with both
    if engine.random() < 0.4:
        plan = replace(plan, first_token="decode", parks_s=engine.choice((0.0, 0.7, 3.0)))
    return rng.choice((_as_is, _as_is, _without_decode, _full_of_rows, _large_and_small))(rng, plan)


def _as_is(rng: random.Random, plan: Plan) -> Plan:
    return plan


def _without_decode(rng: random.Random, plan: Plan) -> Plan:
    """No decode node takes work for a while, so that many park; some ask for one node alone."""
    gone = [
        Mishap(0.05, rng.choice(("cordon", "drain", "die", "stick")), node.name, 8.0)
        for node in plan.nodes
        if node.role != "prefill"
    ]
    asks = [replace(ask, at=ask.at / 2, mode=rng.choice((None, None, None, "local"))) for ask in plan.asks]
    return replace(plan, mode="remote", ttft_s=None, hold_count=1024, asks=tuple(asks), mishaps=(*gone, *plan.mishaps))


def _full_of_rows(rng: random.Random, plan: Plan) -> Plan:
    """Decode nodes are full of long answers, so that requests become due; some ask for one node alone."""
    nodes = [replace(node, step_s=0.2, slots=2 if node.role == "prefill" else 1) for node in plan.nodes]
    asks = [
        replace(ask, at=ask.at / 3, max_tokens=max(ask.max_tokens, 12), mode=rng.choice((None, "remote", "local")))
        for ask in plan.asks
        if ask.num_prompt < 200
    ]
    return replace(plan, patience_s=0.5, ttft_s=None, nodes=tuple(nodes), asks=tuple(asks))


def _large_and_small(rng: random.Random, plan: Plan) -> Plan:
    """Many fit on one node alone, which is slow; others fit anywhere."""
    large = rng.choice(plan.nodes)
    nodes = [
        replace(node, max_len=400 if node is large else 96, num_pages=402 // BLOCK * 2, slots=2) for node in plan.nodes
    ]
    asks = [
        replace(ask, at=ask.at / 3, num_prompt=rng.randint(100, 300) if rng.random() < 0.7 else rng.randint(1, 60))
        for ask in plan.asks
    ]
    return replace(plan, hold_count=1024, nodes=tuple(nodes), asks=_alike(asks))


def _alike(asks: Sequence[Ask]) -> tuple[Ask, ...]:
    """Choices of one request have one prompt."""
    first = {ask.name: ask for ask in asks}
    return tuple(
        ask if ask.parent is None else replace(ask, num_prompt=first[ask.parent].num_prompt, at=first[ask.parent].at)
        for ask in asks
    )


def _draw_nodes(rng: random.Random) -> tuple[NodeSpec, ...]:
    roles: Sequence[Role] = rng.choice(
        (
            ("prefill", "decode"),
            ("prefill", "decode"),
            ("prefill", "decode", "decode"),
            ("prefill", "prefill", "decode"),
            ("prefill", "prefill", "decode", "decode"),
            ("prefill", "mixed", "decode"),
            ("mixed", "mixed"),
            ("mixed",),
            ("prefill", "prefill", "decode", "decode", "mixed"),
        )
    )
    tells_cost, sizes = rng.random() < 0.5, rng.choice(((256,), (256,), (96, 256), (64, 160, 400)))
    prompt_token_s, step_s = rng.choice((0.0005, 0.002, 0.01)), rng.choice((0.02, 0.05, 0.2))
    return tuple(
        NodeSpec(
            f"n{number}",
            role,
            max_len := rng.choice(sizes),
            slots := rng.choice((1, 2, 4)),
            num_pages=max_len // BLOCK * rng.choice((1, 2, slots)) + 2,
            prompt_token_s=prompt_token_s,
            step_s=step_s,
            hint_s=rng.choice((0.02, 0.2, 2.0)),
            tells_cost=tells_cost,
        )
        for number, role in enumerate(roles)
    )


def _draw_rates(rng: random.Random) -> Rates:
    repeat, disorder = rng.choice((0.0, 0.1)), rng.choice((0.0, 0.1))
    if rng.random() < 0.4:
        return Rates(repeat=repeat, disorder=disorder)
    few = rng.choice((0.01, 0.05, 0.15))
    return Rates(
        refuse=rng.choice((0.0, few, 0.3)),
        refuse_for_ever=rng.choice((0.0, 0.0, 0.02)),
        fail=rng.choice((0.0, few)),
        forget=rng.choice((0.0, few)),
        stall=rng.choice((0.0, few / 2)),
        break_transfer=rng.choice((0.0, few)),
        repeat=repeat,
        disorder=disorder,
        end_late=rng.choice((0.0, 0.2)),
    )


def _draw_asks(rng: random.Random, nodes: tuple[NodeSpec, ...]) -> list[Ask]:
    longest = max(node.max_len for node in nodes)
    num, until = rng.choice((8, 20, 30, 50)), rng.choice((0.5, 3.0, 9.0))
    modes = rng.choice(((None,), (None,), (None, None, "local"), (None, "local", "remote")))
    long_share, deadlines = rng.choice((0.0, 0.1, 0.5)), rng.choice(((120.0,), (120.0,), (120.0, 3.0, 12.0)))
    leaves, tenants = rng.random() < 0.4, rng.choice((("",), ("", "a", "b")))
    asks: list[Ask] = []
    while len(asks) < num:
        is_long = rng.random() < long_share
        num_prompt = rng.randint(longest // 3, longest * 4 // 5) if is_long else rng.randint(1, longest // 5)
        max_tokens = rng.choice((1, 2, 5, 12, 30))
        first = Ask(
            f"r{len(asks)}",
            at=rng.uniform(0.0, until),
            num_prompt=num_prompt,
            max_tokens=min(max_tokens, longest - num_prompt),
            seed=rng.randrange(1 << 30),
            deadline_s=rng.choice(deadlines),
            prefix=rng.choice((None, 0, 1)),
            ignores_eos=rng.random() < 0.2,
            mode=rng.choice(modes),
            tenant=rng.choice(tenants),
            weight=rng.choice((1.0, 1.0, 4.0)),
            priority=rng.choice((0, 0, 0, 1, -1)),
            session=rng.choice(("", "", "s")),
            wants_prompt_logprobs=rng.random() < 0.05,
            takes_rows=rng.random() < 0.6,
            **(_draw_leave(rng) if leaves and rng.random() < 0.4 else {}),
        )
        if rng.random() < 0.1:
            first = replace(first, max_tokens=longest - num_prompt, is_open_ended=True, ignores_eos=False)
        num_choices = rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
        if num_choices > 1:
            first = replace(first, leads=True)
        asks.append(first)
        for choice in range(1, num_choices):
            fork = {"name": f"{first.name}-{choice}", "leads": False, "parent": first.name, "seed": first.seed + choice}
            asks.append(replace(first, **fork))
    return asks


def _draw_leave(rng: random.Random) -> dict[str, float | int]:
    kind = rng.choice(("leave_s", "leave_s", "stop_at", "leave_at"))
    return {kind: rng.choice((0.0, 0.3, 1.0, 4.0)) if kind == "leave_s" else rng.choice((1, 2, 3, 6))}


def _draw_mishaps(rng: random.Random, nodes: tuple[NodeSpec, ...]) -> list[Mishap]:
    kinds = rng.choice((KINDS, KINDS, KINDS, CALM_KINDS))
    num = rng.choice((0, 1, 2, 5, 10))
    return sorted(
        (
            Mishap(rng.uniform(0.0, 11.0), rng.choice(kinds), rng.choice(nodes).name, rng.choice((0.2, 1.0, 3.0, 8.0)))
            for _ in range(num)
        ),
        key=lambda mishap: mishap.at,
    )
