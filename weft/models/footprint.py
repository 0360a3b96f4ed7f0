"""What the weights of a model take in memory, known before they are loaded, and how they are stored meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch

from weft.abi.errors import ConfigError, Unsupported
from weft.config import Quantization, QuantizedBlocks
from weft.kernels import dispatch
from weft.kernels.block_weights import BlockPart, can_pack, merged, packed_size
from weft.kernels.quantize import KINDS, block_kind
from weft.models.base import ModelSpec
from weft.models.checkpoint import Checkpoint
from weft.models.layers.weights import WeightTarget

GIB = 2**30


class WeightAllocation(NamedTuple):
    """How a weight lies in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def allocation(target: WeightTarget, spec: ModelSpec) -> WeightAllocation:
    """The weight. Of one in blocks, the bytes that it takes when it is packed."""
    if target.blocks:
        size = sum(packed_size(part, target.shape[1]) for part in merged(target.blocks))
        return WeightAllocation((size,), torch.uint8)
    return WeightAllocation(target.shape, spec.dtype)


def weight_targets(checkpoint: Checkpoint, spec: ModelSpec) -> list[list[WeightTarget]]:
    """The weights outside the layers, then those of each layer, with the names that the checkpoint has for their
    sources, and with the types of blocks that `spec` keeps."""
    family = checkpoint.family
    groups = [family.shared_weights(spec), *(family.layer_weights(spec, i) for i in range(spec.num_layers))]
    return [[_as_stored(target, checkpoint, spec) for target in group] for group in groups]


def weight_bytes(checkpoint: Checkpoint, spec: ModelSpec) -> int:
    """Bytes that the weights take in memory in the dtype and quantization of `spec`, scales included."""
    made = [allocation(target, spec) for group in weight_targets(checkpoint, spec) for target in group]
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in made)


def with_settings(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: Quantization | None = None,
    quantized_blocks: QuantizedBlocks = "auto",
) -> ModelSpec:
    """The spec of the checkpoint when it is loaded so. Blocks stay as they are if kernels multiply with them, unless
    weights are to be quantized otherwise. Raises `Unsupported` for a quantization that no kernels compute."""
    kept: set[str] = set()
    if quantization is not None and not supports(quantization, device, dtype):
        raise Unsupported(
            f"quantization {quantization} needs the kernels in C++ on a CPU, with dtype float32 or bfloat16, or those "
            f"in Triton; the device is {torch.device(device).type}, the dtype {str(dtype).removeprefix('torch.')}"
        )
    if quantization is None and quantized_blocks == "auto":
        stored = {info.blocks for info in checkpoint.tensors().values() if info.blocks is not None}
        kept = stored & dispatch.block_types(device, dtype)
    return replace(checkpoint.spec, dtype=dtype, quantization=quantization, block_types=tuple(sorted(kept)))


def supports(quantization: Quantization, device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether kernels multiply with weights that are quantized so."""
    return KINDS[quantization] <= dispatch.block_types(device, dtype)


def storage_notice(checkpoint: Checkpoint, spec: ModelSpec, device: torch.device | str) -> str | None:
    """Which types of blocks weights stay in, and which are expanded, when the checkpoint is loaded as `spec`; None: all
    its weights are plain."""
    tensors = checkpoint.tensors()
    kept: set[str] = set()
    expanded: set[tuple[str, str]] = set()
    quantized: set[str] = set()
    for target in (target for group in weight_targets(checkpoint, spec) for target in group):
        for info in [tensors[source.name] for source in target.sources if source.name in tensors]:
            if info.blocks is not None:
                if target.blocks and spec.quantization is None:
                    kept.add(info.dtype if info.blocks in (info.dtype, None) else f"{info.dtype} (as {info.blocks})")
                else:
                    expanded.add((info.dtype, info.blocks))
            elif info.numbers_in is not None:
                quantized.add(info.dtype)
    if not kept and not expanded and not quantized:
        return None
    said = []
    to = _format(replace(spec, block_types=()))
    if quantized:
        said.append(f"{', '.join(sorted(quantized))} expanded to {to}, as no kernel computes on such matrices")
    # What blocks meet is rounded.
    unrounded = [what for what in checkpoint.unrounded if what != "activations" or quantized or expanded]
    if unrounded:
        dtype = str(spec.dtype).removeprefix("torch.")
        said.append(f"{' and '.join(unrounded)} in {dtype}, where the checkpoint was made for fewer bits")
    if kept:
        how = "which activations meet in 8 bits" if dispatch.rounds_activations(device) else "read as they are"
        said.append(f"{', '.join(sorted(kept))} stay in blocks, {how}")
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, blocks in sorted(expanded):
        reasons[_why_expanded(blocks, spec, device)].append(name)
    said += [f"{', '.join(names)} expanded to {to}, {why}" for why, names in reasons.items()]
    stored_bytes = sum(info.num_bytes for info in tensors.values())
    return (
        f"{'; '.join(said)}: {stored_bytes / GIB:.2f} GiB of weights on disk, "
        f"{weight_bytes(checkpoint, spec) / GIB:.2f} GiB in memory"
    )


def _why_expanded(blocks: str, spec: ModelSpec, device: torch.device | str) -> str:
    if blocks in spec.block_types:
        return "where shapes or mixtures do not fit the kernels"
    if spec.quantization is not None or blocks in dispatch.block_types(device, spec.dtype):
        return "as the settings ask for"
    return "as no kernel computes on such blocks"


def _as_stored(target: WeightTarget, checkpoint: Checkpoint, spec: ModelSpec) -> WeightTarget:
    sources = tuple(source._replace(name=checkpoint.stored_name(source.name)) for source in target.sources)
    target = target._replace(sources=sources)
    if spec.quantization is not None and target.quantized:
        return target._replace(blocks=(_quantized_part(target, spec.quantization),), packed=True)
    if not spec.block_types or len(target.shape) != 2:
        return target
    tensors = checkpoint.tensors()
    types = [tensors[source.name].blocks or "" if source.name in tensors else "" for source in sources]
    parts = tuple(BlockPart(kind, source.rows) for kind, source in zip(types, sources, strict=True))
    fit = set(types) <= set(spec.block_types) and all(can_pack(part, target.shape[1]) for part in merged(parts))
    return target._replace(blocks=parts, packed=True) if fit else target


def _quantized_part(target: WeightTarget, quantization: Quantization) -> BlockPart:
    rows, inputs = target.shape
    part = BlockPart(block_kind(quantization, inputs), rows)
    if not can_pack(part, inputs):
        names = ", ".join(source.name for source in target.sources)
        raise Unsupported(
            f"quantization {quantization} takes matrices whose outputs and inputs are multiples of 32; {names} "
            f"are {rows} outputs of {inputs} inputs together"
        )
    return part


def require_memory(
    model: str, checkpoint: Checkpoint, spec: ModelSpec, device: torch.device | str, free_bytes: int
) -> None:
    """Raise `ConfigError`, with the format that would fit, if `free_bytes` do not hold the weights."""
    needed = weight_bytes(checkpoint, spec)
    if needed <= free_bytes:
        return
    dtypes = (spec.dtype, torch.bfloat16)
    others = [with_settings(checkpoint, dtype, device) for dtype in dtypes]
    quantizations: tuple[Quantization, ...] = ("int8", "int4")
    for quantization in quantizations if _can_quantize(checkpoint, spec) else ():
        fit = [dtype for dtype in dtypes if supports(quantization, device, dtype)]
        others += [with_settings(checkpoint, dtype, device, quantization) for dtype in fit]
    sizes = [(weight_bytes(checkpoint, other), other) for other in others]
    fitting = [(size, other) for size, other in sizes if size <= free_bytes]
    if fitting:
        size, other = fitting[0]
        remedy = f"as {_format(other)} they take {size / GIB:.2f} GiB: {_settings(spec, other)}"
    else:
        size, other = min(sizes, key=lambda one: one[0])
        remedy = f"even as {_format(other)} they take {size / GIB:.2f} GiB: free memory, or choose a smaller model"
    raise ConfigError(
        f"the weights of {model} take {needed / GIB:.2f} GiB as {_format(spec)} and {free_bytes / GIB:.2f} GiB are "
        f"free; {remedy}"
    )


def _can_quantize(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Whether its matrices have the shapes that quantizations take, which are the same for all."""
    try:
        weight_targets(checkpoint, replace(spec, quantization="int4", block_types=()))
    except Unsupported:
        return False
    return True


def _format(spec: ModelSpec) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    if spec.block_types:
        return f"{', '.join(spec.block_types)} and {dtype}"
    return dtype if spec.quantization is None else f"{spec.quantization} and {dtype}"


def _settings(spec: ModelSpec, other: ModelSpec) -> str:
    changes = [] if other.dtype == spec.dtype else [f"dtype to {str(other.dtype).removeprefix('torch.')}"]
    if other.quantization is not None and other.quantization != spec.quantization:
        changes.append(f"quantization to {other.quantization}")
    if other.block_types and not spec.block_types and spec.quantization is None:
        changes.append("quantized_blocks to auto")
    wanted = ["set " + " and ".join(changes)] if changes else []
    if other.quantization is None and spec.quantization is not None:
        wanted.insert(0, "leave out quantization")
    return " and ".join(wanted)
