"""Is a GGUF file read as llama.cpp reads it? The embedded model, quantized by llama.cpp, on held-out conversations.

    python -m bench.gguf_witness --packages DIR [--types Q8_0 Q4_0 Q4_K_M Q5_K_M Q6_K] [--texts 10] [--json FILE]

After every token of each conversation both say which token is the likeliest; KV is in float32. Two comparisons for each
type:

    weights    Weft expands the blocks, and llama.cpp computes on a file that its own quantizer has expanded to float32.
               No activation is rounded, so tokens must be the same wherever the two largest logits differ by more than
               0.001; the command fails otherwise.
    products   Both compute on the blocks, with activations rounded to 8 bits. Sums in another order round other
               activations to other numbers, so likeliest tokens differ here and there, also between any two levels of
               llama.cpp. Beside the distance of both stands how far that rounding takes llama.cpp from itself: from the
               expanded file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.peers import INSTALL
from bench.peers.gguf_checkpoint import gguf_file
from bench.peers.llama_cpp_batch import LlamaCpp, quantized
from bench.quantization import next_token_logprobs
from training.weft_tiny.data import KINDS, held_out
from training.weft_tiny.render import render
from training.weft_tiny.train import ASSET
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.config import QuantizedBlocks
from weft.core.step import F64
from weft.models.loader import load_model

TYPES = ("Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")
MARGIN = 1e-3
"""Of the two largest logits: where they are nearer, sums in another order may exchange them."""
THREADS = 2


class Comparison(NamedTuple):
    """Two models after every token of the same texts."""

    tokens: int
    different: int
    """Positions at which another token is the likeliest one."""
    margin: float
    """Of the first model's two largest logits, the greatest at such a position; 0 where there is none."""
    divergence: float
    """Kullback-Leibler, in nats: of the second from the first, mean over all positions."""

    @classmethod
    def of(cls, true: list[F64], other: list[F64]) -> Comparison:
        """From log-probabilities [tokens, vocabulary] of each text."""
        a, b = np.concatenate(true), np.concatenate(other)
        is_other = a.argmax(-1) != b.argmax(-1)
        largest = np.partition(a, -2)[:, -2:]
        margins = (largest[:, 1] - largest[:, 0])[is_other]
        divergence = (np.exp(a) * (a - b)).sum(-1).mean()
        return cls(len(a), int(is_other.sum()), float(margins.max(initial=0.0)), float(divergence))


def of_llama_cpp(file: Path, texts: list[list[int]]) -> list[F64]:
    """Log-probabilities [tokens, vocabulary] of each text."""
    model = LlamaCpp(file, THREADS, max_sequences=1, context=max(map(len, texts)), float32_kv=True)
    try:
        logits = [torch.from_numpy(model.logits(ids)).double() for ids in texts]
    finally:
        model.close()
    return [each.log_softmax(-1).numpy() for each in logits]


def of_weft(file: Path, texts: list[list[int]], blocks: QuantizedBlocks) -> list[F64]:
    """The same, computed in float32."""
    model = load_model(str(file), dtype="float32", quantized_blocks=blocks).model
    return [next_token_logprobs(model, ids).double().numpy() for ids in texts]


def compare(source: Path, kind: str, texts: list[list[int]], folder: Path) -> dict[str, Comparison]:
    """The comparisons of a type. Its files are in the folder afterwards."""
    file = quantized(source, f"MOSTLY_{kind}", folder / f"{kind}.gguf")
    expanded = of_llama_cpp(quantized(file, "ALL_F32", folder / f"{kind}-expanded.gguf"), texts)
    theirs = of_llama_cpp(file, texts)
    return {
        "weights": Comparison.of(expanded, of_weft(file, texts, "expand")),
        "products": Comparison.of(theirs, of_weft(file, texts, "auto")),
        "llama.cpp from itself": Comparison.of(expanded, theirs),
    }


def conversations(count: int) -> list[list[int]]:
    """Tokens of so many held-out conversations of each kind."""
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    return [
        tokenizer.encode(render(case.messages, case.tools), add_special_tokens=False).ids
        for kind in KINDS
        for case in held_out(kind, count, templates=False)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="a directory into which pip installed llama.cpp with --target")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--texts", type=int, default=10, help="conversations of each kind")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.packages:
        sys.path.append(str(args.packages.resolve()))
    try:
        import llama_cpp
    except ImportError as error:
        raise SystemExit(f"llama.cpp is not installed ({error}): {INSTALL['llama.cpp']}") from error
    torch.set_num_threads(THREADS)
    texts, types = conversations(args.texts), {}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as scratch:
        source = gguf_file(ASSET, "bf16", tokens=True, folder=Path(scratch))
        for kind in args.types:
            types[kind] = compare(source, kind, texts, Path(scratch))
            for name, found in types[kind].items():
                print(
                    f"{kind:7} {name:22} {found.different:4} of {found.tokens} likeliest tokens differ, margin at most "
                    f"{found.margin:.4f}; divergence {found.divergence:.1e}",
                    flush=True,
                )
    if args.json:
        report: dict[str, Any] = {
            **surroundings(threads=THREADS, ran={"llama.cpp": str(llama_cpp.__version__)}),
            "command": command_line("bench.gguf_witness"),
            "types": {kind: {name: found._asdict() for name, found in each.items()} for kind, each in types.items()},
        }
        write_record(args.json, report)
    wrong = [kind for kind, found in types.items() if found["weights"].margin > MARGIN]
    if wrong:
        raise SystemExit(f"read differently: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
