"""Loading: what is accepted, and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.abi.errors import ConfigError, ModelLoadError, Unsupported
from weft.hub import find_model
from weft.models.config_json import window_layers
from weft.models.loader import choose_dtype, load_model, open_checkpoint
from weft.models.random_checkpoints import write_tiny
from weft.models.safetensors_files import INDEX_FILE, SINGLE_FILE, read_header


def edit_config(directory, **changes):
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**raw, **changes}.items() if v != "ABSENT"}))


def edit_tensors(directory, change):
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file(tensors, directory / SINGLE_FILE)


def write_raw(path, header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.fixture
def llama(tmp_path):
    return write_tiny(tmp_path / "llama")


def refused(directory, *parts, error=ModelLoadError, **options):
    """The checkpoint is refused, in a message with all of `parts`."""
    with pytest.raises(error) as caught:
        load_model(str(directory), **options)
    for part in parts:
        assert part in caught.value.message
    return caught.value.message


# What is accepted


def test_weights_are_fused_and_complete(llama):
    loaded = load_model(str(llama))
    tensors = load_file(llama / SINGLE_FILE)
    weights = loaded.model.provider.layer(1)
    prefix = "model.layers.1.self_attn."
    assert torch.equal(weights["qkv"], torch.cat([tensors[f"{prefix}{n}_proj.weight"] for n in "qkv"]))
    assert torch.equal(weights["gate_up"][:96], tensors["model.layers.1.mlp.gate_proj.weight"])
    assert loaded.num_bytes == sum(t.numel() * 4 for t in tensors.values())
    assert loaded.max_context == 512
    assert loaded.eos_ids == (258,)


def test_progress_ends_at_the_total(llama):
    calls = []
    load_model(str(llama), progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == sum(i.num_bytes for i in read_header(llama / SINGLE_FILE).values())


def test_shards_load_as_one_file_does(tmp_path):
    whole = load_model(str(write_tiny(tmp_path / "one")))
    sharded = load_model(str(write_tiny(tmp_path / "three", shards=3)))
    for i in range(3):
        for name, weight in whole.model.provider.layer(i).items():
            assert torch.equal(weight, sharded.model.provider.layer(i)[name])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_dtypes_are_converted(llama, dtype):
    loaded = load_model(str(llama), dtype=dtype)
    wanted = getattr(torch, dtype)
    assert loaded.spec.dtype == loaded.model.kv_spec().dtype == wanted
    assert {w.dtype for w in loaded.model.provider.layer(0).values()} == {wanted}
    logits = loaded.model.head(torch.zeros(2, 48, dtype=wanted))
    assert logits.dtype == (torch.float64 if dtype == "float64" else torch.float32)


def test_auto_dtype_follows_the_checkpoint_where_the_device_computes_it(monkeypatch):
    assert choose_dtype(torch.float32, "auto", "cpu") == torch.float32
    assert choose_dtype(torch.float16, "auto", "cpu") == torch.float32
    assert choose_dtype(torch.float16, "float16", "cpu") == torch.float16
    monkeypatch.setattr("weft.kernels.dispatch.computes_well", lambda device, dtype: True)
    assert choose_dtype(torch.bfloat16, "auto", "cpu") == torch.bfloat16


def test_eos_ids_prefer_the_generation_config(llama):
    (llama / "generation_config.json").write_text('{"eos_token_id": [7, 9, 7]}')
    assert load_model(str(llama)).eos_ids == (7, 9)
    (llama / "generation_config.json").write_text("{}")
    assert load_model(str(llama)).eos_ids == (258,)
    edit_config(llama, eos_token_id="ABSENT")
    assert load_model(str(llama)).eos_ids == ()


@pytest.mark.parametrize("kept", ["both", "embedding", "head"])
def test_tied_embeddings_with_and_without_a_second_copy(tmp_path, kept):
    directory = write_tiny(tmp_path, tie_word_embeddings=True)
    table = load_file(directory / SINGLE_FILE)["model.embed_tokens.weight"]

    def change(tensors):
        if kept != "embedding":
            tensors["lm_head.weight"] = table.clone()
        if kept == "head":
            del tensors["model.embed_tokens.weight"]

    edit_tensors(directory, change)
    model = load_model(str(directory)).model
    assert torch.equal(model.embed(torch.arange(320)), table)
    assert "head" not in model.provider.shared


def test_computed_buffers_of_old_checkpoints_are_ignored(llama):
    edit_tensors(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load_model(str(llama))


def test_code_of_a_checkpoint_is_never_run(llama):
    (llama / "modeling_evil.py").write_text("raise SystemExit('executed')")
    edit_config(llama, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    load_model(str(llama))


def test_max_context(llama):
    assert load_model(str(llama), max_context=100).max_context == 100
    refused(llama, "513", "512", error=ConfigError, max_context=513)


# What is not there


def test_missing_directory_and_file_instead_of_directory(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "there is no directory")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file")


def test_missing_config(llama):
    (llama / "config.json").unlink()
    refused(llama, "config.json", "does not exist")


def test_missing_weights(llama):
    (llama / SINGLE_FILE).unlink()
    refused(llama, SINGLE_FILE, INDEX_FILE)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.pth"])
def test_pickles_are_refused(llama, name):
    (llama / SINGLE_FILE).unlink()
    (llama / name).write_bytes(b"\x80\x04K\x01.")
    refused(llama, name, "Convert", "safetensors")


def test_missing_shard(tmp_path):
    directory = write_tiny(tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    refused(directory, "model-00002-of-00003.safetensors", "missing")


def test_missing_tensors(llama):
    edit_tensors(llama, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    refused(llama, "model.layers.2.mlp.up_proj.weight", "LlamaForCausalLM")


def test_untied_head_is_required(llama):
    edit_tensors(llama, lambda t: t.pop("lm_head.weight"))
    refused(llama, "lm_head.weight")


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
def test_endless_json(tmp_path, name):
    directory = write_tiny(tmp_path, shards=2)
    with (directory / name).open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no room on the disk
    refused(directory, name, "bytes; there may be")


def test_index_that_promises_too_much(tmp_path):
    directory = write_tiny(tmp_path, shards=2)
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    (directory / INDEX_FILE).write_text(json.dumps(index))
    refused(directory, "model.extra", INDEX_FILE)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../x.safetensors"}}]
)
def test_malformed_index(llama, index):
    (llama / INDEX_FILE).write_text(json.dumps(index))
    refused(llama, "weight_map")


def test_embedded_model_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("weft.hub.resources.files", lambda package: tmp_path)
    with pytest.raises(ModelLoadError, match="reinstall"):
        find_model("weft-tiny", files=())


# What is damaged


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": NaN', "\x00"])
def test_malformed_config(llama, text):
    (llama / "config.json").write_text(text)
    refused(llama, "config.json", "JSON")


def test_config_in_the_wrong_encoding(llama):
    (llama / "config.json").write_bytes(b"\xff\xfe{}")
    refused(llama, "config.json", "JSON")


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -5000])
def test_truncated_file(llama, keep):
    path = llama / SINGLE_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    refused(llama, SINGLE_FILE, "truncated")


def test_header_beyond_the_file(llama):
    (llama / SINGLE_FILE).write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    refused(llama, str(1 << 62), "truncated")


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff" * 9])
def test_malformed_header(llama, header):
    write_raw(llama / SINGLE_FILE, header)
    refused(llama, SINGLE_FILE, "header")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 400]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        None,
    ],
)
def test_forged_header_entries(llama, entry):
    write_raw(llama / SINGLE_FILE, {"some.tensor": entry}, b"\0" * 16)
    refused(llama, SINGLE_FILE, "some.tensor")


@pytest.mark.parametrize("shape", [[1] * 9, [2**62] * 200_000])
def test_endless_shapes(llama, shape):
    write_raw(llama / SINGLE_FILE, {"some.tensor": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}, b"\0" * 4)
    assert len(refused(llama, "some.tensor", "more than 8 dimensions")) < 500


def test_names_and_numbers_that_are_long(llama):
    write_raw(llama / SINGLE_FILE, {"x" * 2000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4)
    assert len(refused(llama, "malformed")) < 500
    write_raw(llama / SINGLE_FILE, {"x": {"dtype": "F32", "shape": [10**4000], "data_offsets": [0, 4]}}, b"\0" * 4)
    assert len(refused(llama, "'x'", "cannot occupy")) < 500


@pytest.mark.parametrize("count", [200_000, 10_000_000])
def test_headers_of_which_json_would_make_gigabytes(llama, count):
    write_raw(llama / SINGLE_FILE, b'{"a":[' + b"[]," * count + b"[]]}")
    tracemalloc.start()
    refused(llama, SINGLE_FILE, "header")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_dtypes_that_are_not_read_are_named(llama):
    for dtype in ("F8_E8M0", "F4"):
        write_raw(llama / SINGLE_FILE, {"some.tensor": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}}, b"\0\0")
        refused(llama, SINGLE_FILE, f"'some.tensor' is {dtype}, which is not supported", error=Unsupported)


@pytest.mark.parametrize(
    ("second", "end", "words"),
    [
        ([4, 12], 12, "tensor 'b' at byte {4} overlaps tensor 'a' at byte {0}, which ends at byte {8}"),
        ([12, 20], 20, "tensor 'b' at byte {12} leaves a hole after tensor 'a' at byte {0}, which ends at byte {8}"),
        ([8, 16], 20, "tensor 'b' at byte {8} is the last and ends at byte {16}"),
    ],
)
def test_places_that_overlap_or_leave_holes(llama, second, end, words):
    entries = {"b": second, "a": [0, 8]}
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in entries.items()}
    write_raw(llama / SINGLE_FILE, header, b"\0" * end)
    begin = 8 + len(json.dumps(header))
    refused(llama, SINGLE_FILE, re.sub(r"{(\d+)}", lambda found: str(begin + int(found[1])), words))


def test_a_tensor_in_two_shards_or_in_another(tmp_path):
    directory = write_tiny(tmp_path, shards=2)
    one, other = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((directory / INDEX_FILE).read_text())
    name = next(name for name, file in index["weight_map"].items() if file == one)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": index["weight_map"] | {name: other}}))
    refused(directory, f"promises {name} in {other}")
    tensors = load_file(directory / other) | {name: load_file(directory / one)[name]}
    save_file(tensors, directory / other)
    refused(directory, f"{other} has tensor {name}, which", one)


# What does not fit the configuration


def test_wrong_shape(llama):
    edit_config(llama, intermediate_size=97)
    refused(llama, "model.layers.0.mlp.gate_proj.weight", "[96, 48]", "[97, 48]")


def test_wrong_dtype(llama):
    edit_tensors(llama, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    refused(llama, "model.norm.weight", "I32", "BF16")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight"])
def test_unexpected_tensors(llama, name):
    edit_tensors(llama, lambda t: t.update({name: torch.ones(48)}))
    refused(llama, name, "does not use")


def test_tied_head_that_differs(tmp_path):
    directory = write_tiny(tmp_path, tie_word_embeddings=True)
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": torch.ones(320, 48)}))
    refused(directory, "tie_word_embeddings", "lm_head.weight")


@pytest.mark.parametrize("eos", [-1, 320, "x", [1, None], True])
def test_impossible_eos_ids(llama, eos):
    edit_config(llama, eos_token_id=eos)
    refused(llama, "eos_token_id")


# What config.json may say


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_hidden_layers": "ABSENT"}, ["num_hidden_layers"]),
        ({"hidden_size": "48"}, ["hidden_size", "int"]),
        ({"hidden_size": 0}, ["hidden_size", "positive"]),
        ({"hidden_size": 10**400}, ["hidden_size", "positive"]),
        ({"vocab_size": 2**31}, ["vocab_size", "at most 2147483647"]),
        ({"num_hidden_layers": 100}, ["config.json: num_hidden_layers is 100, and there are 30 tensors"]),
        ({"num_hidden_layers": 300_000}, ["num_hidden_layers", "300000"]),
        ({"num_hidden_layers": 2**63}, ["num_hidden_layers", "9223372036854775808"]),
        ({"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2**31 - 1}, ["num_hidden_layers"]),
        ({"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2**31 - 1}, ["num_hidden_layers"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps"]),
        ({"num_key_value_heads": 4}, ["num_attention_heads", "num_key_value_heads"]),
        ({"head_dim": 7}, ["head_dim", "even"]),
        (
            {"num_attention_heads": 128, "num_key_value_heads": 2, "head_dim": "ABSENT"},
            ["128 heads", "hidden_size (48)"],
        ),
        ({"rope_scaling": "linear"}, ["rope"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.001}}, ["factor 0.001 leaves none of 512 positions"]),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn", "rope_theta above 1"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e-320}}, ["beta_fast", "out of range"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 1e308}}, ["beta_slow", "out of range"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"attention_bias": "no"}, ["attention_bias", "bool"]),
        ({"architectures": "ABSENT"}, ["architecture", "Qwen3ForCausalLM"]),
        ({"architectures": []}, ["architecture"]),
    ],
)
def test_impossible_values_are_named(llama, changes, parts):
    edit_config(llama, **changes)
    refused(llama, *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, ["full_attention"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["LlamaForCausalLM"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["hqq"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "cached keys"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["longrope"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
            },
            ["linear_attention"],
        ),
    ],
)
def test_options_that_are_not_implemented_are_named(llama, changes, parts):
    edit_config(llama, **changes)
    refused(llama, *parts, error=Unsupported)


def test_harmless_options_are_ignored(llama):
    edit_config(llama, pretraining_tp=2, attention_dropout=0.1, initializer_range=1.0, use_cache=False)
    load_model(str(llama))


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"type": "linear", "factor": 1e308}, 2**31 - 1),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
    ],
)
def test_scaling_extends_what_the_positions_allow(llama, rope, positions):
    edit_config(llama, rope_scaling=rope)
    assert open_checkpoint(llama).spec.max_position == positions


def test_mistral_without_a_word_on_windows_has_the_formats_default(tmp_path):
    directory = write_tiny(tmp_path, "mistral")
    assert open_checkpoint(directory).spec.sliding_windows == (None,) * 3
    edit_config(directory, sliding_window="ABSENT")
    assert open_checkpoint(directory).spec.sliding_windows == (4096,) * 3


@pytest.mark.parametrize("name", ["x" * 300, "~nosuchuser/model"])
def test_a_name_that_cannot_be_looked_up_is_an_error_of_the_model(name: str) -> None:
    with pytest.raises(ModelLoadError, match="cannot be looked up"):
        find_model(name, files=["*"])


def test_a_window_that_is_null_is_none() -> None:
    raw = {"num_hidden_layers": 2, "use_sliding_window": True, "max_window_layers": 0}
    assert window_layers(raw) == (4096, 4096)
    assert window_layers({**raw, "sliding_window": None}) == (None, None)
