"""Checkpoints with random weights, to measure the speed of a model's shape without downloading it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from weft.abi.errors import ConfigError
from weft.config import cache_directory

SHAPES: Mapping[str, str] = {
    "tiny": "a Llama of three small layers, to try commands with",
    "qwen3-0.1b": "a small Qwen3 with a vocabulary of 32,000; 0.2 GiB in bfloat16",
    "qwen3-0.6b": "the shape of Qwen3-0.6B with a vocabulary of 32,000; 0.9 GiB in bfloat16",
}


def random_weights(shape: str, report: Callable[[str], None]) -> Path:
    """Return the directory of a checkpoint of this shape; the first call writes it, and calls `report`.

    It is under `WEFT_CACHE`, else under `XDG_CACHE_HOME` or `~/.cache`. Raises `ConfigError` for an unknown shape.
    """
    if shape not in SHAPES:
        known = "; ".join(f"{name} ({text})" for name, text in SHAPES.items())
        raise ConfigError(f"there are no random weights of shape {shape!r}; there are: {known}")
    directory = cache_directory(os.environ) / "random-weights" / shape
    if not (directory / "config.json").is_file():
        report(f"writing random weights of shape {shape} to {directory}")
        _write(shape, directory)
    return directory


def _write(shape: str, directory: Path) -> None:
    import torch

    from weft.models.random_checkpoints import QWEN3_0_1B, QWEN3_0_6B, write_checkpoint, write_tiny

    # An interrupted write must not look like a checkpoint.
    partial = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
    try:
        if shape == "tiny":
            write_tiny(partial, tokenizer=True)
        else:
            config = {"qwen3-0.1b": QWEN3_0_1B, "qwen3-0.6b": QWEN3_0_6B}[shape]
            write_checkpoint(partial, config, dtype=torch.bfloat16, tokenizer=True)
        partial.rename(directory)
    except Exception as error:  # each library reports a full disk with its own error
        raise ConfigError(f"random weights cannot be written to {directory}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
