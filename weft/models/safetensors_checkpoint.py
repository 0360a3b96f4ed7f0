"""A checkpoint in a directory: config.json, generation_config.json, and weights in safetensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from weft.abi.errors import ModelLoadError
from weft.models.checkpoint import Piece, TensorInfo
from weft.models.quantized.expand import expand
from weft.models.quantized.expand import in_blocks as matrix_in_blocks
from weft.models.quantized.formats import CheckpointTensors, checkpoint_tensors, quantized_format, without_zero_biases
from weft.models.quantized.matrix import StoredTensor
from weft.models.registry import family_of
from weft.models.safetensors_files import list_tensors, open_tensors, read_json

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SafetensorsCheckpoint:
    """The `Checkpoint` of a directory with config.json and safetensors files. Raises the errors of `load_model` for its
    config.json."""

    stated_in = "config.json"

    def __init__(self, directory: Path):
        self.path = directory
        self._raw = read_json(directory / "config.json")
        self.family = family_of(self._raw)
        self._format = quantized_format(self._raw)
        self.spec = self.family.spec(self._raw)
        self.unrounded = () if self._format is None else self._format.unrounded

    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens of generation_config.json, or else of config.json."""
        path = self.path / "generation_config.json"
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is None:
            value, path = self._raw.get("eos_token_id"), self.path / "config.json"
        ids = [] if value is None else value if isinstance(value, list) else [value]
        size = self.spec.vocab_size
        if not all(type(i) is int and 0 <= i < size for i in ids):
            raise ModelLoadError(f"{path}: eos_token_id must be token ids below {size}, got {value!r}")
        return tuple(dict.fromkeys(ids))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, read from the headers once. A quantized matrix has the name that it has in plain checkpoints."""
        return self._stored.infos

    @functools.cached_property
    def _stored(self) -> CheckpointTensors:
        tensors = list_tensors(self.path)
        layers = self.spec.num_layers
        if layers > len(tensors):
            raise ModelLoadError(
                f"{self.path / 'config.json'}: num_hidden_layers is {layers}, and there are {len(tensors)} tensors"
            )
        if self._format is None:
            return checkpoint_tensors(tensors, None)
        groups = [self.family.shared_weights(self.spec)]
        groups += [self.family.layer_weights(self.spec, index) for index in range(self.spec.num_layers)]
        needed = frozenset(source.name for group in groups for target in group for source in target.sources)
        return without_zero_biases(checkpoint_tensors(tensors, self._format), needed)

    def stored_name(self, source: str) -> str:
        """`source` but for a tied embedding that only has the head's name."""
        # Some exporters keep only the second of two tied names.
        tensors = self.tensors()
        only_head = self.spec.tie_embeddings and EMBEDDING not in tensors and HEAD in tensors
        return HEAD if only_head and source == EMBEDDING else source

    def pieces(self, names: Collection[str], in_blocks: Collection[str] = ()) -> Iterator[Piece]:
        """Whole tensors, as views of the memory-mapped files; quantized matrices some rows at a time."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._stored.infos[name].file].append(name)
        for file in sorted(by_file):
            with _OpenFiles() as opened:
                for name in by_file[file]:
                    matrix = self._stored.matrices.get(name)
                    if matrix is None:
                        yield Piece(name, 0, opened.read(StoredTensor(name, self._stored.infos[name])))
                    elif name in in_blocks and (kind := matrix.block_type) is not None:
                        yield from matrix_in_blocks(matrix, kind, opened.read)
                    else:
                        yield from expand(matrix, opened.read)


class _OpenFiles(ExitStack):
    """Files that are opened when a tensor is read, because the tensors of a quantized matrix may be in several."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Mapping[str, Tensor]] = {}

    def read(self, part: StoredTensor) -> Tensor:
        """A view of the tensor."""
        file = part.info.file
        if file not in self._opened:
            self._opened[file] = self.enter_context(open_tensors(file))
        return self._opened[file][part.name]
