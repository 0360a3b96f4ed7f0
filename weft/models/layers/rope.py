"""Rotary position embedding: frequencies of every supported scaling, and the rotation of a pass.

Frequencies and angles are float32 in every dtype of the model, as in training and in other implementations: more exact
angles would differ from theirs at long positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.kernels.batch import AttentionBatch
from weft.models.base import RopeSpec


class Rope:
    """The rotation of one model on one device."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device):
        self._inverse_frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._amplitude = spec.attention_factor

    def rotation(self, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the batch's positions, each [T, head_dim / 2] float32; made once per pass."""
        found: tuple[Tensor, Tensor] | None = batch.cache.get(self)
        if found is None:
            angles = batch.positions.to(torch.float32)[:, None] * self._inverse_frequencies
            found = (angles.cos() * self._amplitude, angles.sin() * self._amplitude)
            batch.cache[self] = found
        return found


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of components, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "factors":
        return frequencies / torch.tensor(spec.factors, dtype=torch.float32)
    if spec.kind == "llama3":
        return _llama3(frequencies, spec)
    if spec.kind == "yarn":
        return _yarn(spec, head_dim)
    return frequencies


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    context = spec.original_max_position
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - blend) * frequencies / spec.factor + blend * frequencies
    scaled = torch.where(wavelengths > context / spec.low_freq_factor, frequencies / spec.factor, between)
    return torch.where(wavelengths < context / spec.high_freq_factor, frequencies, scaled)


def _yarn(spec: RopeSpec, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023, section 3.2): high frequencies are kept, low ones divided by `factor`."""

    def dimension_of(rotations: float) -> float:
        waves = spec.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    # `1 - (1 - ramp)` and `ramp` differ in the last bit; the order of operations is the published code's.
    kept = 1 - ramp
    return (1.0 / (spec.factor * periods)) * (1 - kept) + (1.0 / periods) * kept
