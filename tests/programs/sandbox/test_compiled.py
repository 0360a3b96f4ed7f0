"""Machine code in the cache, and the runner in the package."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import wasmtime

from weft.abi.errors import ConfigError, InvalidRequest
from weft.programs.sandbox import build_runner, build_shim
from weft.programs.sandbox.compiled import CompiledCode, key_of

CODE = bytes(wasmtime.wat2wasm('(module (memory (export "memory") 1) (func (export "run")))'))


def test_the_runner_in_the_package_is_current() -> None:
    """If this fails: `python -m weft.programs.sandbox.build_runner --help`."""
    described = build_runner.metadata()
    assert described["sources"] == build_runner.source_hash()
    assert described["componentize_py"] == build_runner.TOOL_VERSION
    component = lzma.decompress(build_runner.COMPONENT.read_bytes())
    assert described["sha256"] == hashlib.sha256(component).hexdigest()


def test_the_hash_is_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {path.name for path in build_runner.sources()}
    assert {"app.py", "runner.wit", "operations.py", "tool_calls.py", "channel.py", "version.py"} <= names
    changed = tmp_path / "new.py"
    changed.write_text("x = 1\n")
    before = build_runner.source_hash()
    monkeypatch.setattr(build_runner, "PACKAGE", tmp_path)
    monkeypatch.setattr(build_runner, "sources", lambda: [changed])
    one = build_runner.source_hash()
    changed.write_text("x = 2\n")
    assert len({before, one, build_runner.source_hash()}) == 3


def test_the_runner_imports_the_host_and_nothing_else() -> None:
    component = lzma.decompress(build_runner.COMPONENT.read_bytes())
    assert b"weft:runner/host@1.0.0" in component
    assert b"wasi:sockets" not in component.split(b"\0asm", 1)[0]


def test_compiled_once(tmp_path: Path) -> None:
    first = CompiledCode(tmp_path / "sandbox").module(CODE).path
    changed = first.stat().st_mtime_ns
    assert CompiledCode(tmp_path / "sandbox").module(CODE).path == first
    assert first.stat().st_mtime_ns == changed


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "index"])
def test_a_damaged_file_is_compiled_again(tmp_path: Path, damage: str) -> None:
    compiled = CompiledCode(tmp_path / "sandbox")
    path = compiled.module(CODE).path
    whole = path.read_bytes()
    index = tmp_path / "sandbox" / f"{key_of('module', hashlib.sha256(CODE).digest())}.json"
    match damage:
        case "cut":
            path.write_bytes(whole[:-100])
        case "changed":
            path.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
        case "gone":
            path.unlink()
        case "index":
            index.write_text('{"sha256": "../../etc/passwd"}')
    again = compiled.module(CODE).path
    assert hashlib.sha256(again.read_bytes()).hexdigest() == json.loads(index.read_text())["sha256"]
    assert wasmtime.Module.deserialize_file is not None
    assert compiled.module(CODE) == (again, ("run", 0, False))


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sandbox"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        CompiledCode(folder)


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CompiledCode(tmp_path / "sandbox")
    codes = [
        bytes(wasmtime.wat2wasm(f'(module (memory (export "memory") {pages}) (func (export "run")))'))
        for pages in (1, 2, 3)
    ]
    first, second = compiled.module(codes[0]).path, compiled.module(codes[1]).path
    for number, path in enumerate((tmp_path / "sandbox").glob("*.json")):
        os.utime(path, ns=(number, number))
    assert compiled.module(codes[0]).path == first  # used again
    monkeypatch.setattr("weft.programs.sandbox.compiled.KEPT_BYTES", 5 * first.stat().st_size // 2)
    third = compiled.module(codes[2]).path
    assert [path.exists() for path in (first, second, third)] == [True, False, True]
    assert len(list((tmp_path / "sandbox").iterdir())) == 4


def test_several_at_once(tmp_path: Path) -> None:
    def compile_it(_: int) -> Path:
        return CompiledCode(tmp_path / "sandbox").module(CODE).path

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(compile_it, range(4)))
    assert all(path.exists() for path in paths)
    assert list((tmp_path / "sandbox").glob("tmp*")) == []


def test_the_compiler_runs_within_limits(tmp_path: Path) -> None:
    program = (
        "import resource\n"
        "from weft.programs.sandbox.rlimits import limit\n"
        "limit(5, 6 << 30, 1 << 20)\n"
        "print([resource.getrlimit(kind)[0] for kind in\n"
        "       (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [5, 6 << 30, 1 << 20, 0]


@pytest.mark.parametrize(
    ("command", "message"),
    [("kill -XCPU $$", "20 s of processor time"), ("kill -9 $$", "2048 MiB of memory"), ("exit 134", "2048 MiB")],
)
def test_a_compiler_that_is_ended_is_the_module_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(InvalidRequest, match=message):
        CompiledCode(tmp_path / "sandbox").module(CODE)


def test_the_shim_s_hash_is_that_of_its_source() -> None:
    assert build_shim.source_hash() == hashlib.sha256(build_shim.SOURCE.read_bytes()).hexdigest()[:16]
    assert os.path.basename(build_shim.LIBRARY) == "_weft_shim.so"
