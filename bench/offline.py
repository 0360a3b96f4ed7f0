"""Offline throughput and latency against other engines on the same weights, tokens and threads.

    python -m bench.offline [--runs 5] [--peers transformers,llama.cpp,openvino] [--packages DIR] [--json FILE]

Random weights in the shape of Qwen3-0.6B (vocabulary 32,000), bfloat16, greedy, end-of-sequence ignored: 32 requests
of 256 -> 64 tokens at once, and one alone. Engines take turns in one process; the median of the runs is reported, its
spread, and the ratio to each peer. A peer that is not installed is left out, and said so, with what would install it:
into this environment, or with pip's `--target` into a directory of its own, which `--packages` names. What is there
is looked for last, so it replaces nothing that Weft uses.
"""

from __future__ import annotations

import os

# What Weft's engine process sets for itself; here it is for every engine. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import asyncio
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from bench.peers import PACKAGES, PEERS
from weft.cli import probe
from weft.cli.version import versions
from weft.config import EngineConfig
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.inline import InlineEngine
from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint
from weft.version import __version__

INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS, THREADS = 256, 64, 32, 2


class Contender(Protocol):
    """An engine that is loaded and ready."""

    name: str
    version: str

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


def measure(contenders: list[Contender], prompts: list[list[int]], runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each contender, taking turns; one warm-up run each is not counted."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for run in range(runs + 1):
        for contender in contenders:
            began = time.perf_counter()
            outputs = contender.generate(prompts, OUTPUT_TOKENS)
            seconds = time.perf_counter() - began
            if [len(output) for output in outputs] != [OUTPUT_TOKENS] * len(prompts):
                raise RuntimeError(f"{contender.name} did not generate {OUTPUT_TOKENS} tokens for each prompt")
            if run:
                times[contender.name].append(seconds)
    return times


def report(title: str, times: dict[str, list[float]]) -> dict[str, object]:
    """Print a table; returns it as data."""
    print(f"\n{title}")
    ours = statistics.median(times["weft"])
    rows: dict[str, object] = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratios = [theirs / mine for theirs, mine in zip(seconds, times["weft"], strict=True)]
        ratio = f"{median / ours:5.2f}x  (pairs {min(ratios):.2f} to {max(ratios):.2f})" if name != "weft" else ""
        print(f"  {name:14s} {median:8.2f} s  (min {min(seconds):.2f}, max {max(seconds):.2f})  {ratio}")
        rows[name] = {"median_s": median, "all_s": seconds, "ratio_to_weft": median / ours}
    return rows


def load_peers(checkpoint: Path, names: list[str], threads: int) -> list[Contender]:
    """Every peer that is asked for and installed; says which are not, and what would install them."""
    peers: list[Contender] = []
    for name in names:
        make: Callable[[Path, int], Contender] = PEERS[name]
        try:
            peers.append(make(checkpoint, threads))
        except ImportError as error:
            print(f"{name} is left out: {error}")
            print(f"  pip install --target DIR {PACKAGES[name]}  installs it; name DIR in --packages")
    return peers


def environment(contenders: list[Contender], threads: int) -> dict[str, object]:
    """The machine, how much of it is used, and what ran: as JSON next to the numbers."""
    ran = {contender.name: contender.version for contender in contenders}
    return {"machine": {**probe.machine(), "threads": threads}, "versions": {**versions(), **ran}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--packages", type=Path, help="a directory into which pip installed peers with --target")
    parser.add_argument("--requests", type=int, nargs="*", default=[REQUESTS, 1])
    parser.add_argument("--checkpoint", type=Path, help="use this checkpoint instead of a random one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [name for name in args.peers.split(",") if name]
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if args.packages:
        if not args.packages.is_dir():
            parser.error(f"--packages {args.packages} is not a directory")
        sys.path.append(str(args.packages.resolve()))
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        checkpoint = args.checkpoint or write_checkpoint(
            Path(folder) / "qwen3-0.6b-random", QWEN3_0_6B, dtype=torch.bfloat16, tokenizer=True
        )
        contenders: list[Contender] = [Weft(checkpoint, args.threads)]
        contenders += load_peers(checkpoint, names, args.threads)
        print(f"{probe.cpu_name()}, {os.cpu_count()} cores, {args.threads} threads, Python {platform.python_version()}")
        print(", ".join(f"{c.name} {c.version}" for c in contenders) + f", torch {torch.__version__}")
        generator = np.random.default_rng(0)
        results: dict[str, object] = {}
        for count in args.requests:
            prompts = generator.integers(0, QWEN3_0_6B["vocab_size"], (count, INPUT_TOKENS)).tolist()
            title = f"{count} request(s) of {INPUT_TOKENS} -> {OUTPUT_TOKENS} tokens, median of {args.runs}"
            results[str(count)] = report(title, measure(contenders, prompts, args.runs))
        where = environment(contenders, args.threads)
        for contender in contenders:
            contender.close()
    if args.json:
        command = shlex.join(["python", "-m", "bench.offline", *sys.argv[1:]])
        data = {**where, "command": command, "results": results}
        args.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
