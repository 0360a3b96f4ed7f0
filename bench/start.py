"""How long it takes from the start of a process to the first token of an answer, against llama.cpp on the same file.

    python -m bench.start [--runs 5] [--gguf bf16|q8_0|q4_0|q4_k] [--shape qwen3-0.6b] [--vocabulary 151936]
                          [--packages DIR] [--json FILE]

A GGUF file with random weights and a byte-level vocabulary of the size of Qwen3's is written once and then read by
every process, and once before each, so it is in the page cache. Each run is a new process: `weft.LLM` with a prompt of
16 token ids and one new token, then the same with llama.cpp. Both take turns; one run of each is not counted. Parts are
measured inside the process: the interpreter's start, imports, tokenizer, weights (read, and arranged for the kernels),
engine (pools, one step to warm up), first token. llama.cpp reads its tokenizer with the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench import alone
from bench.offline import SHAPES, THREADS
from bench.peers import INSTALL
from bench.peers.gguf_checkpoint import gguf_file
from weft.cli.bench.measure import Spread, pair_ratios
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.models.random_checkpoints import write_checkpoint

ENGINES = ("weft", "llama.cpp")
PRECISIONS = ("bf16", "q8_0", "q4_0", "q4_k")
QWEN3_VOCABULARY = 151_936
SHOWN_CHARS = 500

Parts = dict[str, float]


class NotInstalled(Exception):
    """An engine's packages are missing."""


def start(engine: str, file: Path, threads: int, packages: Path | None) -> Parts:
    """Seconds of the parts of one process. Raises `NotInstalled`, and `RuntimeError` with the end of its output."""
    command = [sys.executable, "-m", "bench.peers.start_child", engine, str(file), str(threads)]
    more = [] if packages is None else [str(packages.resolve())]
    done = subprocess.run([*command, repr(time.monotonic()), *more], capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in done.stderr:
        raise NotInstalled(f"{engine} is not installed: {INSTALL.get(engine, '')}")
    if done.returncode:
        raise RuntimeError(f"{engine} ended with status {done.returncode}: {done.stderr[-SHOWN_CHARS:]}")
    found: Parts = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(file: Path, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Take turns, and write the record after every pair."""
    engines = list(ENGINES)
    for number in range(-1, args.runs):
        for engine in [*engines]:
            _read(file)
            try:
                parts = start(engine, file, args.threads, args.packages)
            except NotInstalled as error:
                print(error)
                engines.remove(engine)
                continue
            if number >= 0:
                record["runs"].setdefault(engine, []).append(parts)
        if number >= 0 and args.json:
            write_record(args.json, record)


def _read(file: Path) -> None:
    """Read a file, so that it is in the page cache: some machines drop what was not used for seconds."""
    with file.open("rb", buffering=0) as stream:
        while stream.read(1 << 24):
            pass


def totals(runs: list[Parts]) -> list[float]:
    """Seconds from the start of the process to the first token, by run."""
    return [sum(parts.values()) for parts in runs]


def lines(runs: dict[str, list[Parts]]) -> list[str]:
    """What to print: medians of all and of each part, and the ratio of llama.cpp's seconds to Weft's."""
    found = []
    for engine, each in runs.items():
        median, low, high = Spread.of(totals(each))
        parts = ", ".join(f"{name} {Spread.of([run[name] for run in each]).median:.2f}" for name in each[0])
        found.append(f"{engine:10s} {median:5.2f} s ({low:.2f} to {high:.2f}): {parts}")
    if {"weft", "llama.cpp"} <= set(runs):
        ours, theirs = totals(runs["weft"]), totals(runs["llama.cpp"])
        pairs = Spread.of(pair_ratios(theirs, ours))
        ratio = Spread.of(theirs).median / Spread.of(ours).median
        found.append(f"llama.cpp takes {ratio:.2f} times Weft's time (pairs {pairs.low:.2f} to {pairs.high:.2f})")
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--gguf", choices=PRECISIONS, default="bf16", help="how the matrices are stored")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of the random checkpoint")
    parser.add_argument("--vocabulary", type=int, default=QWEN3_VOCABULARY, help="tokens")
    parser.add_argument("--packages", type=Path, help="a directory into which pip installed llama-cpp-python and gguf")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    args = parser.parse_args(arguments)
    if args.runs < 1:
        parser.error("--runs must be positive")
    return args


def main() -> None:
    args = parse_arguments()
    if args.packages:
        sys.path.append(str(args.packages.resolve()))
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        shape = {**SHAPES[args.shape], "vocab_size": args.vocabulary}
        checkpoint = write_checkpoint(Path(folder) / args.shape, shape, dtype=torch.bfloat16)
        file = gguf_file(checkpoint, args.gguf, tokens=True)
        (checkpoint / "model.safetensors").unlink()  # only the GGUF file is to be in the page cache
        size = file.stat().st_size
        print(f"{args.gguf}, {size / 1e9:.2f} GB, vocabulary of {args.vocabulary}; medians of {args.runs}", flush=True)
        record: dict[str, Any] = {
            **surroundings(threads=args.threads),
            "command": command_line("bench.start"),
            "file_bytes": size,
            "runs": {},
        }
        measure(file, args, record)
    print("\n".join(lines(record["runs"])))


if __name__ == "__main__":
    alone.require()
    main()
