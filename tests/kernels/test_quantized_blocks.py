"""Quantized blocks of GGUF files, against the `gguf` package and against values by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from weft.gguf.types import TYPES, TensorType, block_type
from weft.kernels.quantized_blocks import BadScale, as_block_type, expand

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the float16 scales of a block are."""


def random_blocks(kind: TensorType, count: int = 40) -> np.ndarray:
    """Random bytes with finite scales."""
    generator = np.random.default_rng(NUMBERS[kind.name])
    blocks = generator.integers(0, 256, (count, kind.num_bytes), dtype=np.uint8)
    for first in SCALES.get(kind.name, ()):
        blocks[:, first : first + 2] = generator.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", TYPES.values(), ids=NUMBERS)
def test_every_type_expands_to_the_same_bits(kind: TensorType) -> None:
    blocks = random_blocks(kind)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(NUMBERS[kind.name])).reshape(len(blocks), -1)
    got = expand(kind.name, torch.from_numpy(blocks))
    assert got.shape == (len(blocks), kind.numbers)
    assert np.array_equal(got.float().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("kind", TYPES.values(), ids=NUMBERS)
def test_blocks_of_another_type_are_the_same_numbers(kind: TensorType) -> None:
    blocks, other = torch.from_numpy(random_blocks(kind)), block_type(kind.name)
    if other is None:
        assert kind.numbers == 1
    else:
        assert torch.equal(expand(other, as_block_type(kind.name, blocks)), expand(kind.name, blocks))
        assert (other == kind.name) == (kind.name != "Q5_0")


def test_values_by_hand() -> None:
    half = np.array([0.5], np.float16).tobytes()
    q8 = half + np.array([*range(-16, 16)], np.int8).tobytes()
    assert expand("Q8_0", one(q8)).tolist() == [[i / 2 for i in range(-16, 16)]]
    q4 = half + bytes([0x91] * 16)
    assert expand("Q4_0", one(q4)).tolist() == [[-3.5] * 16 + [0.5] * 16]
    # Group 5 of Q4_K: scale 0b100001 and minimum 0b010010, each in two parts; numbers are 7.
    scales = bytearray(12)
    scales[1], scales[5], scales[9] = 0b10 << 6, 0b01 << 6, 0b0010_0001
    quants = bytearray(128)
    quants[2 * 32 : 3 * 32] = [0x70] * 32
    got = expand("Q4_K", one(half + half + scales + quants))[0].view(8, 32)
    assert got[5].tolist() == [0.5 * 33 * 7 - 0.5 * 18] * 32
    assert not got[[0, 2, 3, 4, 6, 7]].any()
    # Of a group, the scale, a zero point of 3, and in every second 16 numbers of 15.
    group = np.array([0.25], np.float32).tobytes() + bytes([3, 0, 0, 0]) + bytes([0xF1] * 64)
    assert expand("INT4_G128", one(group)).tolist() == [([-0.5] * 16 + [3.0] * 16) * 4]
    assert expand("INT4_G32", one(group[:24])).tolist() == [[-0.5] * 16 + [3.0] * 16]


def one(block: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.uint8)[None]


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_named_by_its_block(name: str, value: float) -> None:
    for first in SCALES[name]:
        blocks = random_blocks(next(kind for kind in TYPES.values() if kind.name == name))
        blocks[7, first : first + 2] = np.array([value], np.float16).view(np.uint8)
        with pytest.raises(BadScale, match="block 7") as caught:
            expand(name, torch.from_numpy(blocks))
        assert caught.value.block == 7
