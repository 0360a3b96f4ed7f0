"""Runs a program: from its source to the JSON of its result, trusted and sandboxed alike.

Owns the form of a program: source text with a function `main`, sync or async, that takes the run's arguments or
nothing. It does not know channels or limits. The runners call it in the context in which the channel is installed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable
from types import CodeType, ModuleType, TracebackType
from typing import Any

from weft.abi.errors import InvalidRequest

Main = Callable[..., Any]
MODULE = "__program__"
"""The `__name__` of every program: code under `if __name__ == "__main__":` does not run here."""
_NOTHING = ModuleType(MODULE)
_MAX_FRAMES = 30
_WEFT = __file__.rpartition("sdk/")[0]
"""The directory of the package, in the sandbox and outside."""


async def run(code: CodeType, args: bytes = b"") -> bytes:
    """Load a program, call its `main` with the arguments (JSON; no bytes: null), and encode the value it returns.

    Raises `InvalidRequest` for a program without a valid `main`, and the errors of `main` itself.
    """
    return encode_result(await call(load(code), decode_args(args)))


def compiled(source: str, name: str) -> CodeType:
    """Compile a source without running it. `name` is the file's name in tracebacks.

    Raises `InvalidRequest` for a syntax error (with its line).
    """
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        shown = f": {line}" if line else ""
        raise InvalidRequest(f"{name}, line {error.lineno}: {error.msg}{shown}", "source") from None
    except ValueError as error:
        raise InvalidRequest(f"{name} is no Python source: {error}", "source") from None


def load(code: CodeType) -> Main:
    """Execute a compiled source as a module and return its `main`.

    Raises `InvalidRequest` for a source without a valid `main`, and the errors of the source itself.
    """
    name, module = code.co_filename, ModuleType(MODULE)
    # Creating a class may look its module up by name (dataclasses do).
    sys.modules[MODULE] = module
    try:
        exec(code, module.__dict__)  # noqa: S102 (running a program is the purpose)
    finally:
        sys.modules[MODULE] = _NOTHING
    main = module.__dict__.get("main")
    if not callable(main):
        raise InvalidRequest(
            f"{name} has no function main; define `async def main(args)`, which returns the result", "source"
        )
    if inspect.isasyncgenfunction(main) or inspect.isgeneratorfunction(main):
        raise InvalidRequest(
            f"main of {name} is a generator; return the result, and send pieces with `weft.sdk.run.send`", "source"
        )
    return main  # type: ignore[no-any-return]


async def call(main: Main, args: object) -> object:
    """Call `main`, with the arguments if it takes any, and return its value."""
    value = main(args) if _takes_args(main) else main()
    return await value if inspect.isawaitable(value) else value


def decode_args(args: bytes) -> Any:
    """Decode the arguments of a run; None for no bytes. Raises `InvalidRequest` for bytes that are not JSON."""
    if not args:
        return None
    try:
        return json.loads(args)
    except ValueError as error:
        raise InvalidRequest(f"the arguments are not JSON: {error}", "args") from None


def encode_result(value: object) -> bytes:
    """Encode the value that `main` returned; dataclasses become objects. Raises `InvalidRequest` for a value without a
    JSON form."""
    return encode(value, "the result of main")


def encode(value: object, what: str) -> bytes:
    """Encode a value as compact JSON in UTF-8. `what` names the value in an `InvalidRequest`."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_default)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it has text with lone surrogates" if isinstance(error, UnicodeError) else error
        raise InvalidRequest(f"{what} cannot be written as JSON: {reason}") from None


def trace(error: BaseException, source: str, name: str) -> str:
    """A traceback of the program's own lines, with the cause last. Frames of the standard library are shown without
    their source lines, and frames of Weft are left out. Without any remaining frame only the cause is shown."""
    lines = source.splitlines()
    frames = _frames(error.__traceback__)
    cut = len(frames) - _MAX_FRAMES
    shown = ["Traceback (most recent call last):"] if frames else []
    for filename, number, function in frames if cut <= 0 else frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]:
        shown.append(f'  File "{filename}", line {number}, in {function}')
        if filename == name and 0 < number <= len(lines):
            shown.append(f"    {lines[number - 1].strip()}")
    if cut > 0:
        shown.insert(1, f"  ({cut} frames in the middle are left out)")
    text = str(error)
    shown.append(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    return "\n".join(shown)


def _frames(step: TracebackType | None) -> list[tuple[str, int, str]]:
    """File, line and function of each frame, without those of Weft."""
    frames = []
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(_WEFT):
            frames.append((code.co_filename, step.tb_lineno, code.co_name))
        step = step.tb_next
    return frames


def _takes_args(main: Main) -> bool:
    try:
        parameters = inspect.signature(main).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return any(parameter.kind in positional for parameter in parameters)


def _default(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that it was never awaited
        raise TypeError(f"it holds a {type(value).__name__} that was not awaited; write `await` before it")
    if isinstance(value, bytes | bytearray):
        raise TypeError("bytes have no JSON form; decode them to text first")
    raise TypeError(f"a {type(value).__name__} has no JSON form")
