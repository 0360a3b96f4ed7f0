"""Training, continued from every kind of state; export; and the comparison that decides what ships."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from training.weft_tiny import conversations, evaluate, export, train
from training.weft_tiny.batches import Batch, Row, collate, reused
from training.weft_tiny.cases import COLUMNS, TEST, read
from training.weft_tiny.evaluate import Difference, difference, may_ship
from training.weft_tiny.grammar import TOP
from training.weft_tiny.state import RunState

ASSET = Path(__file__).parents[2] / "weft" / "assets" / "weft-tiny"


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model of one narrow layer, a cache directory of the test's own, and the signal handlers as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    make = train.make_config

    def narrow(tokenizer: Tokenizer) -> Any:
        config = make(tokenizer)
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 64, 1
        return config

    monkeypatch.setattr(train, "make_config", narrow)
    monkeypatch.setattr(export, "make_config", narrow)
    monkeypatch.setattr("training.weft_tiny.batches._LEAST_POOL", 40)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def trainer(state: Path, tokens: int, **changes: Any) -> train.Trainer:
    args = argparse.Namespace(
        state=state, asset=ASSET, compact=None, fresh=True, tokens=tokens, decay_tokens=None, decay_seconds=None,
        warmup=500, batch=400, longest=200, long_share=0.0, prompt_weight=0.02, average=0.9, muon_lr=0.02,
        adam_lr=0.004, seed=1, workers=0, uses=1, device="cpu", compile=False, report=2, check_cases=2,
        check_seconds=0.0, save_seconds=0.0, share=[], noise=0.3,
    )  # fmt: skip
    vars(args).update(changes)
    return train.Trainer(args)


def test_a_run_continues_where_it_ended_and_logs_what_it_did(tmp_path: Path) -> None:
    first = trainer(tmp_path / "state", 2000)
    first.run()
    second = trainer(tmp_path / "state", 4000)
    assert (second.seen, second.step, second.resumed) == (first.seen, first.step, 1)
    assert second.curriculum.dump() == first.curriculum.dump()
    for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name, value in first.average.items():
        assert torch.equal(second.average[name], value)
    second.run()
    assert second.seen >= 4000
    state = RunState(tmp_path / "state")
    assert {"tokens", "per_s", "per_cpu_s", "loss", "training", "levels"} <= set(state.last("progress") or {})
    assert {f"{column} {kind}" for column, kind in train.validation()} <= set(state.last("check") or {})
    assert (state.last("stop") or {})["tokens"] == second.seen


def test_a_run_continues_from_the_older_checkpoint_if_the_newest_is_damaged(tmp_path: Path) -> None:
    trainer(tmp_path, 2000).run()
    newest, older = RunState(tmp_path).checkpoints()
    newest.write_bytes(newest.read_bytes()[:-100])
    assert f"{trainer(tmp_path, 2000).seen:015d}" in older.name


def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    ran = trainer(tmp_path, 10**9, report=1)
    note = ran.state.note

    def note_and_stop(event: str, **fields: Any) -> None:
        note(event, **fields)
        if event == "progress":
            os.kill(os.getpid(), signal.SIGTERM)

    ran.state.note = note_and_stop  # type: ignore[method-assign]
    ran.run()
    assert ran.step == 1
    assert trainer(tmp_path, 10).seen == ran.seen


def test_a_compact_state_is_small_and_continues_a_run(tmp_path: Path) -> None:
    first = trainer(tmp_path / "state", 1000)
    first.run()
    export.compact(export.newest(tmp_path / "state"), tmp_path / "compact.pt")
    values = sum(value.numel() for value in first.model.parameters())
    assert (tmp_path / "compact.pt").stat().st_size < 6 * values + 60_000
    second = trainer(tmp_path / "other", 2000, compact=tmp_path / "compact.pt")
    assert second.seen == first.seen
    for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16).float())
    second.run()
    assert second.seen >= 2000
    with pytest.raises(FileNotFoundError, match="no valid checkpoint"):
        export.newest(tmp_path / "nothing")


def test_an_exported_model_loads(tmp_path: Path) -> None:
    trained = trainer(tmp_path / "state", 1000)
    trained.run()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes((ASSET / "tokenizer.json").read_bytes())
    export.export(export.newest(tmp_path / "state"), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    for kind in ("tool", "raw"):
        turns = evaluate.turns_of(read(TEST)["values", kind][:3], tokenizer)
        evaluate.generate(model, tokenizer, turns, 8, 4)
        assert all(len(turn.answer) < 60 for turn in turns)
    for name, value in model.named_parameters():
        assert torch.equal(value.float(), trained.average[name].to(torch.bfloat16).float())


def test_the_paired_difference_takes_cases_as_units() -> None:
    same = [(case, case % 3 == 0) for case in range(90)]
    assert difference(same, same) == Difference(0.0, 0.0, 0.0)
    better = [(case, case % 3 < 2) for case in range(90)]
    found = difference(better, same)
    assert found.mean == pytest.approx(1 / 3)
    assert 0 < found.low < found.mean < found.high
    assert found.high - found.mean == pytest.approx(1.96 * (2 / 9 / 90) ** 0.5)
    doubled = difference([row for row in better for _ in "ab"], [row for row in same for _ in "ab"])
    assert doubled.high - doubled.low == pytest.approx(found.high - found.low)
    with pytest.raises(ValueError, match="different cases"):
        difference(same, same[1:])


def test_weights_ship_only_if_no_row_is_surely_worse_and_the_sum_is_better() -> None:
    up, unsure, down = Difference(0.1, 0.05, 0.15), Difference(-0.02, -0.05, 0.01), Difference(-0.02, -0.03, -0.01)
    assert may_ship({"a": up, "b": unsure})
    assert not may_ship({"a": up, "b": down})
    assert not may_ship({"a": unsure})
    assert not may_ship({"a": Difference(0.0, 0.0, 0.0)})


def test_the_frozen_gold_answers_pass_their_own_checks() -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    for (column, _), cases in read(TEST).items():
        assert column in COLUMNS
        for turn in evaluate.turns_of(cases[:40], tokenizer):
            turn.answer, turn.ended = turn.gold, True
            assert turn.right, turn


def test_the_learning_rate_falls_to_zero_over_tokens_or_over_time(tmp_path: Path) -> None:
    ran = trainer(tmp_path / "tokens", 10**9, decay_tokens=1000, warmup=1)
    ran.seen = 700
    assert ran.rate(200) == pytest.approx(0.5)
    ran.run()
    assert ran.seen >= 1700
    timed = trainer(tmp_path / "seconds", 10**9, decay_seconds=100.0, warmup=1)
    timed.began -= 25.0
    assert timed.rate(0) == pytest.approx(0.75, abs=0.05)
    timed.began -= 200.0
    assert timed.rate(0) == 0.0
    timed.run()
    assert timed.step <= 1


def test_an_answer_is_right_if_all_of_its_tokens_are() -> None:
    rows = [Row([1] * 6, [0.1, 0.1, 1.0, 1.0, 0.1, 1.0]), Row([1] * 4, [1.0, 1.0, 0.1, 0.1])]
    batch = collate(rows)
    assert batch.answers.tolist() == [[0, 2, 4], [0, 5, 6], [1, 0, 2]]
    hits = torch.tensor([[False, True, True, False, True], [True, False, False, False, False]])
    # The first token of a row is no target, so an answer that begins with it is never whole.
    assert train.answer_hits(hits, batch.answers).tolist() == [True, True, False]
    hits[0, 2] = False
    assert train.answer_hits(hits, batch.answers).tolist() == [False, True, False]


def test_a_batch_comes_again_among_later_ones_and_tells_nothing_of_its_level() -> None:
    fresh = [Batch(torch.full((2, 3), index), torch.ones(2, 3), torch.zeros(0, 3), 6, (("chat", 2), ("json", 1)))
             for index in range(50)]  # fmt: skip
    batches = list(reused(iter(fresh), 3, 7, after=5))
    counted = [int(batch.tokens[0, 0]) for batch in batches if batch.sources[0] == ("chat", 2)]
    again = [int(batch.tokens[0, 0]) for batch in batches if batch.sources == (("", 0), ("", 0))]
    assert counted == list(range(50))
    assert len(batches) == 50 + len(again) == 50 + 2 * 45
    assert max(map(again.count, again)) <= 2
    assert again != sorted(again)
    assert list(reused(iter(fresh), 1, 7)) == fresh


def test_other_processes_make_batches_by_the_curriculum(tmp_path: Path) -> None:
    ran = trainer(tmp_path, 1500, workers=1, report=1, share=[(kind, float(kind == "list")) for kind in train.WEIGHTS])
    for level in range(1, TOP):
        for _ in range(900):
            ran.curriculum.count("list", level, True)
    levels: set[tuple[str, int]] = set()
    update = ran.update

    def note(batch: Any, factor: float) -> torch.Tensor:
        levels.update(batch.sources)
        return update(batch, factor)

    ran.update = note  # type: ignore[method-assign]
    ran.run()
    assert {kind for kind, _ in levels} == {"list"}
    assert TOP in {level for _, level in levels}


def test_a_conversation_goes_on_with_the_answers_and_a_tool_answers_only_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = {"name": "lookup", "description": "Look up a key.", "parameters": ["key"]}
    turns = ["Hello.", {"answer": "nothing"}, "What is in a?", {"answer": "seven"}]
    (tmp_path / "said.json").write_text(json.dumps([{"title": "Keys", "tools": [tool], "turns": turns}]))
    monkeypatch.setattr(conversations, "CONVERSATIONS", tmp_path / "said.json")
    call = '<tool_call>{"name": "lookup", "arguments": {"key": "a"}}</tool_call>'
    answers, prompts = iter([("Hi!\n\nYes?", True), (call, True), ("seven seven", False)]), []

    def complete(model: Any, tokenizer: Tokenizer, ids: list[list[int]], end: int, limit: int) -> list[Any]:
        prompts.append(tokenizer.decode(ids[0], skip_special_tokens=False))
        return [next(answers)]

    monkeypatch.setattr(conversations, "complete", complete)
    found = conversations.transcripts(cast(Any, None), Tokenizer.from_file(str(ASSET / "tokenizer.json")))
    assert found == "1. Keys\n\n```\n" + "\n".join(
        [
            "tool:         lookup(key): Look up a key.", "user:         Hello.", "weft-tiny:    Hi!", "",
            "              Yes?", "user:         What is in a?", f"weft-tiny:    {call}", "tool answers: seven",
            "weft-tiny:    seven seven [cut after 120 tokens]", "```",
        ]
    )  # fmt: skip
    assert [prompt.count("<|im_start|>assistant") for prompt in prompts] == [1, 2, 3]
    assert f"{call}<|im_end|>\n<|im_start|>tool\nseven<|im_end|>" in prompts[-1]


def test_the_card_has_every_conversation() -> None:
    card = (ASSET / "README.md").read_text(encoding="utf-8")
    said = json.loads(conversations.CONVERSATIONS.read_text(encoding="utf-8"))
    assert len(said) == 20
    for conversation in said:
        assert all(turn.splitlines()[0] in card for turn in conversation["turns"] if isinstance(turn, str))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--decay-tokens", "0"], "--decay-tokens must be positive"),
        (["--decay-seconds", "nan"], "--decay-seconds must be positive"),
        (["--share", "poem=0.5"], "no kind 'poem'"),
        (["--share", "tool=-1"], "invalid"),
        (["--uses", "0"], "--uses must be at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--state", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        train.main()
    assert error in capsys.readouterr().err
