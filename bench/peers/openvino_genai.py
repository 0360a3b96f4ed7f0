"""OpenVINO GenAI: its continuous batching on the CPU, greedy.

A checkpoint in a directory is handed over as f16 GGUF, which OpenVINO GenAI's own reader turns into its graph (it does
not take bf16); a GGUF file is read as it is: Q8_0 becomes 8-bit weights, Q4_0 and Q4_K 4-bit weights. Set here:
arithmetic in bfloat16 (`INFERENCE_PRECISION_HINT`), KV pages in bfloat16 (`KV_CACHE_PRECISION`;
`kv_precisions=("u8",)` measures the quantised pages that OpenVINO uses where a model does not say otherwise), the
number of threads, pages for all requests at once, no prefix cache, no more than `BATCH_TOKENS` tokens a step with
prompts and decoding in one step (`dynamic_split_fuse`). Everything else is its default.

OpenVINO refuses bfloat16 KV on processors without AVX-512. Then KV pages are in float16, or else in float32, and
`notes` says so. Its paged attention can be held to a lower level than the processor's only where CPUID faults
(`hidden_features`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import hidden_features
from bench.peers.gguf_checkpoint import gguf_file
from bench.peers.text import one_line
from weft.cli.probe import cpu_features

BATCH_TOKENS = 512
KV_PRECISIONS = ("bf16", "f16", "f32")
"""What KV pages may be in; the first that OpenVINO takes here is used."""
PAGE_TOKENS = 32
"""What OpenVINO's paged attention uses on CPUs."""


class OpenVino:
    """Prompts of any number up to `max_sequences`; raises `ImportError` where the packages are missing."""

    def __init__(
        self,
        checkpoint: Path,
        threads: int,
        max_sequences: int = 32,
        context: int = 512,
        batch_tokens: int = BATCH_TOKENS,
        kv_precisions: Sequence[str] = KV_PRECISIONS,
    ):
        """Raises `ImportError`, and OpenVINO's last error where it takes none of `kv_precisions`."""
        import openvino
        import openvino_genai

        self._tensor: Any = openvino.Tensor
        self._config: Any = openvino_genai.GenerationConfig
        self.version = str(openvino_genai.__version__)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = batch_tokens
        scheduler.max_num_seqs = max_sequences
        scheduler.num_kv_blocks = max_sequences * context // PAGE_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        file = str(checkpoint if checkpoint.is_file() else gguf_file(checkpoint, "f16", tokens=True))
        # oneDNN writes what it uses; the attention over pages has kernels of its own, which it chooses by CPUID.
        shown = hidden_features.shows_avx512()
        uses_avx512 = "avx512f" in cpu_features() if shown is None else shown
        self.instructions = ["paged attention: avx512f"] if uses_avx512 else []
        self.notes: list[str] = []
        for precision in kv_precisions:
            properties = {
                "INFERENCE_PRECISION_HINT": "bf16",
                "KV_CACHE_PRECISION": precision,
                "INFERENCE_NUM_THREADS": threads,
            }
            try:
                self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(file, scheduler, "CPU", properties)
                self.generate([[0]], 1)  # some settings are refused by the first step only
                break
            except RuntimeError as error:
                if precision == kv_precisions[-1]:
                    raise
                self.notes.append(f"KV pages are not in {precision}, which is refused: {one_line(error)}")
        if self.notes:
            self.notes.append(f"KV pages are in {precision}")

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        config = self._config(
            max_new_tokens=output_tokens, min_new_tokens=output_tokens, ignore_eos=True, do_sample=False
        )
        inputs = [self._tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    def close(self) -> None:
        del self._pipeline
