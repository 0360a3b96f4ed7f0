"""A quantized matrix, as the headers of its tensors and the settings of its format describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from weft.abi.errors import ModelLoadError
from weft.gguf.types import GROUPS
from weft.models.checkpoint import TensorInfo

SCALE_DTYPES = ("F32", "F16", "BF16")
GROUP_BITS = 4
"""Of the numbers of `GROUPS`."""
WORD = 32
"""Bits of the I32 words that numbers are packed in."""

NumberLayout = Literal["gptq", "awq", "rows", "plain"]
"""gptq: words [I * bits / 32, O] along inputs. awq: words [I, O / 8] along outputs, interleaved. rows: words
[O, I * bits / 32, rounded up]. plain: one I8 or F8_E4M3 for each number, [O, I]."""
ZeroLayout = Literal["gptq", "gptq_v1", "awq", "rows", "plain"]
"""gptq: words [groups, O * bits / 32]; of gptq_v1, less one each. awq: words [groups, O / 8], interleaved. rows: words
[O * bits / 32, groups]. plain: I8 [O, groups]."""


class StoredTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    info: TensorInfo

    def error(self, text: str) -> ModelLoadError:
        """The error that names the tensor and its place."""
        return ModelLoadError(f"{self.info.file}: tensor {self.name} at byte {self.info.offset} {text}")

    def require_shape(self, *shapes: tuple[int, ...]) -> None:
        """Raise `ModelLoadError` unless the tensor has one of these shapes."""
        if self.info.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(
                f"has shape {list(self.info.shape)}, beside the others of its module it must be {expected}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix [O, I] of small numbers: each less its zero point, times its scale."""

    name: str
    """As the architecture calls it."""
    format: str
    """For people, with the number of bits."""
    shape: tuple[int, int]
    bits: int
    numbers: StoredTensor
    layout: NumberLayout
    scales: StoredTensor
    """[rows of blocks, columns of blocks], or without dimensions of 1."""
    inputs_first: bool = False
    """Whether `scales` are the other way round."""
    block: tuple[int, int]
    """Outputs and inputs that share a scale; the last block of a row or column may have fewer."""
    zeros: StoredTensor | None = None
    """As they are packed; None: `zero` for all."""
    zero_layout: ZeroLayout = "plain"
    zero: int = 0
    groups: StoredTensor | None = None
    """For each input the column of its scale; None: they are in order."""
    any_order: bool = False
    """Whether `groups` may be in another order than that of the inputs."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def block_type(self) -> str | None:
        """The type of quantized blocks that the matrix becomes without loss; None: it has to be expanded."""
        rows, inputs = self.block
        is_ordered = self.groups is None or not self.any_order
        if self.bits != GROUP_BITS or rows != 1 or not is_ordered:
            return None
        fitting = [kind for kind in GROUPS.values() if not inputs % kind.numbers and not self.shape[1] % kind.numbers]
        return max(fitting, key=lambda kind: kind.numbers).name if fitting else None

    def parts(self) -> list[StoredTensor]:
        """All tensors that the values depend on."""
        return [part for part in (self.numbers, self.scales, self.zeros, self.groups) if part is not None]


class ModuleTensors:
    """The tensors of one module, by the last component of their names. Methods raise `ModelLoadError`."""

    def __init__(self, name: str, tensors: Mapping[str, TensorInfo], format_name: str):
        self.name = name
        self._tensors = tensors
        self._format = format_name

    def find(self, suffix: str, dtypes: tuple[str, ...], rank: int | None = None) -> StoredTensor | None:
        """The tensor, of one of these dtypes and of so many dimensions; None: the module has none."""
        info = self._tensors.get(suffix)
        if info is None:
            return None
        part = StoredTensor(f"{self.name}.{suffix}", info)
        if info.dtype not in dtypes:
            raise part.error(f"is {info.dtype}; {self._format} has {' or '.join(dtypes)} there")
        if rank is not None and len(info.shape) != rank:
            raise part.error(f"has shape {list(info.shape)}; {self._format} has {rank} dimensions there")
        return part

    def take(self, suffix: str, dtypes: tuple[str, ...], rank: int | None = None) -> StoredTensor:
        """As `find`, of a tensor that must be there."""
        part = self.find(suffix, dtypes, rank)
        if part is None:
            beside, info = next(iter(self._tensors.items()))
            raise ModelLoadError(
                f"{info.file} has tensor {self.name}.{beside}, and the checkpoint lacks tensor {self.name}.{suffix}, "
                f"which {self._format} needs"
            )
        return part


class QuantizedFormat(Protocol):
    """A format, with the settings of a checkpoint."""

    unrounded: tuple[str, ...]
    """What the checkpoint was made to round to fewer bits, and is computed in the model's dtype, for people."""
    parts: frozenset[str]
    """Last components of the names of tensors that make up a quantized matrix, `weight` excepted."""
    unused: frozenset[str]
    """Those of tensors that only rounding needs."""

    def is_left(self, module: str) -> bool:
        """Whether the settings say that the module is not quantized."""
        ...

    def matrix(self, module: str, tensors: Mapping[str, TensorInfo]) -> QuantizedMatrix:
        """The matrix of a module. Raises `ModelLoadError` for tensors that are missing or contradict each other."""
        ...


def words(count: int, bits: int) -> int:
    """Words that so many numbers take."""
    return -(-count * bits // WORD)
