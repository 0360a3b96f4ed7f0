"""The command line in this process, without the settings of the user who runs the tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from weft.cli.main import app

Weft = Callable[..., Result]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("WEFT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def weft() -> Weft:
    """Run a command; `input` is what is piped into it."""
    runner = CliRunner()

    def run(*arguments: str, input: str | None = None) -> Result:
        return runner.invoke(app, list(arguments), input=input, prog_name="weft")

    return run
