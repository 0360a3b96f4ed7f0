"""Loads a model from a checkpoint, tensor by tensor.

Owns the order of loading and the check of the checkpoint's tensors against the architecture. Families are the matter of
`registry.py`, formats of files that of the implementations of `checkpoint.Checkpoint`; progress goes to a callback.
Weights are allocated, copied (and converted) from the memory map and packed one after the other, in the order of the
files, so anonymous memory peaks at one copy of the model plus one weight. Quantization, and the expansion of blocks,
take a few rows at a time, without a complete copy in float32.

Tensors that the architecture does not use are refused, because a model without them computes other results. `HARMLESS`
lists exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from weft.abi.errors import ConfigError, ModelLoadError
from weft.config import DType, Quantization, QuantizedBlocks
from weft.gguf.types import TYPE_NAMES
from weft.hub import find_model
from weft.kernels import dispatch
from weft.kernels.base import Kernels
from weft.kernels.block_weights import BlockPart, BlockWeight, merged, stored_size
from weft.kernels.quantize import quantize
from weft.models.base import LanguageModel, ModelSpec, ResidentWeights
from weft.models.checkpoint import Checkpoint, TensorInfo
from weft.models.config_json import DTYPES
from weft.models.footprint import (
    allocation,
    require_memory,
    storage_notice,
    weight_bytes,
    weight_targets,
    with_settings,
)
from weft.models.gguf_checkpoint import GgufCheckpoint
from weft.models.layers.weights import WeightTarget
from weft.models.safetensors_checkpoint import EMBEDDING, HEAD, SafetensorsCheckpoint
from weft.models.safetensors_files import FLOATS, some

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read)."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
"""Files downloaded for a hub id: weights, configuration, tokenizer, chat template; no pickles, no code."""
HARMLESS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Suffixes of tensors in old checkpoints that are computed from the configuration."""
READABLE = {*FLOATS, *TYPE_NAMES}
"""Dtypes that weights may be stored in."""
QUANTIZED_NUMBERS = 1 << 20
"""Numbers of a tensor that are quantized at a time: what comes of them in between stays near the caches."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, with the checkpoint's other settings."""

    model: LanguageModel
    path: Path
    """The checkpoint's directory or file."""
    eos_ids: tuple[int, ...]
    """Tokens that end a sequence; empty when the checkpoint names none."""
    max_context: int
    """Longest sequence in tokens."""
    num_bytes: int
    """Memory of the weights."""
    notice: str | None = None
    """What a user should know about the way in which they are stored, or None."""

    @property
    def spec(self) -> ModelSpec:
        """The model's spec, in the dtype that it was loaded in."""
        return self.model.spec


class _Slice(NamedTuple):
    """Destination of one tensor: the rows of `weight` from `first` on."""

    weight: Tensor
    first: int
    in_blocks: bool = False
    """Whether `weight` is the bytes of quantized blocks, [rows, bytes of a row], as the checkpoint has them."""
    quantized_to: str | None = None
    """The type of blocks whose bytes it is, made of what the checkpoint has."""


def load_model(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    dtype: DType = "auto",
    quantization: Quantization | None = None,
    quantized_blocks: QuantizedBlocks = "auto",
    device: torch.device | str = "cpu",
    max_context: int | None = None,
    kernels: Kernels | None = None,
    progress: Progress | None = None,
    memory_bytes: int | None = None,
) -> LoadedModel:
    """Load `model` (the embedded model's name, a directory, a GGUF file, or a hub id) onto `device`.

    With `quantization`, the weights of the layers' projections are quantized; embeddings, norms, biases and the output
    head have the model's dtype. Without, matrices in quantized blocks stay in them where kernels multiply with them, or
    are expanded if `quantized_blocks` says so. `kernels` default to the best for the device and dtype.

    Raises `ModelLoadError` for a checkpoint that is missing, damaged or of the wrong shape, `Unsupported`
    for an architecture or option that is not implemented, and `ConfigError` when `max_context` exceeds what the
    model's positions allow, or the weights take more than `memory_bytes`.
    """
    checkpoint = open_checkpoint(find_model(model, revision, files=MODEL_FILES, offline=offline))
    stored = checkpoint.spec
    if max_context is not None and max_context > stored.max_position:
        raise ConfigError(f"max_context {max_context} exceeds the {stored.max_position} positions of {model}; lower it")
    chosen_dtype = choose_dtype(stored.dtype, dtype, device)
    spec = with_settings(checkpoint, chosen_dtype, device, quantization, quantized_blocks)
    eos_ids = checkpoint.eos_ids()
    chosen = kernels or dispatch.select(device, spec.dtype)
    groups = checked_targets(checkpoint, spec)
    if memory_bytes is not None:
        require_memory(model, checkpoint, spec, device, memory_bytes)
    weights = _load_weights(checkpoint, groups, spec, torch.device(device), chosen, progress)
    return LoadedModel(
        model=checkpoint.family.build(spec, weights, chosen),
        path=checkpoint.path,
        eos_ids=eos_ids,
        max_context=max_context or spec.max_position,
        num_bytes=weight_bytes(checkpoint, spec),
        notice=storage_notice(checkpoint, spec, device),
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory, or in a GGUF file. Raises `ModelLoadError` or `Unsupported`."""
    return GgufCheckpoint(path) if path.is_file() else SafetensorsCheckpoint(path)


def choose_dtype(checkpoint: torch.dtype, wanted: DType, device: torch.device | str) -> torch.dtype:
    """The dtype to compute in: `wanted`, or for "auto" the checkpoint's unless the device is slow or inexact in it."""
    if wanted != "auto":
        return DTYPES[wanted]
    return checkpoint if dispatch.computes_well(device, checkpoint) else torch.float32


def checked_targets(checkpoint: Checkpoint, spec: ModelSpec) -> list[list[WeightTarget]]:
    """The weights of the model, which the checkpoint has, with the names that its tensors have there. Raises
    `ModelLoadError` for tensors that are missing, too many or of other shapes."""
    groups = weight_targets(checkpoint, spec)
    _check(checkpoint, checkpoint.tensors(), [target for group in groups for target in group], spec)
    return groups


def _load_weights(
    checkpoint: Checkpoint,
    groups: list[list[WeightTarget]],
    spec: ModelSpec,
    device: torch.device,
    kernels: Kernels,
    progress: Progress | None,
) -> ResidentWeights:
    loaded: list[dict[str, Tensor]] = [{} for _ in groups]
    places = [(target, weights) for group, weights in zip(groups, loaded, strict=True) for target in group]
    copy = _Copy(checkpoint, [target for target, _ in places], progress)
    places.sort(key=lambda place: copy.place_on_disk(place[0]))
    for target, weights in places:
        weight = _allocate(target, spec, device)
        copy(_slices(target, weight, spec))
        if spec.tie_embeddings and target.name == "embedding":
            _check_tied(checkpoint, weight)
        # What was read is freed before the next one is.
        weights[target.name] = kernels.pack_weight(weight) if target.packed else weight
        del weight
    return ResidentWeights(loaded[0], loaded[1:])


def _slices(target: WeightTarget, weight: Tensor, spec: ModelSpec) -> dict[str, _Slice]:
    """Where each tensor of the checkpoint goes that the weight consists of."""
    if target.blocks:
        return _slices_of_blocks(target, weight, spec)
    slices: dict[str, _Slice] = {}
    first = 0
    for source in target.sources:
        slices[source.name] = _Slice(weight, first)
        first += source.rows
    return slices


def _slices_of_blocks(target: WeightTarget, weight: Tensor, spec: ModelSpec) -> dict[str, _Slice]:
    """The sources of a weight in quantized blocks lie one after the other."""
    quantized_to = None if spec.quantization is None else target.blocks[0].kind
    kinds = [quantized_to] * len(target.sources) if quantized_to else [part.kind for part in target.blocks]
    sizes = [
        stored_size(BlockPart(kind, source.rows), target.shape[1])
        for kind, source in zip(kinds, target.sources, strict=True)
    ]
    parts = zip(target.sources, torch.split(weight, sizes), strict=True)
    return {s.name: _Slice(data.view(s.rows, -1), 0, quantized_to is None, quantized_to) for s, data in parts}


def _allocate(target: WeightTarget, spec: ModelSpec, device: torch.device) -> Tensor:
    """A weight, uninitialized; of one in blocks, the bytes before they are packed."""
    if not target.blocks:
        shape, dtype = allocation(target, spec)
        return torch.empty(shape, dtype=dtype, device=device)
    size = sum(stored_size(part, target.shape[1]) for part in target.blocks)
    data = torch.empty(size, dtype=torch.uint8, device=device)
    return BlockWeight.of(data, merged(target.blocks), target.shape[1])


class _Copy:
    """Copies tensors of a checkpoint to where they go, and tells how many bytes of all `targets` were read."""

    def __init__(self, checkpoint: Checkpoint, targets: list[WeightTarget], progress: Progress | None):
        self._checkpoint, self._progress = checkpoint, progress
        self._tensors = checkpoint.tensors()
        self._read = 0
        self._total = sum(self._tensors[source.name].num_bytes for target in targets for source in target.sources)

    def place_on_disk(self, target: WeightTarget) -> tuple[Path, int]:
        """The file and offset of the first of its tensors."""
        infos = [self._tensors[source.name] for source in target.sources]
        return min((info.file, info.offset) for info in infos)

    def __call__(self, slices: Mapping[str, _Slice]) -> None:
        tensors = self._tensors
        in_blocks = {name for name, part in slices.items() if part.in_blocks}
        for name, start, values in self._checkpoint.pieces(slices, in_blocks):
            weight, first, _, quantized_to = slices[name]
            rows = slice(first + start, first + start + len(values))
            where = f"{tensors[name].file}: tensor {name}"
            if quantized_to is None:
                weight[rows].copy_(values)
            else:
                for part, blocks in _quantized(where, values, quantized_to):
                    weight[rows][part].copy_(blocks)
            if self._progress is not None:
                read, size = start + len(values), tensors[name].shape[0]
                self._progress(self._read + tensors[name].num_bytes * read // size, self._total)
                self._read += tensors[name].num_bytes if read == size else 0


def _quantized(name: str, tensor: Tensor, kind: str) -> Iterator[tuple[slice, Tensor]]:
    """A tensor [O, I] in blocks, a few rows at a time: which rows, and what they became."""
    step = max(1, QUANTIZED_NUMBERS // tensor.shape[1])
    for first in range(0, len(tensor), step):
        rows = slice(first, first + step)
        try:
            made = quantize(tensor[rows], kind)
        except ValueError as error:
            raise ModelLoadError(f"{name} cannot be quantized: {error}") from error
        yield rows, made


def _check(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], targets: list[WeightTarget], spec: ModelSpec
) -> None:
    """Check the checkpoint's tensors against the model's weights: names, shapes and dtypes."""
    needed: dict[str, tuple[int, ...]] = {
        source.name: (source.rows, *target.shape[1:]) for target in targets for source in target.sources
    }
    missing = sorted(set(needed) - set(tensors))
    if missing:
        raise ModelLoadError(f"{checkpoint.path} lacks {_listed(missing)}, which {spec.architecture} needs")
    for name, shape in needed.items():
        info = tensors[name]
        where = f"{info.file}: tensor {info.numbers_in or name} at byte {info.offset}"
        if info.shape != shape:
            held = "" if info.numbers_in is None else f" holds {name}, which"
            raise ModelLoadError(
                f"{where}{held} has shape {list(info.shape)}, {checkpoint.stated_in} asks for {list(shape)}"
            )
        if info.dtype not in READABLE and info.numbers_in is None:
            raise ModelLoadError(f"{where} is {info.dtype}; weights must be one of {list(FLOATS)}")
    extra = sorted(n for n in set(tensors) - set(needed) if not n.endswith(HARMLESS))
    if spec.tie_embeddings:
        extra = [name for name in extra if name not in (EMBEDDING, HEAD)]
    if extra:
        raise ModelLoadError(
            f"{checkpoint.path} has {_listed(extra)}, which {spec.architecture} as {checkpoint.stated_in} describes it "
            "does not use; running without them would give other results than the checkpoint was made for"
        )


def _check_tied(checkpoint: Checkpoint, embedding: Tensor) -> None:
    """A checkpoint may store a tied head a second time, but not a different one."""
    tensors = checkpoint.tensors()
    if EMBEDDING not in tensors or HEAD not in tensors:
        return
    for _, _, head in checkpoint.pieces([HEAD]):
        if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding.cpu()):
            raise ModelLoadError(
                f"{checkpoint.path}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; "
                'set "tie_word_embeddings": false in config.json'
            )


def _listed(names: list[str]) -> str:
    return f"{'tensor' if len(names) == 1 else 'tensors'} {some(names)}"
