"""`weft profile` from end to end on a small model: what it says, keeps and writes; never how fast anything was."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.models.runner import with_kernels
from weft.cli import profile_report
from weft.config import EngineConfig
from weft.core.cost.fit import Sample
from weft.core.cost.model import StepShape
from weft.core.cost.profile import Identity, Measurements, Profile, make_profile
from weft.engine.build import build_engine
from weft.engine.profiles import load_profile, store_profile
from weft.models.loader import choose_dtype, open_checkpoint
from weft.models.random_checkpoints import write_tiny
from weft.sched.config import prompt_budget
from weft.worker.identity import identify_spec

IDENTITY = Identity(model="m", dtype="d", device="d", threads=1, page_size=16, kernels=[], software=[])
SMALL = ("--quick", "--num-pages", "64", "--max-running", "4", "--max-step-tokens", "64", "--threads", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("checkpoint"), "llama", tokenizer=True))


def made_up(identity: Identity = IDENTITY) -> Profile:
    """One of a device that is busy from 32 tokens on."""
    chunks = [StepShape.chunk(2**e) for e in range(10)] + [StepShape.chunk(2**e, 100) for e in range(10)]
    samples = [Sample("chunk", shape, max(0.032, 0.001 * shape.num_tokens)) for shape in chunks]
    return make_profile(identity, "made up", Measurements(samples, [], []))


def test_measures_keeps_and_writes(weft, checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "profile.json"
    result = weft("profile", checkpoint, *SMALL, "--json", str(file))
    assert result.exit_code == 0, result.stderr
    assert "T_fwd = " in result.stdout
    assert "T_swap out = " in result.stdout
    assert "90th percentile" in result.stdout
    [stored] = (tmp_path / "cache" / "profiles").iterdir()
    assert f"stored in {stored}" in result.stdout
    found = load_profile(stored)
    assert stored.stem == found.key == found.identity.key
    assert (found.name, found.identity.threads, found.max_tokens) == (checkpoint, 1, 64)
    assert found.swap_out.model is not None
    assert {"all", "chunk", "decode", "mixed"} <= {one.kind for one in found.errors}
    content = json.loads(file.read_text())
    assert content["profile"]["key"] == found.key
    assert content["machine"]["usable_cores"] >= 1
    assert content["versions"]["torch"]


def test_an_engine_uses_what_was_kept(weft, checkpoint, monkeypatch, tmp_path, caplog):
    from weft.llm import LLM

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    options = {"num_pages": 64, "max_running": 4, "max_step_tokens": 64, "threads": 1}
    caplog.set_level("INFO", "weft.engine")
    with LLM(checkpoint, **options) as llm:
        llm.generate("Once", max_tokens=4, ignore_eos=True)
        assert (llm.stats().cost_ratio, llm.stats().cost_factor) == (None, None)
    assert f"`weft profile {checkpoint}` makes one" in caplog.text
    assert weft("profile", checkpoint, *SMALL).exit_code == 0
    with LLM(checkpoint, **options) as llm:
        llm.generate("Once", max_tokens=4, ignore_eos=True)
        stats = llm.stats()
        assert sum(stats.cost_ratio.counts) == stats.steps > 3
        assert stats.cost_factor > 0
        assert 1 <= stats.saturation_tokens <= 64
    assert "cost profile " in caplog.text
    with LLM(checkpoint, **options | {"dtype": "float64"}) as llm:  # not what was profiled
        assert llm.stats().cost_factor is None
    [stored] = (tmp_path / "profiles").iterdir()
    stored.write_text(stored.read_text()[:1000])
    with LLM(checkpoint, **options) as llm:
        assert llm.stats().cost_factor is None
    assert f"{stored} is not used: it is no cost profile, or a damaged one" in caplog.text


@with_kernels
def test_doctor_says_what_another_dtype_takes_where_it_was_measured(weft, checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    config = EngineConfig(model=checkpoint, device="cpu", num_pages=64, max_running=4, threads=1)
    flags = ("--json", "--device", "cpu", "--num-pages", "64", "--max-running", "4", "--threads", "1")

    def measured() -> list[str]:
        return json.loads(weft("doctor", checkpoint, *flags).output)["will_use"]["measured"]

    assert measured() == []
    spec = open_checkpoint(Path(checkpoint)).spec
    for dtype, quantization in ((torch.float32, None), (torch.bfloat16, "int8")):
        store_profile(tmp_path, made_up(identify_spec(config, replace(spec, dtype=dtype, quantization=quantization))))
    (with_int8, float32) = measured()
    assert re.fullmatch(r"float32: [\d.]+ ms for a token, [\d.e+]+ ms for a prompt of 256 tokens", float32)
    assert with_int8.startswith("bfloat16 with int8 weights: ")


def test_the_saturation_point_bounds_prompts(weft, checkpoint, monkeypatch, tmp_path, caplog):
    """A profile made for exactly this configuration; `weft doctor` tells what an engine then does."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    caplog.set_level("INFO", "weft.engine")
    config = EngineConfig(model=checkpoint, device="cpu", num_pages=64, max_running=4, threads=1)
    spec = open_checkpoint(Path(checkpoint)).spec
    identity = identify_spec(config, replace(spec, dtype=choose_dtype(spec.dtype, "auto", "cpu")))
    store_profile(tmp_path, made_up(identity))
    flags = ("--json", "--device", "cpu", "--num-pages", "64", "--max-running", "4", "--threads", "1")
    for more, expected in (((), 29), (("--max-step-tokens", "64"), "none")):
        planned = json.loads(weft("doctor", checkpoint, *flags, *more).output)["will_use"]
        assert planned["saturation_tokens"] == expected
    for changes, expected in (({}, 29), ({"max_running": 40}, 56), ({"max_step_tokens": 64}, 64)):
        engine = build_engine(msgspec.structs.replace(config, **changes), lambda client, envelope: None)
        try:
            assert prompt_budget(engine.scheduler.config, engine.info.max_running, 16) == expected
        finally:
            engine.close()
    assert "a step of 29 tokens gets no more of prompts than a page" in caplog.text


def test_a_pool_too_small_to_learn_from(weft, checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    result = weft("profile", checkpoint, "--quick", "--num-pages", "2", "--max-running", "1", "--max-step-tokens", "1")
    assert result.exit_code == 1
    assert "samples are too few to fit" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_before_anything_is_measured(weft, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = weft("profile", "--png", str(tmp_path / "profile.png"))
    assert result.exit_code == 1
    assert "--png needs the package matplotlib: pip install matplotlib" in result.stderr


def test_a_cache_that_cannot_be_written(weft, checkpoint, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file"))
    result = weft("profile", checkpoint, *SMALL)
    assert result.exit_code == 1
    assert "set WEFT_CACHE to another folder" in result.stderr


def test_bars():
    lines = list(profile_report.bars(made_up()))
    assert len(lines) == 10
    assert [line for line in lines if line.endswith("← S")] == lines[5:6]
    assert all("│" in line for line in lines)
    assert lines[0].count("█") < lines[-1].count("█") == profile_report.BAR_WIDTH


def test_the_formula_names_its_terms():
    text = "\n".join(profile_report.formula(made_up()))
    assert "T_fwd = 32 ms" in text
    assert "1 ms per token above 32" in text
    assert "S = 29 tokens per step (of 512 measured)" in text
    assert "T_swap in = not measured" in text


def test_a_drawing(tmp_path: Path):
    pytest.importorskip("matplotlib")
    profile_report.write_png(made_up(), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
