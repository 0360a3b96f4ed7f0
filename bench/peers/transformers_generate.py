"""transformers' `generate`: one batch, scaled-dot-product attention."""

from __future__ import annotations

from pathlib import Path

import torch


class TransformersGenerate:
    """All prompts have the same length, so the batch needs no padding."""

    notes: tuple[str, ...] = ()

    def __init__(self, checkpoint: Path, threads: int):
        import transformers

        self.version = transformers.__version__
        self.instructions = [f"ATen: {torch.backends.cpu.get_cpu_capability()}"]
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        del self._model
