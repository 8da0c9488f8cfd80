"""Pieces of the batch-invariant mode: what each computes, that it does not look at what is beside it, and what is
refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import KERNEL_CACHE

from pdcluster.core.errors import ConfigError
from pdcluster.engine.model.collective import InOrder
from pdcluster.engine.model.rope import Rope, RopeConfig
from pdcluster.engine.ops.attention import AttentionShape
from pdcluster.engine.ops.batch_invariant import InvariantOps, invariant_arithmetic, invariant_ops
from pdcluster.node.native.process import arithmetic_of, check
from pdcluster.settings.config import NodeConfig


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def ops(request: pytest.FixtureRequest) -> Iterator[InvariantOps]:
    made = invariant_ops("cpu", "bfloat16", request.param, KERNEL_CACHE)
    yield made
    made.close()


def noise(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


@pytest.mark.parametrize("inputs", [32, 96, 608])
@pytest.mark.parametrize("sizes", [(4,), (7, 33), (1003,)])
def test_a_product_is_right_and_each_row_the_same_bits_among_any_others(
    ops: InvariantOps, inputs: int, sizes: tuple[int, ...]
) -> None:
    weights, x = [noise(size, inputs) for size in sizes], noise(200, inputs)
    biases = [noise(sizes[0]), *[None] * (len(sizes) - 1)]
    product = ops.linear(weights, biases)
    whole = product(x)
    expected = torch.cat([x.double() @ weight.double().T for weight in weights], dim=-1)
    expected[:, : sizes[0]] += biases[0].double()
    torch.testing.assert_close(whole.double(), expected, rtol=2e-2, atol=0.2)
    for begin, end in ((0, 1), (199, 200), (5, 7), (11, 14), (50, 54), (51, 56), (90, 101), (3, 103)):
        assert torch.equal(product(x[begin:end].clone()), whole[begin:end])


def test_norm_and_activation_of_a_row_are_the_same_bits_among_any_others(ops: InvariantOps) -> None:
    for width in (32, 72, 384, 896):
        x, weight = noise(100, 2 * width).float(), noise(2 * width)
        normed, active = ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x, torch.bfloat16)
        for begin, end in ((0, 1), (99, 100), (1, 3), (7, 40)):
            part = x[begin:end].clone()
            assert torch.equal(ops.rms_norm(part, weight, 1e-6), normed[begin:end]) and torch.equal(
                ops.silu_mul(part, torch.bfloat16), active[begin:end]
            )


BITS_OF_NORM_AND_ACTIVATION = """
import hashlib, numpy as np
from pdcluster.engine.kernels.batch_invariant import rms_norm, silu_mul
noise = np.random.default_rng(3).normal(0, 4, (500, 1930)).astype(np.float32)
weight = (noise[0].view(np.uint32) >> 16).astype(np.uint16)
normed, active = np.zeros((500, 1930), np.uint16), np.zeros((500, 965), np.uint16)
rms_norm(noise, weight, np.float32(1e-6), normed, 0, 500)
silu_mul(noise, active, 0, 500)
print(hashlib.sha256(normed.tobytes()).hexdigest(), hashlib.sha256(active.tobytes()).hexdigest(), len(set(normed[0])), len(set(active[0])))
"""


def test_norm_and_activation_are_the_same_bits_whatever_a_compiler_knows_of_the_cpu(tmp_path: Path) -> None:
    """Nodes of CPUs with vectors of another width may join: `invariant_arithmetic` does not tell them apart."""
    bits = [
        subprocess.run(
            ["env", *setting, f"NUMBA_CACHE_DIR={tmp_path}", sys.executable, "-c", BITS_OF_NORM_AND_ACTIVATION],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout
        for setting in ([], ["NUMBA_CPU_NAME=generic"])
    ]
    assert bits[0] == bits[1]
    assert min(map(int, bits[0].split()[2:])) > 100


def test_angles_are_those_of_rope_and_depend_on_their_position_alone(ops: InvariantOps) -> None:
    config, positions = RopeConfig(theta=10000.0, type="linear", factor=2.0), torch.arange(1000)
    whole = ops.rope(config, 96).angles(positions)
    for found, expected in zip(whole, Rope(config, 96, "cpu").angles(positions), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    for position in (0, 1, 17, 999):
        alone = ops.rope(config, 96).angles(torch.tensor([position]))
        assert all(torch.equal(one[0], many[position]) for one, many in zip(alone, whole, strict=True))


class FourRanks:
    """What the others of four ranks hold is known beforehand."""

    rank, size = 0, 4

    def __init__(self, others: list[torch.Tensor]) -> None:
        self._others = others

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a ring's order is not fixed")

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, *(other[: len(x)] for other in self._others)], dim=-1)

    def close(self) -> None:
        """Nothing is open."""


def test_ranks_are_summed_in_their_order_and_rounded_once() -> None:
    parts = [torch.tensor([[value]]).bfloat16().repeat(5, 3) for value in (1.0, 2.0**-9, 2.0**-9, -1.0)]
    assert torch.equal(InOrder(FourRanks(parts[1:])).sum(parts[0].clone()), torch.full((5, 3), 2.0**-8).bfloat16())


def test_other_types_and_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not supported in float32.*--dtype bfloat16"):
        invariant_ops("cpu", "float32", 1, tmp_path)
    with pytest.raises(ConfigError, match="not supported on cuda"):
        invariant_ops("cuda", "bfloat16", 1, tmp_path)
    with pytest.raises(ConfigError, match=r"node\.device is cuda"):
        check(NodeConfig(deterministic=True, device="cuda"))


def test_without_numba_the_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match="deterministic needs numba"):
        invariant_ops("cpu", "bfloat16", 1, tmp_path)


def test_shapes_that_are_no_whole_vectors_are_refused_by_their_numbers(ops: InvariantOps) -> None:
    with pytest.raises(ConfigError, match=r"weights of shape \(8, 304\)"):
        ops.linear([noise(8, 304)], [None])
    for head_dim, page_tokens in ((48, 32), (64, 12)):
        with pytest.raises(ConfigError, match=f"heads of {head_dim} dimensions and pages of {page_tokens} tokens"):
            ops.attention(
                AttentionShape(2, 2, head_dim, 1e-6), torch.zeros(1, 1, 2, 2, page_tokens, head_dim).bfloat16()
            )


def test_a_node_says_whether_and_how_its_bits_are_equal() -> None:
    assert arithmetic_of(NodeConfig()) == "default"
    assert arithmetic_of(NodeConfig(deterministic=True, tp=2)) == invariant_arithmetic(2) != invariant_arithmetic(1)
    assert invariant_arithmetic(1).startswith("invariant, ")
