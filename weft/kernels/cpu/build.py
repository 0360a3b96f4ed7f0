"""Compiles the C++ kernels into one shared library beside this file.

    python -m weft.kernels.cpu.build

Owns the compiler's command lines. Installing the package calls it too (`setup.py`), so it imports nothing but the
standard library. A machine without a compiler does without the library: the kernels in torch do the same work slower.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = HERE / "_weft_cpu.so"

_COMMON = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (
    *(*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    "-mprefer-vector-width=512",
)
_X86_LEVELS = {"avx2": _AVX2, "avx512": _AVX512, "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16")}


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which and how."""


def source_hash() -> str:
    """Identifies the sources, so that a library that was built from others is not used."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(target: Path = LIBRARY) -> Path:
    """Compile and link; replaces `target` in one step. Raises `BuildError`."""
    compiler = _compiler()
    levels: dict[str, tuple[str, ...]] = {"abi": (), "threads": (), "level_portable": ()}
    if platform.machine().lower() in ("x86_64", "amd64"):
        levels |= {f"level_{name}": flags for name, flags in _X86_LEVELS.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        running = []
        for name, flags in levels.items():
            objects.append(str(Path(scratch, f"{name}.o")))
            command = [*compiler, *_COMMON, *flags, f'-DWEFT_SOURCE_HASH="{source_hash()}"']
            running.append(_start([*command, "-c", str(SOURCES / f"{name}.cpp"), "-o", objects[-1]]))
        for process in running:
            _finish(process)
        linked = Path(scratch, target.name)
        _finish(_start([*compiler, "-shared", "-pthread", *objects, "-o", str(linked)]))
        # Another process may have the old file mapped: it keeps that one, and new processes find the new one whole.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as beside:
            beside.write(linked.read_bytes())
        os.chmod(beside.name, 0o755)  # noqa: S103
        os.replace(beside.name, target)
    return target


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError("no C++ compiler: looked for $CXX, g++, clang++ and c++")


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error


def _finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate()
    if process.returncode != 0:
        command = process.args if isinstance(process.args, list) else [str(process.args)]
        raise BuildError(f"{shlex.join(map(str, command))} failed:\n{output.strip()}")


def main() -> int:
    """Build, and say where; 1 and the reason when that fails."""
    try:
        print(f"built {build()}")
    except BuildError as error:
        print(f"Kernels in C++ were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
