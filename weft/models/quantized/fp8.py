"""FP8 (`quant_method` fp8): F8_E4M3 matrices with a scale for each block, or one for all."""

from __future__ import annotations

from collections.abc import Mapping

from weft.models.checkpoint import TensorInfo
from weft.models.quantized.matrix import SCALE_DTYPES, ModuleTensors, QuantizedMatrix
from weft.models.quantized.names import is_part_of
from weft.models.quantized.settings import QuantizationSettings, refusal

FP8 = "F8_E4M3"
ACTIVATION_SCALES = frozenset(
    {
        *("input_scale", "output_scale", "activation_scale", "input_zero_point", "output_zero_point"),
        *("q_scale", "k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point"),
    }
)
"""Last components of the names of tensors for activations and KV that are rounded."""


class Fp8Format:
    """With `weight_block_size`, `weight_scale_inv` is the factor of each block; without, one `weight_scale` or
    `weight_scale_inv` that of the matrix."""

    unrounded: tuple[str, ...] = ("activations",)
    parts = frozenset({"weight_scale", "weight_scale_inv"})
    unused = ACTIVATION_SCALES

    def __init__(self, settings: QuantizationSettings):
        scheme = settings.text("activation_scheme", default="dynamic")
        if scheme not in ("dynamic", "static"):
            raise refusal(f"FP8 with the activation_scheme {scheme!r}")
        kind = settings.text("fmt", default="e4m3")
        if kind not in ("e4m3", "float8_e4m3fn"):
            raise refusal(f"FP8 of the kind {kind!r}")
        self._block = settings.block("weight_block_size")
        self._left = settings.names("modules_to_not_convert", "ignored_layers")

    def is_left(self, module: str) -> bool:
        """Whether `modules_to_not_convert` or `ignored_layers` has it."""
        return is_part_of(module, self._left)

    def matrix(self, module: str, tensors: Mapping[str, TensorInfo]) -> QuantizedMatrix:
        """The scale of a whole matrix may have one dimension or none."""
        found = ModuleTensors(module, tensors, "FP8")
        numbers = found.take("weight", (FP8,), 2)
        outputs, inputs = numbers.info.shape
        if self._block is not None:
            block = self._block
            scales = found.take("weight_scale_inv", SCALE_DTYPES, 2)
            scales.require_shape((-(-outputs // block[0]), -(-inputs // block[1])))
        else:
            block = (max(1, outputs), max(1, inputs))
            given = found.find("weight_scale_inv", SCALE_DTYPES)
            scales = found.take("weight_scale", SCALE_DTYPES) if given is None else given
            scales.require_shape((), (1,), (1, 1))
        return QuantizedMatrix(
            name=f"{module}.weight",
            format="FP8",
            shape=(outputs, inputs),
            bits=8,
            numbers=numbers,
            layout="plain",
            scales=scales,
            block=block,
        )
