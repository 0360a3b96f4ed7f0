"""Restricts every engine to the same processor instructions, and reads the instructions that engines report.

Variables of the environment hold libraries to a level: ATen, oneDNN and MKL read theirs when they are loaded, and Weft
reads `WEFT_CPU_KERNELS`. Where CPUID can be made to fault, a process does not even see the features beyond the level
(`hidden_features`). llama.cpp has to be compiled for the level. A library may ignore its variable, so a figure counts
only if the engine's own words show the level: what it answers when asked, and the implementations that oneDNN names as
it creates them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.peers import hidden_features

_VARIABLES = ("WEFT_CPU_KERNELS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_VALUES = {"avx2": ("avx2", "avx2", "AVX2", "AVX2"), "avx512": ("avx512", "avx512", "AVX512_CORE_BF16", "AVX512")}
_HIDDEN = {"avx2": ("avx512", "amx"), "avx512": ("amx",)}
_BEYOND = {"avx2": ("avx512", "avx10", "amx"), "avx512": ("amx",)}
LEVELS = tuple(_VALUES)


def environment(level: str | None) -> dict[str, str]:
    """Variables that hold an engine's process to `level` and make oneDNN name what it creates. None: no variables."""
    if level is None:
        return {}
    variables = dict(zip(_VARIABLES, _VALUES[level], strict=True))
    return {**variables, **hidden_features.environment(_HIDDEN[level]), "ONEDNN_VERBOSE": "profile_create"}


def in_log(log: str) -> list[str]:
    """What oneDNN wrote of instructions: the level it takes, and the kinds of implementations it created."""
    found = set()
    for line in log.splitlines():
        if not line.startswith("onednn_verbose"):
            continue
        for field in line.split(","):
            if field.startswith("isa:") or re.fullmatch(r"(jit|brg|x64|gemm|simple|ref)\w*(:\w+)+", field):
                found.add(f"oneDNN {field}")
    return sorted(found)


def refusal(level: str, words: Iterable[str]) -> str | None:
    """Why `words`, an engine's own, do not show that it stays at `level`; None if they do."""
    said = [re.sub(r"\w+ = 0", "", each).lower() for each in words]
    for each in said:
        for beyond in _BEYOND[level]:
            if beyond in each:
                return f"it uses more than {level}: {each.strip()[:160]}"
    if not any(level in each for each in said):
        return f"nothing that it says shows {level}"
    return None
