"""For what a profile holds: other weights do not matter, everything that takes other time does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from weft.config import EngineConfig
from weft.core.cost.profile import Identity
from weft.models.loader import load_model, read_spec
from weft.models.random_checkpoints import write_tiny
from weft.worker.identity import identify, identify_spec


def of(directory: Path, family: str = "llama", seed: int = 0, **options: object) -> Identity:
    checkpoint = str(write_tiny(directory / f"{family}{seed}", family, seed=seed))
    config = EngineConfig(model=checkpoint, **{"device": "cpu", "dtype": "float32", "threads": 1, **options})  # type: ignore[arg-type]
    return identify(config, load_model(checkpoint, dtype=config.dtype))


def test_weights_do_not_matter(tmp_path: Path) -> None:
    assert of(tmp_path).key == of(tmp_path, seed=1).key


def test_the_weights_need_not_be_loaded(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "model", "qwen3")
    config = EngineConfig(model=str(checkpoint), device="cpu", dtype="float64")
    loaded = load_model(str(checkpoint), dtype=config.dtype)
    assert identify_spec(config, replace(read_spec(checkpoint), dtype=torch.float64)) == identify(config, loaded)


def test_what_takes_other_time_does(tmp_path: Path) -> None:
    others = [
        of(tmp_path),
        of(tmp_path, "qwen3"),
        of(tmp_path, dtype="float64"),
        of(tmp_path, threads=2),
        of(tmp_path, page_size=8),
    ]
    assert len({one.key for one in others}) == len(others)


def test_it_can_be_read(tmp_path: Path) -> None:
    found = of(tmp_path)
    assert found.describe().startswith("LlamaForCausalLM ")
    assert (found.dtype, found.threads, found.page_size) == ("float32", 1, 16)
    assert found.device
    assert any(kernel.startswith("attention: ") for kernel in found.kernels)
    assert [one.split()[0] for one in found.software] == ["weft", "torch"]
