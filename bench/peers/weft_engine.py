"""Weft's engine as `weft.LLM` runs it, on token ids."""

from __future__ import annotations

import asyncio
from pathlib import Path

from weft.config import EngineConfig
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.inline import InlineEngine
from weft.kernels.cpu import ops
from weft.version import __version__


class Weft:
    """The engine as `weft.LLM` runs it, without the text."""

    version = __version__
    notes: tuple[str, ...] = ()

    def __init__(self, checkpoint: Path, threads: int, **options: object):
        defaults: dict[str, object] = {
            "num_pages": 1200,
            "prefix_cache": False,
            "max_context": 4096,
            "performance_mode": "throughput",
        }
        config = EngineConfig(model=str(checkpoint), dtype="bfloat16", threads=threads, **(defaults | options))
        kernels = ops.best()
        level = "torch's" if isinstance(kernels, Exception) else kernels.level.name.lower()
        self.instructions = [f"kernels: {level}"]
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
