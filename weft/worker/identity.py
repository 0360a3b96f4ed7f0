"""For what a cost profile holds: model, dtype, device, threads, pages and kernels, as they are in this process."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict

import torch

from weft.config import EngineConfig
from weft.core.cost.profile import Identity
from weft.kernels import dispatch
from weft.kernels.cpu import library
from weft.models.base import ModelSpec
from weft.models.loader import LoadedModel
from weft.version import __version__
from weft.worker.build import choose_device
from weft.worker.machine import cpu_name
from weft.worker.memory import usable_cores
from weft.worker.sizing import kernel_threads


def identify(config: EngineConfig, loaded: LoadedModel) -> Identity:
    """The identity of a worker of this configuration and model. Raises `ConfigError` for a device that is not there."""
    return identify_spec(config, loaded.spec)


def identify_spec(config: EngineConfig, spec: ModelSpec) -> Identity:
    """The identity of a worker whose model need not be loaded; `spec` has the dtype and quantization that it would be
    loaded with. Raises `ConfigError` for a device that is not there."""
    device = choose_device(config)
    dtype = spec.dtype
    on_gpu = device.type == "cuda"
    return Identity(
        model=f"{spec.architecture} {_shape_hash(spec)}",
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name() or platform.machine(),
        threads=kernel_threads(config.threads, usable_cores()),
        page_size=config.page_size,
        kernels=[*(f"{c.operation}: {c.chosen}" for c in dispatch.describe(device, dtype)), *_build(on_gpu)],
        software=[f"weft {__version__}", f"torch {torch.__version__}"],
        host_link=describe_link(config.host_link_gbs),
    )


def describe_link(host_link_gbs: float | None) -> str:
    """`Identity.host_link` of a link of this rate; None: not throttled."""
    return "" if host_link_gbs is None else f"{host_link_gbs:g} GB/s"


def _shape_hash(spec: ModelSpec) -> str:
    """Of all that the model computes but for the values of its weights."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True, default=str).encode()).hexdigest()[:12]


def _build(on_gpu: bool) -> list[str]:
    """Which C++ kernels would run, where they may."""
    if on_gpu:
        return []
    try:
        loaded = library.load()
        level = library.wanted_level(loaded)
        name = level.name.lower() + (library.WITH_VNNI if library.wants_vnni(loaded, level) else "")
        return [f"C++: {name}, {loaded.weft_source_hash().decode()}"]
    except library.KernelsUnavailable:
        return ["C++: none"]
