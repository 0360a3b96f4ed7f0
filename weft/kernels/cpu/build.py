"""Compiles the C++ kernels into one shared library beside this file.

    python -m weft.kernels.cpu.build

Owns the compiler's command lines. Installing the package calls it too (`setup.py`), so it imports nothing but the
standard library and `weft.native`. A machine without a compiler does without the library: the kernels in torch do the
same work slower.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

from weft import native

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = HERE / "_weft_cpu.so"

_COMMON = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512F = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512 = (*_AVX512F, "-mavx512bf16")
_X86_LEVELS = {"avx2": _AVX2, "avx512f": _AVX512F, "avx512": _AVX512, "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16")}
_X86_BLOCKS = {
    "avx2": _AVX2,
    "avx2vnni": (*_AVX2, "-mavxvnni"),
    "avx512f": _AVX512F,
    "avx512vnni": (*_AVX512F, "-mavx512vnni"),
    "amx": (*_AVX512, "-mavx512vnni", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"),
}
"""Products with quantized blocks. Dot products of bytes are there or not at more than one level."""


def source_hash() -> str:
    """Identifies the sources, so that a library that was built from others is not used."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(target: Path = LIBRARY) -> Path:
    """Compile and link; replaces `target` in one step. Raises `native.BuildError`."""
    compiler = native.find_compiler("C++", "CXX", ("g++", "clang++", "c++"))
    levels: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("abi", "threads", "level_portable", "quant", "quant_portable"), ()
    )
    if platform.machine().lower() in ("x86_64", "amd64"):
        levels |= {f"level_{name}": flags for name, flags in _X86_LEVELS.items()}
        levels |= {f"quant_{name}": flags for name, flags in _X86_BLOCKS.items()}
    with native.replacing(target) as made:
        objects = {name: str(made.with_name(f"{name}.o")) for name in levels}
        defined = f'-DWEFT_SOURCE_HASH="{source_hash()}"'
        native.run(
            [
                [*compiler, *_COMMON, *flags, defined, "-c", str(SOURCES / f"{name}.cpp"), "-o", objects[name]]
                for name, flags in levels.items()
            ]
        )
        native.run([[*compiler, "-shared", "-pthread", *objects.values(), "-o", str(made)]])
    return target


if __name__ == "__main__":
    sys.exit(native.main(build, "Kernels in C++ were not built"))
