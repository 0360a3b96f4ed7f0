"""`weft models`: formats, bits and memory of checkpoints, read from their headers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft as weft_package
from tests.gguf.writing import all_of, write_gguf
from tests.models.quantized_writing import CASES, write_quantized
from tests.models.runner import bytes_of_weights
from weft.kernels import dispatch
from weft.models.random_checkpoints import write_tiny
from weft.worker.sizing import FreeMemory

ASSETS = Path(weft_package.__file__).parent / "assets" / "weft-tiny"
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in safetensors, with GGUF files beside and below it."""
    folder = write_tiny(tmp_path / "models", "qwen2", dtype=torch.bfloat16, **SHAPE)
    (folder / "q8").mkdir()
    write_gguf(folder / "q8" / "m.gguf", folder, all_of("Q8_0"))
    write_gguf(folder / "split.gguf", folder, split=15)
    (folder / "bad.gguf").write_bytes(b"GGUF")
    return folder


def listed(weft, *arguments: str) -> dict[str, dict]:
    result = weft("models", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return {one["name"]: one for one in json.loads(result.output)["models"]}


def test_a_directory(weft, folder: Path) -> None:
    found = listed(weft, str(folder))
    split = f"{folder}/split-00001-of-00003.gguf"
    assert list(found) == [str(folder), f"{folder}/bad.gguf", f"{folder}/q8/m.gguf", split]
    plain, q8, whole = found[str(folder)], found[f"{folder}/q8/m.gguf"], found[split]
    assert (plain["format"], plain["bits"], plain["where"]) == ("safetensors BF16", 16.0, "directory")
    assert (q8["format"], whole["format"], whole["bits"]) == ("GGUF Q8_0", "GGUF F32", 32.0)
    assert 8.5 <= q8["bits"] < 8.8
    assert plain["memory_bytes"] == bytes_of_weights(folder, torch.bfloat16)
    assert q8["memory_bytes"] < 0.6 * plain["memory_bytes"]
    if dispatch.block_types("cpu", torch.bfloat16):
        assert q8["memory_bytes"] == bytes_of_weights(folder / "q8" / "m.gguf", torch.bfloat16)
    assert whole["memory_bytes"] == bytes_of_weights(Path(split), torch.float32)
    assert whole["bytes"] == sum(file.stat().st_size for file in folder.glob("split-*"))
    assert plain["bytes"] == sum((folder / name).stat().st_size for name in ("config.json", "model.safetensors"))
    assert (q8["architecture"], q8["max_context"], q8["dtype"]) == ("Qwen2ForCausalLM", 512, "bfloat16")


def test_blocks_that_become_others(weft, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_tiny(tmp_path / "model", "qwen2", **SHAPE), all_of("Q5_0"))
    if dispatch.block_types("cpu", torch.bfloat16):
        assert listed(weft, str(path))[str(path)]["memory_bytes"] == bytes_of_weights(path, torch.bfloat16)


def test_files_and_what_cannot_be_served(weft, folder: Path) -> None:
    path = f"{folder}/q8/m.gguf"
    found = listed(weft, path, f"{folder}/bad.gguf")
    assert found[path]["where"] == "file"
    assert "bad.gguf is truncated" in found[f"{folder}/bad.gguf"]["error"]
    table = weft("models", path, f"{folder}/bad.gguf").output
    assert "GGUF Q8_0" in table
    assert "cannot be served" in table
    nothing = weft("models", str(folder / "nowhere"))
    assert (nothing.exit_code, "neither a config.json nor GGUF files" in nothing.stderr) == (1, True)


@pytest.mark.parametrize(("name", "bits"), [("gptq", 4.4), ("awq", 4.2), ("pack-4-bits", 4.3), ("fp8-blocks", 8.0)])
def test_quantized_safetensors(weft, name: str, bits: float, tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "num_hidden_layers": 12}
    packed, plain = write_quantized(tmp_path, *CASES[name][:2], **sizes)
    found = listed(weft, str(packed), str(plain))
    one, other = found[str(packed)], found[str(plain)]
    assert one["format"] == f"safetensors {CASES[name][2]}"
    rest = 2 * 320 * 128 * 32 / (12 * 147_456 + 2 * 320 * 128)
    assert one["bits"] == pytest.approx(bits + rest * (1 - bits / 32), abs=0.15)
    assert one["memory_bytes"] == bytes_of_weights(packed, torch.float32)
    assert other["memory_bytes"] == bytes_of_weights(plain, torch.float32)
    assert one["bytes"] < 0.4 * other["bytes"]


def test_quantized_safetensors_that_cannot_be_served(weft, tmp_path: Path) -> None:
    packed, _ = write_quantized(tmp_path, CASES["gptq"][0], {"quant_method": "hqq"})
    assert "quant_method 'hqq'" in listed(weft, str(packed))[str(packed)]["error"]
    assert "cannot be served" in " ".join(weft("models", str(packed)).output.split())


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-blocks"])
def test_the_format_is_that_of_the_matrices_beside_a_large_embedding(weft, name: str, tmp_path: Path) -> None:
    packed, _ = write_quantized(tmp_path, *CASES[name][:2], vocab_size=4096)
    assert listed(weft, str(packed))[str(packed)]["format"] == f"safetensors {CASES[name][2]}"


def test_names_are_shown_as_they_are(weft, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "[v2]", "qwen2", **SHAPE)
    write_gguf(directory / "[b]m.gguf", directory, all_of("Q8_0"))
    (directory / "odd\udcff.gguf").write_bytes(b"GGUF")
    raw = json.loads((directory / "config.json").read_text())
    for architecture, shown in (("[/b]", "[/b]"), (5, "5")):
        (directory / "config.json").write_text(json.dumps({**raw, "architectures": [architecture]}))
        table = "".join(weft("models", str(directory)).output.split())
        assert "[v2]/[b]m.gguf" in table
        assert f"{shown}512" in table
        assert "odd\\udcff.gguf" in table


def test_one_that_cannot_be_read_leaves_the_others(weft, folder: Path) -> None:
    (folder / "gone.gguf").symlink_to(folder / "nowhere.gguf")
    (folder / "config.json").write_text('{"a":' * 100_000)
    found = listed(weft, str(folder))
    assert "does not exist" in found[f"{folder}/gone.gguf"]["error"]
    assert "not valid JSON" in found[str(folder)]["error"]
    assert found[f"{folder}/q8/m.gguf"]["format"] == "GGUF Q8_0"
    assert "gone.gguf" in weft("models", str(folder)).output


def test_a_checkpoint_that_is_cut_is_named(weft, folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    one = listed(weft, str(folder))[str(folder)]
    assert (one["format"], "model.safetensors" in one["error"]) == (None, True)


def test_the_hub_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--org--gguf"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (folder / "config.json").unlink()
    folder.rename(repository / "snapshots" / commit)
    # The hub's client reads where its cache is when it is imported. Headers are read without torch.
    program = (
        "import sys\nfrom weft.cli.main import app\ntry:\n    app(['models', '--json'])\n"
        "except SystemExit:\n    assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    found = {one["name"]: one for one in json.loads(ran.stdout)["models"]}
    assert list(found) == ["weft-tiny", "org/gguf/bad.gguf", "org/gguf/q8/m.gguf", "org/gguf/split-00001-of-00003.gguf"]
    assert found["org/gguf/q8/m.gguf"]["where"] == "hub cache, main"


def test_doctor_says_what_a_file_will_need(weft, folder: Path) -> None:
    path = folder / "q8" / "m.gguf"
    result = weft("doctor", str(path), "--json", "--num-pages", "64", "--device", "cpu", "--dtype", "float32")
    found = json.loads(result.output)["will_use"]
    assert (found["architecture"], found["dtype"]) == ("Qwen2ForCausalLM", "float32")
    note = "stay in blocks" if dispatch.block_types("cpu", torch.float32) else "expanded to float32, as no kernel"
    assert found["weights_note"].startswith(f"Q8_0 {note}")


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"intermediate_size": 96}, "has shape"),
    ],
)
def test_doctor_names_what_would_not_load(weft, edit: dict[str, int], problem: str, folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | edit))
    result = weft("doctor", str(folder), "--device", "cpu")
    assert result.exit_code == 1
    assert problem in result.output


def test_doctor_names_a_tokenizer_that_does_not_fit(weft, folder: Path) -> None:
    result = weft("doctor", str(folder), "--device", "cpu")
    assert (result.exit_code, "tokenizer.json" in result.output) == (1, True)
    shutil.copy(ASSETS / "tokenizer.json", folder)
    result = weft("doctor", str(folder), "--device", "cpu")
    assert result.exit_code == 1
    assert "tokens and the model only 320" in result.output
    assert weft("doctor", "--device", "cpu").exit_code == 0


def test_doctor_says_that_weights_do_not_fit(weft, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.worker.build.free_memory", lambda device: FreeMemory(100_000, 100_000))
    result = weft("doctor", str(folder), "--device", "cpu", "--dtype", "float32")
    assert result.exit_code == 1
    assert f"PROBLEM: {folder}: the weights of {folder} take" in result.output
