"""A checkpoint in a GGUF file: what its header says of the model, and its tensors, expanded a few rows at a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.abi.errors import ModelLoadError, Unsupported
from weft.gguf.file import GgufTensor, read_gguf
from weft.gguf.tokens import TOKENS, end_ids, read_tokens
from weft.gguf.types import block_type
from weft.kernels.quantized_blocks import PLAIN, BadScale, as_block_type, check_scales, expand
from weft.models import gguf_config
from weft.models.base import ModelSpec, RopeSpec
from weft.models.checkpoint import PIECE_NUMBERS, Piece, TensorInfo
from weft.models.registry import family_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rows = np.ndarray[Any, np.dtype[np.int64]]
_ROTATED = re.compile(r"blk\.[0-9]+\.attn_([qk])\.(?:weight|bias)")


class GgufCheckpoint:
    """The `Checkpoint` of a GGUF file, or of the files of a split model. Raises `ModelLoadError` or `Unsupported` for
    what the header says."""

    stated_in = "the metadata"
    unrounded: tuple[str, ...] = ()

    def __init__(self, path: Path):
        self._file = read_gguf(path)
        self.path = self._file.path
        if TOKENS in self._file.metadata:
            read_tokens(self._file)
        raw = gguf_config.config_of(self._file)
        self.family = family_of(raw)
        try:
            spec = self.family.spec(raw)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.path}, its metadata read as config.json: {error}") from error
        self.spec = self._completed(spec)

    def _completed(self, spec: ModelSpec) -> ModelSpec:
        """The spec, with what a GGUF file says by the presence of a tensor."""
        tensors = self._file.tensors
        return replace(
            spec,
            rope=self._rope(spec),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
        )

    def _rope(self, spec: ModelSpec) -> RopeSpec:
        tensor = self._file.tensors.get(gguf_config.ROPE_FACTORS)
        if tensor is None:
            return spec.rope
        where = f"{tensor.file}: tensor {tensor.name!r} at byte {tensor.offset}"
        if spec.rope.kind != "default":
            raise Unsupported(f"{where} and rope scaling {spec.rope.kind!r} together are not supported")
        if tensor.type.name != "F32" or tensor.shape != (spec.head_dim // 2,):
            raise ModelLoadError(f"{where} must be F32 of {spec.head_dim // 2} numbers")
        factors = np.fromfile(tensor.file, "<f4", spec.head_dim // 2, offset=tensor.offset)
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ModelLoadError(f"{where} has factors that are not positive numbers")
        return spec.rope._replace(kind="factors", factors=tuple(factors.tolist()))

    def eos_ids(self) -> tuple[int, ...]:
        """The ids that the metadata name."""
        return end_ids(self._file, self.spec.vocab_size)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors but the rotary factors, which are part of the spec."""
        return self._infos

    @functools.cached_property
    def _infos(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(
                *(tensor.file, tensor.type.name, tensor.shape, tensor.num_bytes, tensor.offset),
                blocks=block_type(tensor.type.name),
            )
            for name, tensor in self._file.tensors.items()
            if name != gguf_config.ROPE_FACTORS
        }

    def stored_name(self, source: str) -> str:
        """llama.cpp's name of a tensor, such as `blk.0.attn_q.weight`."""
        return gguf_config.stored_name(source)

    def pieces(self, names: Collection[str], in_blocks: Collection[str] = ()) -> Iterator[Piece]:
        """At most about `PIECE_NUMBERS` numbers at a time."""
        maps: dict[Path, Bytes] = {}
        tensors = [self._file.tensors[name] for name in names]
        for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
            if tensor.file not in maps:
                maps[tensor.file] = np.memmap(tensor.file, np.uint8, "c")  # torch wants memory that may be written
            yield from self._parts(tensor, maps[tensor.file], tensor.name in in_blocks)

    def _parts(self, tensor: GgufTensor, data: Bytes, in_blocks: bool) -> Iterator[Piece]:
        """A matrix in pieces of rows; a vector as a whole."""
        columns = tensor.shape[1] if len(tensor.shape) > 1 else 1
        count = tensor.shape[0]
        order = self._order(tensor)
        if len(tensor.shape) == 1:
            whole = expand(tensor.type.name, self._blocks(tensor, data, slice(1), tensor.num_bytes)).flatten()
            yield Piece(tensor.name, 0, whole if order is None else whole[torch.from_numpy(order)])
            return
        step = max(1, PIECE_NUMBERS // columns)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            blocks = self._blocks(tensor, data, rows if order is None else order[rows], tensor.num_bytes // count)
            values = (as_block_type if in_blocks else expand)(tensor.type.name, blocks)
            yield Piece(tensor.name, first, values.view(rows.stop - first, -1))

    def _blocks(self, tensor: GgufTensor, data: Bytes, rows: Rows | slice, row_bytes: int) -> torch.Tensor:
        """Rows of a tensor, in this order, as [blocks, bytes of a block], with scales that are finite. A slice of them
        is not copied."""
        stored = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, row_bytes)
        blocks = torch.from_numpy(stored[rows].reshape(-1, tensor.type.num_bytes))
        try:
            if tensor.type.name not in PLAIN:
                check_scales(tensor.type.name, blocks)
        except BadScale as error:
            row, block = divmod(error.block, row_bytes // tensor.type.num_bytes)
            number = int(np.arange(len(stored))[rows][row])
            at = tensor.offset + number * row_bytes + block * tensor.type.num_bytes
            raise ModelLoadError(
                f"{tensor.file}: tensor {tensor.name!r} at byte {tensor.offset}: its block at byte {at} has a scale "
                "that is NaN or infinite; the file is damaged"
            ) from error
        return blocks

    def _order(self, tensor: GgufTensor) -> Rows | None:
        """For each row as the families take it, the number of the row in the file. None: they take them as they are.

        The `llama` architecture rotates neighbouring components of a head, where the families rotate the first half
        with the second; its rows of queries and keys are stored so that both give the same.
        """
        found = _ROTATED.fullmatch(tensor.name)
        if found is None or self._file.metadata["general.architecture"] != "llama":
            return None
        heads = self.spec.num_heads if found[1] == "q" else self.spec.num_kv_heads
        return np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
