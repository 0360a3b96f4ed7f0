"""A disk that fills up while code is compiled for the sandbox: that launch says so, and half a file is never used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import wasmtime

from tests.programs.host.help import TENANT, Bench, with_host
from tests.programs.sandbox.help import EXAMPLES
from tests.small_disk import small_disk
from weft.abi.errors import StorageFailed
from weft.programs.registry import Quota, checked_code
from weft.programs.run.runs import RunSpec
from weft.programs.sandbox import compile_worker
from weft.programs.sandbox.compiled import CompiledCode
from weft.programs.sandbox.engine import engine_config

CODE = bytes(wasmtime.wat2wasm('(module (memory (export "memory") 1) (func (export "run")))'))


def full(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def replace_until(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.replace` fails from its `number`th call on."""
    calls, real = iter(range(number)), os.replace

    def replace(source: object, target: object) -> None:
        real(source, target) if next(calls, None) is not None else full()

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("step", ["folder", "code", "index", "named"])
def test_whichever_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    compiled = CompiledCode(tmp_path / "sandbox")
    with monkeypatch.context() as patch:
        if step == "folder":
            patch.setattr(tempfile, "mkdtemp", full)
        elif step == "index":
            patch.setattr(Path, "write_text", full)
        else:
            replace_until(0 if step == "code" else 1, patch)
        with pytest.raises(StorageFailed, match=r"No space left.*WEFT_CACHE"):
            compiled.module(CODE)
    assert not list(compiled.directory.glob("*.json"))
    assert not [path for path in compiled.directory.iterdir() if path.is_dir()]
    found = compiled.module(CODE).path
    wasmtime.Module.deserialize(wasmtime.Engine(engine_config()), found.read_bytes())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_compiler_s_own_write() -> None:
    command = [sys.executable, "-m", "weft.programs.sandbox.compile_worker", "module", "/dev/full", "60", str(2 << 30)]
    ended = subprocess.run(command, input=CODE, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (compile_worker.UNWRITTEN, b"No space left on device\n")


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "32k") as disk:
        compiled = CompiledCode(disk / "sandbox")
        large = (EXAMPLES / "rust" / "complete.wasm").read_bytes()
        with pytest.raises(StorageFailed, match="No space left"):
            compiled.module(large)
        assert not list(compiled.directory.iterdir())
        assert compiled.module(CODE).path.exists()


def test_the_launch_says_so_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (EXAMPLES / "c" / "complete.wasm").read_bytes()
    # A section of its own makes it a module that no cache has.
    code = checked_code(source + b"\0\x06\x05" + os.urandom(4).hex().encode()[:5], "wasm", Quota(), "complete")
    spec = RunSpec(code=code, args=b'"once upon"', trusted=False)

    async def test(bench: Bench) -> None:
        await bench.parts.guests.open()
        with monkeypatch.context() as patch:
            replace_until(0, patch)
            error = (await bench.host.launch(spec, TENANT).wait()).error
        assert error is not None
        assert error.kind == "storage_failed"
        assert "No space left" in error.message
        assert (await bench.host.launch(spec, TENANT).wait()).status == "finished"

    with_host(test)
