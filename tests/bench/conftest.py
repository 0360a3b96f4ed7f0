"""Benchmarks are tried here, not measured, so they may run beside the training of the embedded model."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BESIDE_TRAINING", "1")
