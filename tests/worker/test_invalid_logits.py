"""Logits that are not numbers: the sampler says whose they are, and a model that starts with them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.sampling_help import late_inputs, sample, sampling_batch, slot_set, table_of, ways
from weft.abi.errors import ModelLoadError
from weft.config import EngineConfig
from weft.core.sampling import SamplingParams
from weft.models.random_checkpoints import write_tiny
from weft.worker.build import load, start_worker

V = 61
WAYS = ways()
POISONS = {
    "all": lambda row: row.fill_(torch.nan),
    "one": lambda row: row[17].fill_(torch.nan),
    "overflow": lambda row: row[3].fill_(torch.inf),
    "nothing": lambda row: row.fill_(-torch.inf),
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0, top_k=9, top_p=0.8),
    "edited": SamplingParams(temperature=1.0, frequency_penalty=0.5),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=[1, 2]),
    "masked": SamplingParams(temperature=0.7),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("poison", POISONS)
def test_a_row_of_invalid_logits_gives_no_token_and_the_others_theirs(way: dict[str, Any], poison: str) -> None:
    logits = torch.randn(2 * len(PARAMS), V, generator=torch.Generator().manual_seed(1))
    states = [slot_set(slot, params) for slot, params in enumerate([*PARAMS.values(), *PARAMS.values()])]
    late = np.zeros(len(states), np.bool_)
    late[[4, 9]] = True
    # In an order of its own, so that rows are not samplers.
    order = np.random.default_rng(3).permutation(len(states))
    batch = sampling_batch(order, order, np.linspace(0.05, 0.9, len(states)), late_mask=late[order])
    waiting = np.flatnonzero(late[order])
    masks = late_inputs(waiting, np.ones((len(waiting), V), np.bool_))
    table = table_of(*states, vocab_size=V)
    before = sample(table, logits, batch, masks, **way)
    assert min(before) >= 0
    for row in range(len(PARAMS)):
        POISONS[poison](logits[row])
    after = sample(table_of(*states, vocab_size=V), logits, batch, masks, **way)
    assert after == [-1 if row < len(PARAMS) else token for row, token in zip(order, before, strict=True)]


def test_a_finite_row_may_hold_tokens_of_no_probability() -> None:
    logits = torch.full((1, V), -torch.inf)
    logits[0, 5] = 2.0
    for params in PARAMS.values():
        table = table_of(slot_set(0, params), vocab_size=V)
        assert sample(table, logits, sampling_batch([0], [0], [0.5]))[0] >= 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("name", "rows"),
    [("mlp.down_proj", slice(1)), ("embed_tokens", slice(1)), ("embed_tokens", slice(20, 30)), ("embed_tokens", -1)],
)
def test_a_model_whose_first_pass_is_invalid_does_not_start(
    tmp_path: Path, value: float, name: str, rows: slice | int
) -> None:
    path = write_tiny(tmp_path / "poisoned", "llama")
    [file] = Path(path).glob("*.safetensors")
    weights = load_file(file)
    assert any("lm_head" in weight for weight in weights), "tied embeddings would show in every logit"
    weights[next(weight for weight in weights if name in weight)][rows] = value
    save_file(weights, file, metadata={"format": "pt"})
    config = EngineConfig(model=str(path), num_pages=16, max_running=2, device="cpu", threads=1)
    with pytest.raises(ModelLoadError, match=r"poisoned.*NaN or infinite"):
        start_worker(config, load(config))
