"""What tests of the examples share: the embedded model in float64 behind a program host, and transformers' model."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from weft.config import EngineConfig, ProgramsConfig
from weft.engine.inline import InlineEngine
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.host.process import host_parts
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.network.client import Network
from weft.programs.quota.limits import Limits
from weft.programs.registry import Code, Quota, checked_code
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run, RunSpec
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.store.values import MemoryValueStore
from weft.tokenizers.load import load_tokenizer

ASSET = "weft/assets/weft-tiny"
EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"
TENANT = Caller(tenant="t", namespace="t")
WITHIN_S = 120.0


class Lab:
    """An engine and a host on an event loop of their own. `run` runs a program to its end."""

    def __init__(self, runner: asyncio.Runner):
        self.runner = runner
        self.tokenizer = load_tokenizer("weft-tiny")

    async def open(self) -> None:
        config = EngineConfig(dtype="float64", device="cpu", threads=2, max_context=1024, num_pages=1500)
        self.engine = InlineEngine.from_config(config)
        await self.engine.wait_ready()
        self.runtime = Runtime(self.engine, self.tokenizer)
        model = ProgramModel("weft-tiny", self.runtime, tool_call_parser="hermes")
        self.parts = replace(
            host_parts([model], ProgramsConfig(), MemoryValueStore(), GuestFactory()), resolve=self._resolve
        )
        self.host = ProgramHost(self.parts, HostOptions(allow_trusted=True))

    async def close(self) -> None:
        await self.host.close()
        await self.engine.drain()
        stats = await self.engine.stats()
        assert stats.num_sequences == stats.num_spaces == 0
        assert self.runtime.num_operations == self.runtime.num_sequences == 0
        assert stats.device_pages_free + stats.device_pages_cached + stats.space_pages == stats.device_pages_total
        await self.parts.close()
        await self.engine.close()

    def forget(self) -> None:
        """An empty store for the programs that follow."""
        self.parts = replace(self.parts, store=MemoryValueStore())
        self.host = ProgramHost(self.parts, HostOptions(allow_trusted=True))

    def allow(self, *entries: str) -> None:
        """From now on, programs may reach these where their run's own list has them too."""
        self.parts = replace(self.parts, network=Network(entries))
        self.host = ProgramHost(self.parts, HostOptions(allow_trusted=True))

    async def _resolve(self, tenant: str, reference: str) -> Code:
        """Examples are there under their names, as if they were the operator's own."""
        code = checked_code(self.text(reference).encode(), "python", Quota(), reference)
        return msgspec.structs.replace(code, trusted=True)

    # ---- running

    def launch(self, source: str, name: str, args: object = None, *, trusted: bool = True, **limits: Any) -> Run:
        """A run of this source; on the loop."""
        code = checked_code(source.encode(), "python", Quota(), name)
        spec = RunSpec(code=code, args=json.dumps(args).encode(), trusted=trusted, limits=Limits(**limits))
        return self.host.launch(spec, TENANT)

    async def outcome(self, run: Run) -> tuple[Any, list[Any]]:
        """Result and messages of a run. Fails with the program's traceback."""
        listener = run.messages()
        record = await asyncio.wait_for(run.wait(), WITHIN_S)
        assert record.error is None, f"{record.error.kind}: {record.error.message}\n{record.error.traceback}"
        return json.loads(run.result or b"null"), [json.loads(message) async for message in listener]

    @staticmethod
    def text(name: str) -> str:
        """The source of an example."""
        return (EXAMPLES / f"{name}.py").read_text()

    def example(self, name: str, args: object = None, **options: Any) -> Any:
        """What an example returns."""
        return self.told(name, args, **options)[0]

    def told(self, name: str, args: object = None, **options: Any) -> tuple[Any, list[Any]]:
        """What an example returns, and what it sends."""
        return self.source(self.text(name), name, args, **options)

    def source(self, source: str, name: str = "program", args: object = None, **options: Any) -> tuple[Any, list[Any]]:
        """The same of a source."""

        async def body() -> tuple[Any, list[Any]]:
            return await self.outcome(self.launch(source, name, args, **options))

        return self.runner.run(body())

    # ---- text

    def encode(self, text: str) -> list[int]:
        """Its tokens."""
        return list(memoryview(self.tokenizer.encode(text)).cast("i"))

    def chat(self, user: str, system: str | None = None) -> str:
        """The text of a chat with one message, up to where the model's answer begins."""
        before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        return f"{before}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


@contextmanager
def lab() -> Iterator[Lab]:
    """A lab; afterwards nothing may be left of anything that ran in it."""
    with asyncio.Runner() as runner:
        made = Lab(runner)
        runner.run(made.open())
        yield made
        runner.run(made.close())


@functools.cache
def reference() -> Any:
    """The same weights in transformers, in float64."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(ASSET, dtype=torch.float64)
