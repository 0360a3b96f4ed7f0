"""Accuracy of int8 weights: the embedded model in bfloat16, with and without quantization, on held-out text.

    python -m bench.quantization [--cases 500] [--texts 50] [--threads 2] [--json FILE]

Two measures. Answers to held-out cases (`training.weft_tiny`), greedy and checked by code: the share of right ones, and
of answers that are the same tokens with both. And the next-token distribution after every token of held-out
conversations, gold answers included: how far it is (Kullback-Leibler divergence, in nats) from that of the same model
in float32 and in bfloat16, and how often the likeliest token is the same. The distance of bfloat16 from float32 is that
of rounding activations and weights alone: what quantization adds is to be read against it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench import alone
from training.weft_tiny.data import KINDS, held_out
from training.weft_tiny.evaluate import COLUMNS, Turn, turns_of
from training.weft_tiny.render import render
from training.weft_tiny.tokenizer import IM_END
from training.weft_tiny.train import ASSET
from weft import LLM
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.config import EMBEDDED_MODEL, DType, Quantization
from weft.core.step import ForwardBatch
from weft.kernels import dispatch
from weft.models.base import LanguageModel, lower
from weft.models.loader import load_model

PAGE = 16
MOST_TOKENS = 200
"""Of an answer."""


class Setting(NamedTuple):
    """A way to load the model."""

    name: str
    dtype: DType
    quantization: Quantization | None = None


FLOAT32 = Setting("float32", "float32")
BFLOAT16 = Setting("bfloat16", "bfloat16")
INT8 = Setting("int8", "bfloat16", "int8")
PAIRS = ((BFLOAT16, FLOAT32), (INT8, FLOAT32), (INT8, BFLOAT16))
"""Which distributions are compared: the first with the second, which counts as the true one."""


@torch.inference_mode()
def next_token_logprobs(model: LanguageModel, ids: list[int]) -> Tensor:
    """Log-probabilities of all tokens after each of these, [tokens, vocabulary] float64."""
    count, pages = len(ids), -(-len(ids) // PAGE)
    numbers = np.arange(count, dtype=np.int32)
    forward = ForwardBatch(
        token_ids=np.array(ids, np.int32),
        positions=numbers,
        write_slots=numbers,
        q_indptr=np.array([0, count], np.int32),
        kv_indptr=np.array([0, pages], np.int32),
        kv_page_ids=np.arange(pages, dtype=np.int32),
        kv_lens=np.array([count], np.int32),
    )
    batch, spec = lower(forward, PAGE), model.kv_spec()
    x = model.embed(torch.from_numpy(forward.token_ids))
    for index, layer in enumerate(model.layers):
        kv = torch.empty(spec.layer_shape(index, pages, PAGE), dtype=spec.dtype)
        x = layer.forward(x, model.provider.layer(index), batch, kv)
    return model.head(model.final_norm(x)).to(torch.float64).log_softmax(-1)


def distances(models: dict[str, LanguageModel], texts: list[list[int]]) -> dict[str, dict[str, float]]:
    """For each pair: divergence per token, mean and largest, and how often the likeliest token is the same."""
    found: dict[tuple[Setting, Setting], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for ids in texts:
        logprobs = {name: next_token_logprobs(model, ids) for name, model in models.items()}
        for pair in PAIRS:
            got, true = (logprobs[setting.name] for setting in pair)
            same = got.argmax(-1) == true.argmax(-1)
            found[pair].append(((true.exp() * (true - got)).sum(-1), same))
    results = {}
    for (one, other), parts in found.items():
        divergence, same = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        results[f"{one.name} from {other.name}"] = {
            "tokens": len(divergence),
            "mean_divergence": float(divergence.mean()),
            "largest_divergence": float(divergence.max()),
            "same_likeliest_token": float(same.double().mean()),
        }
    return results


def answer(setting: Setting, turns: list[Turn], tokenizer: Tokenizer, threads: int) -> list[list[int]]:
    """Fill in every turn's answer; returns their tokens."""
    end = tokenizer.token_to_id(IM_END)
    with LLM(dtype=setting.dtype, quantization=setting.quantization, device="cpu", threads=threads) as llm:
        prompts = [turn.tokens for turn in turns]
        results = llm.generate(prompts, temperature=0, max_tokens=MOST_TOKENS, progress=False)
    tokens = []
    for turn, result in zip(turns, results, strict=True):
        ids = [token for token in result.token_ids if token != end]
        turn.ended = result.finish_reason == "stop"
        turn.answer = tokenizer.decode(ids)
        tokens.append(ids)
    return tokens


def answers(cases: int, tokenizer: Tokenizer, threads: int) -> dict[str, dict[str, dict[str, float]]]:
    """Column -> kind -> shares of right answers of each setting, and of equal ones."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for column in COLUMNS:
        turns = {kind: turns_of(kind, cases, column == "templates", 0, tokenizer) for kind in KINDS}
        flat = [turn for kind in KINDS for turn in turns[kind]]
        tokens, right = {}, {}
        for setting in (BFLOAT16, INT8):
            tokens[setting.name] = answer(setting, flat, tokenizer, threads)
            right[setting.name] = [turn.right for turn in flat]
        same = [a == b for a, b in zip(tokens["bfloat16"], tokens["int8"], strict=True)]
        results[column] = {}
        for kind in (*KINDS, "all"):
            chosen = [i for i, turn in enumerate(flat) if kind in (turn.kind, "all")]
            shares = {name: sum(values[i] for i in chosen) / len(chosen) for name, values in right.items()}
            equal = sum(same[i] for i in chosen) / len(chosen)
            results[column][kind] = {"answers": len(chosen), **shares, "same_tokens": equal}
    return results


def table(report: dict[str, Any]) -> str:
    """The results as a readable table."""
    lines = ["Right answers, held out   answers  bfloat16     int8  same tokens"]
    for column, kinds in report["answers"].items():
        for kind, row in kinds.items():
            shares = f"{row['bfloat16']:8.1%} {row['int8']:8.1%} {row['same_tokens']:12.1%}"
            lines.append(f"  {column:10} {kind:10} {row['answers']:9} {shares}")
    lines.append("Next-token distributions     tokens  mean divergence  largest  same likeliest token")
    for pair, row in report["distances"].items():
        numbers = f"{row['mean_divergence']:16.2e} {row['largest_divergence']:8.3f} {row['same_likeliest_token']:21.2%}"
        lines.append(f"  {pair:25} {row['tokens']:8} {numbers}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=500, help="of each kind and column; 0: none")
    parser.add_argument("--texts", type=int, default=50, help="conversations of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    texts = [
        tokenizer.encode(render(case.messages, case.tools), add_special_tokens=False).ids
        for kind in KINDS
        for case in held_out(kind, args.texts, templates=False)
    ]
    loaded = {
        setting.name: load_model(EMBEDDED_MODEL, dtype=setting.dtype, quantization=setting.quantization)
        for setting in (FLOAT32, BFLOAT16, INT8)
    }
    report: dict[str, Any] = {
        **surroundings(threads=args.threads),
        "kernels": dispatch.int8_note("cpu", torch.bfloat16),
        "command": command_line("bench.quantization"),
        "weight_bytes": {name: model.num_bytes for name, model in loaded.items()},
        "distances": distances({name: one.model for name, one in loaded.items()}, texts),
        "answers": answers(args.cases, tokenizer, args.threads) if args.cases else {},
        "seconds": None,
    }
    report["seconds"] = round(time.monotonic() - began, 1)
    print(table(report))
    if args.json:
        write_record(args.json, report)


if __name__ == "__main__":
    alone.require()
    main()
