"""Offline throughput and latency against other engines on the same weights, tokens and threads.

    python -m bench.offline [--runs 5] [--peers transformers,llama.cpp,openvino,vllm] [--packages DIR] [--json FILE]
                            [--vllm-python PATH]

Random weights in the shape of Qwen3-0.6B (vocabulary 32,000), bfloat16, greedy, end-of-sequence ignored: 32 requests
of 256 -> 64 tokens at once, and one alone. Engines take turns; the median of the runs is reported, its spread, and the
ratio to each peer, with the least and the greatest ratio of neighbouring runs. A peer that is not installed is left
out, and said so, with what would install it: into this environment, or with pip's `--target` into a directory of its
own, which `--packages` names. What is there is looked for last, so it replaces nothing that Weft uses.

Engines share this process, but for vLLM, which needs a Python environment of its own (`--vllm-python` names its
interpreter). Its process is stopped while others are measured, and its time is taken inside it.
"""

from __future__ import annotations

import os

# What Weft's engine process sets for itself; here it is for every engine. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import asyncio
import contextlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from bench import alone
from bench.peers import INSTALL, PEERS, PYTHON_VARIABLE
from bench.peers.text import one_line
from weft.cli.bench.measure import Spread, pair_ratios
from weft.cli.bench.record import command_line, surroundings, write_record
from weft.config import EngineConfig
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.inline import InlineEngine
from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint
from weft.version import __version__
from weft.worker.machine import cpu_name

INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS, THREADS = 256, 64, 32, 2
CONTEXT = 512
"""Tokens that each engine has room for, in each of `REQUESTS` sequences."""


class Contender(Protocol):
    """An engine that is loaded and ready."""

    name: str
    version: str
    seconds_inside: float | None
    """Of the last `generate`, by the process that computes; None where that is this one."""
    notes: Sequence[str]
    """Settings that the engine refused, and what it uses instead."""

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """Generate exactly `output_tokens` greedy tokens for each prompt, all at once."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class Weft:
    """The engine as `weft.LLM` runs it, without the text."""

    name = "weft"
    version = __version__
    seconds_inside = None
    notes: tuple[str, ...] = ()

    def __init__(self, checkpoint: Path, threads: int, **options: object):
        defaults: dict[str, object] = {
            "num_pages": 1200,
            "prefix_cache": False,
            "max_context": 4096,
            "performance_mode": "throughput",
        }
        config = EngineConfig(model=str(checkpoint), dtype="bfloat16", threads=threads, **(defaults | options))
        self.loop = asyncio.new_event_loop()
        self.engine = InlineEngine.from_config(config)
        self.loop.run_until_complete(self.engine.wait_ready())
        self._next = 0

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        return self.loop.run_until_complete(self._generate(prompts, output_tokens))

    async def _generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        outputs: dict[int, list[int]] = {}
        done = asyncio.Event()
        left = len(prompts)

        def receive(envelope: wire.Envelope) -> None:
            nonlocal left
            for event in envelope.events:
                if isinstance(event, wire.Token):
                    outputs[event.op].append(event.token)
                elif isinstance(event, wire.Finished):
                    left -= 1
                else:
                    raise RuntimeError(f"unexpected {event}")
            if left == 0:
                done.set()

        self.engine.subscribe(receive)
        commands: list[wire.Command] = []
        ids = []
        for prompt in prompts:
            self._next += 1
            ids.append(self._next)
            outputs[self._next] = []
            stop = StopParams(max_tokens=output_tokens, ignore_eos=True)
            commands += [
                wire.Open(seq=self._next),
                wire.Append(seq=self._next, op=self._next, tokens=pack_tokens(prompt)),
                wire.Generate(seq=self._next, op=self._next, sampling=SamplingParams(temperature=0.0), stop=stop),
            ]
        self.engine.send(commands)
        await done.wait()
        self.engine.send([wire.Release(seq=seq) for seq in ids])
        return [outputs[seq] for seq in ids]

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()


class Measured(NamedTuple):
    """The runs of all contenders on the same prompts."""

    times: dict[str, list[float]]
    """Seconds of each run, by name; only of contenders that completed every run."""
    failures: dict[str, str]
    """Why the others did not, by name."""


def measure(contenders: list[Contender], prompts: list[list[int]], output_tokens: int, runs: int) -> Measured:
    """Time each run of each contender, taking turns; one warm-up run each is not counted.

    A contender that fails is not run again, and the others go on.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    failures: dict[str, str] = {}
    for run in range(runs + 1):
        for contender in contenders:
            if contender.name in failures:
                continue
            try:
                seconds = _timed(contender, prompts, output_tokens)
            except Exception as error:  # each peer has errors of its own
                failures[contender.name] = one_line(error)
                del times[contender.name]
                print(f"{contender.name} failed and is left out of these runs: {failures[contender.name]}")
                continue
            if run:
                times[contender.name].append(seconds)
    return Measured(times, failures)


def _timed(contender: Contender, prompts: list[list[int]], output_tokens: int) -> float:
    """Seconds of one `generate`. Raises `RuntimeError` for another number of tokens than was asked for."""
    began = time.perf_counter()
    outputs = contender.generate(prompts, output_tokens)
    seconds = time.perf_counter() - began
    if [len(output) for output in outputs] != [output_tokens] * len(prompts):
        raise RuntimeError(f"{contender.name} did not generate {output_tokens} tokens for each prompt")
    inside = contender.seconds_inside
    return seconds if inside is None else inside


def report(title: str, times: dict[str, list[float]]) -> dict[str, object]:
    """Print a table; returns it as data."""
    print(f"\n{title}")
    if "weft" not in times:
        raise RuntimeError("Weft itself failed, so there is nothing to compare with")
    ours = statistics.median(times["weft"])
    rows: dict[str, object] = {}
    for name, seconds in times.items():
        median, least, most = Spread.of(seconds)
        pairs = Spread.of(pair_ratios(seconds, times["weft"]))
        ratio = f"{median / ours:5.2f}x  (pairs {pairs.low:.2f} to {pairs.high:.2f})" if name != "weft" else ""
        print(f"  {name:14s} {median:8.2f} s  (min {least:.2f}, max {most:.2f})  {ratio}")
        rows[name] = {
            "median_s": median,
            "all_s": seconds,
            "ratio_to_weft": median / ours,
            "ratio_pairs": [pairs.low, pairs.high],
        }
    return rows


def load_peers(checkpoint: Path, names: list[str], threads: int) -> tuple[list[Contender], dict[str, str]]:
    """Load the peers; return those that run here, and why the others do not, by name.

    Prints that too, with what installs a peer that is missing, and the settings that a peer refused.
    """
    peers: list[Contender] = []
    left_out: dict[str, str] = {}
    for name in names:
        make: Callable[[Path, int], Contender] = PEERS[name]
        try:
            peer = make(checkpoint, threads)
        except Exception as error:  # each peer has errors of its own
            left_out[name] = one_line(error)
            print(f"{name} is left out: {left_out[name]}")
            if isinstance(error, ImportError):
                print(f"  {INSTALL[name]}")
            continue
        peers.append(peer)
        for note in peer.notes:
            print(f"{name}: {note}")
    return peers, left_out


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--packages", type=Path, help="a directory into which pip installed peers with --target")
    parser.add_argument("--vllm-python", help=f"the interpreter of an environment with vLLM ({PYTHON_VARIABLE})")
    parser.add_argument("--requests", type=int, nargs="*", default=[REQUESTS, 1])
    parser.add_argument("--input-tokens", type=int, default=INPUT_TOKENS)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
    parser.add_argument("--quantization", choices=["int8"], help="of Weft's weights; peers keep bfloat16")
    parser.add_argument("--checkpoint", type=Path, help="use this checkpoint instead of a random one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    if unknown := [name for name in args.peers if name not in PEERS]:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if max(args.requests, default=1) > REQUESTS or args.input_tokens + args.output_tokens > CONTEXT:
        parser.error(f"every engine has room for {REQUESTS} requests of {CONTEXT} tokens, input and output together")
    if args.packages:
        if not args.packages.is_dir():
            parser.error(f"--packages {args.packages} is not a directory")
        sys.path.append(str(args.packages.resolve()))
    if args.vllm_python:
        os.environ[PYTHON_VARIABLE] = args.vllm_python
    return args


def run(args: argparse.Namespace, checkpoint: Path) -> dict[str, object]:
    """Load every engine, measure them in turn, free them; the whole report as data."""
    results: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        contenders: list[Contender] = [Weft(checkpoint, args.threads, quantization=args.quantization)]
        stack.callback(contenders[0].close)
        peers, left_out = load_peers(checkpoint, args.peers, args.threads)
        for peer in peers:
            contenders.append(peer)
            stack.callback(peer.close)
        print(f"{cpu_name()}, {os.cpu_count()} cores, {args.threads} threads, Python {platform.python_version()}")
        print(", ".join(f"{c.name} {c.version}" for c in contenders) + f", torch {torch.__version__}")
        generator = np.random.default_rng(0)
        for count in args.requests:
            prompts = generator.integers(0, QWEN3_0_6B["vocab_size"], (count, args.input_tokens)).tolist()
            title = f"{count} request(s) of {args.input_tokens} -> {args.output_tokens} tokens, median of {args.runs}"
            measured = measure(contenders, prompts, args.output_tokens, args.runs)
            results[str(count)] = report(title, measured.times) | {
                name: {"error": reason} for name, reason in measured.failures.items()
            }
        where = surroundings(threads=args.threads, ran={each.name: each.version for each in contenders})
    notes = {contender.name: list(contender.notes) for contender in contenders if contender.notes}
    lengths = {"input_tokens": args.input_tokens, "output_tokens": args.output_tokens}
    asked = {"command": command_line("bench.offline"), **lengths, "quantization": args.quantization}
    return {**where, **asked, "left_out": left_out, "notes": notes, "results": results}


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        checkpoint = args.checkpoint or write_checkpoint(
            Path(folder) / "qwen3-0.6b-random", QWEN3_0_6B, dtype=torch.bfloat16, tokenizer=True
        )
        data = run(args, checkpoint)
    if args.json:
        write_record(args.json, data)


if __name__ == "__main__":
    alone.require()
    main()
