"""Runs programs for nodes of workflows: as runs of the tenant, with its accounts, in the sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from weft.abi.errors import Overloaded, ProgramFailed, WeftError
from weft.endpoints.models import Models
from weft.endpoints.record import namespace_of, trace_id
from weft.programs.registry import Code
from weft.programs.run.runs import RunSpec
from weft.programs.types import Caller
from weft.server.programs import ServedPrograms
from weft.workflow.service.programs import ProgramCall


class ServedProgramRunner:
    """A `weft.workflow.service.programs.ProgramRunner`. Used from one event loop."""

    def __init__(self, programs: ServedPrograms, models: Models):
        self._programs = programs
        self._models = models

    async def check(self, tenant: str, program: str | None, source: str | None, model: str | None) -> None:
        """As `ProgramRunner.check`."""
        self._programs.check_on()
        self._models.find(model)
        await self._code(tenant, program, source)

    async def run(self, call: ProgramCall) -> Any:
        """As `ProgramRunner.run`."""
        code = await self._code(call.tenant, call.program, call.source)
        limits = self._programs.limits({}) if call.limits is None else self._programs.bounded(call.limits)
        model = self._models.usable(call.model)
        spec = RunSpec(
            code=code,
            args=msgspec.json.encode(call.args),
            limits=limits,
            trusted=code.trusted,
            model=model.names[0],
        )
        caller = Caller(
            request_id=trace_id(call.tenant, call.name),
            tenant=call.tenant,
            namespace=namespace_of(call.tenant, call.cache_salt),
            priority=call.priority,
        )
        run = await self._programs.launch(spec, caller)
        try:
            record = await run.wait()
        except asyncio.CancelledError:
            run.cancel("the workflow that ran it ended")
            raise
        if record.error is not None:
            error = record.error.error()
            if isinstance(error, Overloaded) and record.started_s is not None:
                # A workflow tries `Overloaded` again, because nothing of the program has run. A part of this one has.
                raise ProgramFailed(error.message)
            raise error
        if run.result is None:
            raise WeftError(f"the run {run.id} ended as {record.status}, without a result")
        return msgspec.json.decode(run.result)

    async def _code(self, tenant: str, program: str | None, source: str | None) -> Code:
        if program is not None:
            return await self._programs.code(tenant, program)
        assert source is not None
        return await self._programs.inline_code(tenant, source)
