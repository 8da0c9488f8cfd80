"""A router over a scripted model, run by the repository's own venv for the clients' tests.

The last `draw N` of a prompt decides what the model says, so a request that comes again gets the same answer. It prints
its URL and the model's name, and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(each) for each in (TESTS.parent, TESTS.parent / "router", *TESTS.glob("harness/*"))]

from scripted_dispatcher import EOS, MODEL, SPEAKING, TEXT, SpeakingDispatcher, Step, Tokens, served  # noqa: E402

from pdcluster.core.errors import Unavailable  # noqa: E402
from pdcluster_router.core.generation import Generation  # noqa: E402

ASKED = re.compile(r"(draw|fail) (\d+)")
WORDS = ("hello", "ü", "日本", "\n", "{", "<", "10 €", ".", "a b")


def drawn_text(draw: random.Random) -> str:
    """Thoughts or none, then texts and calls in any order."""

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 5)))

    def call() -> str:
        arguments = {
            name: draw.choice([words(), 3, None, [True], {}])
            for name in draw.sample(["city", "n", "ü"], k=draw.randint(0, 3))
        }
        said = json.dumps({"name": draw.choice(["get_weather", "add"]), "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{said}\n</tool_call>"

    thoughts = f"<think>\n{words()}\n</think>\n" if draw.random() < 0.5 else ""
    parts = [draw.choice([words, call])() for _ in range(draw.randint(0, 4))]
    return thoughts + draw.choice(["", " ", "\n"]).join(parts)


def script(generation: Generation) -> list[Step]:
    prompt = SPEAKING.decode(generation.token_ids, skip_special_tokens=False)
    kind, number = ASKED.findall(prompt)[-1]
    draw, steps = random.Random(int(number)), list[Step]()
    ids = [*TEXT.encode(drawn_text(draw), add_special_tokens=False), EOS]
    if kind == "fail":
        ids = ids[: draw.randint(1, len(ids))]
    while ids:
        size = draw.randint(1, 9)
        steps.append(Tokens(tuple(ids[:size])))
        ids = ids[size:]
    return [*steps, Unavailable("no node takes the request; all of them drain")] if kind == "fail" else steps


async def main() -> None:
    async with served(SpeakingDispatcher(script, max_len=1 << 16)) as url:
        print(url, MODEL, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
