"""The table of formats, and which tensors of a checkpoint are those of a quantized matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from weft.models.checkpoint import TensorInfo
from weft.models.quantized.awq import AwqFormat
from weft.models.quantized.compressed_tensors import CompressedTensorsFormat
from weft.models.quantized.fp8 import FP8, Fp8Format
from weft.models.quantized.gptq import GptqFormat
from weft.models.quantized.matrix import QuantizedFormat, QuantizedMatrix, StoredTensor
from weft.models.quantized.settings import QuantizationSettings, refusal

FORMATS: Mapping[str, Callable[[QuantizationSettings], QuantizedFormat]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fp8": Fp8Format,
}
"""`quant_method` of config.json -> format."""
SCALED_DTYPES = ("I8", FP8)
"""Of tensors `weight` that need scales."""
PARTS = {"qweight": "GPTQ or AWQ", "weight_packed": "compressed-tensors", "weight_scale_inv": "FP8"}
"""Last component of a name that only quantized matrices have -> format."""


class CheckpointTensors(NamedTuple):
    """The tensors of a checkpoint, as the architecture names them."""

    infos: Mapping[str, TensorInfo]
    matrices: Mapping[str, QuantizedMatrix]
    """Those of `infos` that are quantized matrices."""


def quantized_format(raw: Mapping[str, Any]) -> QuantizedFormat | None:
    """The format that a config.json states; None: weights are not quantized.

    Raises `Unsupported` for formats and variants that are not implemented, `ModelLoadError` for impossible settings.
    """
    stated = raw.get("quantization_config")
    if not stated:
        if raw.get("compression_config"):
            raise refusal("compression_config in config.json, the old form of compressed-tensors,")
        if raw.get("quantization"):
            raise refusal("quantization in config.json, of the library MLX,")
        return None
    settings = QuantizationSettings(stated)
    method = settings.text("quant_method", default=_unnamed_method(raw, settings))
    if method not in FORMATS:
        raise refusal(f"quant_method {method!r} (there are {', '.join(FORMATS)})")
    return FORMATS[method](settings)


def _unnamed_method(raw: Mapping[str, Any], settings: QuantizationSettings) -> str:
    """The method of settings without `quant_method`, by what only one library writes."""
    if raw.get("quantization"):
        return "mlx"
    return "bitsandbytes" if settings.has("load_in_4bit") or settings.has("load_in_8bit") else "unknown"


def checkpoint_tensors(tensors: Mapping[str, TensorInfo], form: QuantizedFormat | None) -> CheckpointTensors:
    """Put a quantized matrix in the place of its tensors, and drop those that only rounded activations need.

    Raises `ModelLoadError` for tensors that are missing or contradict each other or config.json, `Unsupported` for
    quantized ones without a format.
    """
    if form is None:
        for name in tensors:
            if (made := PARTS.get(name.rpartition(".")[2])) is not None:
                raise refusal(f"tensor {name} ({made}) without quantization_config in config.json")
        return CheckpointTensors(tensors, {})
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        modules[module][last] = info
    infos: dict[str, TensorInfo] = {}
    matrices: dict[str, QuantizedMatrix] = {}
    for module, own in modules.items():
        is_quantized = not form.parts.isdisjoint(own) or ("weight" in own and own["weight"].dtype in SCALED_DTYPES)
        if is_quantized:
            weight = form.matrix(module, own)
            _check_module(module, weight, own, form)
            matrices[weight.name] = weight
            infos[weight.name] = _info(weight)
        for last, info in own.items():
            if last not in form.unused and not (is_quantized and (last in form.parts or last == "weight")):
                infos[f"{module}.{last}" if module else last] = info
    return CheckpointTensors(infos, matrices)


def without_zero_biases(stored: CheckpointTensors, needed: frozenset[str]) -> CheckpointTensors:
    """Drop biases of quantized matrices that the architecture does not have and that are 0, as writers of GPTQ leave
    them."""
    dropped = set()
    for name, weight in stored.matrices.items():
        bias = name.removesuffix("weight") + "bias"
        info = stored.infos.get(bias)
        if info is not None and bias not in needed and info.shape == weight.shape[:1]:
            values = np.fromfile(info.file, np.uint8, info.num_bytes, offset=info.offset)
            if not values.any():
                dropped.add(bias)
    return stored._replace(infos={name: info for name, info in stored.infos.items() if name not in dropped})


def _check_module(module: str, weight: QuantizedMatrix, own: Mapping[str, TensorInfo], form: QuantizedFormat) -> None:
    if form.is_left(module):
        raise weight.numbers.error(
            f"is {weight.format}, and quantization_config in config.json says that {module} is not quantized"
        )
    if "weight" in own and weight.numbers.name != weight.name:
        raise StoredTensor(weight.name, own["weight"]).error(
            f"stands beside {weight.numbers.name}, which is the same matrix"
        )


def _info(weight: QuantizedMatrix) -> TensorInfo:
    numbers = weight.numbers
    num_bytes = sum(part.info.num_bytes for part in weight.parts())
    return TensorInfo(
        *(numbers.info.file, weight.format, weight.shape, num_bytes, numbers.info.offset),
        numbers_in=numbers.name,
        blocks=weight.block_type,
    )
