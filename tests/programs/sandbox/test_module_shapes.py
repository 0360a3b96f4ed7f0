"""No shape of a module ends the process that hosts it; and what the host uses of a module is what it says it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import wasmtime

from tests.programs.sandbox.help import FakeHost, execute
from weft.abi.errors import InvalidRequest
from weft.programs.sandbox import bindings
from weft.programs.sandbox.module_shape import Entry
from weft.programs.sandbox.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[3]


def shapes(folder: Path, seed: int, count: int) -> dict[str, int]:
    """How modules ended, in a process of its own."""
    if not _has_fibers():
        pytest.skip("the sandbox's shim is not built")
    command = [sys.executable, "-m", "tests.programs.sandbox.module_shapes", str(folder), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, f"status {done.returncode}; see {folder}/module.wasm\n{done.stderr[-2000:]}"
    ends: dict[str, int] = ast.literal_eval(done.stdout)
    return ends


def _has_fibers() -> bool:
    try:
        bindings.shim()
    except bindings.BindingsUnavailable:
        return False
    return True


def test_no_shape_of_a_module_ends_its_host(tmp_path: Path) -> None:
    ends = shapes(tmp_path, 1, 120)
    # It tries something: modules that run, modules that are refused, and modules that only the second check stops.
    assert min(ends["checked: finished"], ends["checked: InvalidRequest"], ends["unchecked: BindingsUnavailable"]) > 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_no_shape_of_many_ends_its_host(tmp_path: Path, seed: int) -> None:
    ends = shapes(tmp_path, 1000 + seed, 2000)
    assert sum(ends.values()) >= 2000


@pytest.mark.parametrize("name", ["_initialize", "run", "_start", "memory"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("(global (export {}) i32 (i32.const 1))", "global"),
        ("(table (export {}) 1 funcref)", "table"),
        ("(memory (export {}) 1)", "memory"),
        ("(func (export {}) (param i32))", "nothing"),
    ],
)
def test_an_export_of_the_wrong_kind_is_refused(sandbox: Sandbox, name: str, kind: str, said: str) -> None:
    if name == said == "memory":
        return
    memory = "" if "memory" in (name, said) else '(memory (export "memory") 1)'
    run = "" if name in ("run", "_start") else '(func (export "run"))'
    code = bytes(wasmtime.wat2wasm(f"(module {memory} {run} {kind.format(f'{chr(34)}{name}{chr(34)}')})"))
    with pytest.raises(
        InvalidRequest, match="no memory" if name == "memory" or said == "memory" else f"{name}.*{said}"
    ):
        sandbox.compile(code)


def test_the_shim_refuses_what_the_check_has_let_pass(fibers: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '(module (memory (export "memory") 1) (func (export "run")) (func (export "x")))'
    compiled = fibers.compile(bytes(wasmtime.wat2wasm(text)))
    for entry in (Entry("memory", 0, False), Entry("absent", 0, False), Entry("run", 0, True)):
        monkeypatch.setattr(compiled.code, "entry", entry)
        with pytest.raises(bindings.BindingsUnavailable, match="export"):
            execute(fibers.module(compiled, b"null", FakeHost()).run())
