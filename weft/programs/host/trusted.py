"""`TrustedGuest`: a program as a task of the host's own event loop, for code that its operator trusts.

Owns the task and its channel. Source, SDK and wire are those of the sandbox, without its boundary. Calls have the least
overhead, but nothing protects the host: the program may do everything that Python can, its limits of processor time and
memory are not enforced, `print` goes to the host's own output, and a program that computes without ever awaiting blocks
the whole event loop and cannot be killed. `weft.programs.host.guest_factory` creates it.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from weft.abi.errors import Cancelled, EngineDead, ProgramFailed, WeftError
from weft.programs.guest import GuestHost, GuestUsage
from weft.sdk import errors as sdk
from weft.sdk import main as program
from weft.sdk import run
from weft.sdk.channel import Channel, install

_compiled = functools.lru_cache(64)(program.compiled)
"""Cached, because most programs are launched many times."""


class TrustedGuest:
    """One run of a trusted program."""

    def __init__(
        self,
        host: GuestHost,
        *,
        args: bytes = b"",
        main: Callable[..., Any] | None = None,
        source: str | None = None,
        name: str = "program.py",
    ):
        """Takes either the program's `main` or its source. `args` is JSON; no bytes mean null. `name` is the file name
        of the source in tracebacks."""
        if (main is None) == (source is None):
            raise ValueError("a trusted program is a main or a source, one of the two")
        self._host = host
        self._args = args
        self._main, self._source, self._name = main, source, name
        self._channel = Channel(self._on_commands, self._hurry)
        self._task: asyncio.Task[bytes] | None = None
        self._over: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        """The error that the run ends with, also if the program catches it."""
        self._host_calls = 0
        self._ended = False

    async def run(self) -> bytes:
        """Run the program and return the JSON of the value that `main` returned. Raises `ProgramFailed` with the
        traceback of an error of `main` (but `EngineDead` as it is), the error of `kill`, or an error of the host."""
        if self._task is not None:
            raise RuntimeError("a guest runs once")
        loop = self._loop = asyncio.get_running_loop()
        if self._error is not None:
            self._ended = True
            raise self._error
        self._host.on_events(self._on_events)
        # The program's own tasks inherit the `contextvars` context with the channel; the host's tasks do not.
        context = copy_context()
        context.run(install, self._channel)
        self._task = loop.create_task(self._call(), context=context)
        self._over = loop.create_future()
        self._task.add_done_callback(lambda task: self._wake())
        try:
            # Wait for an event instead of the task: a program that swallows its cancellation must not delay the end.
            await self._over
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            self._ended = True
            # Tasks that the program left behind get an error from their calls.
            self._channel.close(Cancelled("the program has ended"))
        return self._outcome(self._task)

    def kill(self, error: WeftError) -> None:
        """End the program at its next `await`: `run` raises `error`, also if the program catches its cancellation."""
        if not self._ended:
            self._end(error)

    def usage(self) -> GuestUsage:
        """An empty usage: processor time and memory of a trusted program cannot be separated from the host's."""
        return GuestUsage(host_calls=self._host_calls)

    # ---- inside

    async def _call(self) -> bytes:
        try:
            main = self._main if self._source is None else program.load(_compiled(self._source, self._name))
            if main is None:
                raise RuntimeError("a trusted program has neither main nor source")
            args = program.decode_args(self._args)
            run.set_args(args)
            encoded = program.encode_result(await program.call(main, args))
        except (SystemExit, KeyboardInterrupt) as error:
            # These exceptions would end the event loop, and with it all other programs.
            what = "raised KeyboardInterrupt"
            if isinstance(error, SystemExit):
                what = f"called sys.exit({_shown(error.code)})"
            raise ProgramFailed(f"the program {what}", traceback=self._trace(error)) from None
        # The last commands are executed before the end is reported; a refusal of one is the program's failure.
        self._flush()
        behind = self._host.behind()
        if behind is not None:
            await behind
        self._on_events()
        self._channel.raise_failure()
        return encoded

    def _outcome(self, task: asyncio.Task[bytes]) -> bytes:
        if self._error is not None:
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise self._error
        failed = None if task.cancelled() else task.exception()
        if isinstance(failed, ProgramFailed):
            # A new error: the program's may be of its own class, or refer to its objects.
            raise ProgramFailed(_text_of(failed), traceback=_text_of(failed.traceback)) from failed
        if task.cancelled():
            raise ProgramFailed("the program cancelled itself: its main ended with asyncio.CancelledError")
        if isinstance(failed, sdk.EngineDead):
            # This is not a fault of the program, which may be launched again.
            raise EngineDead(_text_of(failed)) from failed
        if failed is not None:
            raise ProgramFailed(_say(failed), traceback=self._trace(failed)) from failed
        return task.result()

    def _trace(self, error: BaseException) -> str:
        step = error.__traceback__
        while step is not None and step.tb_frame.f_code.co_filename == __file__:
            step = step.tb_next
        error = error.with_traceback(step)
        try:
            if self._source is not None:
                return program.trace(error, self._source, self._name)
            return "".join(traceback.format_exception(error))
        except BaseException as second:
            return f"{type(second).__name__} while the traceback was written"

    def _on_commands(self) -> None:
        """Schedule one flush for all commands of this turn of the event loop."""
        if self._ended or self._error is not None:
            self._channel.take()
            raise Cancelled("the program has ended; its host takes nothing more from it")
        if self._loop is not None:
            self._loop.call_soon(self._flush)

    def _hurry(self) -> None:
        """Flush the commands of a program that sends many without awaiting. An error of a command ends it here."""
        self._flush()
        if self._error is not None:
            raise Cancelled(str(self._error))

    def _flush(self) -> None:
        if self._ended or self._error is not None:
            return
        data = self._channel.take()
        if not data:
            return
        self._host_calls += 1
        try:
            self._host.commands(data)
        except Exception as error:
            self._end(error)

    def _on_events(self) -> None:
        if self._ended or self._error is not None:
            return
        try:
            data = self._host.take_events()
            if data:
                self._channel.dispatch(data)
        except Exception as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error = error
        # A task that awaits a call gets the error, then the run's task ends at its next `await`.
        self._channel.close(Cancelled(str(error)))
        if self._task is not None:
            self._task.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


def _say(error: BaseException) -> str:
    """The error of a program, in one line."""
    name = error.kind if isinstance(error, WeftError) else type(error).__name__
    text = " ".join(_text_of(error).split())
    return f"{name}: {text}" if text else name


def _text_of(value: object) -> str:
    """`str(value)`, also if a class of the program raises in it."""
    try:
        return str(value)
    except BaseException as error:
        return f"({type(error).__name__} while it was shown)"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except BaseException as error:
        return f"({type(error).__name__} while it was shown)"
