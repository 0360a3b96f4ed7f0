"""The benchmark of accuracy: distances and answers of a few settings, on a few texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import quantization
from bench.quantization import ASSET, BFLOAT16, FLOAT32, INT8
from tests.models.runner import with_kernels

pytestmark = with_kernels


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "PAIRS", ((FLOAT32, FLOAT32), (INT8, FLOAT32)))
    monkeypatch.setattr(quantization, "SETTINGS", (FLOAT32, INT8))
    monkeypatch.setattr(quantization, "ANSWERING", (BFLOAT16, INT8))
    monkeypatch.setattr(quantization, "MOST_TOKENS", 8)


def test_distances(tmp_path: Path) -> None:
    found = quantization.distances(ASSET, tmp_path, [list(range(300, 340)), [7, 8, 9]])
    same, other = found.pairs["float32 from float32"], found.pairs["int8 from float32"]
    assert same["tokens"] == other["tokens"] == 43
    assert (same["mean_divergence"], same["largest_divergence"], same["same_likeliest_token"]) == (0, 0, 1)
    assert 0 < other["mean_divergence"] < other["largest_divergence"]
    assert found.weight_bytes["int8"] < found.weight_bytes["float32"] / 2


def test_answers_to_frozen_cases() -> None:
    found = quantization.answers(1, Tokenizer.from_file(str(ASSET / "tokenizer.json")), 1)
    assert set(found) == {"values", "templates"}
    for kinds in found.values():
        assert {"chat", "json", "all"} <= set(kinds)
        assert sum(row["answers"] for kind, row in kinds.items() if kind != "all") == kinds["all"]["answers"]
        assert 0 <= kinds["all"]["same_tokens_int8"] <= 1
    report = {"answers": found, "distances": {}}
    assert "same_tokens_int8" in quantization.table(report)
