"""Programs and functions with source in workflows of a server: what runs them, and with which limits.

The runner is of the server, which has the sandbox and the accounts of tenants; it is given, because workflows know
neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from weft.abi.errors import Unsupported, WeftError
from weft.programs.quota.limits import Limits
from weft.workflow.graph.mistakes import Mistake
from weft.workflow.graph.nodes import AnyNode, FunctionNode, ProgramNode
from weft.workflow.run.functions import FUNCTION_TIMEOUT_S
from weft.workflow.run.instructions import CallFunction, RunProgram

SOURCE_LIMITS = Limits(cpu_s=10.0, memory_bytes=64 << 20, wall_s=FUNCTION_TIMEOUT_S, tokens=0, children=0)
"""Of a function with source: it computes; models, programs and the network are for nodes of their own."""


class ProgramCall(NamedTuple):
    """A run of a program that a node asks for."""

    tenant: str
    program: str | None
    """A name, `name@hash` or a hash; None: `source`."""
    source: str | None
    args: Any
    name: str
    """Of the request, in logs and traces."""
    model: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    limits: Limits | None = None
    """None: those of a run of which a client says nothing."""


class ProgramRunner(Protocol):
    """Runs programs in the name of tenants."""

    async def check(self, tenant: str, program: str | None, source: str | None, model: str | None) -> None:
        """Raise what a run of it would be refused with: `UnknownProgram`, `InvalidRequest`, `UnknownModel`,
        `Unsupported`, `StorageFailed`."""

    async def run(self, call: ProgramCall) -> Any:
        """Run a program. Returns its result as JSON; raises its error. Cancelling the task cancels the run."""


class NoPrograms:
    """A `ProgramRunner` of a server without programs."""

    async def check(self, tenant: str, program: str | None, source: str | None, model: str | None) -> None:
        """As `ProgramRunner.check`."""
        raise Unsupported("this server runs no programs")

    async def run(self, call: ProgramCall) -> Any:
        """As `ProgramRunner.run`."""
        await self.check(call.tenant, call.program, call.source, call.model)


class TenantPrograms:
    """The programs of one run or session."""

    def __init__(
        self,
        runner: ProgramRunner,
        tenant: str,
        name: str,
        *,
        model: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ):
        self._runner = runner
        self._call = ProgramCall(tenant, None, None, None, name, model, priority, cache_salt)

    async def program(self, asked: RunProgram) -> Any:
        """Run the program of a node."""
        name = f"{self._call.name}-{asked.task}"
        return await self._runner.run(self._call._replace(program=asked.node.program, args=asked.args, name=name))

    async def source(self, asked: CallFunction) -> Any:
        """Run the source of a node."""
        return await self._runner.run(
            self._call._replace(
                source=asked.node.source,
                args=dict(asked.args),
                name=f"{self._call.name}-{asked.task}",
                limits=SOURCE_LIMITS,
            )
        )


async def program_mistakes(
    runner: ProgramRunner, tenant: str, nodes: Iterable[tuple[str, AnyNode]], model: str | None
) -> list[Mistake]:
    """What cannot run of the programs and sources that labelled nodes name; each is looked at once."""
    found: dict[tuple[str | None, str | None], str] = {}
    mistakes = []
    for label, node in nodes:
        if isinstance(node, ProgramNode):
            asked: tuple[str | None, str | None] = (node.program, None)
        elif isinstance(node, FunctionNode) and node.source is not None:
            asked = (None, node.source)
        else:
            continue
        if asked not in found:
            try:
                await runner.check(tenant, *asked, model)
                found[asked] = ""
            except WeftError as error:
                found[asked] = error.message
        if found[asked]:
            mistakes.append(Mistake(label, found[asked]))
    return mistakes
