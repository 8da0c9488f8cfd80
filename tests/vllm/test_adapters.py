"""LoRA adapters through router, prefill and decode node: the tokens of merged weights, no mixed caches, pdctl.

The adapters are random, written by hand. A token is right when its logit is within 1e-3 of the best one that
transformers computes in float32 with the adapter merged into the weights.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_cluster import ROOT, VllmCluster, free_port, running_cluster

from pdcluster.checkpoint.bundled import path as bundled_model

NEAR = 1e-3
RANK, ALPHA = 4, 16
MODULES = ("q_proj", "v_proj", "o_proj")
SCALE = 0.3
PDCTL_S = 200.0


@dataclass
class AdapterWorld:
    cluster: VllmCluster
    folder: Path
    admin: str

    def pdctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'router'}"}
        return subprocess.run(
            [sys.executable, "-m", "pdcluster_router.pdctl", *arguments, "--admin", self.admin],
            env=environment, capture_output=True, text=True, timeout=PDCTL_S, check=False,
        )  # fmt: skip

    def names(self) -> dict[str, str | None]:
        found = self.cluster.client.get("/v1/models").json()["data"]
        return {model["id"]: model.get("parent") for model in found}

    def tokens(self, model: str, prompt: list[int], count: int = 16) -> tuple[list[int], dict[str, Any]]:
        answer = self.cluster.complete(prompt, model=model, max_tokens=count, temperature=0, ignore_eos=True)
        return answer["choices"][0]["token_ids"], answer["usage"]


def base_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)


def projections(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in model.named_modules() if name.rsplit(".", 1)[-1] in MODULES)


def write_adapter(folder: Path, seed: int, rank: int = RANK) -> Path:
    """A random adapter as peft writes it."""
    import torch
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, part in projections(base_model()):
        out, width = part.weight.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * SCALE
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * SCALE
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA, "lora_dropout": 0.0,
        "bias": "none", "target_modules": list(MODULES), "base_model_name_or_path": "base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path) -> Any:
    from safetensors.torch import load_file

    model, tensors = base_model(), load_file(folder / "adapter_model.safetensors")
    for name, part in projections(model):
        low, high = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        part.weight.data += ALPHA / RANK * high @ low
    return model


def wrong_tokens(oracle: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    import torch

    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return [place for place, gap in enumerate((logits.max(dim=1).values - chosen).tolist()) if gap > NEAR]


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(5, 500) for _ in range(length)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterWorld]:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "first", 1)
    write_adapter(folder / "second", 2)
    write_adapter(folder / "wide", 3, rank=64)
    admin = f"127.0.0.1:{free_port()}"
    settings = ("--set", "router.mode=remote", "--admin", admin)
    given = ("--vllm-adapters", f"first={folder / 'first'}")
    with running_cluster(folder, bundled_model(), ("prefill", "decode"), *settings, node_settings=given) as found:
        yield AdapterWorld(found, folder, admin)


@pytest.fixture(scope="module")
def base() -> Any:
    return base_model()


def test_adapters_of_the_start_answer_through_both_nodes_and_mix_with_nothing(world: AdapterWorld, base: Any) -> None:
    model = world.cluster.name
    assert world.names() == {model: None, "first": model}
    oracle = merged(world.folder / "first")
    for length in (5, 100, 257):
        prompt = prompt_of(length, length)
        tokens, usage = world.tokens("first", prompt)
        assert not wrong_tokens(oracle, prompt, tokens) and wrong_tokens(base, prompt, tokens)
        assert usage["pdcluster"]["mode"] == "remote"
        plain, _ = world.tokens(model, prompt)
        assert not wrong_tokens(base, prompt, plain), "right behind the adapter, whose KV is cached"
        again, _ = world.tokens("first", prompt)
        assert not wrong_tokens(oracle, prompt, again), "and the other way round"


def test_pdctl_loads_and_unloads_an_adapter_while_nodes_serve(world: AdapterWorld, base: Any) -> None:
    model, prompt = world.cluster.name, prompt_of(150, 7)
    for _ in range(2):  # idempotent
        done = world.pdctl("adapter", "load", "second", str(world.folder / "second"))
        assert done.returncode == 0, done.stderr
    assert world.names() == {model: None, "first": model, "second": model}
    oracle = merged(world.folder / "second")
    tokens, _ = world.tokens("second", prompt)
    assert not wrong_tokens(oracle, prompt, tokens) and wrong_tokens(base, prompt, tokens)
    listed = world.pdctl("adapter", "list", "-o", "json")
    assert {(row["name"], row["node"]) for row in json.loads(listed.stdout)} == {
        (name, node) for name in ("first", "second") for node in ("prefill-0", "decode-1")
    }
    refused = world.pdctl("adapter", "load", "second", str(world.folder / "first"))
    assert refused.returncode != 0 and "unload it first" in refused.stderr
    assert world.pdctl("adapter", "unload", "second").returncode == 0
    answer = world.cluster.client.post("/v1/completions", json={"model": "second", "prompt": prompt})
    assert answer.status_code == 404
    # Other files under the same name: their own tokens, no KV of the adapter before.
    assert world.pdctl("adapter", "load", "second", str(world.folder / "first")).returncode == 0
    tokens, _ = world.tokens("second", prompt)
    assert not wrong_tokens(merged(world.folder / "first"), prompt, tokens)
    assert world.pdctl("adapter", "unload", "second").returncode == 0


@pytest.mark.parametrize(
    "path, why", [("wide", "rank"), ("nowhere", "no absolute path"), (".", "adapter_config.json")], ids=str
)
def test_bad_adapters_are_refused_by_name_and_leave_the_nodes_well(world: AdapterWorld, path: str, why: str) -> None:
    refused = world.pdctl("adapter", "load", "bad", str(world.folder / path))
    assert refused.returncode != 0 and why in refused.stderr
    assert "bad" not in world.names()
    assert len(world.tokens("first", prompt_of(20, 1))[0]) == 16


def test_an_adapter_on_one_node_alone_is_loaded_there(world: AdapterWorld) -> None:
    done = world.pdctl("adapter", "load", "half", str(world.folder / "second"), "--node", "decode-1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(world.pdctl("adapter", "list", "-o", "json").stdout)
    assert [row["node"] for row in rows if row["name"] == "half"] == ["decode-1"]
    assert world.pdctl("adapter", "unload", "half").returncode == 0
