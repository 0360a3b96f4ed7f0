"""AWQ, as AutoAWQ writes it for its kernel `gemm`: `qweight`, `qzeros` and `scales`."""

from __future__ import annotations

from collections.abc import Mapping

from weft.models.checkpoint import TensorInfo
from weft.models.quantized.matrix import SCALE_DTYPES, ModuleTensors, QuantizedMatrix
from weft.models.quantized.names import is_part_of
from weft.models.quantized.settings import QuantizationSettings, refusal

BITS, PER_WORD = 4, 8


class AwqFormat:
    """4 bits with zero points, in groups of consecutive inputs."""

    unrounded: tuple[str, ...] = ()
    parts = frozenset({"qweight", "qzeros", "scales"})
    unused: frozenset[str] = frozenset()

    def __init__(self, settings: QuantizationSettings):
        bits = settings.integer("bits", "w_bit", default=BITS)
        if bits != BITS:
            raise refusal(f"AWQ of {bits} bits")
        version = settings.text("version", "checkpoint_format", "format", default="gemm")
        if version != "gemm":
            raise refusal(f"AWQ in the layout {version!r}")
        if not settings.flag("zero_point", default=True):
            raise refusal("AWQ without zero points")
        self._group_size = settings.group_size("group_size", "q_group_size", default=128)
        self._left = settings.names("modules_to_not_convert")

    def is_left(self, module: str) -> bool:
        """Whether `modules_to_not_convert` has it."""
        return is_part_of(module, self._left)

    def matrix(self, module: str, tensors: Mapping[str, TensorInfo]) -> QuantizedMatrix:
        """Eight outputs are in a word."""
        found = ModuleTensors(module, tensors, "AWQ")
        numbers = found.take("qweight", ("I32",), 2)
        inputs, outputs = numbers.info.shape[0], numbers.info.shape[1] * PER_WORD
        size = self._group_size or max(1, inputs)
        if inputs % size:
            raise numbers.error(f"has {inputs} inputs, which are no whole groups of {size}")
        scales = found.take("scales", SCALE_DTYPES, 2)
        scales.require_shape((inputs // size, outputs))
        zeros = found.take("qzeros", ("I32",), 2)
        zeros.require_shape((inputs // size, outputs // PER_WORD))
        return QuantizedMatrix(
            name=f"{module}.weight",
            format=f"AWQ int{BITS}",
            shape=(outputs, inputs),
            bits=BITS,
            numbers=numbers,
            layout="awq",
            scales=scales,
            inputs_first=True,
            block=(1, size),
            zeros=zeros,
            zero_layout="awq",
        )
