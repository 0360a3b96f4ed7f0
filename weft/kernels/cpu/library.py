"""The binding: finds the shared library, checks that it fits, and describes its functions to ctypes.

Owns the choice of level and the one environment variable that overrides it, `WEFT_CPU_KERNELS`: `off`, or the name of
a level, to which `+vnni` adds dot products of bytes where the level is without. Does not know what the functions are
for (`ops` does).
"""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from weft.kernels.cpu import build

VARIABLE = "WEFT_CPU_KERNELS"
WITH_VNNI = "+vnni"
ABI_VERSION = 14
_BFLOAT16 = 1
"""The C++ enumerator `weft::kBfloat16`."""
_PROBE_BYTES, _PROBE_ROUNDS, _PROBES_EACH = 32 << 10, 200, 5
"""A probe takes a quarter of a millisecond at most, on operands in the first-level cache."""
_LINE = 64
"""Bytes of a line of the caches."""
_CLEARLY_FASTER = 1.25
"""So many times as fast, so that no noise changes the choice from one process to the next: results depend on it."""


class Level(IntEnum):
    """Instruction sets the library has kernels for; a higher one is faster, but see `best_level`."""

    PORTABLE = 0
    AVX2 = 1
    AVX512F = 2
    AVX512 = 3
    AMX = 4


class BatchFields(Structure):
    """The C++ struct `weft::Batch`, field by field."""

    _fields_ = [
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("page_size", c_int64),
        ("q_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("page_ids", c_void_p),
        ("kv_lens", c_void_p),
        ("positions", c_void_p),
        ("write_slots", c_void_p),
        ("causal", c_void_p),
        ("visibility", c_void_p),
        ("mask_bits", c_void_p),
        ("mask_indptr", c_void_p),
        ("num_groups", c_int64),
        ("group_chunks", c_void_p),
        ("group_indptr", c_void_p),
        ("members", c_void_p),
        ("shared_indptr", c_void_p),
        ("shared_slots", c_void_p),
    ]


class QuantPart(Structure):
    """The C++ struct `weft::QuantPart`, field by field."""

    _fields_ = [("weight", c_void_p), ("outputs", c_int64), ("type", c_int)]


class Product(Structure):
    """The C++ struct `weft::Product`, field by field."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("packed", c_int),
        ("parts", POINTER(QuantPart)),
        ("num_parts", c_int64),
        ("vnni", c_int),
    ]


class BlockFields(Structure):
    """The C++ struct `weft::BlockArgs`, field by field."""

    _fields_ = [
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("hidden", c_int64),
        ("window", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("attention_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Product),
        ("output", Product),
        ("gate_up", Product),
        ("down", Product),
    ]


class PassFields(Structure):
    """The C++ struct `weft::PassArgs`, field by field."""

    _fields_ = [
        ("batch", POINTER(BatchFields)),
        ("shared", POINTER(BatchFields)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("gate_up", c_void_p),
        ("gated", c_void_p),
        ("threads", c_int),
    ]


_SIGNATURES = {
    "weft_rms_norm": [c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int],
    "weft_silu_mul": [c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int],
    "weft_rotate_and_store": [
        *(c_int, c_int, POINTER(BatchFields), c_int64, c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int),
    ],
    "weft_linear": [c_int, c_int, *(c_void_p,) * 5, *(c_int64,) * 3, c_int],
    "weft_pack_weight": [c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int],
    "weft_linear_packed": [c_int, c_int, *(c_void_p,) * 5, *(c_int64,) * 3, c_int, c_int],
    "weft_pack_blocks": [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int],
    "weft_linear_blocks": [
        *(c_int, c_int, c_int, c_void_p, POINTER(QuantPart), c_int64),
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int),
    ],
    "weft_attention": [
        *(c_int, c_int, POINTER(BatchFields), c_int64, c_int64, c_int64),
        *(c_void_p, c_int64, c_void_p, c_void_p, c_float, c_int64, c_int),
    ],
    "weft_sample": [c_int, c_void_p, c_int64, c_int64, c_void_p, c_int],
    "weft_move_pages": [*(c_void_p,) * 7, c_int64, c_int64, c_int],
    "weft_block": [c_int, c_int, POINTER(BlockFields), POINTER(PassFields), c_void_p, c_void_p],
}
_COUNTING = {
    "weft_take_rows": [c_int, c_void_p, c_void_p, c_void_p, *(c_int64,) * 3],
    "weft_take_block_rows": [c_int, c_void_p, c_void_p, c_void_p, *(c_int64,) * 3],
}
_PROBES = {
    "weft_probe_read": [c_int, c_void_p, c_int64, c_int],
    "weft_probe_product": [c_int, c_int, c_void_p, c_int64, c_int],
}


class KernelsUnavailable(Exception):
    """The library cannot be used here; the message says why and what would help."""


@cache
def load(path: Path = build.LIBRARY) -> ctypes.CDLL:
    """The library with its signatures. Raises `KernelsUnavailable`."""
    if not path.exists():
        raise KernelsUnavailable("not built; `python -m weft.kernels.cpu.build` builds it and says what is missing")
    try:
        library = ctypes.CDLL(str(path))
        library.weft_source_hash.restype = c_char_p
        version = library.weft_abi_version()
        built_from = library.weft_source_hash().decode()
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"cannot be loaded: {error}") from error
    if version != ABI_VERSION or (build.SOURCES.is_dir() and built_from != build.source_hash()):
        raise KernelsUnavailable("built from other sources; `python -m weft.kernels.cpu.build` builds it anew")
    for signatures, result in ((_SIGNATURES, None), (_COUNTING, c_int64), (_PROBES, c_double)):
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = result
    return library


def levels(library: ctypes.CDLL) -> list[Level]:
    """The levels that this machine runs, best first."""
    return [level for level in sorted(Level, reverse=True) if library.weft_has_level(int(level))]


def has_vnni(library: ctypes.CDLL, level: Level) -> bool:
    """Whether this machine has instructions for dot products of bytes that go with the level."""
    return bool(library.weft_has_vnni(int(level)))


def wants_vnni(library: ctypes.CDLL, level: Level) -> bool:
    """Whether to use them at the level to use: a level that the environment names is held to its own instructions.
    Processors of the levels from AVX512 on have these."""
    named = _named()
    return has_vnni(library, level) and (not named or named.endswith(WITH_VNNI) or level >= Level.AVX512)


def _named() -> str:
    return os.environ.get(VARIABLE, "").lower()


@cache
def best_level(library: ctypes.CDLL) -> Level:
    """The fastest level of this machine. Some processors (Intel's with AMX, where a virtual machine hides that)
    multiply pairs of bfloat16 at half the rate of floats: there it is AVX512F. To find out takes 3 ms."""
    best = levels(library)[0]
    if best != Level.AVX512:
        return best
    # 0.008 to 0.5, of either type.
    numbers: list[ctypes.c_uint16 | int] = [0x3C00 + i % 0x300 for i in range(_PROBE_BYTES // 2)]
    data = (ctypes.c_uint16 * (len(numbers) + _LINE // 2))()
    to_line = -ctypes.addressof(data) % _LINE
    data[to_line // 2 : to_line // 2 + len(numbers)] = numbers

    def rate(level: Level) -> float:
        """Operations per second of one thread."""
        began = time.perf_counter()
        done: float = library.weft_probe_product(level, _BFLOAT16, ctypes.addressof(data) + to_line, _PROBE_ROUNDS, 1)
        return done / (time.perf_counter() - began)

    # In turns: the clock of a shared machine changes.
    rates = [(rate(Level.AVX512), rate(Level.AVX512F)) for _ in range(_PROBES_EACH)]
    of_pairs, of_floats = map(max, zip(*rates, strict=True))
    return Level.AVX512F if of_floats > _CLEARLY_FASTER * of_pairs else best


def wanted_level(library: ctypes.CDLL) -> Level:
    """The level to use: the one that the environment names, else the best. Raises `KernelsUnavailable`."""
    runs = levels(library)
    named = _named()
    if named == "off":
        raise KernelsUnavailable(f"switched off by {VARIABLE}")
    if not named:
        return best_level(library)
    for level in runs:
        if named == level.name.lower():
            return level
        if named == level.name.lower() + WITH_VNNI and has_vnni(library, level):
            return level
    raise KernelsUnavailable(
        f"{VARIABLE} is {named!r}; this machine runs {', '.join(level.name.lower() for level in runs)}"
    )
