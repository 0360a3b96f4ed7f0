"""What a step costs on the host: schedule, build, update and publish, on a worker that does nothing.

    python -m bench.host_cost [--runs 5]

Prints, for 1 to 256 decoding sequences, the median over runs of the mean time of a step, and the time from the command
to the launch of a 4,000-token prompt that the prefix index knows.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time

import numpy as np

from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.protocols import WorkerSpec
from weft.core.sampling import SamplingParams, StopParams
from weft.core.step import LateInputs, Step, StepHandle, StepResult
from weft.engine.engine import Engine
from weft.sched.scheduler import SchedulerConfig

PROMPT_TOKENS = 250
STEPS = 300


class NullWorker:
    """Samples token 1 at once."""

    def __init__(self, spec: WorkerSpec):
        self.spec = spec

    def launch(self, step: Step) -> StepHandle:
        return _Done(step)

    def bind(self, handle: StepHandle, late: LateInputs) -> None:
        pass

    def close(self) -> None:
        pass


class _Done:
    def __init__(self, step: Step):
        self.step_id = step.step_id
        count = 0 if step.sampling is None else len(step.sampling.rows)
        self._result = StepResult(step.step_id, tokens=np.ones(count, np.int32))

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


def make_engine(num_pages: int = 20_000) -> Engine:
    spec = WorkerSpec(
        vocab_size=32_000,
        hidden_size=1024,
        page_size=16,
        num_device_pages=num_pages,
        num_host_pages=0,
        num_slots=256,
        num_embed_slots=0,
        max_context=8192,
        bytes_per_page=1,
        device="none",
        dtype="none",
    )
    config = SchedulerConfig(max_context=8192, max_running=256, max_step_tokens=8192, vocab_size=32_000)
    return Engine(NullWorker(spec), config, lambda client, envelope: wire.encode_envelope(envelope) and None)


def request(seq: int, tokens: list[int], limit: int) -> list[wire.Command]:
    stop = StopParams(max_tokens=limit, ignore_eos=True)
    return [
        wire.Open(seq=seq),
        wire.Append(seq=seq, op=2 * seq, tokens=pack_tokens(tokens)),
        wire.Generate(seq=seq, op=2 * seq + 1, sampling=SamplingParams(seed=1), stop=stop),
    ]


def decode_step_us(count: int) -> float:
    """Mean microseconds of a step with `count` decoding sequences, encoding its events included."""
    engine = make_engine()
    generator = np.random.default_rng(0)
    for seq in range(1, count + 1):
        engine.submit(1, request(seq, generator.integers(0, 32_000, PROMPT_TOKENS).tolist(), STEPS + 100))
    while len(engine.scheduler.roster.decoding().sequences) < count:
        engine.step()
    for _ in range(20):
        engine.step()
    gc.collect()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - began) / STEPS * 1e6


def admission_us() -> float:
    """Median microseconds to take in, look up, admit and build a 4,000-token prompt that is cached."""
    engine = make_engine()
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 32_000, 4000).tolist()
    times = []
    for seq in range(1, 52):
        commands = request(seq, [*prompt, 7, seq], 1)
        began = time.perf_counter()
        engine.submit(1, commands)
        engine.step()
        times.append((time.perf_counter() - began) * 1e6)
        while engine.busy:
            engine.step()
        engine.submit(1, [wire.Release(seq=seq)])
        engine.step()
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, median of {runs} runs")
    for count in (1, 32, 128, 256):
        times = [decode_step_us(count) for _ in range(runs)]
        print(
            f"step with {count:3d} decoding sequences: {statistics.median(times):7.0f} us "
            f"(min {min(times):.0f}, max {max(times):.0f})"
        )
    times = [admission_us() for _ in range(runs)]
    print(
        f"admitting a cached 4,000-token prompt:  {statistics.median(times):7.0f} us "
        f"(min {min(times):.0f}, max {max(times):.0f})"
    )


if __name__ == "__main__":
    main()
