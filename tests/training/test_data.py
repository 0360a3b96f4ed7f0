"""The data behind weft-tiny: seeded, split as promised, judged by code; and the shipped tokenizer and template."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer

from training.weft_tiny import cases, facts, noise, relations, toolbox, toolset, words
from training.weft_tiny.batches import Stream, encode
from training.weft_tiny.data import KINDS, MAKERS, held_out, stream
from training.weft_tiny.examples import Check, Example, calculate, mentions, parse_call, passes
from training.weft_tiny.grammar import Draw, Phrases, Pool, is_held
from training.weft_tiny.kinds import chat, copying, extract, lists, opening, passage, story, tool
from training.weft_tiny.render import TEMPLATE, compiled, render

ASSET = Path(__file__).parents[2] / "weft" / "assets" / "weft-tiny"
MODULES = (facts, chat, copying, extract, lists, opening, passage, story, tool, toolbox, toolset)
UNSPLIT = (copying.REPEAT, copying.PAIRS, tool.REMARK, tool.AGAIN, tool.RESULT)
"""Groups without held-out lines."""
FROZEN_LINES = json.loads((Path(cases.__file__).parent / "held_lines.json").read_text(encoding="utf-8"))


def answers(example: Example) -> list[str]:
    """The gold answers as a model would write them."""
    found = []
    for index, message in enumerate(example.messages):
        if message["role"] == "assistant":
            text = render(example.messages[index : index + 1])
            found.append(text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n"))
    return found


def groups() -> list[Phrases]:
    """Every phrase group of the generator."""
    found = [value for module in MODULES for value in vars(module).values() if isinstance(value, Phrases)]
    found += [phrases for phrases, _ in (*chat.TALK, *opening.TALK)] + [phrases for _, phrases in toolbox.PROBLEMS]
    found += [phrases for r in (*relations.PERSON, *relations.ITEM, *relations.EVENT) for phrases in (r.say, r.ask)]
    found += [family.ask for family in toolset.NAMED] + list(relations.COMPOUNDS.values())
    return found


def pattern(line: str) -> re.Pattern[str]:
    """What all texts of a line look like: alternations open, slots filled with anything."""
    parts = re.split(r"(\([^()]*\|[^()]*\)|\{\w+\})", line)
    shape = ""
    for part in parts:
        if part.startswith("(") and "|" in part:
            shape += "(?:" + "|".join(map(re.escape, part[1:-1].split("|"))) + ")"
        else:
            shape += ".{1,40}?" if part.startswith("{") else re.escape(part)
    return re.compile(shape)


@pytest.mark.parametrize("kind", list(MAKERS))
def test_stream_is_deterministic_per_seed(kind: str) -> None:
    def first(seed: int) -> list[Example]:
        return list(itertools.islice(stream(seed, {kind: 1.0}), 20))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_held_out_cases_are_deterministic() -> None:
    assert held_out("tool", 5, True) == held_out("tool", 5, True)
    assert held_out("tool", 5, True, seed=1) != held_out("tool", 5, True)


@pytest.mark.parametrize("pool", [value for value in vars(words).values() if isinstance(value, Pool)])
def test_values_keep_to_their_side(pool: Pool) -> None:
    trained = {Draw(random.Random(seed)).value(pool) for seed in range(150)}
    held = {Draw(random.Random(seed), held_values=True).value(pool) for seed in range(150)}
    assert trained.isdisjoint(held)
    assert not any(map(is_held, trained))
    assert all(map(is_held, held))


def test_numbers_keep_to_their_side() -> None:
    trained = {Draw(random.Random(seed)).number(2, 999) for seed in range(300)}
    held = {Draw(random.Random(seed), held_values=True).number(2, 999) for seed in range(300)}
    assert trained.isdisjoint(held)
    assert min(held) >= 10


def test_held_out_lines_differ_from_trained_lines() -> None:
    found = groups()
    assert sum(len(group.held) for group in found) > 150
    trained = {line for group in found for line in group.train}
    held = {line for group in found for line in group.held}
    assert trained.isdisjoint(held)
    assert all(group.held for group in found if group not in UNSPLIT)


def test_held_out_lines_never_appear_in_training() -> None:
    source = stream(11)
    corpus = "\n".join(
        message["content"] for example in itertools.islice(source, 1500) for message in example.messages
        if message["role"] in ("system", "user")
    )  # fmt: skip
    # Lines with little text of their own would match by accident.
    lines = [line for line in FROZEN_LINES if len(re.sub(r"\{\w+\}", "", line)) > 14]
    assert len(lines) > 150
    assert [line for line in lines if pattern(line).search(corpus)] == []


def test_frozen_held_out_lines_are_still_held_out() -> None:
    held = {line for group in groups() for line in group.held}
    held |= {line[1:] for lines in (facts.MADE_UP_SAY, facts.MADE_UP_ASK, toolbox._GET_ASK) for line in lines
             if line.startswith("~")}  # fmt: skip
    assert set(FROZEN_LINES) - held == set()


def test_frozen_cases_have_the_agreed_size_and_values_that_training_rejects() -> None:
    test, choosing = cases.read(cases.TEST), cases.read(cases.VALIDATION)
    assert {key: len(group) for key, group in test.items()} == {
        (column, kind): 300 if kind in ("opening", "raw") else 500
        for column in cases.COLUMNS for kind in KINDS if (column, kind) != ("templates", "raw")
    }  # fmt: skip
    prompts = [{json.dumps(case.messages) for group in each.values() for case in group} for each in (test, choosing)]
    shared = prompts[0] & prompts[1]
    assert all(len(message) < 400 for message in shared)  # A greeting has no value that could tell two cases apart.
    names = [str(case.checks[0].record["name"]) for column in cases.COLUMNS for case in test[column, "json"]
             if case.checks[0].record and "name" in case.checks[0].record]  # fmt: skip
    assert len(names) > 200
    assert all(map(is_held, names))


def test_frozen_cases_cannot_be_added_to(tmp_path: Path) -> None:
    path = tmp_path / "cases.xz"
    cases.append(path, [("values", held_out("tool", 3, False))])
    cases.append(path, [("values", held_out("raw", 2, False)), ("templates", held_out("tool", 1, True))])
    assert cases.read(path)["values", "tool"] == held_out("tool", 3, False)
    with pytest.raises(ValueError, match="frozen"):
        cases.append(path, [("values", held_out("tool", 1, False))])


def test_a_training_draw_never_has_the_form_of_a_held_out_line() -> None:
    group = Phrases("(Name|Give) the {k}", "Say the {k}", "~Name the {k}")
    drawn = {Draw(random.Random(seed)).phrase(group, k="b") for seed in range(80)}
    assert "Give the b" in drawn
    assert "Name the b" not in drawn


def test_raw_text_has_no_template_and_is_all_target() -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    example = next(stream(4, {"raw": 1.0}))
    row = encode(example, tokenizer, 0.1)
    whole = "".join(message["content"] for message in example.messages)
    assert tokenizer.decode(row.tokens, skip_special_tokens=False) == whole + "<|endoftext|>"
    assert set(row.weights) == {1.0}


def test_levels_bound_the_facts_of_a_passage_and_the_items_of_a_list() -> None:
    def longest(kind: str, level: int) -> int:
        made = [MAKERS[kind](Draw(random.Random(seed), level=level)) for seed in range(40)]
        return max(len(case.messages[-2]["content"]) for case in made if len(case.messages) == 2)

    for kind in ("passage", "list", "json", "recall"):
        assert longest(kind, 1) < longest(kind, 6)


def test_draws_use_held_out_lines_only_if_asked() -> None:
    group = Phrases("a {x}", "b {x}", "~c {x}")
    assert {Draw(random.Random(s)).phrase(group, x=1)[0] for s in range(60)} == {"a", "b"}
    assert {Draw(random.Random(s), held_templates=True).phrase(group, x=1)[0] for s in range(20)} == {"c"}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_checks_accept_gold_answers(kind: str) -> None:
    cases = list(itertools.islice(stream(5, {kind: 1.0}), 60))
    if kind in KINDS:
        cases += held_out(kind, 60, False) + held_out(kind, 60, True)
    for case in cases:
        assert len(answers(case)) == len(case.checks)
        for check, answer in zip(case.checks, answers(case), strict=True):
            assert passes(check, answer), (check, answer)


@pytest.mark.parametrize("kind", ["passage", "list", "json", "tool", "story"])
def test_checks_reject_corrupted_answers(kind: str) -> None:
    rejected = total = 0
    for case in held_out(kind, 60, True):
        for check, answer in zip(case.checks, answers(case), strict=True):
            assert not passes(check, "")
            if check.call or check.record or check.include or check.exact:
                total += 1
                broken = re.sub(r"\w+(?=\W*$)", "zzz", answer) if check.exact or check.record else answer
                for value in check.include:
                    broken = re.sub(re.escape(value), "zzz", broken, flags=re.IGNORECASE)
                rejected += not passes(check, broken if not check.call else answer.replace('": "', '": "x', 1))
    assert total > 30
    assert rejected == total


def test_checks_in_detail() -> None:
    assert mentions("It costs 12.", "12")
    assert not mentions("It costs 12.5 or 112", "12")
    assert not passes(Check(include=("12",), exclude=("7",)), "12 or 7")
    assert not passes(Check(record={"a": 1}), '{"a": "1"}')
    assert passes(Check(record={"a": 1, "b": "x"}), '{"b": "x", "a": 1}')
    assert not passes(Check(unrepeated=True), "It rains. It rains.")
    assert not passes(Check(sentences=1), "One. Two.")
    assert parse_call('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>') == ("f", {"x": 1})
    for text in ('{"name": "f", "arguments": {}}', '<tool_call>{"name": "f"}</tool_call>', "<tool_call>f(</tool_call>"):
        assert parse_call(text) is None
    assert calculate("12 * 3 + 4") == 40
    with pytest.raises(ValueError, match="not arithmetic"):
        calculate("f(1)")


def test_calculator_results_follow_from_the_call() -> None:
    for case in held_out("tool", 150, False):
        for call, result in itertools.pairwise(case.messages):
            function = call["tool_calls"][0]["function"] if call.get("tool_calls") else {}
            expression = next(iter(function.get("arguments", {"": ""}).values()))
            if isinstance(expression, str) and re.fullmatch(r"[\d+*/ -]*\d [+*/-] \d[\d+*/ -]*", expression):
                assert toolbox.number_text(calculate(expression)) in result["content"]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}},
    },
}
CALLED = '<|im_start|>assistant\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>\n'


def shipped(**variables: Any) -> str:
    """The template of the shipped tokenizer, rendered."""
    config = json.loads((ASSET / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == TEMPLATE
    return compiled(config["chat_template"]).render(**variables)


def test_shipped_template_renders_tools_calls_and_results() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    text = shipped(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rainy"},
        ],
        tools=[TOOL],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.\n\n<tools>\nweather(city, day): Weather in a city.\n</tools><|im_end|>\n"
        "<|im_start|>user\nWeather in Oslo?<|im_end|>\n" + CALLED + "<|im_start|>tool\nrainy<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_shipped_template_takes_arguments_as_text_and_tools_without_a_system_turn() -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert shipped(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}]) == CALLED
    bare = shipped(messages=[{"role": "user", "content": "Hi"}], tools=[{"function": {"name": "f"}}])
    assert bare == "<|im_start|>system\n<tools>\nf()\n</tools><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    with pytest.raises(TemplateError, match="not critic"):
        shipped(messages=[{"role": "critic", "content": "Hi"}])


def test_shipped_tokenizer_round_trips_and_keeps_call_tags_visible() -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    for text in ("Héllo,  wörld!\t\n\n 中文 🙂 don't x_y-z 12345\r\n", "".join(map(chr, range(1, 700))), CALLED):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    call = '<tool_call>{"name": "f", "arguments": {"x": 31}}</tool_call>'
    encoded = tokenizer.encode(call)
    assert tokenizer.decode(encoded.ids) == call
    assert encoded.tokens[0] == "<tool_call>"
    assert encoded.tokens.count("3") == encoded.tokens.count("1") == 1
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>").ids) == "a"


def test_a_word_has_the_same_tokens_after_a_space_and_a_quote() -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    alone = tokenizer.encode("Zarnok").tokens
    for text in ("to Zarnok.", '{"name": "Zarnok"}', "(Zarnok)"):
        assert " ".join(alone) in " ".join(tokenizer.encode(text).tokens)


def test_loss_falls_on_assistant_turns() -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    example = next(stream(2, {"tool": 1.0}))
    row = encode(example, tokenizer, 0.1)
    assert row.tokens == tokenizer.encode(render(example.messages, example.tools)).ids
    graded = tokenizer.decode([t for t, w in zip(row.tokens, row.weights, strict=True) if w == 1.0], False)
    assert graded == "".join(answer + "<|im_end|>" for answer in answers(example))


def test_several_processes_make_different_batches_and_the_same_ones_again() -> None:
    made = Stream(ASSET / "tokenizer.json", seed=3, size=4000)

    def first(workers: int) -> list[list[list[int]]]:
        return [batch.tokens.tolist() for batch in itertools.islice(made.loader(workers), 4)]

    one, two = first(0), first(2)
    assert first(2) == two
    assert two[0] == one[0]
    assert two[2] == one[1]
    assert two[1] not in one


def test_noise_keeps_answers_names_and_numbers() -> None:
    source, rng = stream(3), random.Random(4)
    changed = 0
    for _ in range(300):
        example = next(source)
        if example.kind not in noise.KINDS:
            continue
        found = noise.noisy(example, rng)
        assert found.level == 0
        assert (found.checks, found.tools) == (example.checks, example.tools)
        held = set(re.findall(r"\w+", " ".join(answers(example)).lower()))
        for before, after in zip(example.messages, found.messages, strict=True):
            if before["role"] in ("assistant", "tool"):
                assert after == before
                continue
            words = [re.findall(r"\w+", message["content"]) for message in (before, after)]
            kept = [[word for word in part if word[0].isupper() or word[0].isdigit()] for part in words]
            assert kept[0] == kept[1]
            assert {word for word in words[0] if word in held} <= set(words[1])
            foreign = set(words[1]) - set(words[0])
            assert not any(word.islower() and is_held(word) for word in foreign)
            changed += words[0] != words[1]
    assert changed > 100
