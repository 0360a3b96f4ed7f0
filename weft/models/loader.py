"""Loads a model from a checkpoint, tensor by tensor from safetensors.

Owns the order of loading and the check of the checkpoint's tensors against the architecture. Families are the matter of
`registry.py`; progress goes to a callback. The destination is allocated first, and each tensor is copied (and
converted) from the memory map into its rows, so anonymous memory peaks at one copy of the model plus one tensor.
Quantization reads the checkpoint's values a few rows at a time, without a complete copy in floating point.

Tensors that the architecture does not use are refused, because a model without them computes other results. `HARMLESS`
lists exceptions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.abi.errors import ConfigError, ModelLoadError
from weft.config import DType, Quantization
from weft.hub import find_model
from weft.kernels import dispatch
from weft.kernels.base import Kernels
from weft.kernels.quantize import quantize
from weft.models.base import LanguageModel, ModelSpec, ResidentWeights
from weft.models.config_json import DTYPES
from weft.models.layers.weights import WeightSource, WeightTarget
from weft.models.registry import ModelFamily, family_of
from weft.models.safetensors_files import FLOATS, TensorInfo, list_tensors, open_tensors, read_json

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read)."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
"""Files downloaded for a hub id: weights, configuration, tokenizer, chat template; no pickles, no code."""
HARMLESS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Suffixes of tensors in old checkpoints that are computed from the configuration."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUANTIZED_NUMBERS = 4 << 20
"""Rows of a tensor quantized at a time."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, with the checkpoint's other settings."""

    model: LanguageModel
    directory: Path
    eos_ids: tuple[int, ...]
    """Tokens that end a sequence; empty when the checkpoint names none."""
    max_context: int
    """Longest sequence in tokens."""
    num_bytes: int
    """Memory of the weights."""

    @property
    def spec(self) -> ModelSpec:
        """The model's spec, in the dtype that it was loaded in."""
        return self.model.spec


class _Slice(NamedTuple):
    """Destination of one tensor: rows `first` to `first + rows` of `weight`."""

    weight: Tensor
    first: int
    source: WeightSource
    scales: Tensor | None
    """[rows of `weight`], where it is quantized."""


def load_model(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    dtype: DType = "auto",
    quantization: Quantization | None = None,
    device: torch.device | str = "cpu",
    max_context: int | None = None,
    kernels: Kernels | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load `model` (the embedded model's name, a directory, or a hub id) onto `device`.

    With `quantization`, the weights of the layers' projections are quantized; embeddings, norms, biases and the output
    head have the model's dtype. `kernels` default to the best for the device
    and dtype. Raises `ModelLoadError` for a checkpoint that is missing, damaged or of the wrong shape, `Unsupported`
    for an architecture or option that is not implemented, and `ConfigError` when `max_context` exceeds what the
    model's positions allow.
    """
    directory = find_model(model, revision, files=MODEL_FILES, offline=offline)
    raw = read_json(directory / "config.json")
    family = family_of(raw)
    spec = family.spec(raw)
    if max_context is not None and max_context > spec.max_position:
        raise ConfigError(f"max_context {max_context} exceeds the {spec.max_position} positions of {model}; lower it")
    spec = replace(spec, dtype=choose_dtype(spec.dtype, dtype, device), quantization=quantization)
    eos_ids = read_eos_ids(directory, raw, spec.vocab_size)
    chosen = kernels or dispatch.select(device, spec.dtype)
    weights, num_bytes = _load_weights(directory, family, spec, torch.device(device), chosen, progress)
    return LoadedModel(
        model=family.build(spec, weights, chosen),
        directory=directory,
        eos_ids=eos_ids,
        max_context=max_context or spec.max_position,
        num_bytes=num_bytes,
    )


def read_spec(directory: Path) -> ModelSpec:
    """The spec of config.json, without reading weights. Raises the errors of `load_model`."""
    raw = read_json(directory / "config.json")
    return family_of(raw).spec(raw)


def read_weight_bytes(directory: Path, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
    """Bytes of the weights, from config.json. Raises the errors of `load_model`."""
    raw = read_json(directory / "config.json")
    family = family_of(raw)
    spec = replace(family.spec(raw), dtype=dtype, quantization=quantization)
    groups = [_allocate(group, spec, torch.device("meta")) for group in _targets(family, spec)]
    return _num_bytes(groups)


def choose_dtype(checkpoint: torch.dtype, wanted: DType, device: torch.device | str) -> torch.dtype:
    """The dtype to compute in: `wanted`, or for "auto" the checkpoint's unless the device is slow or inexact in it."""
    if wanted != "auto":
        return DTYPES[wanted]
    return checkpoint if dispatch.computes_well(device, checkpoint) else torch.float32


def read_eos_ids(directory: Path, raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence tokens of generation_config.json, or else of config.json (`raw`)."""
    path = directory / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value, path = raw.get("eos_token_id"), directory / "config.json"
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ModelLoadError(f"{path}: eos_token_id must be token ids below {vocab_size}, got {value!r}")
    return tuple(dict.fromkeys(ids))


def _load_weights(
    directory: Path,
    family: ModelFamily,
    spec: ModelSpec,
    device: torch.device,
    kernels: Kernels,
    progress: Progress | None,
) -> tuple[ResidentWeights, int]:
    tensors = list_tensors(directory)
    groups = _targets(family, spec)
    if spec.tie_embeddings and EMBEDDING not in tensors and HEAD in tensors:
        # Some exporters keep only the second of two tied names.
        groups[0] = [_renamed(target, EMBEDDING, HEAD) for target in groups[0]]
    _check(directory, tensors, [t for group in groups for t in group], spec)
    loaded = [_allocate(group, spec, device) for group in groups]
    slices: dict[Path, list[_Slice]] = defaultdict(list)
    for group, weights in zip(groups, loaded, strict=True):
        for target in group:
            first = 0
            scales = None if target.scales is None else weights.get(target.scales)
            for source in target.sources:
                slices[tensors[source.name].file].append(_Slice(weights[target.name], first, source, scales))
                first += source.rows
    total = sum(tensors[s.source.name].num_bytes for parts in slices.values() for s in parts)
    _copy(slices, tensors, total, progress)
    if spec.tie_embeddings:
        _check_tied(directory, tensors, loaded[0]["embedding"])
    for group, weights in zip(groups, loaded, strict=True):
        for target in group:
            if target.packed:
                weights[target.name] = kernels.pack_weight(weights[target.name], spec.dtype)
    return ResidentWeights(loaded[0], loaded[1:]), _num_bytes(loaded)


def _targets(family: ModelFamily, spec: ModelSpec) -> list[list[WeightTarget]]:
    """The weights outside the layers, then those of each layer."""
    return [family.shared_weights(spec), *(family.layer_weights(spec, i) for i in range(spec.num_layers))]


def _num_bytes(groups: list[dict[str, Tensor]]) -> int:
    return sum(w.numel() * w.element_size() for weights in groups for w in weights.values())


def _allocate(targets: list[WeightTarget], spec: ModelSpec, device: torch.device) -> dict[str, Tensor]:
    """The uninitialized weights of a layer, or those outside the layers."""
    weights = {}
    for target in targets:
        quantized = target.scales if spec.quantization == "int8" else None
        dtype = spec.dtype if quantized is None else torch.int8
        weights[target.name] = torch.empty(target.shape, dtype=dtype, device=device)
        if quantized is not None:
            weights[quantized] = torch.empty(target.shape[0], dtype=torch.float32, device=device)
    return weights


def _copy(
    slices: Mapping[Path, list[_Slice]], tensors: Mapping[str, TensorInfo], total: int, progress: Progress | None
) -> None:
    done = 0
    for file in sorted(slices):
        with open_tensors(file) as opened:
            for weight, first, source, scales in slices[file]:
                rows = slice(first, first + source.rows)
                if scales is None:
                    weight[rows].copy_(opened[source.name])
                else:
                    _quantize(f"{file}: tensor {source.name}", opened[source.name], weight[rows], scales[rows])
                done += tensors[source.name].num_bytes
                if progress is not None:
                    progress(done, total)


def _quantize(name: str, tensor: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write a tensor [O, I] in int8 to `values` [O, I] and `scales` [O]."""
    step = max(1, QUANTIZED_NUMBERS // tensor.shape[1])
    for first in range(0, len(tensor), step):
        rows = slice(first, first + step)
        try:
            quantized = quantize(tensor[rows])
        except ValueError as error:
            raise ModelLoadError(f"{name} cannot be quantized: {error}") from error
        values[rows].copy_(quantized.values)
        scales[rows].copy_(quantized.scales)


def _check(directory: Path, tensors: Mapping[str, TensorInfo], targets: list[WeightTarget], spec: ModelSpec) -> None:
    """Check the checkpoint's tensors against the model's weights: names, shapes and dtypes."""
    needed: dict[str, tuple[int, ...]] = {
        source.name: (source.rows, *target.shape[1:]) for target in targets for source in target.sources
    }
    missing = sorted(set(needed) - set(tensors))
    if missing:
        raise ModelLoadError(f"{directory} lacks {_listed(missing)}, which {spec.architecture} needs")
    for name, shape in needed.items():
        info = tensors[name]
        if info.shape != shape:
            raise ModelLoadError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, config.json asks for {list(shape)}"
            )
        if info.dtype not in FLOATS:
            raise ModelLoadError(f"{info.file}: tensor {name} is {info.dtype}; weights must be one of {list(FLOATS)}")
    extra = sorted(n for n in set(tensors) - set(needed) if not n.endswith(HARMLESS))
    if spec.tie_embeddings:
        extra = [name for name in extra if name not in (EMBEDDING, HEAD)]
    if extra:
        raise ModelLoadError(
            f"{directory} has {_listed(extra)}, which {spec.architecture} with this config.json does not use; running "
            "without them would give other results than the checkpoint was made for"
        )


def _check_tied(directory: Path, tensors: Mapping[str, TensorInfo], embedding: Tensor) -> None:
    """A checkpoint may store a tied head a second time, but not a different one."""
    if EMBEDDING not in tensors or HEAD not in tensors:
        return
    with open_tensors(tensors[HEAD].file) as opened:
        head = opened[HEAD]
        if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding.cpu()):
            raise ModelLoadError(
                f"{directory}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; "
                'set "tie_word_embeddings": false in config.json'
            )


def _renamed(target: WeightTarget, old: str, new: str) -> WeightTarget:
    return target._replace(sources=tuple(s._replace(name=new) if s.name == old else s for s in target.sources))


def _listed(names: list[str], limit: int = 3) -> str:
    kind = "tensor" if len(names) == 1 else "tensors"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{kind} {', '.join(names[:limit])}{more}"
