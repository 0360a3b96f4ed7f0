"""What the page about benchmarks names is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from bench import interception, offline
from bench.peers import PEERS
from weft.cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks.md").read_text()
HERE = {path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}
HERE |= {path.parent.name for path in (ROOT / "bench").glob("*/__main__.py")}


def test_every_module_is_listed_and_there() -> None:
    named = set(re.findall(r"python -m (bench\.\w+)", PAGE))
    assert all(importlib.util.find_spec(name) for name in named)
    assert named == {f"bench.{name}" for name in HERE}


def test_every_command_is_listed_and_its_flags_exist() -> None:
    group = next(group for group in app.registered_groups if group.name == "bench")
    commands = {command.name for command in group.typer_instance.registered_commands}
    found = re.findall(r"`weft bench ([\w-]+)([^`]*)`", PAGE)
    assert {name for name, _ in found} == commands
    for name, rest in found:
        shown = CliRunner().invoke(app, ["bench", name, "--help"], prog_name="weft").output
        assert all(flag in shown for flag in re.findall(r"--[\w-]+", rest)), (name, rest)


@pytest.mark.parametrize("module", [offline, interception])
def test_flags_of_comparisons_exist(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [command] = re.findall(rf"^python -m {module.__name__} (.*)$", PAGE, re.MULTILINE)
    monkeypatch.setattr("sys.argv", [module.__name__, "--help"])
    with pytest.raises(SystemExit):
        module.parse_arguments()
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in re.findall(r"--[\w-]+", command))


def test_every_contender_is_explained() -> None:
    rows = PAGE.partition("| contender |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([\w-]+)`", rows)) == {one.name for one in interception.CONTENDERS}


def test_every_peer_is_explained() -> None:
    rows = PAGE.partition("| peer |")[2].partition("\n\n")[0].lower()
    assert all(f"| {name}" in rows for name in PEERS)
