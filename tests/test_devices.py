"""The same tokens on every device: prompts of several steps, appended turns, pages that go to the host and come back.

Without a CUDA device only the CPU is tried, with `-m gpu` only the former.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import weft
from weft.models.random_checkpoints import write_tiny

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
STEP_TOKENS, PAGE_SIZE, NUM_PAGES = 64, 16, 40
HOST_BYTES = 64 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices")
    return write_tiny(folder, "llama", dtype=torch.float32, tokenizer=True, max_position_embeddings=512)


@pytest.fixture(params=["cpu", CUDA])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[weft.LLM]:
    sizes = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_step_tokens": STEP_TOKENS, "max_running": 8}
    with weft.LLM(str(checkpoint), device=request.param, threads=1, host_kv_bytes=HOST_BYTES, **sizes) as llm:
        yield llm


def prompts() -> list[list[int]]:
    """More than the pages hold, of several steps each; the second half goes on with the first."""
    first = [[3 + (7 * number + place) % 80 for place in range(200)] for number in range(6)]
    return [*first, *([*prompt, 5, 6, 7] for prompt in first)]


def alone(checkpoint: Path) -> list[list[int]]:
    """What each prompt gives on a CPU, with room for all and nothing shared."""
    with weft.LLM(str(checkpoint), device="cpu", threads=1, num_pages=400, prefix_cache=False) as llm:
        return [llm.generate(prompt, temperature=0, max_tokens=8, ignore_eos=True)[0].token_ids for prompt in prompts()]


def test_tokens_are_those_of_a_cpu(llm: weft.LLM, checkpoint: Path) -> None:
    half = len(prompts()) // 2
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    found = llm.generate(prompts()[:half], **options) + llm.generate(prompts()[half:], **options)
    assert [result.token_ids for result in found] == alone(checkpoint)
    stats = llm.stats()
    assert stats.swapped_out_pages > 0
    assert stats.swapped_in_pages > 0
    assert sum(result.num_host_tokens for result in found[half:]) > 0


def test_log_probabilities_of_prompts_are_those_of_a_cpu(llm: weft.LLM, checkpoint: Path) -> None:
    """Their steps have rows without samplers, and all but the last of a prompt alone have no token."""
    [result] = llm.generate(prompts()[0], max_tokens=0, prompt_logprobs=0)
    with weft.LLM(str(checkpoint), device="cpu", threads=1) as other:
        [expected] = other.generate(prompts()[0], max_tokens=0, prompt_logprobs=0)
    for one, two in zip(result.prompt_logprobs or [], expected.prompt_logprobs or [], strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
