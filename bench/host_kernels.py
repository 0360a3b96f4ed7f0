"""Time between kernels while a real model decodes on this machine's CPU: `bench.host_cost kernels`.

Random weights in the shape of Qwen3-0.6B, bfloat16. Every operation of the kernel table is timed on the device's thread
(a wrapper costs about 0.5 us), and so are torch's operations, sampling, the layout of the batch and the inputs. A step
lasts from the beginning of its forward to that of the next one's; what it takes beyond kernels, torch and sampling is
Weft's own: `between kernels`.
"""

from __future__ import annotations

import os

# What Weft's engine process sets for itself. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from weft.config import EngineConfig
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.kernels import dispatch
from weft.kernels.base import Block, Kernels, PrepareBlock
from weft.kernels.batch import lower
from weft.models.layers.decoder import DecoderModel
from weft.models.layers.rope import Rope
from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint
from weft.worker import runner
from weft.worker.lowering import input_embeddings
from weft.worker.runner import StepRunner
from weft.worker.sampler import StepSampler

PROMPT_TOKENS = 64
STEPS = 20
INSIDE = ("kernel ", "torch: ", "sampling")
"""What these stand before is the work of kernels, our own or torch's."""


class Timers:
    """Seconds by what they were spent on, what is timed within left out, for each step. Used by the device's thread."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: defaultdict[str, float] = defaultdict(float)
        self._inner_s = 0.0
        self._began_s = 0.0
        self._ended_s = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its calls are timed."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner_s, self._inner_s = self._inner_s, 0.0
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - began
                self._now[name] += seconds - self._inner_s
                self._inner_s = inner_s + seconds

        return call

    def begins(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that begins a step."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            now_s = time.perf_counter()
            self._now["step"] = now_s - self._began_s
            self._now["from step to step"] = now_s - self._ended_s
            self.steps.append(self._now)
            self._now, self._began_s = defaultdict(float), now_s
            return function(*args, **kwargs)

        return call

    def ends(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that ends a step."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self._ended_s = time.perf_counter()

        return call

    def timed_blocks(self, prepare: PrepareBlock) -> PrepareBlock:
        """The function, whose results are timed."""

        def prepare_timed(*args: Any, **kwargs: Any) -> Block | None:
            block = prepare(*args, **kwargs)
            return None if block is None else self.timed("kernel block", block)

        return prepare_timed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Models loaded and steps carried out meanwhile are timed."""
        select = dispatch.select

        def timed_select(*args: Any, **kwargs: Any) -> Kernels:
            chosen = select(*args, **kwargs)
            timed = {n: self.timed(f"kernel {n}", getattr(chosen, n)) for n in chosen._fields}
            return chosen._replace(**timed | {"prepare_block": self.timed_blocks(chosen.prepare_block)})

        with (
            mock.patch.object(dispatch, "select", timed_select),
            mock.patch.object(StepRunner, "forward_half", self.begins(StepRunner.forward_half)),
            mock.patch.object(StepRunner, "sampling_half", self.ends(StepRunner.sampling_half)),
            mock.patch.object(StepSampler, "sample", self.timed("sampling", StepSampler.sample)),
            mock.patch.object(DecoderModel, "head", self.timed("torch: logits", DecoderModel.head)),
            mock.patch.object(DecoderModel, "embed", self.timed("torch: embedding", DecoderModel.embed)),
            mock.patch.object(Rope, "rotation", self.timed("torch: rotation", Rope.rotation)),
            mock.patch.object(runner, "lower", self.timed("layout of the batch", lower)),
            mock.patch.object(runner, "input_embeddings", self.timed("inputs", input_embeddings)),
        ):
            yield


def report(sequences: int, runs: int, threads: int | None) -> dict[str, Any]:
    """Measure the time between kernels and print it."""
    timers = Timers()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, timers.installed():
        checkpoint = write_checkpoint(Path(folder) / "model", QWEN3_0_6B, dtype=torch.bfloat16, tokenizer=True)
        config = EngineConfig(
            model=str(checkpoint),
            dtype="bfloat16",
            num_pages=sequences * 24,
            max_context=384,
            threads=threads,
            performance_mode="throughput",
        )
        engine = build_engine(config, _publish)
        try:
            _start(engine, sequences, runs * STEPS)
            timers.steps.clear()
            for _ in range(runs * STEPS):
                engine.step()
        finally:
            engine.close()
    found = [_split(step) for step in timers.steps[2:]]
    print(f"a step of {sequences} sequences that decode, Qwen3-0.6B's shape: ms, median of {len(found)} steps and 80 %")
    table = {name: [one[name] for one in found] for name in found[0]}
    for name, values in table.items():
        low, middle, high = np.percentile(values, (10, 50, 90))
        print(f"  {name:30} {middle:9.3f}  ({low:.3f} to {high:.3f})")
    return table


def _publish(client: int, envelope: wire.Envelope) -> None:
    wire.encode_envelope(envelope)


def _start(engine: Engine, sequences: int, steps: int) -> None:
    generator = np.random.default_rng(0)
    for seq in range(1, sequences + 1):
        tokens = generator.integers(0, QWEN3_0_6B["vocab_size"], PROMPT_TOKENS).tolist()
        commands: list[wire.Command] = [
            wire.Open(seq=seq),
            wire.Append(seq=seq, op=2 * seq, tokens=pack_tokens(tokens)),
            wire.Generate(
                seq=seq,
                op=2 * seq + 1,
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_tokens=min(steps + 20, 300), ignore_eos=True),
            ),
        ]
        engine.submit(1, commands)
    while len(engine.scheduler.sequences.decoding().sequences) < sequences:
        engine.step()


def _split(step: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by what they were spent on."""
    inside = {name: seconds for name, seconds in step.items() if name.startswith(INSIDE)}
    between_s = step["step"] - sum(inside.values())
    own = {f"  {name}": step[name] for name in ("layout of the batch", "inputs", "from step to step")}
    seconds = {
        "step": step["step"],
        **dict(sorted(inside.items(), key=lambda item: -item[1])),
        "between kernels": between_s,
        **own,
        "  Python of the forward": between_s - sum(own.values()),
    }
    return {name: value * 1000 for name, value in seconds.items()}
