"""A program host over a fake engine, for tests."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Coroutine
from typing import Any

from tests.programs.help import settle
from weft.config import ProgramsConfig
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.host.process import host_parts
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.registry import Quota, checked_code
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run, RunSpec
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.store.values import MemoryValueStore
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine

TENANT = Caller(tenant="t", namespace="t")


def spec(source: str, args: bytes = b"null", **fields: Any) -> RunSpec:
    """A trusted run of this source."""
    code = checked_code(textwrap.dedent(source).encode(), "python", Quota(), "program")
    return RunSpec(code=code, args=args, **{"trusted": True} | fields)


class Bench:
    """A host and what it stands on."""

    def __init__(self, config: ProgramsConfig | None = None, **engine: Any):
        config = config or ProgramsConfig()
        self.engine = FakeEngine(**engine)
        self.runtime = Runtime(self.engine, byte_tokenizer())
        self.parts = host_parts([ProgramModel("fake", self.runtime)], config, MemoryValueStore(), GuestFactory())
        options = HostOptions(max_waiting=config.max_waiting, tenant_max_waiting=config.max_waiting, allow_trusted=True)
        self.host = ProgramHost(self.parts, options)

    def launch(self, source: str, args: bytes = b"null", caller: Caller = TENANT, **fields: Any) -> Run:
        return self.host.launch(spec(source, args, **fields), caller)


def with_host(
    test: Callable[[Bench], Coroutine[Any, Any, None]], config: ProgramsConfig | None = None, **engine: Any
) -> None:
    """Run a test; afterwards nothing may be left anywhere."""

    async def body() -> None:
        bench = Bench(config, **engine)
        await asyncio.wait_for(test(bench), 60)
        await bench.host.close()
        await settle()
        assert not bench.host._active
        assert bench.host._num_waiting == 0
        assert not list(bench.host.history.active())
        assert bench.parts.accounts.num_programs == bench.parts.accounts.num_pages == 0
        assert not bench.parts.hub._topics
        assert bench.runtime.num_sequences == bench.runtime.num_operations == 0
        assert bench.engine.sequences == {}
        await bench.parts.close()

    asyncio.run(body())
