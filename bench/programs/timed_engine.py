"""An engine process whose device takes a fixed time for every step and computes nothing: `python -m
bench.programs.timed_engine ADDRESS STEP_MS [BATCHING]`.

The rest of a program's time is the time that Weft adds.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from weft.config import EngineConfig
from weft.core.protocols import WorkerSpec
from weft.core.step import LateInputs, Step, StepHandle, StepResult, TopTokens
from weft.engine.engine import Engine
from weft.engine.gather import policy_of
from weft.engine.loop import EngineLoop
from weft.engine.process import ZmqMailbox
from weft.sched.scheduler import SchedulerConfig
from weft.tokenizers.load import load_tokenizer

MAX_RUNNING = 256
SAMPLE_SLOTS = 256
OVERSLEPT_S = 0.0015
"""How much longer than asked a sleep may take, which would count as Weft's: so long before the end, look instead."""
TOKEN = 300
"""What every sampler draws: some ordinary token."""


class _Timed:
    def __init__(self, step: Step, done_at_s: float, device_s: float):
        self._step = step
        self._done_at_s = done_at_s
        self._device_s = device_s

    @property
    def step_id(self) -> int:
        return self._step.step_id

    def done(self) -> bool:
        return time.monotonic() >= self._done_at_s

    def wait(self) -> StepResult:
        while (left_s := self._done_at_s - time.monotonic()) > 0:
            if left_s > OVERSLEPT_S:
                time.sleep(left_s - OVERSLEPT_S)
        sampling = self._step.sampling
        if sampling is None:
            return StepResult(self._step.step_id, device_s=self._device_s)
        count, rows, top = len(sampling.rows), len(sampling.dist_rows), sampling.dist_top
        dist = None
        if rows:
            ids = np.broadcast_to(TOKEN + np.arange(top, dtype=np.int32), (rows, top)).copy()
            logprobs = np.broadcast_to(-1 - np.arange(top, dtype=np.float32), (rows, top)).copy()
            dist = TopTokens(ids, logprobs)
        return StepResult(
            self._step.step_id,
            tokens=np.full(count, TOKEN, np.int32),
            score_logprobs=np.zeros(len(sampling.score_rows), np.float32),
            score_ranks=np.ones(len(sampling.score_rows), np.int32),
            dist=dist,
            device_s=self._device_s,
        )


class TimedWorker:
    """`core.protocols.Worker`: steps run one after the other, each for `step_s` seconds."""

    def __init__(self, spec: WorkerSpec, step_s: float):
        self.spec = spec
        self._step_s = step_s
        self._free_at_s = 0.0

    def launch(self, step: Step) -> StepHandle:
        """Start the step when the previous one is done."""
        self._free_at_s = max(self._free_at_s, time.monotonic()) + self._step_s
        return _Timed(step, self._free_at_s, self._step_s)

    def bind(self, handle: StepHandle, late: LateInputs) -> None:
        """Do nothing: masks have no cost here."""

    def close(self) -> None:
        """Do nothing: there are no resources to free."""


def main(address: str, step_ms: float, batching: str = "adaptive") -> None:
    """Serve the engine until the process is killed."""
    tokenizer = load_tokenizer("weft-tiny")
    spec = WorkerSpec(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        page_size=16,
        num_device_pages=65536,
        num_host_pages=0,
        num_slots=MAX_RUNNING + SAMPLE_SLOTS,
        num_embed_slots=4096,
        max_context=4096,
        bytes_per_page=1024,
        device="timed",
        dtype="none",
    )
    scheduler = SchedulerConfig(
        max_context=spec.max_context,
        max_running=MAX_RUNNING,
        max_step_tokens=2048,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(tokenizer.eos_token_ids),
        max_rows=1 if batching == "eager" else None,
    )
    config = EngineConfig(batching=batching)  # type: ignore[arg-type]
    mailbox = ZmqMailbox(address)
    engine = Engine(
        TimedWorker(spec, step_ms / 1000),
        scheduler,
        mailbox.send,
        model="timed",
        token_bytes=list(tokenizer.token_bytes),
        policy=policy_of(config),
    )
    EngineLoop(engine, mailbox, 60.0).run()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:4])
