"""The front's access to programs: the registry of uploads, the operator's trusted programs, and the host of runs.

Owns the lookup of programs and the bounds on the limits of a run; work on disks is done on threads. It does not know
HTTP. `weft.server.state.Service` has one; routes call it. `inline_programs` runs programs in the front itself, for
tests; `process_programs` runs them in a child process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import ConfigError, InvalidRequest, UnknownProgram, Unsupported
from weft.config import EngineConfig, ProgramsConfig, ServerConfig, data_directory
from weft.endpoints.models import ActiveModel, Models
from weft.engine.supervisor import ProcessEngine
from weft.programs.history import History
from weft.programs.host.client import HostClient
from weft.programs.host.process import guests_for, host_parts
from weft.programs.host.program_host import HostOptions, ProgramHost, RunHost
from weft.programs.host.wire import HostArgs, HostedModel
from weft.programs.network.client import by_tenant
from weft.programs.quota.limits import Limits
from weft.programs.quota.machine_memory import machine_memory_bytes
from weft.programs.registry import Code, Program, Quota, Registry, check_name, checked_code
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run, RunSpec
from weft.programs.run_records import RunRecords
from weft.programs.sandbox.checker import CodeChecker, check_now
from weft.programs.types import Caller
from weft.server.api_keys import parse_keys
from weft.store.database import Database
from weft.store.programs import ProgramKind, ProgramVersion
from weft.store.values import MemoryValueStore

logger = logging.getLogger("weft.server")

MakeHost = Callable[["ServedPrograms"], RunHost]

SANDBOX_OVERCOMMIT = 4
"""Memory limit of all sandboxes together, as a multiple of the machine's memory: a waiting sandbox uses little of its
own limit."""


BOUNDED_LIMITS = ("cpu_s", "memory_bytes", "wall_s", "message_bytes", "log_bytes")
"""Limits of a run that the operator bounds, by the setting `programs.max_` and the name."""


class Found(NamedTuple):
    """The program that a reference names, and its version."""

    program: Program
    version: ProgramVersion
    trusted: bool


class ServedPrograms:
    """The programs of a server and their runs. Used from one event loop."""

    def __init__(
        self, config: ProgramsConfig, registry: Registry, make_host: MakeHost, records: RunRecords | None = None
    ):
        """`records` keeps runs across restarts; `close` closes it. Raises `ConfigError` for hosts of `network` that no
        program could reach."""
        try:
            by_tenant(config.network)
        except InvalidRequest as error:
            raise ConfigError(f"programs.network: {error.message}") from None
        self.config = config
        self._registry = registry
        self._checker = CodeChecker()
        self._writing = asyncio.Lock()
        """Allows one upload or deletion at a time: each occupies a thread while it waits for the disk."""
        self._own = _own_programs(config)
        self._make_host = make_host
        self._host: RunHost | None = None
        self.history = History(max_ended=config.max_kept_runs, max_age_s=config.max_kept_s, journal=records)
        """The present runs and those kept after their end."""
        self._records = records
        if records is not None:
            self.history.restore(records.load())

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the process that runs programs."""
        return self._host.num_restarts if isinstance(self._host, HostClient) else 0

    # ---- programs

    async def upload(self, tenant: str, name: str, content: bytes, kind: ProgramKind | None) -> Program:
        """Upload a program. Raises `InvalidRequest`, `QuotaExceeded`, `StorageFailed`."""
        self.check_on()
        if name in self._own:
            raise InvalidRequest(f"{name} is a program of this server's operator; choose another name.", "name")
        check_name(name)
        code = checked_code(content, kind, self._registry.quota, name)
        await self._check(tenant, code)
        async with self._writing:
            return await asyncio.to_thread(self._registry.upload, tenant, name, content, kind)

    async def find(self, tenant: str, reference: str) -> Found:
        """The program of a reference. Raises `UnknownProgram` or `StorageFailed`."""
        own = self._own.get(reference)
        if own is not None:
            return _found_own(own)
        return Found(*await asyncio.to_thread(self._registry.find, tenant, reference), False)

    async def visible(self, tenant: str) -> list[Found]:
        """All programs that the tenant may run, in alphabetical order; the operator's first. Raises `StorageFailed`."""
        own = [_found_own(code) for _, code in sorted(self._own.items())]
        uploaded = await asyncio.to_thread(self._registry.programs, tenant)
        return own + [Found(program, program.latest, False) for program in uploaded]

    async def delete(self, tenant: str, reference: str) -> tuple[str, list[str]]:
        """Delete a program. Returns its name and the hashes of the deleted versions. Raises `UnknownProgram`,
        `InvalidRequest`, `StorageFailed`."""
        found = await self.find(tenant, reference)
        if found.trusted:
            raise InvalidRequest(f"{reference} belongs to this server's operator.", "program")
        async with self._writing:
            return found.program.name, await asyncio.to_thread(self._registry.delete, tenant, reference)

    async def code(self, tenant: str, reference: str) -> Code:
        """The code of a reference. Raises `UnknownProgram` or `StorageFailed`."""
        own = self._own.get(reference)
        return own if own is not None else await asyncio.to_thread(self._registry.code, tenant, reference)

    # ---- runs

    async def launch(self, spec: RunSpec, caller: Caller) -> Run:
        """Launch a run. Raises `InvalidRequest` for limits above the operator's, and the errors of `RunHost.start`."""
        self.check_on()
        return await self._open().start(spec, caller)

    async def inline_code(self, tenant: str, source: str) -> Code:
        """The code of a source that was not uploaded. Raises `InvalidRequest`."""
        self.check_on()
        code = checked_code(source.encode("utf-8", "surrogatepass"), "python", self._registry.quota)
        await self._check(tenant, code)
        return code

    def limits(self, asked: dict[str, Any]) -> Limits:
        """Check and convert the limits of a request; those not asked for are at most the operator's. Raises
        `InvalidRequest`, naming the limit."""
        try:
            limits = msgspec.convert(asked, Limits)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"limits: {error}.", "limits") from None
        for name, value in self._most().items():
            if name in asked and getattr(limits, name) > value:
                raise InvalidRequest(f"limits.{name} may be at most {value:g} on this server.", f"limits.{name}")
        return self.bounded(limits)

    def bounded(self, limits: Limits) -> Limits:
        """These limits, or the operator's where those are smaller."""
        smaller = {name: min(getattr(limits, name), value) for name, value in self._most().items()}
        return msgspec.structs.replace(limits, **smaller)

    # ---- life

    async def begin(self) -> None:
        """Start the process that runs programs, if it is configured to start with the server."""
        if self.config.start == "eager":
            host = self._open()
            if isinstance(host, HostClient):
                await host.open()

    def cancel_all(self, reason: str) -> None:
        """Cancel all runs that have not ended."""
        for run in self.history.active():
            run.cancel(reason)

    async def idle(self) -> None:
        """Wait until no run is in progress."""
        while active := next(self.history.active(), None):
            await active.wait()

    async def close(self) -> None:
        """End every run and stop the host."""
        await self._checker.close()
        if self._host is not None:
            await self._host.close()
        if self._records is not None:
            await self._records.close()
        await asyncio.to_thread(self._registry.close)

    # ---- inside

    def _most(self) -> dict[str, float]:
        """Bounds that the operator sets, by the name of the limit."""
        return {name: getattr(self.config, f"max_{name}") for name in BOUNDED_LIMITS}

    async def _check(self, tenant: str, code: Code) -> None:
        """Raise `InvalidRequest` for content that is not a program. The time is charged to the tenant's rate."""
        await self._checker.check(tenant, code, lambda cpu_s: self._open().charge(tenant, cpu_s))

    def _open(self) -> RunHost:
        if self._host is None:
            self._host = self._make_host(self)
        return self._host

    def check_on(self) -> None:
        """Raise `Unsupported` where the server runs no programs."""
        if self.config.start == "off":
            raise Unsupported('Programs are not served here: the server runs with programs.start = "off".')


def inline_programs(
    models: Models, config: ProgramsConfig | None = None, records: RunRecords | None = None
) -> ServedPrograms:
    """Programs that run in this process and are kept in memory. Without `records`, runs are kept in memory too."""
    config = config or ProgramsConfig()

    def make_host(programs: ServedPrograms) -> RunHost:
        hosted = [
            ProgramModel(model.names[0], runtime, **_parsers(model)) for model in models for runtime in model.runtimes
        ]
        parts = host_parts(hosted, config, MemoryValueStore(config.max_store_bytes), guests_for(config))
        parts = replace(parts, resolve=programs.code)
        return ProgramHost(parts, HostOptions(max_waiting=config.max_waiting, allow_trusted=True), programs.history)

    return ServedPrograms(config, Registry(quota=_quota(config)), make_host, records)


def process_programs(
    models: Models, server: ServerConfig, config: ProgramsConfig, engines: Sequence[EngineConfig], database: Database
) -> ServedPrograms:
    """Programs that run in a child process and are kept in the database of `data_folder`. `engines` are the
    configurations of the models' engines; each engine must be a `ProcessEngine`. A model that has several engines is
    listed once for each.

    Raises `StorageFailed` for an unusable folder.
    """
    folder = data_folder(config)
    config = resolved(config, num_tenants=len({key.tenant for key in parse_keys(server.api_keys)}))
    if config.start == "off":
        registry, records = Registry(quota=_quota(config)), None
    else:
        registry, records = Registry(database, _quota(config)), RunRecords(database)

    def make_host(programs: ServedPrograms) -> RunHost:
        hosted = [
            HostedModel(
                name=model.names[0],
                model=engine.model,
                revision=engine.revision,
                offline=engine.offline,
                **_parsers(model),
            )
            for model, engine in zip(models, engines, strict=True)
            for _ in model.engine.engines
        ]
        args = HostArgs(
            models=hosted,
            config=config,
            store_folder=str(folder),
            log_level=server.log_level,
            engine_wait_s=server.engine_wait_s,
        )
        clients = [engine for model in models for engine in model.engine.engines if isinstance(engine, ProcessEngine)]
        return HostClient(args, clients, programs.code, programs.history)

    return ServedPrograms(config, registry, make_host, records)


def data_folder(config: ProgramsConfig) -> Path:
    """The folder of a server's data."""
    return Path(config.data_dir) if config.data_dir is not None else data_directory(os.environ)


def resolved(config: ProgramsConfig, num_tenants: int, machine_bytes: int | None = None) -> ProgramsConfig:
    """The configuration with defaults that depend on the machine, which has `machine_bytes` of memory, and on the
    number of tenants: with several, each has only a share."""
    memory = machine_memory_bytes() if machine_bytes is None else machine_bytes
    alone = num_tenants < 2
    most, own = config.max_sandbox_bytes, config.max_sandbox_bytes_per_tenant
    if most is None:
        most = SANDBOX_OVERCOMMIT * memory
    if own is None:
        own = most if alone else min(most, memory) // 2
    fraction = config.tenant_pages_fraction
    if fraction is None:
        fraction = 1.0 if alone else 0.5
    return msgspec.structs.replace(
        config, max_sandbox_bytes=most, max_sandbox_bytes_per_tenant=own, tenant_pages_fraction=fraction
    )


def _quota(config: ProgramsConfig) -> Quota:
    return Quota(max_programs=config.max_uploads, max_bytes=config.max_upload_bytes)


def _parsers(model: ActiveModel) -> dict[str, str | None]:
    dialect = model.dialect
    return {"tool_call_parser": dialect.tool_form, "reasoning_parser": "think" if dialect.reasoning else None}


def _own_programs(config: ProgramsConfig) -> dict[str, Code]:
    """Name -> program of the operator. Raises `InvalidRequest` for a file that is not a program, `UnknownProgram` for a
    missing folder."""
    if config.trusted_dir is None:
        return {}
    folder = Path(config.trusted_dir)
    if not folder.is_dir():
        raise UnknownProgram(f"programs.trusted_dir is {folder}, which is not a directory")
    own = {}
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith(("_", ".")):
            continue
        try:
            code = checked_code(path.read_bytes(), "python", Quota(), path.stem)
            check_now(code)
        except (OSError, InvalidRequest) as error:
            raise InvalidRequest(f"{path} in programs.trusted_dir cannot be a program: {error}") from error
        own[path.stem] = msgspec.structs.replace(code, trusted=True)
    logger.info("%d trusted programs from %s: %s", len(own), folder, ", ".join(own) or "none")
    return own


def _found_own(code: Code) -> Found:
    digest = hashlib.sha256(code.content).hexdigest()
    version = ProgramVersion(hash=digest, kind=code.kind, size_bytes=len(code.content), created_s=0.0)
    return Found(Program(code.name, [version]), version, True)
