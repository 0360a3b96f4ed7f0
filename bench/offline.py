"""Offline throughput and latency against other engines on the same weights, tokens and threads.

    python -m bench.offline [--runs 5] [--peers transformers,llama.cpp,openvino,vllm] [--packages DIR]
                            [--vllm-python PATH] [--level LEVEL] [--shape SHAPE] [--gguf q8_0|q4_0|q4_k|q4_k_m|FILE]
                            [--requests 32 1]
                            [--json FILE [--resume]]

Random weights in the shape of Qwen3-0.6B (vocabulary 32,000) or Qwen3-1.7B, bfloat16, greedy, end-of-sequence ignored:
32 requests of 256 -> 64 tokens at once, and one alone. Every engine has a process of its own, and times itself inside
it. One peer is loaded at a time; Weft and the peer take turns, and while one computes the other is stopped. The medians
of the runs are reported, the ratio of the medians, and the least and the greatest ratio of neighbouring runs.

A peer that is not installed is left out, and said so, with what would install it: into this environment, or with pip's
`--target` into a directory of its own, which `--packages` names; vLLM needs an environment of its own.

`--gguf` has Weft, llama.cpp and OpenVINO, the peers that read it, compute on the same file with quantized blocks: one
made of the random checkpoint, or FILE, whose vocabulary has at least the 32,000 tokens of SHAPE. The file of q4_k_m,
which has some matrices in Q6_K, is by llama.cpp's own quantizer.

`--level` holds all engines to the instructions of a smaller processor. An engine whose own output does not show that it
stays there gets no figure. With `--json`, the file is written after every pair of runs, and `--resume` continues such a
file: what it has is not measured again, and a comparison that was interrupted gets the pairs that it lacks.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench import alone
from bench.peers import INSTALL, PEERS, levels
from bench.peers.child import ChildPeer
from bench.peers.gguf_checkpoint import gguf_file
from bench.peers.llama_cpp_batch import quantized
from bench.peers.text import one_line
from bench.peers.vllm_cpu import vllm_cpu
from bench.resume import add_arguments, check_arguments, chosen, continued
from weft.cli.bench.measure import Spread, pair_ratios
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.models.random_checkpoints import QWEN3_0_6B, QWEN3_1_7B, write_checkpoint
from weft.worker.machine import cpu_name

INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS, THREADS = 256, 64, 32, 2
CONTEXT = 512
"""Tokens that each engine has room for, in each of `REQUESTS` sequences."""
GGUF_PRECISIONS = ("q8_0", "q4_0", "q4_k")
GGUF_TYPES = (*GGUF_PRECISIONS, "q4_k_m")
GGUF_PEERS = ("llama.cpp", "openvino")
SHAPES = {"qwen3-0.6b": QWEN3_0_6B, "qwen3-1.7b": QWEN3_1_7B}
# What Weft's engine process sets for itself; here every engine has it.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}

Prompts = list[list[int]]


class Contender(Protocol):
    """An engine that is loaded and ready."""

    name: str
    version: str
    notes: list[str]
    """Settings that the engine refused, and what it uses instead."""
    seconds_inside: float | None
    """Of the last `generate`, as the engine's process measured it."""

    def generate(self, prompts: Prompts, output_tokens: int) -> Prompts:
        """Generate exactly `output_tokens` greedy tokens for each prompt, all at once."""
        ...

    def instructions(self) -> list[str]:
        """What the engine has said of the instructions that it uses."""
        ...

    def close(self) -> None:
        """Free the engine's memory and processes. Idempotent."""
        ...


class Unmeasured(Exception):
    """A comparison without a figure; the message says why."""


def start(name: str, checkpoint: Path, args: argparse.Namespace) -> ChildPeer:
    """Load an engine. Raises `ImportError` for a peer that is not installed, else `ChildError`."""
    environment = {**_WAITING, **levels.environment(args.level)}
    if name == "vllm":
        return vllm_cpu(checkpoint, args.threads, environment)
    command = [sys.executable, "-m", "bench.peers.engine_child", name]
    if args.packages:
        command.append(str(args.packages.resolve()))
    options = {"quantization": args.quantization} if name == "weft" else {}
    model = checkpoint if args.gguf is None else gguf_of(args.gguf, checkpoint, args.packages)
    return ChildPeer(name, command, environment, checkpoint=str(model), threads=args.threads, **options)


def gguf_of(wanted: str, checkpoint: Path, packages: Path | None = None) -> Path:
    """The GGUF file that `--gguf` asks for. Ends the process where llama.cpp has to make it and is not installed."""
    if wanted == "q4_k_m":
        file = checkpoint / "model-q4_k_m.gguf"
        if not file.exists():
            source = gguf_file(checkpoint, "bf16", tokens=True)
            try:
                quantized(source, "MOSTLY_Q4_K_M", file.with_suffix(".unfinished"), packages).replace(file)
            except ImportError as error:
                raise SystemExit(
                    f"llama.cpp, which makes this file, is missing ({error}): {INSTALL['llama.cpp']}"
                ) from error
        return file
    return gguf_file(checkpoint, wanted, tokens=True) if wanted in GGUF_PRECISIONS else Path(wanted)  # type: ignore[arg-type]


def compare(
    ours: Contender,
    peer: Contender,
    prompts: Prompts,
    output_tokens: int,
    runs: int,
    level: str | None = None,
    *,
    before: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Time `runs` runs of each, taking turns, after one warm-up each that is not counted; the record of it as data.

    `keep` is called with the record after every pair. `before` is a record with fewer pairs, which count as the first
    ones if they are of the same version of the peer.

    Raises `Unmeasured` where the peer fails, or where one of them does not show that it stays at `level`.
    """
    known = before if before is not None and before["version"] == peer.version else {"weft_all_s": (), "all_s": ()}
    mine, theirs = [*known["weft_all_s"]], [*known["all_s"]]
    _pair(ours, peer, prompts, output_tokens)
    if level is not None:
        for contender in (ours, peer):
            if why := levels.refusal(level, contender.instructions()):
                raise Unmeasured(f"{contender.name}: {why}")
    while len(mine) < runs:
        for times, seconds in zip((mine, theirs), _pair(ours, peer, prompts, output_tokens), strict=True):
            times.append(seconds)
        keep(_comparison(ours, peer, mine, theirs))
    return _comparison(ours, peer, mine, theirs)


def _pair(ours: Contender, peer: Contender, prompts: Prompts, output_tokens: int) -> tuple[float, float]:
    """Seconds of one run of each, ours first."""
    mine = _timed(ours, prompts, output_tokens)
    try:
        return mine, _timed(peer, prompts, output_tokens)
    except Exception as error:  # each peer has errors of its own
        raise Unmeasured(one_line(error)) from error


def _comparison(ours: Contender, peer: Contender, mine: list[float], theirs: list[float]) -> dict[str, Any]:
    pairs = Spread.of(pair_ratios(theirs, mine))
    return {
        "median_s": statistics.median(theirs),
        "all_s": list(theirs),
        "weft_median_s": statistics.median(mine),
        "weft_all_s": list(mine),
        "ratio_to_weft": statistics.median(theirs) / statistics.median(mine),
        "ratio_pairs": [pairs.low, pairs.high],
        "version": peer.version,
        "notes": list(peer.notes),
        "instructions": {each.name: said for each in (ours, peer) if (said := each.instructions())},
    }


def _timed(contender: Contender, prompts: Prompts, output_tokens: int) -> float:
    """Seconds of one `generate`. Raises `RuntimeError` for another number of tokens than was asked for."""
    outputs = contender.generate(prompts, output_tokens)
    if [len(output) for output in outputs] != [output_tokens] * len(prompts):
        raise RuntimeError(f"{contender.name} did not generate {output_tokens} tokens for each prompt")
    assert contender.seconds_inside is not None
    return contender.seconds_inside


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print the line of a peer."""
    if "error" in found:
        print(f"  {name:14s} no figure: {found['error']}", flush=True)
        return
    ours, theirs = Spread.of(found["weft_all_s"]), Spread.of(found["all_s"])
    low, high = found["ratio_pairs"]
    print(
        f"  {name:14s} {theirs.median:7.2f} s ({theirs.low:.2f} to {theirs.high:.2f}), weft {ours.median:7.2f} s "
        f"({ours.low:.2f} to {ours.high:.2f}): {found['ratio_to_weft']:.2f}x (pairs {low:.2f} to {high:.2f})",
        flush=True,
    )
    for note in found["notes"]:
        print(f"  {'':14s} {note}")


@contextmanager
def loaded(name: str, checkpoint: Path, args: argparse.Namespace) -> Iterator[ChildPeer]:
    """A peer while it is loaded. Raises `Unmeasured`, after it has printed what would install it."""
    try:
        peer = start(name, checkpoint, args)
    except Exception as error:
        if isinstance(error, ImportError) or "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
            print(f"{name} is not installed: {INSTALL[name]}")
        raise Unmeasured(one_line(error)) from error
    try:
        yield peer
    finally:
        peer.close()


def run(args: argparse.Namespace, checkpoint: Path, record: dict[str, Any]) -> None:
    """Measure what `record` lacks; it is written after each pair of runs."""
    generator = np.random.default_rng(0)
    vocab_size = SHAPES[args.shape]["vocab_size"]
    work = {n: generator.integers(0, vocab_size, (n, args.input_tokens)).tolist() for n in sorted(set(args.requests))}
    missing = {name: [n for n in args.requests if _lacks(args, record, n, name)] for name in args.peers}
    if not any(missing.values()):
        return
    ours = start("weft", checkpoint, args)
    try:
        for name, counts in missing.items():
            if not counts:
                continue
            try:
                with loaded(name, checkpoint, args) as peer:
                    for count in counts:
                        _fill(args, record, count, ours, peer, work[count])
            except Unmeasured as error:
                for count in counts:
                    _keep(args, record, count, name, _failed(record, count, name, error))
                    show(name, _cell(record, count, name))
    finally:
        ours.close()


def _fill(
    args: argparse.Namespace, record: dict[str, Any], count: int, ours: Contender, peer: Contender, prompts: Prompts
) -> None:
    """Measure one comparison, or the rest of it."""
    print(
        f"{count} request(s) of {args.input_tokens} -> {args.output_tokens} tokens, median of {args.runs}", flush=True
    )

    def keep(found: dict[str, Any]) -> None:
        _keep(args, record, count, peer.name, found)

    before = _cell(record, count, peer.name) or None
    try:
        compare(ours, peer, prompts, args.output_tokens, args.runs, args.level, before=before, keep=keep)
    except Unmeasured as error:
        keep(_failed(record, count, peer.name, error))
    show(peer.name, _cell(record, count, peer.name))


def _cell(record: Mapping[str, Any], count: int, name: str) -> dict[str, Any]:
    """What the record has of a comparison; empty: nothing."""
    found: dict[str, Any] = record["results"].get(str(count), {}).get(name, {})
    return found


def _lacks(args: argparse.Namespace, record: Mapping[str, Any], count: int, name: str) -> bool:
    return len(_cell(record, count, name).get("all_s", ())) < args.runs


def _failed(record: Mapping[str, Any], count: int, name: str, error: Unmeasured) -> dict[str, Any]:
    """A comparison that ended early, with the pairs that it has."""
    return {**_cell(record, count, name), "error": str(error)}


def _keep(args: argparse.Namespace, record: dict[str, Any], count: int, name: str, found: Any) -> None:
    record["results"].setdefault(str(count), {})[name] = found
    if args.json:
        write_record(args.json, record)


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """What has to be equal for figures to stand in one file."""
    names = ("shape", "level", "threads", "runs", "input_tokens", "output_tokens", "quantization", "gguf")
    return {name: getattr(args, name) for name in names}


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """The record to fill: a new one, or with `--resume` that of the file. Ends the process where that is of another
    machine or other settings."""
    record: dict[str, Any] = {
        **surroundings(threads=args.threads),
        "command": command_line("bench.offline"),
        "asked": asked(args),
        "results": {},
    }
    if not args.resume or not args.json.exists():
        return record
    before = continued(args.json, record)
    cells = [(found, name) for found in before["results"].values() for name in found]
    failed = [(found, name) for found, name in cells if found[name].pop("error", None) is not None]
    for found, name in failed:
        if not found[name]:
            del found[name]
    print(f"{args.json} is continued; {len(failed)} comparisons that failed are tried again")
    return before


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--peers", help=f"comma-separated, by default all: {', '.join(PEERS)}")
    parser.add_argument("--packages", type=Path, help="a directory into which pip installed peers with --target")
    parser.add_argument("--level", choices=levels.LEVELS, help="hold every engine to these instructions")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of the random checkpoint")
    parser.add_argument("--requests", type=int, nargs="*", default=[REQUESTS, 1])
    parser.add_argument("--input-tokens", type=int, default=INPUT_TOKENS)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of Weft's weights; peers keep bfloat16")
    parser.add_argument("--gguf", help=f"a file that engines compute on, or its type: {', '.join(GGUF_TYPES)}")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint of SHAPE to use instead of a random one")
    add_arguments(parser, record="every pair of runs", kept="figures")
    args = parser.parse_args(arguments)
    peers, kind = (PEERS, "peer") if args.gguf is None else (GGUF_PEERS, "peer with --gguf")
    args.peers = chosen(parser, args.peers or ",".join(peers), peers, kind)
    if args.gguf is not None and args.quantization:
        parser.error("--gguf and --quantization exclude each other")
    if args.gguf is not None and args.gguf not in GGUF_TYPES and not Path(args.gguf).is_file():
        parser.error(f"--gguf {args.gguf} is neither a file nor one of {', '.join(GGUF_TYPES)}")
    if max(args.requests, default=1) > REQUESTS or args.input_tokens + args.output_tokens > CONTEXT:
        parser.error(f"every engine has room for {REQUESTS} requests of {CONTEXT} tokens, input and output together")
    if args.packages and not args.packages.is_dir():
        parser.error(f"--packages {args.packages} is not a directory")
    check_arguments(parser, args)
    return args


def main() -> None:
    args = parse_arguments()
    record = begin(args)
    print(f"{cpu_name()}, {os.cpu_count()} cores, {args.threads} threads, level {args.level or 'of the processor'}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        checkpoint = args.checkpoint or write_checkpoint(
            Path(folder) / args.shape, SHAPES[args.shape], dtype=torch.bfloat16, tokenizer=True
        )
        run(args, checkpoint, record)


if __name__ == "__main__":
    alone.require()
    main()
