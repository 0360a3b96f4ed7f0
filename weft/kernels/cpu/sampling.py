"""Tokens from logits on the C++ library: edits and draws of a step in one call."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SAMPLER = np.dtype(
    [
        ("logits", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        *((name, np.float64) for name in ("top_p", "min_p", "uniform")),
        *((name, np.int64) for name in ("bias_ids", "bias", "num_bias", "counts")),
        *((name, np.float64) for name in ("repetition", "frequency", "presence")),
        *((name, np.int64) for name in ("bans", "num_bans", "allowed", "late", "token")),
    ]
)
"""The C++ struct `weft::Sampler`, field by field; pointers are addresses, 0 for null."""


class CpuSampling:
    """Sampling at one level of the library."""

    def __init__(self, loaded: ctypes.CDLL, level: int):
        self._level = level
        self._sample = loaded.weft_sample

    @staticmethod
    def fits(logits: Tensor) -> bool:
        """Whether the library reads these logits."""
        return logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()

    def sample(
        self, samplers: npt.NDArray[Any], vocab_size: int, levels: npt.NDArray[np.float32], threads: int
    ) -> None:
        """Set the field `token` of samplers [n] of `SAMPLER`. `levels` has the fields of `weft::SamplingLevels`. The
        caller keeps what the addresses point to."""
        self._sample(self._level, samplers.ctypes.data, len(samplers), vocab_size, levels.ctypes.data, threads)
