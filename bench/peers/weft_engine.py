"""Weft's engine as `weft.LLM` runs it, on token ids."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.token_client import TokenClient, TokenRequest
from weft.config import EngineConfig
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
        level = "torch's" if isinstance(kernels, Exception) else kernels.instructions
        self.instructions = [f"kernels: {level}"]
        self.loop = asyncio.new_event_loop()
        self.engine = InlineEngine.from_config(config)
        self.loop.run_until_complete(self.engine.wait_ready())
        self._client = TokenClient(self.engine)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        requests = [TokenRequest(prompt, output_tokens) for prompt in prompts]
        found = self.loop.run_until_complete(self._client.generate(requests))
        return [[event.token for event in events] for events in found]

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()
