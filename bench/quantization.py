"""Accuracy of weights in 8 and 4 bits: the embedded model in bfloat16, with and without quantization, on held-out text.

    python -m bench.quantization [--cases 500] [--texts 50] [--shape qwen3-0.6b] [--threads 2] [--json FILE]

Models are quantized when they are loaded (int8, int4), or come from a GGUF file of the same weights (Q8_0, Q4_K) with
the embedding and the head in blocks too. Blocks are computed on as they are, with activations in 8 bits, or expanded.
The distance between these two is what rounding activations costs.

Two measures. Answers to held-out cases (`training.weft_tiny`), greedy and checked by code: the share of right ones, and
of answers that are the same tokens with both. And the next-token distribution after every token of held-out
conversations, gold answers included: how far it is (Kullback-Leibler divergence, in nats) from that of the same model
in float32 and in bfloat16, and how often the likeliest token is the same. The distance of bfloat16 from float32 is that
of rounding activations and weights alone: what quantization adds is to be read against it. `--shape` measures the
distances of a random checkpoint of that shape on random tokens instead.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench import alone
from bench.peers.gguf_checkpoint import Precision, gguf_file
from training.weft_tiny.cases import COLUMNS, TEST, read
from training.weft_tiny.data import KINDS, held_out
from training.weft_tiny.evaluate import Turn, turns_of
from training.weft_tiny.render import render
from training.weft_tiny.tokenizer import IM_END
from training.weft_tiny.train import ASSET
from weft import LLM
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.config import DType, Quantization, QuantizedBlocks
from weft.core.step import ForwardBatch
from weft.kernels.cpu import ops
from weft.models.base import LanguageModel, lower
from weft.models.loader import LoadedModel, load_model
from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint

PAGE = 16
SHAPES = {"qwen3-0.6b": QWEN3_0_6B}
MOST_TOKENS = 200
"""Of an answer."""


class Setting(NamedTuple):
    """A way to load the model."""

    name: str
    dtype: DType
    quantization: Quantization | None = None
    gguf: Precision | None = None
    """The matrices of the GGUF file that is loaded; None: the checkpoint itself is."""
    quantized_blocks: QuantizedBlocks = "auto"


FLOAT32 = Setting("float32", "float32")
BFLOAT16 = Setting("bfloat16", "bfloat16")
INT8 = Setting("int8", "bfloat16", "int8")
INT4 = Setting("int4", "bfloat16", "int4")
Q8_0 = Setting("Q8_0", "bfloat16", gguf="q8_0")
Q8_0_EXPANDED = Setting("Q8_0 expanded", "bfloat16", gguf="q8_0", quantized_blocks="expand")
Q4_K = Setting("Q4_K", "bfloat16", gguf="q4_k")
Q4_K_EXPANDED = Setting("Q4_K expanded", "bfloat16", gguf="q4_k", quantized_blocks="expand")
PAIRS = (
    (BFLOAT16, FLOAT32),
    (INT8, FLOAT32),
    (INT8, BFLOAT16),
    (INT4, BFLOAT16),
    (Q8_0, BFLOAT16),
    (Q8_0_EXPANDED, BFLOAT16),
    (Q8_0, Q8_0_EXPANDED),
    (Q4_K, BFLOAT16),
    (Q4_K_EXPANDED, BFLOAT16),
    (Q4_K, Q4_K_EXPANDED),
)
"""Which distributions are compared: the first with the second, which counts as the true one."""
SETTINGS = tuple(dict.fromkeys(setting for pair in PAIRS for setting in pair))
ANSWERING = (BFLOAT16, INT8, INT4)
"""Settings whose answers are checked."""
RANDOM_TOKENS = 256
"""Of a text of random tokens."""


@torch.inference_mode()
def next_token_logprobs(model: LanguageModel, ids: list[int]) -> Tensor:
    """Log-probabilities of all tokens after each of these, [tokens, vocabulary] float32: those of ten settings are kept
    at once."""
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
    return model.head(model.final_norm(x)).to(torch.float64).log_softmax(-1).float()


def load(setting: Setting, checkpoint: Path, folder: Path) -> LoadedModel:
    """The model of a checkpoint; its GGUF files are in `folder`."""
    path = checkpoint if setting.gguf is None else gguf_file(checkpoint, setting.gguf, folder=folder)
    return load_model(
        str(path),
        dtype=setting.dtype,
        quantization=setting.quantization,
        quantized_blocks=setting.quantized_blocks,
    )


class Distances(NamedTuple):
    """What the settings cost in accuracy and take in memory."""

    pairs: dict[str, dict[str, float]]
    """For each pair: divergence per token, mean and largest, and how often the likeliest token is the same."""
    weight_bytes: dict[str, int]


def distances(checkpoint: Path, folder: Path, texts: list[list[int]]) -> Distances:
    """Load one model after the other, and compare what they say of the texts."""
    logprobs, sizes = {}, {}
    for setting in SETTINGS:
        loaded = load(setting, checkpoint, folder)
        sizes[setting.name] = loaded.num_bytes
        logprobs[setting] = [next_token_logprobs(loaded.model, ids) for ids in texts]
    results = {}
    for one, other in PAIRS:
        texts_of = [(got.double(), true.double()) for got, true in zip(logprobs[one], logprobs[other], strict=True)]
        divergence = torch.cat([(true.exp() * (true - got)).sum(-1) for got, true in texts_of])
        same = torch.cat([got.argmax(-1) == true.argmax(-1) for got, true in texts_of])
        results[f"{one.name} from {other.name}"] = {
            "tokens": len(divergence),
            "mean_divergence": float(divergence.mean()),
            "largest_divergence": float(divergence.max()),
            "same_likeliest_token": float(same.double().mean()),
        }
    return Distances(results, sizes)


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
        frozen = [group[:cases] for (of, _), group in read(TEST).items() if of == column]
        flat = [turn for group in frozen for turn in turns_of(group, tokenizer)]
        tokens, right = {}, {}
        for setting in ANSWERING:
            tokens[setting.name] = answer(setting, flat, tokenizer, threads)
            right[setting.name] = [turn.right for turn in flat]
        same = {
            f"same_tokens_{setting.name}": [
                a == b for a, b in zip(tokens["bfloat16"], tokens[setting.name], strict=True)
            ]
            for setting in ANSWERING[1:]
        }
        results[column] = {}
        for kind in (*dict.fromkeys(turn.kind for turn in flat), "all"):
            chosen = [i for i, turn in enumerate(flat) if kind in (turn.kind, "all")]
            shares = {name: sum(values[i] for i in chosen) / len(chosen) for name, values in (right | same).items()}
            results[column][kind] = {"answers": len(chosen), **shares}
    return results


def table(report: dict[str, Any]) -> str:
    """The results as a readable table."""
    names = [*(setting.name for setting in ANSWERING), *(f"same_tokens_{setting.name}" for setting in ANSWERING[1:])]
    lines = ["Right answers, held out   answers" + "".join(f" {name:>16}" for name in names)]
    for column, kinds in report["answers"].items():
        for kind, row in kinds.items():
            shares = "".join(f" {row[name]:16.1%}" for name in names)
            lines.append(f"  {column:10} {kind:10} {row['answers']:9}{shares}")
    lines.append("Next-token distributions               tokens  mean divergence  largest  same likeliest token")
    for pair, row in report["distances"].items():
        numbers = f"{row['mean_divergence']:16.2e} {row['largest_divergence']:8.3f} {row['same_likeliest_token']:21.2%}"
        lines.append(f"  {pair:35} {row['tokens']:8} {numbers}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=500, help="of each kind and column; 0: none")
    parser.add_argument("--texts", type=int, help="conversations of each kind (50), or texts of random tokens (2)")
    parser.add_argument("--shape", choices=SHAPES, help="distances of random weights of this shape, and no answers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = ops.best()
    if isinstance(kernels, Exception):
        parser.error(f"the kernels in C++, which compute on quantized blocks, are {kernels}")
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as scratch:
        folder = Path(scratch)
        if args.shape is None:
            checkpoint = ASSET
            count = 50 if args.texts is None else args.texts
            texts = [
                tokenizer.encode(render(case.messages, case.tools), add_special_tokens=False).ids
                for kind in KINDS
                for case in held_out(kind, count, templates=False)
            ]
        else:
            checkpoint = write_checkpoint(folder / args.shape, SHAPES[args.shape], dtype=torch.bfloat16)
            size = (2 if args.texts is None else args.texts, RANDOM_TOKENS)
            texts = np.random.default_rng(0).integers(0, SHAPES[args.shape]["vocab_size"], size).tolist()
        found = distances(checkpoint, folder, texts)
    asked = args.cases if args.shape is None else 0
    report: dict[str, Any] = {
        **surroundings(threads=args.threads),
        "kernels": kernels.instructions,
        "command": command_line("bench.quantization"),
        "weight_bytes": found.weight_bytes,
        "distances": found.pairs,
        "answers": answers(asked, tokenizer, args.threads) if asked else {},
        "seconds": None,
    }
    report["seconds"] = round(time.monotonic() - began, 1)
    print(table(report))
    if args.json:
        write_record(args.json, report)


if __name__ == "__main__":
    alone.require()
    main()
