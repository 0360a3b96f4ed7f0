"""Examines this machine for `weft doctor` and for benchmarks."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.abi.errors import WeftError
from weft.cli.version import versions
from weft.config import EngineConfig, cache_directory
from weft.hub import OFFLINE_IS_SET, find_model
from weft.worker.machine import cpu_lines, cpu_name

if TYPE_CHECKING:
    from weft.config import Quantization
    from weft.models.checkpoint import Checkpoint

REQUIRED = (
    "numpy",
    "msgspec",
    "torch",
    "safetensors",
    "tokenizers",
    "jinja2",
    "zmq",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "websockets",
    "httpx",
    "huggingface_hub",
    "prometheus_client",
    "psutil",
    "rich",
)
"""Modules of the dependencies, which may be installed and still fail to import."""
CPU_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512vbmi", "avx512_vnni", "amx_bf16"),
    *("asimd", "bf16", "sve"),
)
LOW_MEMORY_BYTES = 1 << 30
NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass
class MachineReport:
    """The findings of `weft doctor`. Values are JSON."""

    machine: dict[str, Any] = field(default_factory=dict)
    software: dict[str, Any] = field(default_factory=dict)
    will_use: dict[str, Any] = field(default_factory=dict)
    """Device, dtype, threads, pages and other choices of an engine with this configuration."""
    notes: list[str] = field(default_factory=list)
    """Advice on components that work but could work better."""
    problems: list[str] = field(default_factory=list)
    """Required components that do not work."""

    def sections(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the sections that are not empty, each with its title."""
        named = (("This machine", self.machine), ("Software", self.software), ("Will use", self.will_use))
        return [(title, rows) for title, rows in named if rows]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; `ok` is true if there are no problems."""
        return {"ok": not self.problems, **asdict(self)}


def probe(config: EngineConfig) -> MachineReport:
    """Create the report. Parts that need torch are omitted if torch cannot be imported."""
    report = MachineReport()
    report.software = dict(versions())
    broken = broken_modules()
    report.problems += [f"{name} cannot be imported: {why}; reinstall weft" for name, why in broken.items()]
    _check_sockets(report)
    if {"torch", "psutil", "numpy", "msgspec"} & set(broken):
        return report
    report.machine = machine()
    _note_machine(report)
    try:
        report.will_use = plan(config)
        _require_tokenizer(config)
    except WeftError as error:
        report.problems.append(f"{config.model}: {error.message}")
    return report


def machine() -> dict[str, Any]:
    """Describe cores, memory and devices. Imports torch."""
    import psutil

    from weft.worker.memory import free_host_bytes, usable_cores

    return {
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpu_features": cpu_features(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": gib(psutil.virtual_memory().total),
        "usable_free_memory_gib": gib(free_host_bytes()),
        "gpus": gpus(),
    }


def cpu_features() -> list[str]:
    """Return the CPU features in `CPU_FLAGS` that this processor has."""
    for line in cpu_lines():
        if line.startswith(("flags", "Features")):
            found = set(line.partition(":")[2].split())
            return [flag for flag in CPU_FLAGS if flag in found]
    return []


def gpus() -> list[str]:
    """Describe the CUDA devices that torch finds."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            f"{properties.name}, {gib(properties.total_memory)} GiB, compute {properties.major}.{properties.minor}"
        )
    return found


def broken_modules() -> dict[str, str]:
    """Return the dependencies that cannot be imported, with the reason."""
    broken = {}
    for name in REQUIRED:
        try:
            importlib.import_module(name)
        except Exception as error:  # a damaged shared library may raise any exception
            broken[name] = f"{type(error).__name__}: {error}"
    return broken


def _find(config: EngineConfig) -> Path:
    """Where the model is. Raises `WeftError` if it is not here."""
    from weft.models.loader import MODEL_FILES

    return find_model(
        config.model,
        config.revision,
        files=MODEL_FILES,
        offline=True,
        offline_because=OFFLINE_IS_SET if config.offline else "this command downloads nothing",
    )


def _require_tokenizer(config: EngineConfig) -> None:
    """Raise `WeftError` if the model has no tokenizer that can be used, or one of more tokens."""
    from weft.engine.build import require_fit
    from weft.models.loader import open_checkpoint
    from weft.tokenizers.load import load_tokenizer

    path = _find(config)
    require_fit(load_tokenizer(str(path)), open_checkpoint(path).spec.vocab_size)


def plan(config: EngineConfig) -> dict[str, Any]:
    """Return device, dtype, threads, kernels and pages that an engine with this configuration would use.

    Pages are those that would fit now, after the weights are loaded. Reads the config.json of the model and the headers
    of its weights; downloads nothing. Raises `WeftError` if the model cannot be served.
    """
    from weft.engine.profiles import find_profile, saturation_tokens
    from weft.kernels import dispatch
    from weft.models.base import KVSpec, LayerKV
    from weft.models.footprint import require_memory, storage_notice, weight_bytes, with_settings
    from weft.models.loader import checked_targets, choose_dtype, open_checkpoint
    from weft.worker.build import choose_device, free_memory, graphs_missing, step_tokens
    from weft.worker.identity import identify_spec
    from weft.worker.memory import usable_cores
    from weft.worker.sizing import FreeMemory, kernel_threads, size_pools

    device = choose_device(config)
    path = _find(config)
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    dtype = choose_dtype(spec.dtype, config.dtype, device)
    loaded = with_settings(checkpoint, dtype, device, config.quantization, config.quantized_blocks)
    layout = KVSpec((LayerKV(spec.num_kv_heads, spec.head_dim),) * spec.num_layers, dtype)
    bytes_per_page = layout.bytes_per_page(config.page_size)
    checked_targets(checkpoint, loaded)
    weights = weight_bytes(checkpoint, loaded)
    free = free_memory(device)
    require_memory(config.model, checkpoint, loaded, device, free.device)
    on_gpu = device.type == "cuda"
    left = FreeMemory(max(0, free.device - weights), free.host if on_gpu else max(0, free.host - weights))
    sizing = size_pools(config, bytes_per_page=bytes_per_page, model_context=spec.max_position, free=left, gpu=on_gpu)
    choices = dispatch.describe(device, dtype)
    identity = identify_spec(config, loaded)
    profile = find_profile(cache_directory(os.environ), identity, config.model)
    return {
        "model": config.model,
        "architecture": spec.architecture,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": _quantization_note(config, device),
        "threads": kernel_threads(config.threads, usable_cores()),
        "kernels": [f"{choice.operation}: {choice.chosen}" for choice in choices],
        "kernels_note": choices[0].note or "none",
        "cuda_graphs": graphs_missing(config, replace(spec, dtype=dtype), device) or "yes",
        "weights_gib": gib(weights),
        "weights_note": storage_notice(checkpoint, loaded, device) or "none",
        "kv_pages": sizing.num_device_pages,
        "kv_tokens": sizing.num_device_pages * config.page_size,
        "kv_gib": gib(sizing.num_device_pages * bytes_per_page),
        "host_kv_pages": sizing.num_host_pages,
        "max_context": sizing.max_context,
        "max_step_tokens": step_tokens(config),
        "saturation_tokens": saturation_tokens(config, profile) or "none",
        "measured": _measured(config, checkpoint),
        "notice": sizing.notice or "none",
    }


def _quantization_note(config: EngineConfig, device: Any) -> str:
    from weft.kernels import dispatch

    if config.quantization is None:
        return "none"
    return f"{config.quantization}: {'C++, activations in 8 bits' if dispatch.rounds_activations(device) else 'Triton'}"


def _measured(config: EngineConfig, checkpoint: Checkpoint) -> list[str]:
    """Return step times: a line for each dtype and quantization that `weft profile` has measured on this machine."""
    import torch

    from weft.core.cost.model import StepShape
    from weft.engine.profiles import find_profile, profile_path
    from weft.models.footprint import supports, with_settings
    from weft.worker.build import choose_device
    from weft.worker.identity import identify_spec

    cache, device = cache_directory(os.environ), choose_device(config)
    lines = []
    quantizations: tuple[Quantization | None, ...] = (None, "int8", "int4")
    for dtype, quantization in product((torch.bfloat16, torch.float16, torch.float32), quantizations):
        if quantization is not None and not supports(quantization, device, dtype):
            continue
        loaded = with_settings(checkpoint, dtype, device, quantization, config.quantized_blocks)
        identity = identify_spec(config, loaded)
        profile = find_profile(cache, identity, config.model) if profile_path(cache, identity).exists() else None
        if profile is not None:
            token = profile.forward.predict_s(StepShape.decodes(1, 256))
            prompt = profile.forward.predict_s(StepShape.chunk(256, 0, 1))
            weights = quantization or ", ".join(loaded.block_types)
            name = str(dtype).removeprefix("torch.") + (f" with {weights} weights" if weights else "")
            lines.append(f"{name}: {token * 1e3:.3g} ms for a token, {prompt * 1e3:.3g} ms for a prompt of 256 tokens")
    return lines


def gib(num_bytes: int) -> float:
    """Convert bytes to GiB, rounded to two digits."""
    return round(num_bytes / 1024**3, 2)


def _note_machine(report: MachineReport) -> None:
    import torch

    if report.machine["usable_free_memory_gib"] * 1024**3 < LOW_MEMORY_BYTES:
        report.notes.append("less than 1 GiB of memory is free: only the smallest models will fit")
    if torch.cuda.is_available():
        return
    if NVIDIA.exists() and torch.version.cuda is None:
        report.notes.append("there is an NVIDIA driver, but torch was built without CUDA; install a CUDA build")
    elif torch.version.cuda is not None:
        report.notes.append(f"torch was built for CUDA {torch.version.cuda} and finds no usable device")


def _check_sockets(report: MachineReport) -> None:
    """Problems with the directory for temporary files, which holds the sockets of engine processes."""
    try:
        with tempfile.TemporaryDirectory(prefix="weft-"):
            pass
    except OSError as error:
        report.problems.append(f"the directory for temporary files is not writable ({error.strerror}); set TMPDIR")
        return
    # The kernel limits a socket's path to about a hundred characters.
    if len(tempfile.gettempdir()) > 60:
        report.problems.append(f"TMPDIR is too long for sockets: {tempfile.gettempdir()}; set a shorter one")
