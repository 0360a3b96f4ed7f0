"""Stands in for vLLM: takes what the benchmark's child asks of it, and says what it was asked on standard output."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

__version__ = "0.0 of a stand-in"


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool


class LLM:
    def __init__(self, model: str, **options: object):
        if model == "missing":
            raise ValueError("no such checkpoint")
        print("loading", model, options)

    def generate(self, inputs: list[dict], sampling: SamplingParams, use_tqdm: bool) -> list[SimpleNamespace]:
        assert sampling.temperature == 0
        assert sampling.ignore_eos
        tokens = [[prompt["prompt_token_ids"][-1]] * sampling.max_tokens for prompt in inputs]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids))]) for ids in tokens]
