"""What the weights of a model take in memory, known before they are loaded, and how they are stored meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from weft.abi.errors import ConfigError
from weft.gguf.types import TYPE_NAMES
from weft.kernels import dispatch
from weft.kernels.quantized_blocks import PLAIN
from weft.models.base import ModelSpec
from weft.models.checkpoint import Checkpoint
from weft.models.layers.weights import WeightTarget
from weft.models.registry import ModelFamily

GIB = 2**30


class WeightAllocation(NamedTuple):
    """A tensor that a layer has in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def allocations(target: WeightTarget, spec: ModelSpec) -> Iterator[WeightAllocation]:
    """The weight, and its scales if it is quantized."""
    if target.scales is None or spec.quantization is None:
        yield WeightAllocation(target.name, target.shape, spec.dtype)
    else:
        yield WeightAllocation(target.name, target.shape, torch.int8)
        yield WeightAllocation(target.scales, target.shape[:1], torch.float32)


def weight_targets(family: ModelFamily, spec: ModelSpec) -> list[list[WeightTarget]]:
    """The weights outside the layers, then those of each layer."""
    return [family.shared_weights(spec), *(family.layer_weights(spec, i) for i in range(spec.num_layers))]


def weight_bytes(family: ModelFamily, spec: ModelSpec) -> int:
    """Bytes of all weights."""
    targets = (target for group in weight_targets(family, spec) for target in group)
    return sum(math.prod(a.shape) * a.dtype.itemsize for target in targets for a in allocations(target, spec))


def storage_notice(checkpoint: Checkpoint, spec: ModelSpec, device: torch.device | str) -> str | None:
    """Which types of blocks are expanded when the checkpoint is loaded as `spec`; None: none."""
    tensors = checkpoint.tensors().values()
    blocks = {info.dtype for info in tensors if info.dtype in TYPE_NAMES and info.dtype not in PLAIN}
    expanded = blocks - dispatch.block_types(device, spec.dtype)
    if not expanded:
        return None
    stored = sum(info.num_bytes for info in tensors)
    return (
        f"{', '.join(sorted(expanded))} expanded to {_format(spec)}, as no kernel computes on such blocks: "
        f"{stored / GIB:.2f} GiB of weights on disk, {weight_bytes(checkpoint.family, spec) / GIB:.2f} GiB in memory"
    )


def require_memory(model: str, family: ModelFamily, spec: ModelSpec, free_bytes: int) -> None:
    """Raise `ConfigError`, with the format that would fit, if `free_bytes` do not hold the weights."""
    needed = weight_bytes(family, spec)
    if needed <= free_bytes:
        return
    others = [replace(spec, dtype=torch.bfloat16), replace(spec, quantization="int8")]
    others.append(replace(spec, dtype=torch.bfloat16, quantization="int8"))
    sizes = [(weight_bytes(family, other), other) for other in others]
    fitting = [(size, other) for size, other in sizes if size <= free_bytes]
    if fitting:
        size, other = fitting[0]
        remedy = f"as {_format(other)} they take {size / GIB:.2f} GiB: set {_settings(spec, other)}"
    else:
        size, other = min(sizes, key=lambda one: one[0])
        remedy = f"even as {_format(other)} they take {size / GIB:.2f} GiB: free memory, or choose a smaller model"
    raise ConfigError(
        f"the weights of {model} take {needed / GIB:.2f} GiB as {_format(spec)} and {free_bytes / GIB:.2f} GiB are "
        f"free; {remedy}"
    )


def _format(spec: ModelSpec) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    return dtype if spec.quantization is None else f"{spec.quantization} and {dtype}"


def _settings(spec: ModelSpec, other: ModelSpec) -> str:
    changes = [] if other.dtype == spec.dtype else [f"dtype to {str(other.dtype).removeprefix('torch.')}"]
    if other.quantization != spec.quantization:
        changes.append(f"quantization to {other.quantization}")
    return " and ".join(changes)
