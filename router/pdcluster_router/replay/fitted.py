"""Costs of a real node for the replay, read from Admin's DescribeNode as JSON, and nodes like it.

The file holds the fields of messages.CostReport, alone or under "cost", in either JSON spelling of protobuf
(prefill_fixed_s or prefillFixedS).
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import msgspec

from pdcluster.core.bounds import UINT63, BigCount, Seconds
from pdcluster.core.errors import ConfigError, ProtocolError
from pdcluster.core.reported import CostReport, Root
from pdcluster.cost.cost import CostError, NodeCost

MAX_FILE_BYTES = 1 << 20
# Of a normal distribution, within which 9 of 10 lie.
SIGMAS = 1.645
# Sampled values stay within this factor of the original.
TWICE = 2.0


def read_cost(path: Path) -> NodeCost:
    """Raises ConfigError for anything that is no fitted cost."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the cost of a node from {path}: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} has more than {MAX_FILE_BYTES} bytes, a node's cost has some hundreds; give what DescribeNode "
            "says of one node"
        )
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
        fields = found.get("cost", found)
        report = msgspec.convert(_snake_case(fields), _AsFile)
        cost = NodeCost.of(report.report())
    except (msgspec.DecodeError, ProtocolError) as error:
        raise ConfigError(
            f"{path} holds no cost of a node: {error}; give the JSON of DescribeNode, or its cost"
        ) from error
    if not (cost.prefill.seconds(1) > 0 and cost.decode.seconds(1, 1) > 0):
        raise ConfigError(f"by {path} a step takes no time at all; let the node compute prompts and decode first")
    return cost


def drawn(cost: NodeCost, chance: random.Random) -> NodeCost:
    """A node like this one: its coefficients sampled within their error bars."""
    prefill, decode = cost.prefill, cost.decode
    fixed_s, token_s, pair_s = _shifted((prefill.fixed_s, prefill.token_s, prefill.pair_s), prefill.error, chance)
    decode_fixed_s, row_s, context_s = _shifted((decode.fixed_s, decode.row_s, decode.context_s), decode.error, chance)
    return NodeCost(
        replace(prefill, fixed_s=fixed_s, token_s=token_s, pair_s=pair_s),
        replace(decode, fixed_s=decode_fixed_s, row_s=row_s, context_s=context_s),
    )


def _shifted(values: tuple[float, float, float], error: CostError, chance: random.Random) -> tuple[float, ...]:
    """Values plus the root's transpose times independent normal numbers, which have the root's covariance."""
    a, b, c, d, e, f = error.root
    x, y, z = (chance.gauss(0.0, 1.0 / SIGMAS) for _ in range(3))
    shifts = (a * x, b * x + c * y, d * x + e * y + f * z)
    return tuple(
        min(max(value + shift, value / TWICE), value * TWICE) for value, shift in zip(values, shifts, strict=True)
    )


class _AsFile(msgspec.Struct, forbid_unknown_fields=True):
    """CostReport by names. JSON of protobuf leaves out zeros and writes 64-bit integers as strings."""

    prefill_fixed_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    prefill_pair_s: Seconds = 0.0
    decode_fixed_s: Seconds = 0.0
    decode_row_s: Seconds = 0.0
    decode_context_s: Seconds = 0.0
    chunk_tokens: BigCount | str = 0
    prefill_samples: BigCount | str = 0
    decode_samples: BigCount | str = 0
    prefill_spread: Seconds = 0.0
    prefill_doubt: Seconds = 0.0
    prefill_root: Root = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    decode_spread: Seconds = 0.0
    decode_doubt: Seconds = 0.0
    decode_root: Root = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def report(self) -> CostReport:
        values = msgspec.structs.asdict(self)
        for name in ("chunk_tokens", "prefill_samples", "decode_samples"):
            values[name] = _integer(name, values[name])
        return CostReport(**values)


def _integer(name: str, value: int | str) -> int:
    if isinstance(value, str) and not (
        value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= UINT63
    ):
        raise ProtocolError(f"{name} is {value[:40]!r}, which is no number")
    return int(value)


def _snake_case(fields: object) -> object:
    if not isinstance(fields, dict):
        return fields
    return {
        re.sub(r"(?<=[a-z])([A-Z])", lambda found: f"_{found[1].lower()}", str(name)): value
        for name, value in fields.items()
    }
