"""A checkpoint in a directory: config.json, generation_config.json, and weights in safetensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from weft.abi.errors import ModelLoadError
from weft.models.checkpoint import Piece, TensorInfo
from weft.models.registry import family_of
from weft.models.safetensors_files import list_tensors, open_tensors, read_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SafetensorsCheckpoint:
    """The `Checkpoint` of a directory with config.json and safetensors files. Raises the errors of `load_model` for its
    config.json."""

    stated_in = "config.json"

    def __init__(self, directory: Path):
        self.path = directory
        self._raw = read_json(directory / "config.json")
        self.family = family_of(self._raw)
        self.spec = self.family.spec(self._raw)

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
        """All tensors, read from the headers once."""
        return self._tensors

    @functools.cached_property
    def _tensors(self) -> Mapping[str, TensorInfo]:
        return list_tensors(self.path)

    def stored_name(self, source: str) -> str:
        """`source` but for a tied embedding that only has the head's name."""
        # Some exporters keep only the second of two tied names.
        only_head = self.spec.tie_embeddings and EMBEDDING not in self._tensors and HEAD in self._tensors
        return HEAD if only_head and source == EMBEDDING else source

    def pieces(self, names: Collection[str], in_blocks: Collection[str] = ()) -> Iterator[Piece]:
        """Whole tensors, as views of the memory-mapped files."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._tensors[name].file].append(name)
        for file in sorted(by_file):
            with open_tensors(file) as opened:
                for name in by_file[file]:
                    yield Piece(name, 0, opened[name])
