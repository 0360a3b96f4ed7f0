"""Safetensors checkpoints with quantized weights: every format, against plain checkpoints of the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.quantized_writing import (
    AWQ,
    CASES,
    FP8,
    GPTQ,
    awq,
    compressed_tensors,
    float8,
    gptq,
    int_quantized,
    pack_quantized,
    write_quantized,
)
from tests.models.runner import Runner, bytes_of_weights
from tests.models.test_against_transformers import logits_of, prompts, reference
from weft.models.loader import load_model, open_checkpoint
from weft.models.quantized import expand as expanding
from weft.models.safetensors_files import INDEX_FILE


def values_of(path: Path, name: str) -> torch.Tensor:
    return torch.cat([piece.values for piece in open_checkpoint(path).pieces([name])])


def logits(path: Path, **options) -> torch.Tensor:
    runner = Runner(load_model(str(path), **{"quantized_blocks": "expand", **options}).model)
    return runner.run([(runner.open(64), prompts(320)[0])])[0]


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_they_stand_for(name: str, tmp_path: Path) -> None:
    packer, settings, kind = CASES[name]
    packed, plain = write_quantized(tmp_path, packer, settings, "qwen2")
    infos, meant = open_checkpoint(packed).tensors(), load_file(plain / "model.safetensors")
    assert set(infos) == set(meant)
    for tensor, expected in meant.items():
        is_packed = "_proj.weight" in tensor
        assert (infos[tensor].dtype, infos[tensor].shape) == (kind if is_packed else "F32", expected.shape)
        assert torch.equal(values_of(packed, tensor), expected), tensor
    stored = sum(info.num_bytes for info in open_checkpoint(packed).tensors().values())
    assert stored < 0.9 * sum(tensor.numel() * 4 for tensor in meant.values())
    assert torch.equal(logits(packed), logits(plain))
    assert load_model(str(packed), quantized_blocks="expand").num_bytes == bytes_of_weights(plain, torch.float32)


@pytest.mark.parametrize("name", ["gptq-64-act-order", "awq", "pack-4-bits-asymmetric", "int8", "fp8-blocks"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_transformers(name: str, family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    packed, plain = write_quantized(tmp_path, *CASES[name][:2], family)
    expected = logits_of(reference(plain, torch.float32), prompts(320)[0])
    assert expected.std() > 0.1
    assert (logits(packed) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_expanded_in_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packer, settings, _ = CASES[name]
    packed, plain = write_quantized(tmp_path, packer, settings)
    monkeypatch.setattr(expanding, "PIECE_NUMBERS", 3000)
    meant = load_file(plain / "model.safetensors")
    for piece in open_checkpoint(packed).pieces([tensor for tensor in meant if "_proj" in tensor]):
        assert piece.values.numel() <= 3000
        assert torch.equal(piece.values, meant[piece.name][piece.first : piece.first + len(piece.values)])
    calls = []
    load_model(str(packed), progress=lambda done, total: calls.append((done, total)))
    assert len(calls) > 100
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == sum(i.num_bytes for i in open_checkpoint(packed).tensors().values())


def test_a_zero_point_of_0_is_kept_by_version_1(tmp_path: Path) -> None:
    """Version 1 subtracts 1 from words of eight zero points; a 0 borrows."""
    packed, plain = write_quantized(tmp_path, gptq(4, 32, sym=False, version=2), {**GPTQ, "group_size": 32})
    path, name = packed / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(path)
    before = tensors[f"{name}.qzeros"]
    with_zeros = before & ~0xF0  # the second of eight
    for key in [key for key in tensors if key.endswith("qzeros")]:
        tensors[key] = (with_zeros if key == f"{name}.qzeros" else tensors[key]) - 0x11111111
    save_file(tensors, path)
    expected = load_file(plain / "model.safetensors")[f"{name}.weight"].clone()
    scales = tensors[f"{name}.scales"].float()
    expected[1::8] += ((before >> 4 & 15) * scales[:, 1::8]).T.repeat_interleave(32, 1)
    torch.testing.assert_close(values_of(packed, f"{name}.weight"), expected, rtol=1e-6, atol=1e-7)


def test_words_that_are_filled_in_part(tmp_path: Path) -> None:
    """Rows of 42 numbers end within a word, and zero points of 42 outputs too."""
    settings = compressed_tensors("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False})
    packer = pack_quantized(4, -1, symmetric=False)
    packed, plain = write_quantized(tmp_path, packer, settings, intermediate_size=42, hidden_size=36, head_dim=6)
    for name, expected in load_file(plain / "model.safetensors").items():
        assert torch.equal(values_of(packed, name), expected)


def test_tensors_of_a_matrix_may_be_in_several_files(tmp_path: Path) -> None:
    packed, plain = write_quantized(tmp_path, gptq(4, 32, sym=False), {**GPTQ, "group_size": 32})
    tensors = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    files = {name: f"{'b' if name.endswith(('scales', 'g_idx')) else 'a'}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, packed / file)
    (packed / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    assert torch.equal(logits(packed), logits(plain))


def test_the_dtype_of_computing_is_a_setting(tmp_path: Path) -> None:
    packed, plain = write_quantized(tmp_path, *CASES["gptq"][:2])
    for options in ({"dtype": "bfloat16"}, {"dtype": "float64"}):
        assert torch.equal(logits(packed, **options), logits(plain, **options))


# Modules that are left as they were


@pytest.mark.parametrize(
    ("packer", "settings"),
    [
        (gptq(4, 128, sym=True), {**GPTQ, "modules_to_not_convert": ["model.layers.0", "down_proj"]}),
        (gptq(4, 128, sym=True), {**GPTQ, "dynamic": {"-:.*down_proj": {}}}),
        (awq(128), {**AWQ, "modules_to_not_convert": ["layers.0", "lm_head", "down_proj"]}),
        (float8((32, 64), "weight_scale_inv"), {**FP8, "modules_to_not_convert": ["model.layers.0", "down_proj"]}),
        (float8((32, 64), "weight_scale_inv"), {**FP8, "ignored_layers": ["down_proj"]}),
        (
            pack_quantized(4, 64, symmetric=True),
            compressed_tensors(
                "pack-quantized",
                {"num_bits": 4, "strategy": "group", "group_size": 64},
                ignore=["lm_head", "re:model\\.layers\\.0\\..*", "re:.*down_proj$"],
            ),
        ),
    ],
)
def test_modules_that_are_not_quantized_are_plain(packer, settings, tmp_path: Path) -> None:
    packed, plain = write_quantized(tmp_path, packer, settings, left=("0", "down_proj"))
    infos = open_checkpoint(packed).tensors()
    assert {name for name, info in infos.items() if info.numbers_in} == {
        f"model.layers.1.{name}_proj.weight"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    }
    assert torch.equal(logits(packed), logits(plain))


def test_other_modules_may_be_quantized_too(tmp_path: Path) -> None:
    packed, plain = write_quantized(tmp_path, *CASES["gptq"][:2], also=("lm_head",))
    assert open_checkpoint(packed).tensors()["lm_head.weight"].numbers_in == "lm_head.qweight"
    assert torch.equal(logits(packed), logits(plain))


def test_groups_of_modules_have_settings_of_their_own(tmp_path: Path) -> None:
    """In order of a name, a pattern, a class."""
    four = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}
    eight = {"targets": ["re:.*mlp"], "weights": {"num_bits": 8, "strategy": "channel"}}
    whole = {
        "targets": ["model.layers.1.mlp.up_proj"],
        "format": "int-quantized",
        "weights": {"num_bits": 8, "strategy": "channel"},
    }
    groups = {"config_groups": {"a": four, "b": eight, "c": whole}}
    settings = {**compressed_tensors("pack-quantized", {}), **groups}
    packers = {"self_attn": pack_quantized(4, 64, symmetric=True), "mlp": pack_quantized(8, -1, symmetric=True)}
    meant: dict[str, torch.Tensor] = {}
    stored: dict[str, torch.Tensor] = {}
    for part, other in (("self_attn", "mlp"), ("mlp", "self_attn")):
        packed, plain = write_quantized(tmp_path / part, packers[part], settings, left=(other,))
        new = load_file(plain / "model.safetensors")
        meant.update({name: tensor for name, tensor in new.items() if f".{other}." not in name})
        new = load_file(packed / "model.safetensors")
        stored.update({name: tensor for name, tensor in new.items() if f".{other}." not in name})
    name = "model.layers.1.mlp.up_proj"
    tensors, values = int_quantized(symmetric=True)(meant[f"{name}.weight"].numpy(), np.random.default_rng(3))
    meant[f"{name}.weight"] = torch.from_numpy(values)
    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(name)}
    stored.update({f"{name}.{last}": tensor for last, tensor in tensors.items()})
    save_file(stored, packed / "model.safetensors")
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    kinds = {info.dtype for info in open_checkpoint(packed).tensors().values()}
    assert kinds == {"F32", "compressed-tensors int4", "compressed-tensors int8"}
    assert torch.equal(logits(packed), logits(plain))


def test_biases_of_0_that_the_architecture_has_not_are_dropped(tmp_path: Path) -> None:
    extra = {"model.layers.0.mlp.up_proj.bias": torch.zeros(256, dtype=torch.float16)}
    packed, plain = write_quantized(tmp_path / "zeros", *CASES["gptq"][:2], extra=extra)
    assert torch.equal(logits(packed), logits(plain))


def test_scales_of_activations_and_of_kv_are_not_needed(tmp_path: Path) -> None:
    prefix = "model.layers.0.self_attn"
    names = (f"{prefix}.k_scale", f"{prefix}.v_scale", f"{prefix}.q_proj.input_scale", f"{prefix}.q_proj.output_scale")
    for name in ("float8-tensor", "fp8-tensor"):
        packed, plain = write_quantized(
            tmp_path / name, *CASES[name][:2], extra={name: torch.ones(1) for name in names}
        )
        assert torch.equal(logits(packed), logits(plain))


# What is said


def test_expansion_is_announced(tmp_path: Path) -> None:
    packed, _ = write_quantized(tmp_path / "gptq", *CASES["gptq-64-act-order"][:2])
    notice = load_model(str(packed), dtype="float32").notice
    assert notice is not None
    assert notice.startswith("GPTQ int4 expanded to float32, as no kernel computes on such matrices: ")
    packed, _ = write_quantized(tmp_path / "int8", *CASES["int8"][:2])
    notice = load_model(str(packed), dtype="bfloat16").notice
    assert notice is not None
    assert notice.startswith("compressed-tensors int8 expanded to bfloat16, as no kernel computes on such matrices")
    assert "; activations in bfloat16, where the checkpoint was made for fewer bits: " in notice
    settings = {**CASES["float8-tensor"][1], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    packed, _ = write_quantized(tmp_path / "kv", CASES["float8-tensor"][0], settings)
    assert "; KV in float32, where the" in str(load_model(str(packed)).notice)
    packed, plain = write_quantized(tmp_path / "fp8", *CASES["fp8-blocks"][:2])
    assert "; activations in float32, where the" in str(load_model(str(packed)).notice)
    assert load_model(str(plain)).notice is None
