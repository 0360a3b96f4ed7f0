"""What a result says of its making."""

from __future__ import annotations

import sys

import pytest

from weft.cli.bench.record import command_line


def test_command_names_no_directory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/weft", "bench", "latency", "--json", "/var/out file.json", "-n", "3"])
    assert command_line() == "weft bench latency --json 'out file.json' -n 3"
    monkeypatch.setattr(sys, "argv", ["bench/start.py", "--packages", "/srv/peers", "--json", "results/start.json"])
    assert command_line("bench.start") == "python -m bench.start --packages peers --json results/start.json"
