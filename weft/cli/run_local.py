"""A program on an engine in this process, for `weft run`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from weft.abi.errors import InvalidRequest, RunCancelled, UnknownProgram
from weft.cli.files import read_file
from weft.cli.loading import loading_progress
from weft.cli.run_values import Screen
from weft.client.values import LogEntry, RunError
from weft.config import Config, ProgramsConfig, data_directory
from weft.endpoints.dialect import dialect_of
from weft.engine.inline import InlineEngine
from weft.programs.host.process import guests_for, host_parts, open_store
from weft.programs.host.program_host import HostOptions, HostParts, ProgramHost
from weft.programs.quota.limits import Limits
from weft.programs.registry import Code, Quota, checked_code
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run, RunChange, RunSpec
from weft.programs.runtime import Runtime
from weft.programs.sandbox.checker import check_now
from weft.programs.types import Caller
from weft.tokenizers.load import load_tokenizer

FOREVER_S = 10.0 * 365 * 86400


@dataclass(frozen=True)
class LocalRun:
    """A program, its arguments, messages and limits, and whether it runs in the sandbox."""

    file: Path
    content: bytes
    args: Any
    messages: Sequence[Any]
    limits: dict[str, Any]
    sandbox: bool = False

    def spec(self) -> RunSpec:
        """Return the specification of the run. Raises `InvalidRequest` for an invalid file or limit."""
        code = checked_code(self.content, None, Quota(), str(self.file))
        check_now(code)
        trusted = not self.sandbox and code.kind == "python"
        # The process is not shared with other tenants, so time is unlimited by default.
        free: dict[str, Any] = {"wall_s": FOREVER_S, "cpu_s": FOREVER_S, **({"network": ["*"]} if trusted else {})}
        try:
            limits = msgspec.convert(free | self.limits, Limits)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"--limit: {error}; known limits are {', '.join(Limits.__struct_fields__)}") from None
        return RunSpec(code=code, args=msgspec.json.encode(self.args), limits=limits, trusted=trusted)


def run_here(config: Config, run: LocalRun, screen: Screen) -> bool:
    """Load the model, run the program, and return whether it finished.

    Raises `KeyboardInterrupt` if Ctrl-C cancelled it, and `WeftError` if the model cannot be loaded.
    """
    spec = run.spec()
    return asyncio.run(_run(config, run, spec, screen))


async def _run(config: Config, local: LocalRun, spec: RunSpec, screen: Screen) -> bool:
    engine = InlineEngine.from_config(config.engine, loading_progress(config.engine.model))
    tokenizer = await asyncio.to_thread(
        load_tokenizer, config.engine.model, config.engine.revision, config.engine.offline
    )
    try:
        await engine.wait_ready()
        dialect = dialect_of(tokenizer, config.server.tool_call_parser, config.server.reasoning_parser)
        model = ProgramModel(
            config.engine.model,
            Runtime(engine, tokenizer),
            tool_call_parser=dialect.tool_form,
            reasoning_parser="think" if dialect.reasoning else None,
        )
        parts = _parts(model, config.programs, spec, local.file.parent)
        host = ProgramHost(parts, HostOptions(allow_trusted=True))
        try:
            return await _carry_out(host, local, spec, screen)
        finally:
            await host.close()
            await parts.close()
    finally:
        await engine.close()


async def _carry_out(host: ProgramHost, local: LocalRun, spec: RunSpec, screen: Screen) -> bool:
    told = _Teller(screen)
    host.on_run = told.watch
    run = host.launch(spec, Caller(request_id="weft-run"))
    for message in local.messages:
        run.send(msgspec.json.encode(message))
    with _interruptible(run):
        record = await run.wait()
    if told.unwritten is not None:
        raise told.unwritten
    error = record.error
    if error is None:
        screen.result(msgspec.json.decode(run.result or b"null"))
        return True
    if told.interrupted:
        screen.close()
        raise KeyboardInterrupt
    screen.failure(
        record.status,
        RunError(kind=error.kind, message=error.message, param=error.param, traceback=error.traceback),
    )
    return False


class _Teller:
    """Writes the messages of the first run and the log lines of all runs as they arrive."""

    def __init__(self, screen: Screen):
        self._screen = screen
        self._first: Run | None = None
        self.unwritten: OSError | None = None
        """The error of a failed write: the reader closed the pipe, or the disk is full."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        error = self._first.record().error if self._first is not None else None
        return error is not None and error.kind == RunCancelled.kind and error.message == _INTERRUPTED

    def watch(self, run: Run) -> None:
        self._first = self._first or run
        run.watcher = self._on_change

    def _on_change(self, run: Run, change: RunChange) -> None:
        if self.unwritten is not None:
            return
        try:
            self._write(run, change)
        except OSError as error:
            # A watcher must not raise; the error is raised after the run has ended.
            self.unwritten = error
            if self._first is not None:
                self._first.cancel("its output cannot be written")

    def _write(self, run: Run, change: RunChange) -> None:
        if change.message is not None and run is self._first:
            self._screen.message(msgspec.json.decode(change.message))
        elif change.line is not None:
            self._screen.log(LogEntry(at=change.line.at_s, level=change.line.level, text=change.line.text))


_INTERRUPTED = "interrupted by Ctrl-C"


class _interruptible:
    """Makes the first Ctrl-C cancel the run; the second raises `KeyboardInterrupt` as usual."""

    def __init__(self, run: Run):
        self._run = run

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            self._run.cancel(_INTERRUPTED)

        loop.add_signal_handler(signal.SIGINT, cancel)

    def __exit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def _parts(model: ProgramModel, config: ProgramsConfig, spec: RunSpec, folder: Path) -> HostParts:
    """Create the parts of a program host: the allowed network, the user's store, and the programs beside the file."""
    data = Path(config.data_dir) if config.data_dir is not None else data_directory(os.environ)
    allowed = msgspec.structs.replace(config, network=[*config.network, *spec.limits.network])
    parts = host_parts([model], allowed, open_store(data, config), guests_for(allowed))

    async def resolve(tenant: str, reference: str) -> Code:
        file = folder / f"{reference}.py"
        if not reference.isidentifier() or not file.is_file():
            raise UnknownProgram(
                f"there is no program {reference[:80]!r}: no file {file.name} beside this one", "program"
            )
        code = checked_code(read_file(file), "python", Quota(), str(file))
        await asyncio.to_thread(check_now, code)
        return msgspec.structs.replace(code, trusted=spec.trusted)

    return replace(parts, resolve=resolve)
