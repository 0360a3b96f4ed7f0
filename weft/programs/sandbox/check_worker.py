"""The process that checks an upload: `python -S -m weft.programs.sandbox.check_worker python|wasm CPU_S BYTES`.

Reads a program from its standard input and says whether it may be one: a Python source parses and has a `main`, a
module keeps to docs/wasm.md. Exit status 0, or 1 and the reason on standard error. Parsing may take time and memory out
of all proportion to the size of a source (f-strings, nested parentheses), so no server process ever parses one: this
one limits itself first. It ignores SIGTERM and SIGINT, which reach the whole process group of the server: requests in
progress are still answered. Nothing beyond the standard library, so that it starts in milliseconds. Started by
`checker`.
"""

from __future__ import annotations

import ast
import signal
import sys

from weft.programs.sandbox.rlimits import limit

THE_PROGRAM = "The program"
"""What a reason calls it: its file may have many names."""
_LINE_CHARS = 200


def python_problem(content: bytes) -> str | None:
    """Why a source cannot be a program; None where nothing speaks against it."""
    try:
        tree = ast.parse(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"The program is not UTF-8 text: {error}."
    except SyntaxError as error:
        line = (error.text or "").strip()[:_LINE_CHARS]
        shown = f"\n    {line}" if line else ""
        return f"{THE_PROGRAM}, line {error.lineno}, is not valid Python: {error.msg}{shown}"
    except (ValueError, RecursionError, SystemError) as error:  # the last: how 3.11 may say the second
        return f"The program cannot be parsed: {error or 'nested too deeply'}."
    if not any(_defines_main(statement) for statement in tree.body):
        return "The program has no `main`: write `async def main(args):` in it."
    return None


def wasm_problem(content: bytes) -> str | None:
    """Why a module cannot be a program; None where nothing speaks against it."""
    from weft.abi.errors import InvalidRequest
    from weft.programs.sandbox.imports import checked_entry

    try:
        checked_entry(content)
    except InvalidRequest as error:
        return f"The module was refused: {error}."
    return None


def _defines_main(statement: ast.stmt) -> bool:
    """Whether the source has `main` after this statement: a function, an import, or an assignment."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.name == "main"
    if isinstance(statement, ast.ImportFrom):
        return any((alias.asname or alias.name) == "main" for alias in statement.names)
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "main" for target in statement.targets)
    return False


def main() -> int:
    """Check the program on standard input; the exit status of the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    kind, cpu_s, memory_bytes = sys.argv[1:4]
    limit(int(cpu_s), int(memory_bytes), 1 << 20)
    content = sys.stdin.buffer.read()
    problem = python_problem(content) if kind == "python" else wasm_problem(content)
    if problem is None:
        return 0
    print(problem, file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        status = main()
    except MemoryError:
        status = 2
    sys.exit(status)
