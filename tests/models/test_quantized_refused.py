"""Quantized weights that are refused: formats that are not implemented, and tensors that cannot be right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.quantized_writing import AWQ, CASES, FP8, GPTQ, TOKENS_IN_8_BITS, compressed_tensors, write_quantized
from weft.abi.errors import ModelLoadError, Unsupported
from weft.models.loader import load_model
from weft.models.quantized.names import is_part_of, matches
from weft.models.random_checkpoints import write_tiny

UP = "model.layers.1.mlp.up_proj"
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 64}
INT8 = {"num_bits": 8, "strategy": "channel"}


def refused(directory: Path, *parts: str, error: type[Exception] = ModelLoadError) -> None:
    with pytest.raises(error) as caught:
        load_model(str(directory))
    for part in parts:
        assert part in str(caught.value)


def stating(directory: Path, settings: Any) -> Path:
    """A plain checkpoint whose config.json has these settings, and whose weights cannot be read."""
    write_tiny(directory)
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directory


# What is not implemented


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        *((({"quant_method": method, "bits": 4}), f"quant_method '{method}'") for method in (
            *("bitsandbytes", "aqlm", "hqq", "quip", "mxfp4", "marlin", "eetq", "torchao", "fbgemm_fp8", "auto-round"),
        )),
        ({"bits": 4}, "quant_method 'unknown'"),
        ({"load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({**GPTQ, "bits": 3}, "GPTQ of 3 bits"),
        ({**GPTQ, "bits": 2}, "GPTQ of 2 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "'is_marlin_format'"),
        ({**GPTQ, "rotation": "hadamard"}, "'rotation'"),
        ({**GPTQ, "pack_dtype": "int16"}, "words other than int32"),
        ({**GPTQ, "dynamic": {"-:.*down": {}, "+:.*up": {"bits": 8}}}, "settings by module"),
        ({**AWQ, "bits": 8}, "AWQ of 8 bits"),
        ({**AWQ, "version": "gemv"}, "layout 'gemv'"),
        ({**AWQ, "zero_point": False}, "without zero points"),
        ({**FP8, "activation_scheme": "none"}, "activation_scheme 'none'"),
        ({**FP8, "fmt": "e5m2"}, "'e5m2'"),
        (compressed_tensors("pack-quantized", {**INT4, "num_bits": 3}), "int weights of 3 bits"),
        (compressed_tensors("pack-quantized", {"num_bits": 4, "strategy": "tensor"}), "strategy 'tensor'"),
        (compressed_tensors("int-quantized", INT4), "int weights of 4 bits"),
        (compressed_tensors("float-quantized", INT8), "int weights of 8 bits"),
        (compressed_tensors("float-quantized", {**INT8, "type": "float", "strategy": "token"}), "strategy 'token'"),
        *(
            (compressed_tensors(layout, INT4), f"layout '{layout}'")
            for layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "marlin-24", "mixed-precision", "dense")
        ),
        (compressed_tensors("pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}), "24-bitmask"),
        (compressed_tensors("pack-quantized", INT4, transform_config={"config_groups": {"u": {}}}), "transform_config"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "without weights"),
    ],
)  # fmt: skip
def test_formats_are_refused_by_name(settings: dict[str, Any], part: str, tmp_path: Path) -> None:
    remedy = "use a GGUF file of the model, or an unquantized checkpoint with --quantization int8 or int4"
    refused(stating(tmp_path / "model", settings), part, "is not supported; ", remedy, error=Unsupported)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ("gptq", ["quantization_config must be an object", "'gptq'"]),
        ({"quant_method": 4}, ["quant_method must be of type str"]),
        ({"quant_method": "gptq"}, ["no 'bits'"]),
        ({**GPTQ, "bits": True}, ["bits must be of type int", "True"]),
        ({**GPTQ, "group_size": 0}, ["group_size must be -1 or at least 1, got 0"]),
        ({**GPTQ, "group_size": -2}, ["group_size must be -1", "-2"]),
        ({**GPTQ, "group_size": 10**30}, ["group_size must be at most 2147483647"]),
        ({**FP8, "weight_block_size": [10**30, 64]}, ["weight_block_size must be two positive integers up to"]),
        ({**GPTQ, "group_size": 12.5}, ["group_size must be of type int"]),
        ({**GPTQ, "desc_act": "yes"}, ["desc_act must be of type bool"]),
        ({**AWQ, "group_size": 0}, ["group_size must be -1 or at least 1, got 0"]),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert must be a list of names"]),
        ({**AWQ, "modules_to_not_convert": [1]}, ["modules_to_not_convert must be a list of names"]),
        ({**FP8, "weight_block_size": [0, 64]}, ["weight_block_size must be two positive integers"]),
        ({**FP8, "weight_block_size": [64]}, ["weight_block_size must be two positive integers"]),
        (compressed_tensors("pack-quantized", {"num_bits": 4, "group_size": 0}), ["group_0.weights.group_size", "0"]),
        (compressed_tensors("pack-quantized", {"num_bits": 4, "strategy": "group"}), ["'group' and no size"]),
        (compressed_tensors("int-quantized", {"strategy": "block"}), ["'block' and no size"]),
        (compressed_tensors("int-quantized", {**INT8, "symmetric": 1}), ["weights.symmetric must be of type bool"]),
        (compressed_tensors("int-quantized", INT8, targets="Linear"), ["targets must be a list of names"]),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, ["W4A16 must be an object"]),
    ],
)
def test_impossible_settings_are_named(settings: Any, parts: list[str], tmp_path: Path) -> None:
    refused(stating(tmp_path / "model", settings), "config.json: ", *parts)


@pytest.mark.parametrize("copied", [False, True])
def test_settings_of_mlx_are_named(copied: bool, tmp_path: Path) -> None:
    settings = {"group_size": 64, "bits": 4}
    path = stating(tmp_path / "model", settings if copied else None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization": settings}))
    refused(path, "quant_method 'mlx'" if copied else "of the library MLX", error=Unsupported)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gptq", ".qweight (GPTQ or AWQ) without quantization_config"),
        ("pack-4-bits", ".weight_packed (compressed-tensors) without quantization_config"),
        ("fp8-blocks", ".weight_scale_inv (FP8) without quantization_config"),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_quantized_weights_of_no_stated_format(case: str, words: str, old: bool, tmp_path: Path) -> None:
    path, _ = write_quantized(tmp_path, *CASES[case][:2])
    config = json.loads((path / "config.json").read_text())
    stated = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config | ({"compression_config": stated} if old else {})))
    words = "compression_config in config.json, the old form of compressed-tensors" if old else words
    refused(path, words, "is not supported; use a GGUF file", error=Unsupported)


# What is in the file


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The checkpoint of a case, with other tensors."""
    path, _ = write_quantized(tmp_path, *CASES[name][:2])
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def put(last: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    """Replace a tensor of `UP`."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.{last}"] = edit(tensors[f"{UP}.{last}"]).contiguous()

    return change


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Put a number in the last place."""

    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.flatten()[-1:] = value
        return tensor

    return edit


@pytest.mark.parametrize(
    ("case", "last"),
    [
        *(("gptq", last) for last in ("qweight", "qzeros", "scales")),
        ("gptq-64-act-order", "g_idx"),
        *(("awq", last) for last in ("qweight", "qzeros", "scales")),
        *(("pack-4-bits-asymmetric", f"weight_{n}") for n in ("packed", "scale", "shape", "zero_point")),
        ("int8-asymmetric", "weight_zero_point"),
        *(("float8-channel", last) for last in ("weight", "weight_scale")),
        *(("fp8-blocks", last) for last in ("weight", "weight_scale_inv")),
        ("fp8-tensor", "weight_scale"),
    ],
)
def test_a_tensor_that_is_missing(case: str, last: str, tmp_path: Path) -> None:
    path = changed(tmp_path, case, lambda tensors: tensors.pop(f"{UP}.{last}"))
    refused(path, "model.safetensors has tensor", f"lacks tensor {UP}.{last}, which")


SHAPES = [
    ("gptq", "scales", lambda t: t[:, :-8], "[1, 256]"),
    ("gptq", "scales", lambda t: t.repeat(2, 1), "[1, 256]"),
    ("gptq", "qzeros", lambda t: t[:, :-1], "[1, 32]"),
    ("gptq", "qweight", lambda t: t.flatten(), "2 dimensions"),
    ("gptq", "g_idx", lambda t: t[:-1], "[128]"),
    ("awq", "scales", lambda t: t[:, :-8], "[1, 256]"),
    ("awq", "qzeros", lambda t: t[:, :-1], "[1, 32]"),
    ("awq", "qweight", lambda t: t[:-1], "no whole groups of 128"),
    ("pack-4-bits", "weight_packed", lambda t: t[:, :-1], "[256, 16]"),
    ("pack-4-bits", "weight_scale", lambda t: t[:, :-1], "[256, 2]"),
    ("pack-4-bits", "weight_shape", lambda t: t[:1], "[2]"),
    ("pack-4-bits", "weight_shape", lambda t: -t, "two sizes"),
    ("pack-4-bits", "weight_shape", lambda t: t << 40, "beside the others of its module"),
    ("pack-4-bits-asymmetric", "weight_zero_point", lambda t: t[:-1], "[32, 4]"),
    ("pack-4-bits-act-order", "weight_g_idx", lambda t: t[:-1], "[128]"),
    ("int8", "weight_scale", lambda t: t[:-1], "[256, 1]"),
    ("int8-asymmetric", "weight_zero_point", lambda t: t[:-1], "[256, 1]"),
    ("float8-tensor", "weight_scale", lambda t: t.repeat(2), "[1]"),
    ("float8-block", "weight_scale", lambda t: t[:-1], "[6, 2]"),
    ("fp8-blocks", "weight_scale_inv", lambda t: t[:-1], "[8, 2]"),
    ("fp8-tensor", "weight_scale", lambda t: torch.ones(256), "[1, 1]"),
]


@pytest.mark.parametrize(("case", "last", "edit", "part"), SHAPES)
def test_a_tensor_of_the_wrong_shape(case: str, last: str, edit: Any, part: str, tmp_path: Path) -> None:
    # A forged weight_shape is found out by the tensor that it describes.
    named = "weight_packed" if part.startswith("beside") else last
    refused(changed(tmp_path, case, put(last, edit)), f"model.safetensors: tensor {UP}.{named} at byte", part)


@pytest.mark.parametrize(
    ("case", "last", "dtype"),
    [
        ("gptq", "qweight", torch.int64),
        ("gptq", "scales", torch.int32),
        ("gptq", "g_idx", torch.int64),
        ("awq", "qzeros", torch.int8),
        ("pack-4-bits", "weight_packed", torch.float32),
        ("pack-4-bits", "weight_shape", torch.int32),
        ("int8", "weight", torch.uint8),
        ("int8", "weight", torch.bfloat16),
        ("int8", "weight_scale", torch.float64),
        ("float8-channel", "weight", torch.float8_e5m2),
        ("fp8-blocks", "weight", torch.int8),
        ("fp8-blocks", "weight_scale_inv", torch.uint8),
    ],
)
def test_a_tensor_of_the_wrong_dtype(case: str, last: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = changed(tmp_path, case, put(last, lambda tensor: tensor.float().to(dtype)))
    refused(path, f"model.safetensors: tensor {UP}.{last} at byte", " is ", " has ")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("case", "last"),
    [
        ("gptq-32-asymmetric", "scales"),
        ("awq-32", "scales"),
        ("pack-4-bits", "weight_scale"),
        ("int8", "weight_scale"),
        ("float8-tensor", "weight_scale"),
        ("fp8-blocks", "weight_scale_inv"),
    ],
)
def test_scales_that_are_not_finite(case: str, last: str, value: float, tmp_path: Path) -> None:
    path = changed(tmp_path, case, put(last, filled(value)))
    refused(path, f"model.safetensors: tensor {UP}.{last} at byte", "a scale that is NaN or infinite")


@pytest.mark.parametrize(
    ("case", "last", "value", "part"),
    [
        ("gptq-64-act-order", "g_idx", 2, "groups from 0 to 2, and there are 2"),
        ("gptq-64-act-order", "g_idx", -1, "groups from -1 to 1, and there are 2"),
        ("gptq-64-act-order", "g_idx", 2**31 - 1, "and there are 2"),
        ("pack-4-bits-act-order", "weight_g_idx", 4, "groups from 0 to 4, and there are 4"),
        ("pack-4-bits-act-order", "weight_g_idx", -1, "groups from -1 to 3, and there are 4"),
        ("gptq-32-asymmetric", "g_idx", 0, "not in the order of the inputs, and desc_act in config.json is false"),
    ],
)
def test_groups_that_there_are_not(case: str, last: str, value: int, part: str, tmp_path: Path) -> None:
    path = changed(tmp_path, case, put(last, filled(value)))
    refused(path, f"model.safetensors: tensor {UP}.{last} at byte", part)


@pytest.mark.parametrize("name", ["gptq", "awq", "pack-4-bits", "int8", "fp8-blocks"])
def test_sizes_that_are_not_those_of_the_architecture(name: str, tmp_path: Path) -> None:
    path, _ = write_quantized(tmp_path, *CASES[name][:2])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 384}))
    main = {"gptq": "qweight", "awq": "qweight", "pack-4-bits": "weight_packed"}.get(name, "weight")
    gate = "model.layers.0.mlp.gate_proj"
    refused(
        path, f"tensor {gate}.{main} at byte", f"holds {gate}.weight", "[256, 128], config.json asks for [384, 128]"
    )


def test_matrices_without_numbers(tmp_path: Path) -> None:
    def empty(tensors: dict[str, torch.Tensor]) -> None:
        for last, shape in {"qweight": (0, 256), "scales": (0, 256), "qzeros": (0, 32), "g_idx": (0,)}.items():
            tensors[f"{UP}.{last}"] = torch.zeros(shape, dtype=tensors[f"{UP}.{last}"].dtype)

    refused(changed(tmp_path, "gptq-row-act-order", empty), f"{UP}.qweight", "has shape [256, 0]")


@pytest.mark.parametrize(
    ("case", "more", "named"),
    [
        ("gptq", {"modules_to_not_convert": ["up_proj"]}, ".mlp.up_proj.qweight"),
        ("awq", {"modules_to_not_convert": ["model.layers.1.mlp"]}, "tensor model.layers.1.mlp."),
        ("fp8-blocks", {"modules_to_not_convert": [UP]}, f"tensor {UP}.weight"),
        ("pack-4-bits", {"ignore": [UP]}, f"tensor {UP}.weight_packed"),
        ("pack-4-bits", {"ignore": ["lm_head", r"re:.*layers\.1\.mlp\.up_proj"]}, f"tensor {UP}.weight_packed"),
    ],
)
def test_quantized_modules_that_are_listed_as_plain(
    case: str, more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path, _ = write_quantized(tmp_path, CASES[case][0], {**CASES[case][1], **more})
    refused(path, f"{path}/model.safetensors: tensor", named, "at byte", "is not quantized")


def test_a_module_with_a_plain_and_a_packed_matrix(tmp_path: Path) -> None:
    path = changed(tmp_path, "gptq", lambda tensors: tensors.update({f"{UP}.weight": torch.ones(256, 128)}))
    refused(path, f"tensor {UP}.weight at byte", f"beside {UP}.qweight")


def test_scales_beside_a_plain_matrix(tmp_path: Path) -> None:
    path = changed(tmp_path, "fp8-blocks", put("weight", lambda tensor: tensor.float()))
    refused(path, f"tensor {UP}.weight at byte", "is F32; FP8 has F8_E4M3 there")


def test_a_bias_that_is_not_0_and_that_the_architecture_has_not(tmp_path: Path) -> None:
    path = changed(tmp_path, "gptq", lambda tensors: tensors.update({f"{UP}.bias": torch.eye(1, 256).flatten()}))
    refused(path, f"{UP}.bias", "does not use")


def test_a_module_that_no_target_names(tmp_path: Path) -> None:
    packer, _, _ = CASES["pack-4-bits"]
    settings = compressed_tensors("pack-quantized", INT4, targets=[r"re:.*layers\.0\.", UP])
    path, _ = write_quantized(tmp_path, packer, settings)
    refused(path, "model.safetensors has module model.layers.1.", "no target in config.json names")


def test_patterns_that_re2_does_not_take(tmp_path: Path) -> None:
    for pattern in ("re:(?!model)", "re:(", "re:" + "a" * 2000):
        path, _ = write_quantized(
            tmp_path / str(len(pattern)),
            CASES["int8"][0],
            compressed_tensors("int-quantized", INT8, targets=[pattern], input_activations=TOKENS_IN_8_BITS),
        )
        refused(path, "pattern", "is not supported", error=Unsupported)


def test_names_of_modules() -> None:
    assert is_part_of("model.layers.1.mlp.gate_proj", ["layers.1"])
    assert is_part_of("lm_head", ["lm_head"])
    assert not is_part_of("model.layers.11.mlp.gate_proj", ["layers.1", "gate", "mlp.gate", "proj"])
    assert matches("model.layers.1.mlp", "re:model.*mlp")
    assert not matches("model.layers.1.mlp", "re:layers")
    assert not matches("model.layers.1.mlp", "model.layers.1")
    # A pattern that takes exponential time with backtracking.
    assert not matches("a" * 60, "re:(a+)+b")
