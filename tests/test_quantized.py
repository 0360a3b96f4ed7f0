"""An engine with int8 weights, from the setting to the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.abi.errors import ConfigError
from weft.config import EngineConfig
from weft.kernels import dispatch
from weft.kernels.quantize import dequantize, quantize
from weft.llm import LLM
from weft.models.random_checkpoints import write_tiny
from weft.models.safetensors_files import SINGLE_FILE
from weft.worker.build import load, start_worker

ENGINE = {"device": "cpu", "threads": 2, "num_pages": 200, "max_context": 256}
PANELS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
PACKED = dispatch.int8_note("cpu", torch.bfloat16) == "int8: C++, packed"


def prompts():
    """Token ids, of lengths from one token to some pages."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 250, size).tolist() for size in (1, 2, 3, 7, 18, 33, 60)]


def generated(llm, work):
    results = llm.generate(work, temperature=0, max_tokens=12, ignore_eos=True, progress=False)
    return [result.token_ids for result in results]


def test_the_tokens_are_those_of_the_dequantized_checkpoint(tmp_path):
    given = write_tiny(tmp_path / "given", "qwen3", dtype=torch.float64, tokenizer=True)
    twin = write_tiny(tmp_path / "twin", "qwen3", dtype=torch.float64, tokenizer=True)
    tensors = load_file(given / SINGLE_FILE)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = dequantize(*quantize(tensor), torch.float64)
    save_file(tensors, twin / SINGLE_FILE)
    with LLM(str(twin), dtype="float64", **ENGINE) as llm:
        expected = generated(llm, prompts())
    with LLM(str(given), dtype="float64", quantization="int8", **ENGINE) as llm:
        assert generated(llm, prompts()) == expected


@pytest.mark.skipif(not PACKED, reason="without packed int8 weights, a row's bits may depend on its batch")
def test_in_bfloat16_a_request_gets_the_same_alone_and_among_others(tmp_path):
    model = write_tiny(tmp_path, "qwen3", **PANELS, dtype=torch.bfloat16, tokenizer=True)
    with LLM(str(model), dtype="bfloat16", quantization="int8", prefix_cache=False, **ENGINE) as llm:
        together = generated(llm, prompts())
        alone = [tokens for prompt in prompts() for tokens in generated(llm, [prompt])]
    assert together == alone


def test_a_worker_says_how_its_weights_are(tmp_path):
    model = str(write_tiny(tmp_path, tokenizer=True))
    for quantization in ("int8", None):
        config = EngineConfig(model=model, quantization=quantization, **ENGINE)
        worker = start_worker(config, load(config))
        assert worker.spec.quantization == quantization
        worker.close()


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="quantization"):
        LLM(quantization="int3")
