"""Cutting a model for tensor parallel: the shares are the whole, and nothing more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import Shape

from pdcluster.core.errors import ConfigError
from pdcluster.engine.model.config import ModelConfig, read_config
from pdcluster.engine.model.shard import cut, share_of
from pdcluster.engine.model.weights import Weights, load_weights
from pdcluster.kv.layout import head_range

SHAPE = Shape(
    "llama",
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=97,
    intermediate_size=50,
    config={"attention_bias": True, "mlp_bias": True},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Weights]:
    directory = checkpoints.save(checkpoints.build_model(SHAPE, seed=4), tmp_path_factory.mktemp("model"))
    config = read_config(directory)
    return config, load_weights(Path(directory), config)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_products_of_the_shares_add_up_to_the_products_of_the_whole(
    model: tuple[ModelConfig, Weights], size: int
) -> None:
    config, weights = model
    shares = [cut(weights, config, share_of(config, rank, size)) for rank in range(size)]
    layer, parts = weights.layers[1], [share.layers[1] for share in shares]
    x = torch.randn(3, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
    for name in ("q", "gate", "up"):
        whole = x @ getattr(layer, name).T + getattr(layer, f"{name}_bias")
        found = torch.cat([x @ getattr(part, name).T + getattr(part, f"{name}_bias") for part in parts], dim=-1)
        torch.testing.assert_close(found, whole)
    inner = torch.randn(3, SHAPE.intermediate_size, generator=torch.Generator().manual_seed(2))
    pieces = inner.split([part.gate.shape[0] for part in parts], dim=-1)
    down = sum(
        piece @ part.down.T + (0 if part.down_bias is None else part.down_bias)
        for piece, part in zip(pieces, parts, strict=True)
    )
    torch.testing.assert_close(down, inner @ layer.down.T + layer.down_bias)
    attended = torch.randn(3, 8 * 16, generator=torch.Generator().manual_seed(3))
    output = sum(
        piece @ part.o.T + (0 if part.o_bias is None else part.o_bias)
        for piece, part in zip(attended.chunk(size, dim=-1), parts, strict=True)
    )
    torch.testing.assert_close(output, attended @ layer.o.T + layer.o_bias)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_kv_head_is_held_beside_the_query_heads_that_read_it(
    model: tuple[ModelConfig, Weights], size: int
) -> None:
    config, weights = model
    for rank in range(size):
        share = share_of(config, rank, size)
        group = config.num_heads // config.num_kv_heads
        read = {head // group for head in range(share.heads.start, share.heads.stop)}
        assert read == set(range(share.kv_heads.start, share.kv_heads.stop))
        own = cut(weights, config, share).layers[0]
        assert torch.equal(own.k, weights.layers[0].k[share.kv_heads.start * 16 : share.kv_heads.stop * 16])


@pytest.mark.parametrize("size", [2, 4])
def test_the_heads_rows_are_padded_to_equal_parts(model: tuple[ModelConfig, Weights], size: int) -> None:
    config, weights = model
    rows = [cut(weights, config, share_of(config, rank, size)).head for rank in range(size)]
    assert {part.shape for part in rows} == {(-(-97 // size), SHAPE.hidden_size)}
    assert torch.equal(torch.cat(rows)[:97], weights.head)


def test_row_slices_share_memory_with_the_file(model: tuple[ModelConfig, Weights]) -> None:
    config, weights = model
    own = cut(weights, config, share_of(config, 1, 2))
    storage = weights.layers[0].q.untyped_storage().data_ptr()
    assert own.layers[0].q.untyped_storage().data_ptr() == storage and own.embedding is weights.embedding


@pytest.mark.parametrize("size", [3, 5, 16])
def test_heads_that_cannot_be_dealt_out_are_refused_with_what_can(
    model: tuple[ModelConfig, Weights], size: int
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"over {size} ranks cannot deal out 8 attention heads and 2 kv heads evenly; use --tp 1 or 2 or 4 or 8",
    ):
        share_of(model[0], 0, size)


def test_kv_heads_that_do_not_go_with_the_ranks_are_refused(model: tuple[ModelConfig, Weights]) -> None:
    odd = replace(model[0], num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError, match="use --tp 1 or 2 or 3 or 6 or 12"):
        share_of(odd, 0, 4)


@pytest.mark.parametrize(("heads", "ranks"), [(1, 1), (1, 4), (2, 4), (8, 2), (8, 8), (4, 1)])
def test_head_ranges_cover_all_heads_equally_often(heads: int, ranks: int) -> None:
    held = [head for rank in range(ranks) for head in range(*head_range(heads, rank, ranks))]
    assert sorted(set(held)) == list(range(heads))
    assert {held.count(head) for head in held} == {max(1, ranks // heads)}
