"""Random weights in quantized blocks, and every way of this machine to multiply with them."""

from __future__ import annotations

import numpy as np
import torch

from weft.gguf.types import BY_NAME, GROUPS
from weft.kernels.block_weights import BlockPart, BlockWeight
from weft.kernels.cpu import library, ops

SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 scales of a block are."""
TILE_ROWS = 24
"""`kTileRows` of the kernels: from so many rows on, tiles multiply bfloat16."""


def all_kernels() -> list[ops.CpuKernels]:
    """Every level, with and without dot products of bytes; empty: the library is not there."""
    try:
        loaded = library.load()
    except library.KernelsUnavailable:
        return []
    found = []
    for level in library.levels(loaded):
        found += [ops.CpuKernels(loaded, level, vnni=vnni) for vnni in {False, library.has_vnni(loaded, level)}]
    return found


def rounds_activations(kernels: ops.CpuKernels, rows: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a product of so many rows has activations in 8 bits. Tiles of bfloat16 multiply them as they are."""
    tiles = kernels.level == library.Level.AMX and kernels.vnni and dtype == torch.bfloat16
    return not tiles or rows < TILE_ROWS


def name_of(kernels: ops.CpuKernels) -> str:
    """As `WEFT_CPU_KERNELS` names it."""
    return kernels.level.name.lower() + (library.WITH_VNNI if kernels.vnni else "")


def random_bytes(kind: str, outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Blocks of random bytes with small scales of both signs, as one tensor."""
    generator = np.random.default_rng(seed)
    count = outputs * inputs // BY_NAME[kind].numbers
    blocks = generator.integers(0, 256, (count, BY_NAME[kind].num_bytes), dtype=np.uint8)
    if kind in GROUPS:
        blocks[:, :4] = (generator.normal(size=(count, 1)) * 0.01).astype(np.float32).view(np.uint8)
        blocks[:, 4] = generator.integers(0, 17, count)
    for first in SCALES.get(kind, ()):
        scales = (generator.normal(size=(count, 1)) * 0.01).astype(np.float16)
        blocks[:, first : first + 2] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(-1))


def random_block_weight(parts: list[tuple[str, int]], inputs: int, seed: int = 0) -> BlockWeight:
    """A weight that is not packed; parts are (type, outputs)."""
    data = torch.cat([random_bytes(kind, outputs, inputs, seed + i) for i, (kind, outputs) in enumerate(parts)])
    return BlockWeight.of(data, [BlockPart(*part) for part in parts], inputs)
