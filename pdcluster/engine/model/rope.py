"""Rotary position embedding: which frequencies a model rotates with. Angles are computed per step, in float32.

Variants whose frequencies depend on the length of the sequence (`dynamic`, `longrope`) cannot be cached in pages. They
are refused where the config is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Fields beyond theta count only for the types that name them: factor (linear, llama3, yarn), low/high (llama3),
    the rest (yarn)."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class Rotation(Protocol):
    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [n, head_dim / 2] each."""


class Rope:
    """cos and sin of every position of a step, scaled by the variant's attention factor. Any thread may call it."""

    def __init__(self, config: RopeConfig, head_dim: int, device: str) -> None:
        self._inverse = inverse_frequencies(config, head_dim).to(device)
        self._scale = attention_scale(config)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n, head_dim / 2] each."""
        phase = positions.to(torch.float32)[:, None] * self._inverse
        cos, sin = phase.cos(), phase.sin()
        return (cos, sin) if self._scale == 1.0 else (cos.mul_(self._scale), sin.mul_(self._scale))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians per position of each pair of dimensions."""
    periods = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    base = 1.0 / periods
    match config.type:
        case "default":
            return base
        case "linear":
            return base / config.factor
        case "llama3":
            return _llama3(base, config)
        case "yarn":
            return _yarn(periods, config, head_dim)


def attention_scale(config: RopeConfig) -> float:
    """What yarn multiplies cos and sin by; 1 for the others."""
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _temperature(config.factor, config.mscale) / _temperature(config.factor, config.mscale_all_dim)
    return _temperature(config.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(base: Tensor, config: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    longest, shortest = (
        config.original_max_len / config.low_freq_factor,
        config.original_max_len / config.high_freq_factor,
    )
    blend = (config.original_max_len / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - blend) * base / config.factor + blend * base
    stretched = torch.where(wavelength > longest, base / config.factor, blended)
    return torch.where(wavelength < shortest, base, stretched)


def _yarn(periods: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are stretched, with a linear ramp
    between."""
    low = _dimension_of(config.beta_fast, config, head_dim)
    high = _dimension_of(config.beta_slow, config, head_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _dimension_of(turns: float, config: RopeConfig, head_dim: int) -> float:
    """The dimension that makes `turns` full turns over the original context."""
    return head_dim * math.log(config.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(config.theta))
