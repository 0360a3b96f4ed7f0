"""Where the kernels in Triton can be used. Imports neither Triton nor what needs it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from weft.kernels.base import HeadShape

NAME = "triton"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
"""Of a device: what the sizes of the kernels were chosen for; older ones have less shared memory, and no bfloat16."""

MAX_GROUP = 64
"""Query heads that share a KV head: the queries of a token are in one program."""
MAX_HEAD_DIM = 256


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of `dtype` on `device`."""
    return device.type == "cuda" and missing(device, dtype) is None


def has_heads(shape: HeadShape) -> bool:
    """Whether attention takes heads of this shape; others go to torch."""
    return shape.head_dim <= MAX_HEAD_DIM and shape.group <= MAX_GROUP


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether this is a device of capability 9.x: a block can have 227 KiB of shared memory, and products are those of
    warp groups."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the kernels from being used for `dtype` on this CUDA device. None: nothing."""
    if dtype not in DTYPES:
        return f"no kernels for {str(dtype).removeprefix('torch.')}"
    return _missing_here() or _missing_on(device)


def note(device: torch.device, dtype: torch.dtype) -> str:
    """For people: which Triton is used on a CUDA device, or why none is."""
    reason = missing(device, dtype)
    if reason is not None:
        return f"Triton: {reason}"
    try:
        return f"Triton: {version('triton')}"
    except PackageNotFoundError:  # a build of another name
        return "Triton: of unknown version"


@cache
def _missing_here() -> str | None:
    if find_spec("triton") is None:
        return "not installed; torch's builds for CUDA bring it"
    # Triton builds what launches a kernel when it is first launched, with the first of these that it finds.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler; install gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "needs Python's headers, to build what launches its kernels; install python3-dev"
    return None


@cache
def _missing_on(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "not tried on AMD devices"
    # Without a device, the question is what one would have.
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "needs a device of compute capability {}.{}".format(*MIN_CAPABILITY)
    return None
