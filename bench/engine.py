"""How much of the machine the engine uses: MFU of prefill and MBU of decode, against ceilings measured in the same run.

    python -m bench.engine [--quick] [--json FILE] [--model DIR] [--threads N]

Without --model a random Qwen3-shaped bfloat16 checkpoint of 30M parameters is made once and kept in the cache directory. With n tokens, batch B,
contexts c and kv bytes of KV per token:

    prefill   FLOP  = 2 P n + 4 L H d n²/2 + 2 hidden V      P: weights of the layers; the head runs for the last token only
    decode    bytes = W + kv Σc + kv B                       W: bytes of the layers and the head

The FLOP/s ceiling is the best of a few large bfloat16 products; the bandwidth ceiling the best of a few ways to read a buffer as large as the
model, so that both meet the same caches. Contexts are zeros: what is in the pages does not change the time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bench.report import Row as Figure
from bench.report import print_rows, row, write_json
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.kv.layout import ITEM_BYTES
from pdcluster.messages import Sampling
from pdcluster.step import Row, StepPlan

CACHE = Path.home() / ".cache" / "pdcluster"
PAGE_TOKENS = 32
GREEDY = Sampling(max_tokens=1, seed=0, temperature=0.0)

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
    """What to measure; every case is repeated `repeats` times, each the best of `tries` steps."""

    prefills: tuple[int, ...] = (128, 512, 2048)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 2048)
    repeats: int = 5
    tries: int = 5


QUICK = Plan(prefills=(128, 512), batches=(1, 8), repeats=3, tries=3)


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP and bytes of steps, from the model's shape alone."""

    layer_weights: int
    head_weights: int
    attention_flop: int
    """Per query and key."""
    item_bytes: int
    kv_bytes: int

    def prefill_flop(self, tokens: int) -> float:
        return 2.0 * self.layer_weights * tokens + self.attention_flop * tokens**2 / 2 + 2.0 * self.head_weights

    def decode_bytes(self, batch: int, context: int) -> float:
        return float((self.layer_weights + self.head_weights) * self.item_bytes + self.kv_bytes * batch * (context + 1))


def main() -> None:
    arguments = _arguments()
    plan = QUICK if arguments.quick else Plan()
    model_dir = arguments.model or random_checkpoint(CACHE / "bench-engine-30m")
    tokens = max(plan.batches) * (max(plan.contexts) + PAGE_TOKENS)
    engine = Engine(EngineConfig(model_dir, CACHE / "kernels", page_tokens=PAGE_TOKENS, num_pages=tokens // PAGE_TOKENS, threads=arguments.threads))
    try:
        engine.warmup()
        figures = measure(engine, plan)
    finally:
        engine.close()
    print_rows(figures)
    if arguments.json is not None:
        write_json(figures, arguments.json)


def measure(engine: Engine, plan: Plan) -> list[Figure]:
    work = work_of(engine)
    flops = product_ceiling(plan, torch.bfloat16 if engine.layout.dtype == "bfloat16" else torch.float32)
    bandwidth = read_ceiling(plan, int(work.decode_bytes(0, 0)))
    figures = [row("ceiling", "matrix product", [flops / 1e9], "GFLOP/s"), row("ceiling", "read", [bandwidth / 1e9], "GB/s")]
    for tokens in plan.prefills:
        seconds = _repeat(plan, lambda tokens=tokens: engine.step(prefill_plan(engine, tokens)))  # type: ignore[misc]
        rates = [work.prefill_flop(tokens) / value / 1e9 for value in seconds]
        figures.append(row("prefill", f"{tokens} tokens", [1e3 * value for value in seconds], "ms"))
        figures.append(row("prefill MFU", f"{tokens} tokens", rates, "GFLOP/s", against="matrix product", against_value=flops / 1e9))
    for context in plan.contexts:
        for batch in plan.batches:
            seconds = _repeat(plan, lambda batch=batch, context=context: engine.step(decode_plan(engine, batch, context)))  # type: ignore[misc]
            rates = [work.decode_bytes(batch, context) / value / 1e9 for value in seconds]
            case = f"batch {batch}, context {context}"
            figures.append(row("decode step", case, [1e3 * value for value in seconds], "ms"))
            figures.append(row("decode MBU", case, rates, "GB/s", against="read", against_value=bandwidth / 1e9))
    return figures


def work_of(engine: Engine) -> Work:
    config, layout = engine.config, engine.layout
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    return Work(
        layer_weights=config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size),
        head_weights=config.vocab_size * config.hidden_size,
        attention_flop=4 * config.num_layers * config.num_heads * config.head_dim,
        item_bytes=ITEM_BYTES[layout.dtype],
        kv_bytes=layout.token_bytes,
    )


def product_ceiling(plan: Plan, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of a few large products."""
    best = 0.0
    for size in (512, 1024, 2048):
        x, weight = torch.randn(2048, size).to(dtype), torch.randn(size, size).to(dtype)
        seconds = min(_repeat(plan, lambda x=x, weight=weight: torch.nn.functional.linear(x, weight)))  # type: ignore[misc]
        best = max(best, 2.0 * 2048 * size * size / seconds)
    return best


def read_ceiling(plan: Plan, nbytes: int) -> float:
    """Bytes per second of the fastest of a few ways to read nbytes."""
    values = torch.ones(16, max(nbytes // 4 // 16, 1))
    vector = torch.ones(values.shape[1])
    half = values.view(2, -1)
    ways: list[Callable[[], object]] = [lambda: torch.mv(values, vector), lambda: torch.dot(half[0], half[1]), values.sum]
    return values.nbytes / min(min(_repeat(plan, way)) for way in ways)


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
        shapes |= {f"{at}self_attn.{name}_proj.weight": (heads * dim, hidden) for name, heads in (("q", 8), ("k", 4), ("v", 4))}
        shapes |= {f"{at}self_attn.o_proj.weight": (hidden, 8 * dim), f"{at}self_attn.q_norm.weight": (dim,), f"{at}self_attn.k_norm.weight": (dim,)}
        shapes |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")} | {f"{at}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()
        for name, shape in shapes.items()
    }


def prefill_plan(engine: Engine, tokens: int) -> StepPlan:
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, tokens).astype(np.int32)
    return StepPlan((Row("prefill", ids, 0, np.arange(engine.layout.num_pages(tokens), dtype=np.int32), GREEDY),))


def decode_plan(engine: Engine, batch: int, context: int) -> StepPlan:
    needed = engine.layout.num_pages(context + 1)
    pages = np.arange(batch * needed, dtype=np.int32).reshape(batch, needed)
    return StepPlan(tuple(Row(str(index), np.ones(1, np.int32), context, pages[index], GREEDY) for index in range(batch)))


def _repeat(plan: Plan, run: Callable[[], object]) -> list[float]:
    """Seconds of each repeat, after one run that is not counted."""
    run()
    return [min(_seconds(run) for _ in range(plan.tries)) for _ in range(plan.repeats)]


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description="MFU of prefill and MBU of decode against measured ceilings")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory instead of the random model")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
