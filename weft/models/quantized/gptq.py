"""GPTQ, as AutoGPTQ and GPTQModel write it: `qweight`, `qzeros`, `scales` and `g_idx`."""

from __future__ import annotations

from collections.abc import Mapping

from weft.models.checkpoint import TensorInfo
from weft.models.quantized.matrix import SCALE_DTYPES, WORD, ModuleTensors, QuantizedMatrix, words
from weft.models.quantized.names import is_part_of
from weft.models.quantized.settings import QuantizationSettings, refusal

BITS = (4, 8)
OTHER_PRODUCTS = ("rotation", "adapter", "is_marlin_format")
"""Settings under which a product is not that with the expanded weight, or the layout another one."""


class GptqFormat:
    """4 or 8 bits, zero points as stored (`sym` does not matter), in groups of inputs in any order (`desc_act`).

    Which modules are quantized, also by exceptions in `dynamic`, the tensors say.
    """

    unrounded: tuple[str, ...] = ()
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    unused: frozenset[str] = frozenset()

    def __init__(self, settings: QuantizationSettings):
        self._bits = settings.integer("bits")
        if self._bits not in BITS:
            raise refusal(f"GPTQ of {self._bits} bits")
        self._group_size = settings.group_size("group_size", default=128)
        self._any_order = settings.flag("desc_act", default=False)
        settings.flag("sym", default=True)
        version = settings.text("checkpoint_format", "format", default="gptq")
        if version not in ("gptq", "gptq_v2"):
            raise refusal(f"GPTQ in the layout {version!r}")
        self._first_version = version == "gptq"
        if settings.text("pack_dtype", default="int32") != "int32":
            raise refusal("GPTQ in words other than int32")
        for key in OTHER_PRODUCTS:
            if settings.has(key):
                raise refusal(f"GPTQ with {key!r}")
        dynamic = settings.inner("dynamic")
        if dynamic is not None and not all(key.startswith("-:") for key in dynamic.fields()):
            raise refusal("GPTQ with settings by module ('dynamic')")
        self._left = settings.names("modules_to_not_convert")

    def is_left(self, module: str) -> bool:
        """Whether `modules_to_not_convert` has it."""
        return is_part_of(module, self._left)

    def matrix(self, module: str, tensors: Mapping[str, TensorInfo]) -> QuantizedMatrix:
        """The inputs follow from the words of `qweight`, which are whole."""
        name = f"GPTQ int{self._bits}"
        found = ModuleTensors(module, tensors, name)
        numbers = found.take("qweight", ("I32",), 2)
        inputs, outputs = numbers.info.shape[0] * WORD // self._bits, numbers.info.shape[1]
        size = self._group_size or max(1, inputs)
        count = -(-inputs // size)
        scales = found.take("scales", SCALE_DTYPES, 2)
        scales.require_shape((count, outputs))
        zeros = found.take("qzeros", ("I32",), 2)
        zeros.require_shape((count, words(outputs, self._bits)))
        groups = found.take("g_idx", ("I32",), 1) if self._any_order else found.find("g_idx", ("I32",), 1)
        if groups is not None:
            groups.require_shape((inputs,))
        return QuantizedMatrix(
            name=f"{module}.weight",
            format=name,
            shape=(outputs, inputs),
            bits=self._bits,
            numbers=numbers,
            layout="gptq",
            scales=scales,
            inputs_first=True,
            block=(1, size),
            zeros=zeros,
            zero_layout="gptq_v1" if self._first_version else "gptq",
            groups=groups,
            any_order=self._any_order,
        )
