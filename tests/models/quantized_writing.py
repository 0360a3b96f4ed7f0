"""Packers of quantized weights, written from the definitions of the formats and apart from the code that reads them.

Each takes a matrix [O, I] and gives the tensors that stand for it, by the last component of their names, and what they
stand for, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from weft.models.random_checkpoints import write_tiny

Array = np.ndarray[Any, Any]
Packed = tuple[dict[str, torch.Tensor], Array]
Packer = Callable[[Array, np.random.Generator], Packed]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
"""Rows of whole groups of 128."""


def words(numbers: Array, bits: int) -> Array:
    """numbers [n, k], unsigned, from the lowest bits of an int32 up -> [n, k * bits / 32, rounded up]."""
    per_word = 32 // bits
    out = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), np.uint32)
    for column in range(numbers.shape[1]):
        out[:, column // per_word] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * (column % per_word))
    return out.view(np.int32)


def integers(
    weight: Array, groups: Array, largest: int, rng: np.random.Generator, *, symmetric: bool, scale: str = "float16"
) -> tuple[Array, Array, Array, Array]:
    """Quantize to 0 .. `largest`, input i with the scale of group groups[i].

    -> numbers [O, I], zero points [O, groups], scales [O, groups] float32 that `scale` holds exactly, and what the
    numbers stand for [O, I].
    """
    count = int(groups.max()) + 1
    numbers, values = np.zeros(weight.shape, np.int64), np.zeros(weight.shape, np.float32)
    zeros, scales = np.zeros((len(weight), count), np.int64), np.zeros((len(weight), count), np.float32)
    for group in range(count):
        columns = np.flatnonzero(groups == group)
        zero = np.full(len(weight), (largest + 1) // 2)
        if not symmetric:
            zero = rng.integers(1, largest + 1, len(weight))
        room = np.where(symmetric, largest // 2, np.maximum(zero, largest - zero))
        steps = rounded(np.abs(weight[:, columns]).max(1) / room, scale)
        fields = np.clip(np.rint(weight[:, columns] / steps[:, None]) + zero[:, None], 0, largest).astype(np.int64)
        numbers[:, columns], zeros[:, group], scales[:, group] = fields, zero, steps
        values[:, columns] = (fields - zero[:, None]).astype(np.float32) * steps[:, None]
    return numbers, zeros, scales, values


def rounded(values: Array, dtype: str) -> Array:
    return as_tensor(values, dtype).to(torch.float32).numpy()


def as_tensor(values: Array, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))


def in_order(inputs: int, size: int) -> Array:
    return np.arange(inputs) // (inputs if size == -1 else size)


def gptq(bits: int, size: int, *, sym: bool, desc_act: bool = False, version: int = 1, index: bool = True) -> Packer:
    def pack(weight: Array, rng: np.random.Generator) -> Packed:
        groups = in_order(weight.shape[1], size)
        if desc_act:
            rng.shuffle(groups)
        numbers, zeros, scales, values = integers(weight, groups, (1 << bits) - 1, rng, symmetric=sym)
        tensors = {
            "qweight": torch.from_numpy(words(numbers, bits).T.copy()),
            "qzeros": torch.from_numpy(words(zeros.T - (version == 1), bits)),
            "scales": as_tensor(scales.T, "float16"),
        }
        if index:
            tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, values

    return pack


def awq(size: int) -> Packer:
    def interleaved(numbers: Array) -> Array:
        """Of eight neighbours the even ones come first: 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits up."""
        eights = numbers.reshape(len(numbers), -1, 8)
        return words(np.concatenate([eights[..., 0::2], eights[..., 1::2]], -1).reshape(len(numbers), -1), 4)

    def pack(weight: Array, rng: np.random.Generator) -> Packed:
        groups = in_order(weight.shape[1], size)
        numbers, zeros, scales, values = integers(weight, groups, 15, rng, symmetric=False)
        tensors = {
            "qweight": torch.from_numpy(interleaved(numbers.T)),
            "qzeros": torch.from_numpy(interleaved(zeros.T)),
            "scales": as_tensor(scales.T, "float16"),
        }
        return tensors, values

    return pack


def pack_quantized(bits: int, size: int, *, symmetric: bool, ordered: bool = True, filled: bool = True) -> Packer:
    """compressed-tensors in words; `filled` false: g_idx is there and holds -1."""

    def pack(weight: Array, rng: np.random.Generator) -> Packed:
        groups = in_order(weight.shape[1], size)
        if not ordered:
            rng.shuffle(groups)
        numbers, zeros, scales, values = integers(
            weight, groups, (1 << bits) - 1, rng, symmetric=symmetric, scale="bfloat16"
        )
        tensors = {
            "weight_packed": torch.from_numpy(words(numbers, bits)),
            "weight_scale": as_tensor(scales, "bfloat16"),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(words(zeros.T, bits).T.copy())
        if not ordered or not filled:
            tensors["weight_g_idx"] = torch.from_numpy((groups if filled else groups * 0 - 1).astype(np.int32))
        return tensors, values

    return pack


def int_quantized(*, symmetric: bool) -> Packer:
    def pack(weight: Array, rng: np.random.Generator) -> Packed:
        groups = in_order(weight.shape[1], -1)
        numbers, zeros, scales, values = integers(weight, groups, 255, rng, symmetric=symmetric, scale="bfloat16")
        tensors = {"weight": as_tensor(numbers - 128, "int8"), "weight_scale": as_tensor(scales, "bfloat16")}
        if not symmetric:
            tensors["weight_zero_point"] = as_tensor(zeros - 128, "int8")
        return tensors, values

    return pack


def e4m3(octets: Array) -> Array:
    """What bytes of float8 E4M3 stand for: a sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign = np.where(octets & 128, -1.0, 1.0)
    exponent, mantissa = (octets >> 3 & 15).astype(np.int64), octets & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return (sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)).astype(np.float32)


def float8(block: tuple[int, int] | None, name: str, dtype: str = "float32", shape: str = "grid") -> Packer:
    """`block` None: one scale for the matrix; of `shape` "scalar" without dimensions, of "flat" with one."""

    def pack(weight: Array, rng: np.random.Generator) -> Packed:
        rows, columns = weight.shape if block is None else (block[0] or 1, block[1] or weight.shape[1])
        grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales, stored, values = np.zeros(grid, np.float32), np.zeros(weight.shape, np.uint8), np.zeros_like(weight)
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = rounded(np.abs(weight[part]).max() / 448, dtype).item()
                stored[part] = as_tensor(weight[part] / scales[i, j], "float8_e4m3fn").view(torch.uint8).numpy()
                values[part] = e4m3(stored[part]) * scales[i, j]
        flat = {"grid": grid, "flat": (grid[0] * grid[1],), "scalar": ()}[shape]
        return {
            "weight": torch.from_numpy(stored).view(torch.float8_e4m3fn),
            name: as_tensor(scales.reshape(flat), dtype),
        }, values.astype(np.float32)

    return pack


def write_quantized(
    folder: Path,
    packer: Packer,
    settings: Mapping[str, Any],
    family: str = "llama",
    *,
    left: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    extra: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> tuple[Path, Path]:
    """A checkpoint whose projections are packed, but for modules whose names have a component of `left`, and with those
    of `also`; and one with plain weights that these stand for."""
    plain = write_tiny(folder / "plain", family, seed=4, **{**SHAPE, **options})
    packed = folder / "packed"
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": dict(settings)}))
    rng = np.random.default_rng(11)
    stored, meant = {}, load_file(plain / "model.safetensors")
    for name, tensor in list(meant.items()):
        module, _, last = name.rpartition(".")
        parts = module.split(".")
        if last == "weight" and (parts[-1] in PROJECTIONS or module in also) and not set(left) & {*parts, module}:
            tensors, values = packer(tensor.numpy(), rng)
            stored.update({f"{module}.{suffix}": part.contiguous() for suffix, part in tensors.items()})
            meant[name] = torch.from_numpy(values)
        else:
            stored[name] = tensor
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    save_file({**stored, **(extra or {})}, packed / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def compressed_tensors(layout: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors with one group, of all linear modules."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    own = {key: more.pop(key) for key in ("input_activations", "targets") if key in more}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {**group, **own}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


def _pack(bits: int, size: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    return compressed_tensors("pack-quantized", weights, **more)


TOKENS_IN_8_BITS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CHANNELS = {"num_bits": 8, "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 64]}

CASES: Mapping[str, tuple[Packer, Mapping[str, Any], str]] = {
    "gptq": (gptq(4, 128, sym=True), GPTQ, "GPTQ int4"),
    "gptq-32-asymmetric": (gptq(4, 32, sym=False), {**GPTQ, "group_size": 32, "sym": False}, "GPTQ int4"),
    "gptq-64-act-order": (
        gptq(4, 64, sym=False, desc_act=True),
        {**GPTQ, "group_size": 64, "sym": False, "desc_act": True},
        "GPTQ int4",
    ),
    "gptq-row-act-order": (
        gptq(4, -1, sym=True, desc_act=True),
        {**GPTQ, "group_size": -1, "desc_act": True},
        "GPTQ int4",
    ),
    "gptq-v2": (
        gptq(4, 64, sym=False, version=2),
        {**GPTQ, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        "GPTQ int4",
    ),
    "gptq-8-bits": (gptq(8, 32, sym=False), {**GPTQ, "bits": 8, "group_size": 32, "sym": False}, "GPTQ int8"),
    "gptq-8-bits-row": (gptq(8, -1, sym=True, index=False), {**GPTQ, "bits": 8, "group_size": -1}, "GPTQ int8"),
    "awq": (awq(128), AWQ, "AWQ int4"),
    "awq-32": (awq(32), {**AWQ, "group_size": 32, "version": "GEMM"}, "AWQ int4"),
    "awq-row": (awq(-1), {**AWQ, "group_size": -1}, "AWQ int4"),
    "pack-4-bits": (pack_quantized(4, 64, symmetric=True), _pack(4, 64, True), "compressed-tensors int4"),
    "pack-4-bits-asymmetric": (pack_quantized(4, 32, symmetric=False), _pack(4, 32, False), "compressed-tensors int4"),
    "pack-4-bits-act-order": (
        pack_quantized(4, 32, symmetric=False, ordered=False),
        _pack(4, 32, False),
        "compressed-tensors int4",
    ),
    "pack-4-bits-no-order": (
        pack_quantized(4, 32, symmetric=True, filled=False),
        _pack(4, 32, True),
        "compressed-tensors int4",
    ),
    "pack-8-bits-channel": (pack_quantized(8, -1, symmetric=True), _pack(8, -1, True), "compressed-tensors int8"),
    "pack-8-bits-asymmetric": (
        pack_quantized(8, -1, symmetric=False),
        _pack(8, -1, False),
        "compressed-tensors int8",
    ),
    "int8": (
        int_quantized(symmetric=True),
        compressed_tensors("int-quantized", CHANNELS, input_activations=TOKENS_IN_8_BITS),
        "compressed-tensors int8",
    ),
    "int8-asymmetric": (
        int_quantized(symmetric=False),
        compressed_tensors("int-quantized", {**CHANNELS, "symmetric": False}, input_activations=TOKENS_IN_8_BITS),
        "compressed-tensors int8",
    ),
    "float8-tensor": (
        float8(None, "weight_scale", "bfloat16", "flat"),
        compressed_tensors("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        "compressed-tensors fp8",
    ),
    "float8-channel": (
        float8((1, 0), "weight_scale", "bfloat16"),
        compressed_tensors("float-quantized", {**CHANNELS, "type": "float"}),
        "compressed-tensors fp8",
    ),
    "float8-block": (
        float8((48, 80), "weight_scale"),
        compressed_tensors(
            "naive-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 80]}
        ),
        "compressed-tensors fp8",
    ),
    "fp8-blocks": (float8((32, 64), "weight_scale_inv", "bfloat16"), FP8, "FP8"),
    "fp8-cut-blocks": (float8((48, 80), "weight_scale_inv"), {**FP8, "weight_block_size": [48, 80]}, "FP8"),
    "fp8-tensor": (
        float8(None, "weight_scale", shape="scalar"),
        {"quant_method": "fp8", "activation_scheme": "static"},
        "FP8",
    ),
}
"""Packer, `quantization_config`, and how the format is called."""
