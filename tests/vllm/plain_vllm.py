"""One vLLM without pdcluster: reads prompts of token ids as JSON, answers each by itself, writes greedy tokens as JSON.

python plain_vllm.py MODEL NUM_OUTPUT ARGUMENT...     the arguments are those of `vllm serve`
"""

from __future__ import annotations

import json
import sys


def main(model: str, num_output: int, arguments: list[str]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", model, *arguments])
    engine = LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    answers = []
    for prompt in json.load(sys.stdin):
        (found,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answers.append(list(found.outputs[0].token_ids))
    print("@" + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
