"""compressed-tensors: the layouts pack-quantized, int-quantized, float-quantized and naive-quantized, by groups of
modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from weft.abi.errors import ModelLoadError
from weft.models.checkpoint import TensorInfo
from weft.models.quantized.fp8 import ACTIVATION_SCALES, FP8
from weft.models.quantized.matrix import SCALE_DTYPES, ModuleTensors, QuantizedMatrix, StoredTensor, words
from weft.models.quantized.names import PATTERN, matches
from weft.models.quantized.settings import QuantizationSettings, refusal

PACKED = "pack-quantized"
EIGHT_BITS = ("tensor", "channel", "group", "block")
LAYOUTS: Mapping[str, Mapping[tuple[str, int], tuple[str, ...]]] = {
    PACKED: {("int", 4): ("group", "channel"), ("int", 8): ("group", "channel")},
    "int-quantized": {("int", 8): EIGHT_BITS},
    "float-quantized": {("float", 8): EIGHT_BITS},
    "naive-quantized": {("int", 8): EIGHT_BITS, ("float", 8): EIGHT_BITS},
}
"""By layout, type and bits: the sets of numbers that may share a scale."""
EMBEDDINGS = ("embed_tokens",)
"""Last components of the names of modules that are tables, and not linear."""


class QuantizationScheme(NamedTuple):
    """How the weights of the modules of a group are stored."""

    targets: tuple[str, ...]
    layout: str
    type: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]


class CompressedTensorsFormat:
    """Weights of 4 and 8 bits in I32 words, and of 8 bits as I8 or F8_E4M3."""

    parts = frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})
    unused = ACTIVATION_SCALES

    def __init__(self, settings: QuantizationSettings):
        sparsity = settings.inner("sparsity_config")
        if sparsity is not None and sparsity.text("format", default="dense") != "dense":
            raise refusal(f"compressed-tensors with the sparsity {sparsity.text('format')!r}")
        for key in ("transform_config", "moe_sparsity_config"):
            if settings.has(key):
                raise refusal(f"compressed-tensors with {key!r}")
        layout = settings.text("format", default="dense")
        groups = settings.inner("config_groups")
        named = [] if groups is None else [groups.inner(key) for key in groups.fields()]
        schemes = [scheme for scheme in named if scheme is not None]
        self._schemes = [_scheme(scheme, layout) for scheme in schemes if scheme.inner("weights") is not None]
        if not self._schemes:
            raise refusal(f"compressed-tensors in the layout {layout!r} without weights in 'config_groups'")
        rounded = {
            "activations": any(scheme.has(f"{what}_activations") for scheme in schemes for what in ("input", "output")),
            "KV": settings.has("kv_cache_scheme"),
        }
        self.unrounded = tuple(what for what, is_rounded in rounded.items() if is_rounded)
        self._left = settings.names("ignore")

    def is_left(self, module: str) -> bool:
        """Whether an entry of `ignore` names it."""
        return any(matches(module, entry) for entry in self._left)

    def matrix(self, module: str, tensors: Mapping[str, TensorInfo]) -> QuantizedMatrix:
        """By the settings whose targets name the module most exactly: by its name, by a pattern, by its class."""
        scheme = self._scheme_of(module)
        if scheme is None:
            file = next(iter(tensors.values())).file
            raise ModelLoadError(f"{file} has module {module} quantized, which no target in config.json names")
        kind = f"compressed-tensors {'fp' if scheme.type == 'float' else 'int'}{scheme.bits}"
        found = ModuleTensors(module, tensors, kind)
        if scheme.layout == PACKED:
            return _packed(found, scheme, kind)
        numbers = found.take("weight", (FP8 if scheme.type == "float" else "I8",), 2)
        shape = numbers.info.shape[0], numbers.info.shape[1]
        zeros = None if scheme.type == "float" and scheme.symmetric else _zeros(found, scheme, ("I8",))
        scales, block = _scales(found, scheme, shape)
        weight = QuantizedMatrix(
            name=f"{module}.weight",
            format=kind,
            shape=shape,
            bits=8,
            numbers=numbers,
            layout="plain",
            scales=scales,
            block=block,
            zeros=zeros,
        )
        if zeros is not None:
            zeros.require_shape(*_without_ones(weight.grid))
        return weight

    def _scheme_of(self, module: str) -> QuantizationScheme | None:
        kind = "Embedding" if module.endswith(EMBEDDINGS) else "Linear"
        for wanted in (
            lambda target: target == module,
            lambda target: target.startswith(PATTERN) and matches(module, target),
            lambda target: target == kind,
        ):
            for scheme in self._schemes:
                if any(map(wanted, scheme.targets)):
                    return scheme
        return None


def _scheme(settings: QuantizationSettings, layout: str) -> QuantizationScheme:
    """The settings of a group, with the refusal of those that are not implemented."""
    layout = settings.text("format", default=layout)
    weights = settings.inner("weights") or settings
    kind, bits = weights.text("type", default="int"), weights.integer("num_bits", default=8)
    size = weights.group_size("group_size", default=-1) or 0
    block = weights.block("block_structure")
    strategy = weights.text(
        "strategy", default="group" if size else "channel" if weights.has("group_size") else "tensor"
    )
    what = f"compressed-tensors in the layout {layout!r}"
    if layout not in LAYOUTS:
        raise refusal(what)
    if (kind, bits) not in LAYOUTS[layout]:
        raise refusal(f"{what} with {kind} weights of {bits} bits")
    if strategy not in LAYOUTS[layout][kind, bits]:
        raise refusal(f"{what} with the strategy {strategy!r}")
    if (strategy == "group" and not size) or (strategy == "block" and block is None):
        raise ModelLoadError(f"config.json: {weights.path} has the strategy {strategy!r} and no size of one")
    return QuantizationScheme(
        targets=settings.names("targets"),
        layout=layout,
        type=kind,
        bits=bits,
        symmetric=weights.flag("symmetric", default=True),
        strategy=strategy,
        group_size=size,
        block=block or (1, 1),
    )


def _packed(found: ModuleTensors, scheme: QuantizationScheme, kind: str) -> QuantizedMatrix:
    """Rows of words; their last word may be filled in part, which only `weight_shape` tells."""
    numbers = found.take("weight_packed", ("I32",), 2)
    shape = _shape(found.take("weight_shape", ("I64",), 1))
    numbers.require_shape((shape[0], words(shape[1], scheme.bits)))
    scales, block = _scales(found, scheme, shape)
    zeros = _zeros(found, scheme, ("I32",))
    groups = found.find("weight_g_idx", ("I32",), 1)
    if groups is not None:
        groups.require_shape((shape[1],))
    weight = QuantizedMatrix(
        name=f"{found.name}.weight",
        format=kind,
        shape=shape,
        bits=scheme.bits,
        numbers=numbers,
        layout="rows",
        scales=scales,
        block=block,
        zeros=zeros,
        zero_layout="rows",
        zero=0 if zeros is not None else 1 << scheme.bits - 1,
        groups=groups,
        any_order=True,
    )
    if zeros is not None:
        zeros.require_shape((words(shape[0], scheme.bits), weight.grid[1]))
    return weight


def _scales(
    found: ModuleTensors, scheme: QuantizationScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, tuple[int, int]]:
    """The scales, and the block that has one."""
    outputs, inputs = max(1, shape[0]), max(1, shape[1])
    blocks = {
        "tensor": (outputs, inputs),
        "channel": (1, inputs),
        "group": (1, scheme.group_size),
        "block": scheme.block,
    }
    block = blocks[scheme.strategy]
    scales = found.take("weight_scale", SCALE_DTYPES)
    scales.require_shape(*_without_ones((-(-shape[0] // block[0]), -(-shape[1] // block[1]))))
    return scales, block


def _zeros(found: ModuleTensors, scheme: QuantizationScheme, dtypes: tuple[str, ...]) -> StoredTensor | None:
    """Zero points. Symmetric weights may have them too, all of them 0."""
    name = "weight_zero_point"
    return found.find(name, dtypes) if scheme.symmetric else found.take(name, dtypes)


def _shape(part: StoredTensor) -> tuple[int, int]:
    part.require_shape((2,))
    shape = np.fromfile(part.info.file, "<i8", 2, offset=part.info.offset).tolist()
    if len(shape) != 2 or min(shape) < 0:
        raise part.error(f"must hold two sizes, has {shape}")
    return shape[0], shape[1]


def _without_ones(shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes that a table of this shape may be written with."""
    return [shape, *([shape[:1]] if shape[1] == 1 else []), *([()] if shape == (1, 1) else [])]
