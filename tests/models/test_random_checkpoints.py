"""Random checkpoints are the same for the same seed, and complete enough to serve."""

from __future__ import annotations

import json

import jinja2
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from weft.models.loader import load_model
from weft.models.random_checkpoints import IM_END_ID, IM_START_ID, SPECIAL_TOKENS, write_tiny


def test_same_seed_same_files(tmp_path):
    one, two, other = (write_tiny(tmp_path / n, seed=s) for n, s in (("one", 1), ("two", 1), ("other", 2)))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_tokenizer_and_template(tmp_path):
    directory = write_tiny(tmp_path, "qwen3", tokenizer=True, dtype=torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "Ünïcode, \x00 and\nlines 🧵"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    rendered = jinja2.Template(settings["chat_template"]).render(
        messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    ids = tokenizer.encode(rendered).ids
    assert ids.count(IM_START_ID) == 2
    assert ids.count(IM_END_ID) == 1
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == [256, 257, 258]
    assert load_model(str(directory)).eos_ids == (IM_END_ID,)
    assert {t.dtype for t in load_file(directory / "model.safetensors").values()} == {torch.bfloat16}
