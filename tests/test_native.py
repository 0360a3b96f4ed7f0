"""Native libraries: built by nothing but the standard library, whole or not at all, and failures say why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft import native

ROOT = Path(__file__).resolve().parent.parent


def test_builders_need_the_standard_library_alone() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    program += "import weft.kernels.cpu.build, weft.programs.sandbox.build_shim\n"
    program += "print('site' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_compiler_is_the_one_named_or_the_first_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("second", "third"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("THE_CC", raising=False)
    names = ("first", "second", "third")
    assert native.find_compiler("Fortran", "THE_CC", names) == [str(tmp_path / "second")]
    monkeypatch.setenv("THE_CC", "ccache 'my compiler' -m32")
    assert native.find_compiler("Fortran", "THE_CC", names) == ["ccache", "my compiler", "-m32"]
    monkeypatch.delenv("THE_CC")
    with pytest.raises(native.BuildError, match=r"^no Fortran compiler: looked for \$THE_CC, first and fourth$"):
        native.find_compiler("Fortran", "THE_CC", ("first", "fourth"))


def test_a_command_that_fails_is_quoted_with_what_it_said() -> None:
    bad = ["sh", "-c", "echo on stdout; echo on stderr >&2; exit 3"]
    with pytest.raises(native.BuildError, match=r"^sh -c '.*' failed:\non stdout\non stderr$"):
        native.run([["true"], bad, ["true"]])
    with pytest.raises(native.BuildError, match="cannot run no-such-compiler"):
        native.run([["no-such-compiler"]])


def test_a_library_takes_its_place_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "library.so"
    with native.replacing(target) as made:
        made.write_text("first")
        assert not target.exists()
    before = target.open()

    def half() -> None:
        with native.replacing(target) as made:
            made.write_text("half of the sec")
            native.run([["false"]])

    with pytest.raises(native.BuildError):
        half()
    assert target.read_text() == "first"
    with native.replacing(target) as made:
        made.write_text("third")
    assert (before.read(), target.read_text()) == ("first", "third")  # who has it open keeps what it has
    before.close()
    assert [path.name for path in target.parent.iterdir()] == ["library.so"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_builder_says_where_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert native.main(lambda: tmp_path, "It was not built") == 0
    assert capsys.readouterr().out == f"built {tmp_path}\n"

    def fails() -> Path:
        raise native.BuildError("no compiler")

    assert native.main(fails, "It was not built") == 1
    assert capsys.readouterr().err == "It was not built: no compiler\n"
