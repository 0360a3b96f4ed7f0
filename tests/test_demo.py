"""The demo is the one test of everything at once: the command, its processes, a real client, real signals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_demo_finds_everything_as_expected() -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "demo.run"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
