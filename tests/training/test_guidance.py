"""Where values of answers stand, the attention that is drawn there, and the trunk that shows it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from training.weft_tiny.batches import collate, encode, joined
from training.weft_tiny.data import stream
from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.guidance import attended, guidance_loss
from training.weft_tiny.train import ASSET, losses_of, make_config
from training.weft_tiny.trunk import Trunk

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / ASSET / "tokenizer.json"))


def sources_of(prompt: str, answer: str, check: Check) -> list[tuple[str, str]]:
    """The first token of each value that is looked up, with the text before its source."""
    row = encode(Example("test", [user(prompt), assistant(answer)], [check]), TOKENIZER, 0.1)
    found = []
    for at, source in row.sources:
        assert row.tokens[at + 1] == row.tokens[source]
        assert source < at
        found.append((TOKENIZER.decode([row.tokens[source]]), TOKENIZER.decode(row.tokens[:source])))
    return found


def test_a_value_is_looked_up_wherever_it_stands() -> None:
    check = Check(include=("Zarnok",))
    found = sources_of("Zarnok is a city. Ada lives in Zarnok.", "Ada lives in Zarnok.", check)
    assert [before.endswith("Ada lives in ") for _, before in found] == [False, True]
    assert len({first for first, _ in found}) == 1


def test_a_number_is_not_looked_up_within_another_one() -> None:
    found = sources_of("Cup 17, lamp 7, vase 71, pen 7.", "It costs 7.", Check(include=("7",)))
    assert [before.split()[-1] for _, before in found] == ["lamp", "pen"]


def test_records_and_calls_have_their_values_looked_up() -> None:
    record = {"name": "Ada", "age": 36}
    found = sources_of("Keys: name, age. Ada is 36.", json.dumps(record), Check(record=record))
    assert {before.split()[-1] for _, before in found} == {"Keys:", "name,", "age.", "is"}


def test_what_stands_nowhere_is_not_looked_up() -> None:
    assert sources_of("How are you?", "There are 3 items.", Check(include=("3",))) == []


def test_sources_move_with_their_row() -> None:
    rows = [encode(example, TOKENIZER, 0.1) for example in itertools.islice(stream(4, {"passage": 1.0}), 3)]
    whole = joined(rows)
    assert len(whole.sources) == sum(len(row.sources) for row in rows) > 0
    assert all(whole.tokens[at + 1] == whole.tokens[source] for at, source in whole.sources)
    batch = collate([*rows, whole])
    assert batch.sources.tolist() == sorted(batch.sources.tolist())
    row, query, key = batch.sources.unbind(1)
    assert torch.equal(batch.tokens[row, query + 1], batch.tokens[row, key])


def test_attention_is_summed_over_the_sources_of_a_query() -> None:
    weights = torch.zeros(2, 1, 4, 4)
    weights[0, 0, 3] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    weights[1, 0, 2] = torch.tensor([0.5, 0.5, 0.0, 0.0])
    pairs = torch.tensor([[0, 3, 0], [0, 3, 2], [1, 2, 1]])
    assert attended(weights, pairs).flatten().tolist() == pytest.approx([0.4, 0.5])


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = make_config(TOKENIZER)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 3, 64, 96
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def test_the_trunk_is_the_model() -> None:
    tiny = model(1)
    batch = collate([encode(example, TOKENIZER, 0.1) for example in itertools.islice(stream(5), 5)])
    hidden, seen = Trunk(tiny, 1)(batch.tokens)
    expected = tiny.model(batch.tokens, output_attentions=True, use_cache=False)
    torch.testing.assert_close(hidden, expected.last_hidden_state, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(seen, expected.attentions[1], atol=2e-6, rtol=1e-4)
    assert Trunk(tiny)(batch.tokens)[1] is None


def test_guided_heads_learn_where_to_look() -> None:
    tiny = model(2)
    trunk = Trunk(tiny, 1)
    batch = collate([encode(example, TOKENIZER, 0.1) for example in itertools.islice(stream(6, {"copying": 1.0}), 6)])
    assert len(batch.sources) > 4
    optimizer = torch.optim.Adam(tiny.parameters(), 2e-3)
    looks = []
    for _ in range(12):
        losses = losses_of(trunk, tiny.lm_head, batch, "cpu", [0, 1])
        (losses.total + losses.looks).backward()
        optimizer.step()
        optimizer.zero_grad()
        looks.append(losses.looks.item())
    assert looks[-1] < 0.7 * looks[0]
    weights = trunk(batch.tokens[:, :-1])[1]
    guided, others = (guidance_loss(weights[:, heads], batch.sources).item() for heads in ([0, 1], [6, 7]))
    assert guided < others
    unguided = losses_of(Trunk(tiny), tiny.lm_head, batch, "cpu", [])
    assert unguided.looks.item() == 0
