"""An engine with quantized weights, from the setting to the tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.runner import greedy, with_kernels
from tests.models.test_gguf import LARGE
from weft.abi.errors import ConfigError
from weft.config import EngineConfig, Quantization
from weft.kernels.block_weights import BlockPart, expand_rows
from weft.kernels.quantize import block_kind, quantize
from weft.llm import LLM
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny
from weft.models.safetensors_files import SINGLE_FILE
from weft.worker.build import load, start_worker

ENGINE = {"device": "cpu", "threads": 2, "num_pages": 200, "max_context": 256}
NUM_TOKENS = 12

quantizations = pytest.mark.parametrize("quantization", ["int8", "int4"])


def prompts() -> list[list[int]]:
    """Token ids, of lengths from one token to some pages."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 250, size).tolist() for size in (1, 2, 3, 7, 18, 33, 60)]


def generated(llm: LLM, work: list[list[int]]) -> list[list[int]]:
    results = llm.generate(work, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, progress=False)
    return [result.token_ids for result in results]


@with_kernels
@quantizations
def test_tokens_are_those_of_the_model_alone_and_among_others(quantization: Quantization, tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path, "qwen3", **LARGE, tokenizer=True))
    plain = [greedy(load_model(model).model, [prompt], NUM_TOKENS)[0][0] for prompt in prompts()]
    quantized = load_model(model, quantization=quantization).model
    expected = [greedy(quantized, [prompt], NUM_TOKENS)[0][0] for prompt in prompts()]
    assert expected != plain  # quantization can be seen
    with LLM(model, quantization=quantization, prefix_cache=False, **ENGINE) as llm:
        assert generated(llm, prompts()) == expected
        assert [tokens for prompt in prompts() for tokens in generated(llm, [prompt])] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@quantizations
def test_tokens_on_a_device_are_those_of_the_expanded_weights(quantization: Quantization, tmp_path: Path) -> None:
    """There activations are not rounded."""
    model = write_tiny(tmp_path / "plain", "qwen3", **LARGE, tokenizer=True)
    with LLM(str(model), quantization=quantization, dtype="float32", **{**ENGINE, "device": "cuda"}) as llm:
        found = generated(llm, prompts())
    tensors = load_file(model / SINGLE_FILE)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            outputs, inputs = weight.shape
            part = BlockPart(block_kind(quantization, inputs), outputs)
            tensors[name] = expand_rows(quantize(weight, part.kind), part, inputs)
    save_file(tensors, model / SINGLE_FILE)
    with LLM(str(model), dtype="float32", **ENGINE) as llm:
        assert generated(llm, prompts()) == found


@with_kernels
def test_a_worker_says_how_its_weights_are(tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path, **LARGE, tokenizer=True))
    for quantization in ("int8", None):
        config = EngineConfig(model=model, quantization=quantization, **ENGINE)  # type: ignore[arg-type]
        worker = start_worker(config, load(config))
        assert worker.spec.quantization == quantization
        worker.close()


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization"):
        LLM(quantization="int3")  # type: ignore[arg-type]
