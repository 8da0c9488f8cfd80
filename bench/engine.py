"""How much of the machine the engine uses: MFU of prefill and MBU of decode, against ceilings measured in the same run.

    python -m bench.engine [--quick] [--json FILE] [--model DIR] [--threads N] [--core N]
    python -m bench.engine --python-share                 how much of a decode step of 32 rows is not spent in kernels
    python -m bench.engine --deterministic                what the batch-invariant mode costs
    python -m bench.engine --quantization                 what weights of eight bits win, and what they lose in quality
    python -m bench.engine --compare vllm llama.cpp       beside rivals, where these are installed (bench/README.md)

Without --model a random Qwen3-shaped bfloat16 checkpoint of 30M parameters is made once and kept in the cache
directory. With n tokens, batch B, contexts c and kv bytes of KV per token:

    prefill   FLOP  = 2 P n + 4 L H d n²/2 + 2 hidden V      P: weights of the layers; the head runs for the last token
    only decode    bytes = W + kv Σc + kv B                       W: bytes of the layers and the head FLOP  = (2 P + 2
    hidden V) B + 4 L H d Σc

The roofline of a decode step is what the slower of its bytes and its FLOP takes at those ceilings; of many rows that is
the products. The FLOP/s ceiling is the best of a few large products, our own and torch's: oneDNN's in bfloat16 where
the CPU has one, else in float32 (its bfloat16 is then many times slower than what the CPU can do); the row says which
won. What torch does in float32 stands beside it, unjudged: where products of bfloat16 are slow it is more than weights
of bfloat16, which are widened first, can reach. The bandwidth ceiling is the best of a few ways to read a buffer as
large as the model, so that both meet the same caches. Both run with the engine's threads on the engine's core, since
the pace of a shared machine drifts by a tenth within minutes: products in turns with each prompt, reading in turns with
each decode step, whose roofline has the products of the run's start. Contexts are zeros: what is in the pages does not
change the time.

Python's share is what a step takes in which every kernel gets an empty range: all of building the batch, calling
kernels, small torch operations and drawing tokens. On some CPUs prompts run through oneDNN, so it is told for decode
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from bench.harness.report import Row as Figure
from bench.harness.report import add_output_flags, print_rows, row, row_of_turns, save
from bench.parts.engine_quantization import SCHEMES, quality
from bench.rivals.engines import VENVS, compare
from pdcluster.core.messages import Sampling
from pdcluster.core.step import Row, StepPlan
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.kernels.loader import Kernel, Parallel
from pdcluster.engine.model.config import ModelConfig, read_config
from pdcluster.engine.ops.linear import Linear, PlainLinear, can_pack
from pdcluster.engine.ops.select import select_ops
from pdcluster.kv.layout import ITEM_BYTES, DType, KVLayout
from pdcluster.kv.pool import TORCH_DTYPE
from pdcluster.processes.garbage import collect_seldom

CACHE = Path.home() / ".cache" / "pdcluster"
PAGE_TOKENS = 32
MFU_GOAL = MBU_GOAL = 0.85
# A step takes so many times as long as its Python.
PYTHON_GOAL = 10.0
GREEDY = Sampling(max_tokens=1, seed=0, temperature=0.0)

# Of models whose batches are measured up to 8 instead of 32.
LARGE_WIDTH = 1024

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; every case and ceiling is repeated `repeats` times, each the best of `tries`, and of as many
    more as begin within `seconds`: on a shared machine others are in the way for longer than what is short takes."""

    prefills: tuple[int, ...] = (128, 512, 2048)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 2048)
    repeats: int = 5
    tries: int = 5
    seconds: float = 0.5


QUICK = Plan(prefills=(128, 512), batches=(1, 8), repeats=3, tries=3)
# Tokens of all contexts of a quick case beside others: filling theirs is not measured, but takes its time.
MOST_QUICK_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP and bytes of steps, from the model's shape alone."""

    layer_weights: int
    head_weights: int
    # Per query and key.
    attention_flop: int
    item_bytes: int
    kv_bytes: int

    def prefill_flop(self, tokens: int) -> float:
        return 2.0 * self.layer_weights * tokens + self.attention_flop * tokens**2 / 2 + 2.0 * self.head_weights

    def decode_bytes(self, batch: int, context: int) -> float:
        return float((self.layer_weights + self.head_weights) * self.item_bytes + self.kv_bytes * batch * (context + 1))

    def decode_flop(self, batch: int, context: int) -> float:
        return batch * (2.0 * (self.layer_weights + self.head_weights) + self.attention_flop * (context + 1))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The fastest way that was found to do so much in one run: name, FLOP or bytes, and a run."""

    name: str
    amount: float
    run: Callable[[], object]
    # When it was looked for. The machine's own pace drifts by a tenth within minutes, so whoever compares runs it again
    # beside what it compares.
    per_second: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do, per second."""

    work: Work
    flops: float
    bandwidth: float

    def decode_seconds(self, batch: int, context: int) -> float:
        """The roofline of a decode step."""
        return max(
            self.work.decode_bytes(batch, context) / self.bandwidth, self.work.decode_flop(batch, context) / self.flops
        )


# Seconds of one and of the other, turn by turn.
Pairs = Sequence[tuple[float, float]]

_per_second = attrgetter("per_second")


def main() -> None:
    arguments = _arguments()
    plan = QUICK if arguments.quick else Plan()
    model_dir = arguments.model or random_checkpoint(CACHE / "bench-engine-30m")
    core = max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core
    if arguments.threads == 1:
        os.sched_setaffinity(0, {core})
    config = read_config(model_dir)
    if config.hidden_size >= LARGE_WIDTH:
        plan = replace(plan, batches=tuple(sorted({min(batch, 8) for batch in (*plan.batches, 4)})))
    if arguments.compare:
        decodes = [(batch, context) for context in plan.contexts for batch in plan.batches]
        torch.set_num_threads(1)
        figures, ceilings = ceilings_alone(plan, work_of(config, config.kv_layout(PAGE_TOKENS, "bfloat16")))
        cases, most = (plan.prefills, decodes), MOST_QUICK_CONTEXT if arguments.quick else None
        figures += compare(
            arguments.compare,
            arguments.rivals,
            model_dir,
            core,
            *cases,
            ceilings.decode_seconds,
            repeats=3,
            most_context=most,
        )
    elif arguments.deterministic:
        figures = beside_default(model_dir, plan, arguments.threads, {"deterministic": {"deterministic": True}})
    elif arguments.quantization:
        figures = quality(CACHE / "kernels", quick=arguments.quick)
        figures += beside_default(
            model_dir, plan, arguments.threads, {scheme: {"quantization": scheme} for scheme in SCHEMES}
        )
    else:
        figures = own_figures(model_dir, plan, arguments.threads, python_only=arguments.python_share)
    print_rows(figures)
    save(figures, arguments)


def ceilings_alone(plan: Plan, work: Work) -> tuple[list[Figure], Ceilings]:
    """As they are when this begins; their memory is free again for those that are compared."""
    with found_ceilings(plan, work) as (product, read):
        return ceiling_rows(plan, product, read), Ceilings(work, product.per_second, read.per_second)


def own_figures(model_dir: Path, plan: Plan, threads: int, *, python_only: bool) -> list[Figure]:
    tokens = max(plan.batches) * (max(plan.contexts) + PAGE_TOKENS)
    engine = Engine(
        EngineConfig(
            model_dir, CACHE / "kernels", page_tokens=PAGE_TOKENS, num_pages=tokens // PAGE_TOKENS, threads=threads
        )
    )
    try:
        engine.warmup()
        collect_seldom()
        share = [python_share(engine, plan, max(plan.batches))]
        return share if python_only else share + measure(engine, plan)
    finally:
        engine.close()


def beside_default(model_dir: Path, plan: Plan, threads: int, modes: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Milliseconds of other modes (by name: what is set) against those of the default one, in turns; the ratio is the
    slowdown."""
    tokens = max(plan.batches) * (max(plan.contexts) + PAGE_TOKENS)
    config = EngineConfig(
        model_dir,
        CACHE / "kernels",
        dtype="bfloat16",
        page_tokens=PAGE_TOKENS,
        num_pages=tokens // PAGE_TOKENS,
        threads=threads,
    )
    default, others = Engine(config), {name: Engine(replace(config, **changes)) for name, changes in modes.items()}
    try:
        collect_seldom()
        cases = [("prefill", f"{count} tokens", prefill_plan(default, count)) for count in plan.prefills]
        for context in plan.contexts:
            cases += [
                ("decode step", f"batch {batch}, context {context}", decode_plan(default, batch, context))
                for batch in plan.batches
            ]
        return [figure for case in cases for figure in _slowdowns(plan, default, others, *case)]
    finally:
        for engine in (default, *others.values()):
            engine.close()


def _slowdowns(
    plan: Plan, default: Engine, others: Mapping[str, Engine], metric: str, case: str, step: StepPlan
) -> list[Figure]:
    samples: dict[Engine, list[float]] = {engine: [] for engine in (default, *others.values())}
    for engine in samples:
        engine.step(step)
    for _ in range(plan.repeats):
        for engine, found in samples.items():
            found.append(1e3 * min(_seconds(lambda engine=engine: engine.step(step)) for _ in range(plan.tries)))  # type: ignore[misc]
    against = statistics.median(samples[default])
    return [
        row(
            f"{metric}, {name}",
            case,
            samples[engine],
            "ms",
            against="default mode",
            against_value=against,
            better="less",
        )
        for name, engine in others.items()
    ]


def python_share(engine: Engine, plan: Plan, batch: int) -> Figure:
    """Milliseconds outside kernels, beside a whole step's."""
    step = decode_plan(engine, batch, 128)
    whole = _repeat(plan, lambda: engine.step(step))
    with empty_kernels():
        idle = [1e3 * seconds for seconds in _repeat(plan, lambda: engine.step(step))]
    against = 1e3 * statistics.median(whole)
    return row(
        "Python of a decode step",
        f"batch {batch}, context 128",
        idle,
        "ms",
        against="whole step",
        against_value=against,
        better="less",
        goal=PYTHON_GOAL,
    )


@contextmanager
def empty_kernels() -> Iterator[None]:
    """Kernels are called as ever, with nothing to do."""
    real = Parallel.run

    def run(self: Parallel, kernel: Kernel, tasks: int, *args: object, grain: int = 1) -> None:
        kernel(*args, 0, 0)

    setattr(Parallel, "run", run)  # noqa: B010 (a plain assignment is no method to the type checker)
    try:
        yield
    finally:
        setattr(Parallel, "run", real)  # noqa: B010


def measure(engine: Engine, plan: Plan) -> list[Figure]:
    """Each case in turns with its ceiling."""
    work = work_of(engine.config, engine.layout)
    with found_ceilings(plan, work) as (product, read):
        figures = ceiling_rows(plan, product, read)
        for tokens in plan.prefills:
            pairs = _in_turns(plan, lambda tokens=tokens: engine.step(prefill_plan(engine, tokens)), product.run)  # type: ignore[misc]
            goal = MFU_GOAL if tokens == 512 else None
            figures += _beside_ceiling(
                "prefill", "prefill MFU", f"{tokens} tokens", work.prefill_flop(tokens), pairs, product, "GFLOP/s", goal
            )
        for context in plan.contexts:
            for batch in plan.batches:
                step = partial(decode_plan, engine, batch, context)
                pairs = _in_turns(plan, lambda step=step: engine.step(step()), read.run)  # type: ignore[misc]
                case, goal = f"batch {batch}, context {context}", MBU_GOAL if batch == 1 else None
                figures += _beside_ceiling(
                    "decode step", "decode MBU", case, work.decode_bytes(batch, context), pairs, read, "GB/s", goal
                )
                least = [
                    Ceilings(work, product.per_second, read.amount / other_s).decode_seconds(batch, context)
                    for _, other_s in pairs
                ]
                steps, most = [1 / own_s for own_s, _ in pairs], [1 / least_s for least_s in least]
                figures.append(
                    row_of_turns("decode of the roofline", case, steps, "step/s", against="roofline", other=most)
                )
    return figures


def _beside_ceiling(
    metric: str, rate: str, case: str, amount: float, pairs: Pairs, ceiling: Ceiling, unit: str, goal: float | None
) -> list[Figure]:
    """Milliseconds of a case, and what it does per second as a share of what its ceiling did right after it."""
    own = [amount / own_s / 1e9 for own_s, _ in pairs]
    other = [ceiling.amount / other_s / 1e9 for _, other_s in pairs]
    beside = row_of_turns(rate, case, own, unit, against=ceiling.name, other=other, goal=goal)
    return [row(metric, case, [1e3 * own_s for own_s, _ in pairs], "ms"), beside]


@contextmanager
def found_ceilings(plan: Plan, work: Work) -> Iterator[tuple[Ceiling, Ceiling]]:
    """Of products and of reading what a decode step reads of weights."""
    dtype: DType = "bfloat16" if work.item_bytes == ITEM_BYTES["bfloat16"] else "float32"
    with product_ceiling(plan, dtype) as product:
        yield product, read_ceiling(plan, int(work.decode_bytes(0, 0)))


def ceiling_rows(plan: Plan, product: Ceiling, read: Ceiling) -> list[Figure]:
    ceilings = [
        row("ceiling", product.name, [product.per_second / 1e9], "GFLOP/s"),
        row("ceiling", read.name, [read.per_second / 1e9], "GB/s"),
    ]
    floats = float_product(plan)
    return (
        ceilings
        if floats.name == product.name
        else [*ceilings, row("beside it", floats.name, [floats.per_second / 1e9], "GFLOP/s")]
    )


def work_of(config: ModelConfig, layout: KVLayout) -> Work:
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    return Work(
        layer_weights=config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size),
        head_weights=config.vocab_size * config.hidden_size,
        attention_flop=4 * config.num_layers * config.num_heads * config.head_dim,
        item_bytes=ITEM_BYTES[layout.dtype],
        kv_bytes=layout.token_bytes,
    )


@contextmanager
def product_ceiling(plan: Plan, dtype: DType) -> Iterator[Ceiling]:
    """The fastest of a few large products, by torch and by the engine's own kernels: whichever is the faster here."""
    ops = select_ops("cpu", dtype, torch.get_num_threads(), CACHE / "kernels")
    try:
        by_torch: DType = dtype if can_pack() else "float32"
        found: list[Ceiling] = []
        for size in (512, 1024, 2048):
            x, weight = torch.randn(2048, size), torch.randn(size, size)
            for name, kind in ((f"torch, {by_torch}", by_torch), (f"our own, {dtype}", dtype)):
                rows, weights = x.to(TORCH_DTYPE[kind]), [weight.to(TORCH_DTYPE[kind])]
                product: Linear = (
                    PlainLinear(weights, [None]) if name.startswith("torch") else ops.linear(weights, [None])
                )
                found.append(_product(plan, name, product, rows))
        yield max(found, key=_per_second)
    finally:
        ops.close()


def float_product(plan: Plan) -> Ceiling:
    """torch's in float32, of a size at which it is as fast as it gets."""
    return _product(plan, "torch, float32", PlainLinear([torch.randn(1024, 1024)], [None]), torch.randn(2048, 1024))


def _product(plan: Plan, name: str, product: Linear, rows: torch.Tensor) -> Ceiling:
    """By a square matrix."""
    return _ceiling(plan, f"matrix product ({name})", 2.0 * len(rows) * rows.shape[1] ** 2, partial(product, rows))


def read_ceiling(plan: Plan, nbytes: int) -> Ceiling:
    """The fastest of a few ways to read nbytes."""
    values = torch.ones(16, max(nbytes // 4 // 16, 1))
    vector = torch.ones(values.shape[1])
    half = values.view(2, -1)
    words = values.numpy().view(np.uint64).reshape(-1)
    ways: list[Callable[[], object]] = [
        lambda: torch.mv(values, vector),
        lambda: torch.dot(half[0], half[1]),
        values.sum,
        lambda: add_runs(words),
    ]
    return max((_ceiling(plan, "read", float(values.nbytes), way) for way in ways), key=_per_second)


def _ceiling(plan: Plan, name: str, amount: float, run: Callable[[], object]) -> Ceiling:
    return Ceiling(name, amount, run, amount / min(_repeat(plan, run)))


@numba.njit(fastmath=True)
def add_runs(words: NDArray[np.uint64]) -> int:
    """The sum of four runs that are read side by side: one stream of loads does not fill the memory bus."""
    run = len(words) // 4
    total = np.uint64(0)
    for index in range(run):
        total += words[index] + words[index + run] + words[index + 2 * run] + words[index + 3 * run]
    return total  # type: ignore[return-value]


def random_checkpoint(directory: Path) -> Path:
    """The 30M checkpoint, made on first use."""
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        save_file(_random_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def _random_tensors() -> dict[str, torch.Tensor]:
    hidden, inner, dim = 512, 1536, 64
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8192, hidden), "model.norm.weight": (hidden,)}
    for index in range(8):
        at = f"model.layers.{index}."
        shapes |= {
            f"{at}self_attn.{name}_proj.weight": (heads * dim, hidden) for name, heads in (("q", 8), ("k", 4), ("v", 4))
        }
        shapes |= {
            f"{at}self_attn.o_proj.weight": (hidden, 8 * dim),
            f"{at}self_attn.q_norm.weight": (dim,),
            f"{at}self_attn.k_norm.weight": (dim,),
        }
        shapes |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")} | {
            f"{at}mlp.down_proj.weight": (hidden, inner)
        }
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        ).bfloat16()
        for name, shape in shapes.items()
    }


def prefill_plan(engine: Engine, tokens: int) -> StepPlan:
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, tokens).astype(np.int32)
    return StepPlan((Row("prefill", ids, 0, np.arange(engine.layout.num_pages(tokens), dtype=np.int32), GREEDY),))


def decode_plan(engine: Engine, batch: int, context: int) -> StepPlan:
    needed = engine.layout.num_pages(context + 1)
    pages = np.arange(batch * needed, dtype=np.int32).reshape(batch, needed)
    return StepPlan(
        tuple(Row(str(index), np.ones(1, np.int32), context, pages[index], GREEDY) for index in range(batch))
    )


def _repeat(plan: Plan, run: Callable[[], object]) -> list[float]:
    """Seconds of each repeat, after one run that is not counted."""
    run()
    return [_best_seconds(plan, run) for _ in range(plan.repeats)]


def _in_turns(plan: Plan, run: Callable[[], object], other: Callable[[], object]) -> Pairs:
    """Of each repeat of one and, right after it, of the other; after one run of each that is not counted."""
    run()
    other()
    return [(_best_seconds(plan, run), _best_seconds(plan, other)) for _ in range(plan.repeats)]


def _best_seconds(plan: Plan, run: Callable[[], object]) -> float:
    begin, found = time.perf_counter(), [_seconds(run) for _ in range(plan.tries)]
    while time.perf_counter() - begin < plan.seconds:
        found.append(_seconds(run))
    return min(found)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description="MFU of prefill and MBU of decode against measured ceilings"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    add_output_flags(parser)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory instead of the random model")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--core", type=int, help="the one core to run on (default: the last one there is)")
    parser.add_argument("--python-share", action="store_true", help="only what a decode step spends outside kernels")
    parser.add_argument("--deterministic", action="store_true", help="only what the batch-invariant mode costs")
    parser.add_argument("--quantization", action="store_true", help="only what weights of eight bits win and lose")
    parser.add_argument("--compare", nargs="+", choices=sorted(VENVS), default=[], help="beside these engines")
    parser.add_argument(
        "--rivals",
        type=Path,
        default=Path.home() / ".cache" / "pdcluster" / "rivals",
        help="where their virtual environments are",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
