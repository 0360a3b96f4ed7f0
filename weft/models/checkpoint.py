"""Interface of a checkpoint on disk: a directory with safetensors, or a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from weft.models.base import ModelSpec
    from weft.models.registry import ModelFamily


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint."""

    file: Path
    dtype: str
    """As safetensors or ggml writes it: F32, BF16, Q8_0, ..."""
    shape: tuple[int, ...]
    num_bytes: int
    offset: int
    """Of its first byte in the file."""


class Piece(NamedTuple):
    """Consecutive rows of a tensor, from `first` on."""

    name: str
    first: int
    values: Tensor
    """Floats, [rows, ...]; or quantized blocks as they are stored, uint8 [rows, bytes of a row]."""


class Checkpoint(Protocol):
    """What the loader needs of a checkpoint. Tensors have the names that the checkpoint gives them."""

    path: Path
    """The directory, or the first file."""
    family: ModelFamily
    spec: ModelSpec
    """In the dtype that the checkpoint states; of quantized blocks, the one that they are best expanded to."""
    stated_in: str
    """Where the spec comes from, for errors."""

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence. Raises `ModelLoadError` for ids beyond the vocabulary."""
        ...

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, their places checked against the files. Raises `ModelLoadError`."""
        ...

    def stored_name(self, source: str) -> str:
        """The checkpoint's name of the tensor that a `WeightSource` names."""
        ...

    def pieces(self, names: Collection[str], in_blocks: Collection[str] = ()) -> Iterator[Piece]:
        """The values of these tensors, as wholes or a few rows at a time, in the order in which they lie on disk.

        Those of `in_blocks` (matrices of quantized blocks) are not expanded. Raises `ModelLoadError` for scales that
        are not finite.
        """
        ...
