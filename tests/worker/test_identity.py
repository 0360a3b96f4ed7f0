"""The identity of a cost profile: it ignores the values of weights, and has everything else that times depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.config import EngineConfig
from weft.core.cost.fit import Sample
from weft.core.cost.model import StepShape
from weft.core.cost.profile import Identity, Measurements, make_profile
from weft.engine.profiles import find_profile, store_profile
from weft.kernels.cpu import library
from weft.models.loader import load_model, open_checkpoint
from weft.models.random_checkpoints import write_tiny
from weft.worker.identity import identify, identify_spec

SHAPES = [StepShape.chunk(tokens, before) for tokens in range(1, 20) for before in (0, 100)]
MEASURED = Measurements([Sample("chunk", shape, 0.001 * shape.num_tokens) for shape in SHAPES], [], [])


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
    assert identify_spec(config, replace(open_checkpoint(checkpoint).spec, dtype=torch.float64)) == identify(
        config, loaded
    )


def test_what_takes_other_time_does(tmp_path: Path) -> None:
    others = [
        of(tmp_path),
        of(tmp_path, "qwen3"),
        of(tmp_path, dtype="float64"),
        of(tmp_path, threads=2),
        of(tmp_path, page_size=8),
    ]
    assert len({one.key for one in others}) == len(others)


def test_a_profile_of_another_level_of_kernels_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`WEFT_CPU_KERNELS` names a lower level than that which the stored profile was measured at, or none."""
    try:
        levels = [level.name.lower() for level in library.levels(library.load())]
    except library.KernelsUnavailable as reason:
        pytest.skip(str(reason))
    caplog.set_level("INFO", "weft.engine")
    stored: list[Identity] = []
    for name in [*levels, "off"]:
        monkeypatch.setenv(library.VARIABLE, name)
        here = of(tmp_path)
        assert any(kernel.startswith(f"C++: {'none' if name == 'off' else name}") for kernel in here.kernels)
        assert find_profile(tmp_path, here, "m") is None
        assert "no cost profile for" in caplog.messages[-1]
        store_profile(tmp_path, make_profile(here, "m", MEASURED))
        stored.append(here)
    monkeypatch.setenv(library.VARIABLE, levels[0])
    found = find_profile(tmp_path, of(tmp_path), "m")
    assert found is not None
    assert found.identity == stored[0]


def test_it_can_be_read(tmp_path: Path) -> None:
    found = of(tmp_path)
    assert found.describe().startswith("LlamaForCausalLM ")
    assert (found.dtype, found.threads, found.page_size) == ("float32", 1, 16)
    assert found.device
    assert any(kernel.startswith("attention: ") for kernel in found.kernels)
    assert [one.split()[0] for one in found.software] == ["weft", "torch"]
