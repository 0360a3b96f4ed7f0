"""The choice between fibers and threads, and the self-test it rests on."""

from __future__ import annotations

import logging

import pytest

from tests.programs.sandbox.help import python
from weft.abi.errors import ConfigError
from weft.programs.sandbox import backend, bindings, selftest
from weft.programs.sandbox.sandbox import Sandbox, SandboxConfig


def test_the_self_test_passes(fibers: Sandbox) -> None:
    selftest.check_fibers()


def test_without_fibers_it_runs_on_threads_and_says_why(
    fibers: Sandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bindings, "pooled_engine", _broken)
    with caplog.at_level(logging.WARNING):
        sandbox = Sandbox.open(SandboxConfig(slots=4))
    assert sandbox.backend == "threads"
    assert "no pools today" in caplog.text
    assert python(sandbox, "def main(): return 1") == b"1"
    sandbox.close()
    with pytest.raises(ConfigError, match="no pools today"):
        backend.choose("fibers", 4, 1 << 26, 0.002)


def test_a_self_test_that_fails_says_at_what(fibers: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "PARKED", -1)
    with pytest.raises(bindings.BindingsUnavailable, match=r"suspending and resuming|never gives way"):
        selftest.check_fibers()


def test_the_clock_sleeps_while_nothing_runs(fibers: Sandbox) -> None:
    engine = bindings.pooled_engine(1, 1 << 20, components=False)
    ticker = bindings.Ticker(engine, 0.0001)
    try:
        # No poll ever: it goes to sleep after some fifty ticks.
        while not ticker.is_asleep:
            pass
    finally:
        ticker.close()


def _broken(*args: object, **kwargs: object) -> object:
    raise bindings.BindingsUnavailable("no pools today")
