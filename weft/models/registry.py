"""The registry of model families, the only place that names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.abi.errors import ModelLoadError, Unsupported
from weft.kernels.base import Kernels
from weft.models import llama, mistral, qwen2, qwen3
from weft.models.base import LanguageModel, ModelSpec, ResidentWeights
from weft.models.layers import decoder
from weft.models.layers.weights import WeightTarget


class ModelFamily(NamedTuple):
    """How to load and run the checkpoints of one architecture."""

    spec: Callable[[Mapping[str, Any]], ModelSpec]
    """From config.json."""
    shared_weights: Callable[[ModelSpec], list[WeightTarget]]
    layer_weights: Callable[[ModelSpec, int], list[WeightTarget]]
    build: Callable[[ModelSpec, ResidentWeights, Kernels], LanguageModel]


def _decoder_family(spec: Callable[[Mapping[str, Any]], ModelSpec]) -> ModelFamily:
    return ModelFamily(spec, decoder.shared_weights, decoder.layer_weights, decoder.DecoderModel)


FAMILIES: Mapping[str, ModelFamily] = {
    module.ARCHITECTURE: _decoder_family(module.spec) for module in (llama, mistral, qwen2, qwen3)
}
"""Architecture, as in config.json's `architectures`, -> family."""


def family_of(raw: Mapping[str, Any]) -> ModelFamily:
    """The family of a config.json. Raises `ModelLoadError` when it names none, `Unsupported` when it is not known."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, Sequence) or isinstance(architectures, str) or not architectures:
        raise ModelLoadError(f"config.json names no architecture; known ones are {', '.join(sorted(FAMILIES))}")
    for name in architectures:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise Unsupported(
        f"architecture {', '.join(map(str, architectures))} is not supported; known ones are "
        f"{', '.join(sorted(FAMILIES))}"
    )
