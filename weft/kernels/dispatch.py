"""Which implementation of each operation runs on a device.

Owns the registry: one tuple of `Variant`s per operation, best first. A new backend is a module that gathers a
`Kernels`, and one entry in `_variants` here. Models receive the selected `Kernels` as an argument and never look here
themselves.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from weft.abi.errors import ConfigError
from weft.kernels import reference, torch_ops
from weft.kernels.base import Kernels
from weft.kernels.block_weights import BLOCK_TYPES
from weft.kernels.cpu import ops as cpu_ops
from weft.kernels.cpu.sampling import CpuSampling
from weft.kernels.triton import support as triton_support


class Variant(NamedTuple):
    """One implementation of one operation."""

    name: str
    operation: str
    supports: Callable[[torch.device, torch.dtype], bool]
    load: Callable[[], Kernels]
    """All operations of the same backend. Imports what they need, if that was left until now."""

    @property
    def function(self) -> Callable[..., Any]:
        """The operation. Only asked for where it is supported."""
        function: Callable[..., Any] = getattr(self.load(), self.operation)
        return function


class Choice(NamedTuple):
    """What `describe` says about one operation."""

    operation: str
    chosen: str
    """"none": the operation is put together from others."""
    available: tuple[str, ...]
    note: str = ""
    """On a CPU: the level of the C++ kernels, or why they are not used. On a CUDA device: the same of Triton's."""


def _anywhere(device: torch.device, dtype: torch.dtype) -> bool:
    return True


def _load_triton() -> Kernels:
    from weft.kernels.triton.ops import KERNELS  # imports Triton, which takes long and is not everywhere

    return KERNELS


AS_BYTES = ("prepare_move",)
"""Operations that do not depend on the dtype."""


def _variants(operation: str) -> tuple[Variant, ...]:
    compiled = cpu_ops.best()
    first = []
    if not isinstance(compiled, Exception):
        supports = cpu_ops.supports_bytes if operation in AS_BYTES else cpu_ops.supports
        first.append(Variant(cpu_ops.NAME, operation, supports, compiled.gather))
    return (
        *first,
        Variant(triton_support.NAME, operation, triton_support.supports, _load_triton),
        Variant(torch_ops.NAME, operation, _anywhere, lambda: torch_ops.KERNELS),
        Variant(reference.NAME, operation, _anywhere, lambda: reference.KERNELS),
    )


def host_sampling() -> CpuSampling | None:
    """Sampling on a CPU in C++; None where the library is not used."""
    compiled = cpu_ops.best()
    return None if isinstance(compiled, Exception) else compiled.sampling


REGISTRY: Mapping[str, tuple[Variant, ...]] = {operation: _variants(operation) for operation in Kernels._fields}
"""Operation -> its variants, best first. The reference is last and supports everything."""

WITH_LINEAR = ("pack_weight", "take_rows", "gated_linear", "linear_rms_norm")
"""Operations that go with `linear`: a packed weight is understood by its own variant only."""
IN_A_BLOCK = ("linear", "gated_linear", "rms_norm", "rotate_and_store", "attention", "silu_mul")
"""What `prepare_block` stands for: it is the variant's that all of them are of, and the reference's, which has none,
where they are of several."""


def select(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    prefer: Mapping[str, str] | None = None,
) -> Kernels:
    """The best variant of every operation for tensors of `dtype` on `device`.

    `prefer` maps an operation, or `*` for all, to the name of the variant to use instead; those in `WITH_LINEAR` are
    always of the variant of `linear`. Raises `ConfigError` when that variant does not exist or does not support the
    device.
    """
    target = torch.device(device)
    wanted = prefer or {}
    unknown = set(wanted) - set(REGISTRY) - {"*"}
    if unknown:
        raise ConfigError(f"no kernel operation named {sorted(unknown)}; there are {sorted(REGISTRY)}")
    chosen = {name: _choose(name, target, dtype, wanted.get(name, wanted.get("*"))) for name in REGISTRY}
    for name in WITH_LINEAR:
        chosen[name] = _choose(name, target, dtype, chosen["linear"].name)
    backends = {chosen[name].name for name in (*IN_A_BLOCK, "prepare_block")}
    if len(backends) > 1:
        chosen["prepare_block"] = _choose("prepare_block", target, dtype, reference.NAME)
    return Kernels(**{name: variant.function for name, variant in chosen.items()})


def describe(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[Choice]:
    """For each operation, the variant that `select` takes and all that would work, best first."""
    target = torch.device(device)
    note = _note(target, dtype)
    choices = []
    for name, variants in REGISTRY.items():
        usable = [v for v in variants if v.supports(target, dtype)]
        if name == "prepare_block":  # backends without one have an entry all the same
            usable = [v for v in usable if v.function is not reference.no_block]
        available = tuple(v.name for v in usable) or ("none",)
        choices.append(Choice(name, available[0], available, note))
    return choices


def block_types(device: torch.device | str, dtype: torch.dtype) -> frozenset[str]:
    """Types of `kernels.quantized_blocks` that `linear` reads as they are, with activations of `dtype`. Weights of all
    other types are expanded when they are loaded."""
    chosen = _choose("linear", torch.device(device), dtype, None).name
    if chosen == triton_support.NAME:
        return frozenset(BLOCK_TYPES)
    return cpu_ops.block_types(dtype) if chosen == cpu_ops.NAME else frozenset()


def rounds_activations(device: torch.device | str) -> bool:
    """Whether products with weights in quantized blocks round activations to 8 bits."""
    return torch.device(device).type == "cpu"


def _note(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        return triton_support.note(device, dtype)
    if device.type != "cpu":
        return ""
    compiled = cpu_ops.best()
    return f"C++: {compiled}" if isinstance(compiled, Exception) else f"C++: {compiled.level.name.lower()}"


def computes_well(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether `device` computes `dtype` at its own speed: with instructions for it, or with kernels that widen it in
    registers. Elsewhere every product would convert its operands to float32 in memory and back."""
    target = torch.device(device)
    if dtype in (torch.float32, torch.float64):
        return True
    if target.type == "cuda":
        return dtype == torch.float16 or torch.cuda.get_device_capability(target) >= (8, 0)
    if target.type == "cpu" and dtype == torch.bfloat16:
        compiled = cpu_ops.best()
        packs = not isinstance(compiled, Exception) and compiled.packs(dtype)
        return packs or _torch_has_bfloat16()
    return False


def _torch_has_bfloat16() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        # oneDNN also says yes to AVX-512 without BF16, where it converts to float32 and back.
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _choose(operation: str, device: torch.device, dtype: torch.dtype, wanted: str | None) -> Variant:
    variants = REGISTRY[operation]
    if wanted is None:
        return next(v for v in variants if v.supports(device, dtype))
    for variant in variants:
        if variant.name == wanted:
            if variant.supports(device, dtype):
                return variant
            raise ConfigError(f"kernel {wanted!r} of {operation!r} does not support {dtype} on {device}")
    raise ConfigError(f"no kernel {wanted!r} of {operation!r}; there are {[v.name for v in variants]}")
