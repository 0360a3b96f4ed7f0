"""OpenVINO GenAI: its continuous batching on the CPU, greedy.

The checkpoint is handed over as f16 GGUF, which OpenVINO GenAI's own reader turns into its graph (it does not take
bf16). Set here: arithmetic in bfloat16 (`INFERENCE_PRECISION_HINT`), KV pages in bfloat16 (`KV_CACHE_PRECISION`;
`kv_precision="u8"` measures the quantised pages that OpenVINO uses where a model does not say otherwise), the number
of threads, pages for all requests at once, no prefix cache, no more than `BATCH_TOKENS` tokens a step with prompts
and decoding in one step (`dynamic_split_fuse`). Everything else is its default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.gguf_checkpoint import gguf_file

BATCH_TOKENS = 512
PAGE_TOKENS = 32
"""What OpenVINO's paged attention uses on CPUs."""


class OpenVino:
    """Prompts of any number up to `max_sequences`; raises `ImportError` where the packages are missing."""

    name = "openvino"
    seconds_inside = None

    def __init__(
        self,
        checkpoint: Path,
        threads: int,
        max_sequences: int = 32,
        context: int = 512,
        batch_tokens: int = BATCH_TOKENS,
        kv_precision: str = "bf16",
    ):
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
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": kv_precision,
            "INFERENCE_NUM_THREADS": threads,
        }
        file = gguf_file(checkpoint, "f16", tokens=True)
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(str(file), scheduler, "CPU", properties)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        config = self._config(
            max_new_tokens=output_tokens, min_new_tokens=output_tokens, ignore_eos=True, do_sample=False
        )
        inputs = [self._tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    def close(self) -> None:
        del self._pipeline
