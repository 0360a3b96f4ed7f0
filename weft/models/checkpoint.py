"""Interface of a checkpoint on disk: a directory with safetensors, or a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from weft.models.base import ModelSpec
    from weft.models.registry import ModelFamily


PIECE_NUMBERS = 1 << 20
"""Numbers that are expanded at a time: no tensor is complete in float32, and intermediate results stay in caches and in
memory that the allocator has already."""


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint."""

    file: Path
    dtype: str
    """As safetensors or ggml writes it: F32, BF16, Q8_0, ...; of a quantized matrix, its format."""
    shape: tuple[int, ...]
    num_bytes: int
    offset: int
    """Of its first byte in the file."""
    numbers_in: str | None = None
    """Of a quantized matrix, which is small numbers and their scales in several tensors of together `num_bytes`: the
    name in the file of the one with the numbers. None: it is one tensor."""
    blocks: str | None = None
    """The type (`weft.kernels.quantized_blocks`) of the blocks that its rows consist of, or become without loss."""


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
    unrounded: tuple[str, ...]
    """What the checkpoint was made to round to fewer bits and is computed in the model's dtype: activations, KV."""

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

        Those of `in_blocks` (matrices with a type of blocks) are not expanded. Raises `ModelLoadError` for scales that
        are not finite.
        """
        ...
