"""Lengths, arrivals, prompts, files and shapes: seeded, and as they say."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from weft.abi.errors import WeftError
from weft.cli.bench.conversation import Pauses, Script, Workload, scripts, session_scripts
from weft.cli.bench.lengths import Lengths, fixed, parse_lengths
from weft.cli.bench.shapes import CONVERSATIONS, SINGLE, single_requests
from weft.cli.bench.workload import (
    BenchRequest,
    arrivals,
    parse_rate,
    random_prompts,
    random_requests,
    read_requests,
)
from weft.sim.agents import AgentParameters, agent_day
from weft.sim.scripts import scaled
from weft.sim.workloads import INTERCEPTIONS, MixtureParameters, mixture

NO_LENGTHS = ("", "0", "-3", "many", "normal:5", "normal:5:-1", "uniform:9:3", "gamma:1:2", "1:2", "nan", "inf")


def draws(lengths: Lengths, count: int = 4000) -> list[int]:
    source = random.Random(7)
    return [lengths.draw(source) for _ in range(count)]


class TestLengths:
    def test_as_they_are_written(self):
        assert parse_lengths("128") == fixed(128)
        for text in ("uniform:64:256", "normal:512:100", "lognormal:512:400"):
            assert str(parse_lengths(text)) == text
        assert str(parse_lengths("128")) == "128"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "0",
            "-3",
            "many",
            "normal:5",
            "normal:5:-1",
            "uniform:9:3",
            "gamma:1:2",
            "1:2",
            "nan",
            "inf",
            "lognormal:0:1",
        ],
    )
    def test_what_is_no_length(self, text: str):
        with pytest.raises(ValueError, match="is not a length"):
            parse_lengths(text)

    @pytest.mark.parametrize(("kind", "deviation"), [("normal", 100), ("lognormal", 400)])
    def test_mean_and_deviation_are_those_of_the_length(self, kind: str, deviation: int):
        found = draws(Lengths(kind, 500, deviation))
        assert statistics.fmean(found) == pytest.approx(500, rel=0.03)
        assert statistics.stdev(found) == pytest.approx(deviation, rel=0.1)

    def test_uniform_reaches_both_ends_and_no_further(self):
        found = draws(Lengths("uniform", 3, 6))
        assert set(found) == {3, 4, 5, 6}

    def test_never_empty(self):
        assert min(draws(Lengths("normal", 2, 50))) == 1
        assert fixed(512).scaled(0.0001).draw(random.Random(0)) == 1

    def test_scaled(self):
        assert Lengths("normal", 100, 10).scaled(0.5) == Lengths("normal", 50, 5)


class TestArrivals:
    def test_all_at_once(self):
        assert list(arrivals(0, 3, math.inf)) == [0, 0, 0]

    def test_poisson_gaps_are_exponential_and_seeded(self):
        times = list(arrivals(0, 4001, 4.0))
        assert times == sorted(times) == list(arrivals(0, 4001, 4.0)) != list(arrivals(1, 4001, 4.0))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
        assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.08)  # as large as the mean
        assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.08)

    def test_a_higher_rate_is_the_same_process_faster(self):
        assert list(arrivals(5, 20, 8.0)) == pytest.approx([at / 2 for at in arrivals(5, 20, 4.0)])

    def test_rates_as_they_are_written(self):
        assert parse_rate("2.5") == 2.5
        assert parse_rate("inf") == math.inf
        for text in ("0", "-1", "nan", "fast", ""):
            with pytest.raises(ValueError, match="is not a rate"):
                parse_rate(text)


class TestRandom:
    def test_prompts_are_seeded_and_share_only_their_prefix(self):
        first = random_prompts(1, range(1000), count=4, lengths=fixed(20), shared_prefix=8)
        assert first == random_prompts(1, range(1000), count=4, lengths=fixed(20), shared_prefix=8)
        assert all(len(prompt) == 20 and prompt[:8] == first[0][:8] for prompt in first)
        assert len({prompt[8] for prompt in first}) == 4
        for seed in (-1, 2):
            assert random_prompts(seed, range(1000), count=1, lengths=fixed(20))[0][:8] != first[0][:8]

    def test_a_prefix_leaves_something_to_differ_in(self):
        with pytest.raises(typer.BadParameter, match="must be less than"):
            random_prompts(0, range(9), count=1, lengths=fixed(8), shared_prefix=8)
        short = random_prompts(0, range(9), count=50, lengths=Lengths("normal", 10, 5), shared_prefix=9)
        assert min(map(len, short)) == 10

    def test_prompts_differ_at_once_as_far_as_there_are_tokens(self):
        found = random_prompts(0, range(40), count=80, lengths=fixed(6), shared_prefix=3)
        assert sorted(prompt[3] for prompt in found) == sorted([*range(40)] * 2)

    def test_requests_of_ids_and_of_words(self):
        sizes = {"count": 3, "inputs": fixed(12), "outputs": Lengths("uniform", 2, 9), "shared_prefix": 4}
        ids, words = random_requests(3, **sizes), random_requests(3, **sizes, as_text=True)
        assert ids == random_requests(3, **sizes)
        assert [len(request.prompt) for request in ids] == [12, 12, 12]
        assert [len(str(request.prompt).split()) for request in words] == [12, 12, 12]
        assert len({tuple(request.prompt[:4]) for request in ids}) == 1
        assert len({tuple(request.prompt[4:]) for request in ids}) == 3
        assert len({tuple(str(request.prompt).split()[:4]) for request in words}) == 1
        assert all(2 <= request.output_len <= 9 for request in ids + words)


class TestFiles:
    def read(self, tmp_path: Path, *rows: object) -> list[BenchRequest]:
        file = tmp_path / "requests.jsonl"
        file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return read_requests(file, fixed(7), seed=0)

    def test_what_a_line_may_be(self, tmp_path: Path):
        chat = [{"role": "user", "content": "hi"}]
        body = {"model": "other", "messages": chat, "max_completion_tokens": 5, "seed": 3, "stream": False}
        found = self.read(
            tmp_path,
            {"prompt": "a text"},
            "",
            '{"prompt": "one\u2028two"}',
            {"prompt": [1, 2], "max_tokens": 3, "temperature": 0.5},
            {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body},
        )
        assert found == [
            BenchRequest("a text", 7),
            BenchRequest("one\u2028two", 7),
            BenchRequest([1, 2], 3, {"temperature": 0.5}),
            BenchRequest(chat, 5, {"seed": 3}),
        ]

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("{", "line 2 of .* is not valid JSON"),
            ("[1]", "line 2 of .* needs either"),
            ('{"text": "x"}', "line 2 of .* needs either"),
            ('{"prompt": "x", "messages": [1]}', "line 2 of .* needs either"),
            ('{"prompt": ""}', "line 2 of .* needs either"),
            ('{"prompt": 5}', "line 2 of .* needs either"),
            ('{"prompt": "x", "max_tokens": 0}', "line 2 of .* asks for 0 tokens"),
            ('{"prompt": "x", "max_tokens": true}', "line 2 of .* asks for True tokens"),
        ],
    )
    def test_what_a_line_may_not_be(self, tmp_path: Path, line: str, why: str):
        with pytest.raises(WeftError, match=why):
            self.read(tmp_path, {"prompt": "fine"}, line)

    def test_files_without_requests(self, tmp_path: Path):
        with pytest.raises(WeftError, match="has no requests"):
            self.read(tmp_path, "", "")
        with pytest.raises(WeftError, match="cannot be read"):
            read_requests(tmp_path / "missing", fixed(1), 0)


class TestShapes:
    @pytest.mark.parametrize("name", SINGLE)
    @pytest.mark.parametrize("as_text", [False, True])
    def test_singles(self, name: str, as_text: bool):
        shape = SINGLE[name]
        assert sum(app.share for app in shape.apps) == pytest.approx(1)
        found = single_requests(shape, 4, 50, 0.05, as_text)
        assert found == single_requests(shape, 4, 50, 0.05, as_text) != single_requests(shape, 5, 50, 0.05, as_text)
        assert len(found) == 50
        assert all(isinstance(request.prompt, str) == as_text and request.output_len >= 1 for request in found)

    def test_requests_of_an_application_share_its_prompt(self):
        found = single_requests(SINGLE["chat-search"], 0, 5, 0.1, as_text=False)
        assert len({tuple(request.prompt[:615]) for request in found}) == 1
        assert len({tuple(request.prompt) for request in found}) == 5
        apart = single_requests(SINGLE["gsm8k"], 0, 5, 0.1, as_text=False)
        assert len({tuple(request.prompt[:5]) for request in apart}) == 5

    @pytest.mark.parametrize("name", CONVERSATIONS)
    @pytest.mark.parametrize("as_text", [False, True])
    def test_conversations(self, name: str, as_text: bool):
        def drawn(seed: int, rate: float = math.inf) -> list[Script]:
            sessions = scaled(CONVERSATIONS[name].draw(20, rate, seed), 0.05, 0.0)
            return session_scripts(sessions, seed, as_text)

        held = drawn(2)
        assert held == drawn(2) == drawn(2, 0.5) != drawn(3)  # a rate moves arrivals alone
        assert len(held) == 20
        turns = [turn for script in held for turn in script.turns]
        assert all(turn.pause_s == 0 and turn.said and turn.output_len >= 1 for turn in turns)
        assert all(isinstance(turn.said, str) == as_text for turn in turns)
        assert statistics.fmean(len(script.turns) for script in held) > 1.5

    def test_the_mixture_is_that_of_the_simulator(self):
        sessions = CONVERSATIONS["mixture"].draw(120, 0.3, 5)
        assert sessions[:90] == CONVERSATIONS["mixture"].draw(90, 0.3, 5)
        assert {session.kind for session in sessions} == set(INTERCEPTIONS)
        minutes = (sessions[-1].arrive_s + 1e-6) / 60
        assert sessions == mixture(MixtureParameters(rate=0.3, minutes=minutes), 5)
        assert [session.arrive_s for session in CONVERSATIONS["mixture"].draw(3, math.inf, 5)] == [0.0] * 3
        for session, script in zip(sessions, session_scripts(sessions, 5, as_text=False), strict=True):
            assert script.kind == session.kind
            assert [len(turn.said) for turn in script.turns] == [turn.new_tokens for turn in session.turns]
            assert [turn.output_len for turn in script.turns] == [turn.output_tokens for turn in session.turns]
            assert [turn.pause_s for turn in script.turns[1:]] == [turn.wait_s for turn in session.turns[:-1]]

    def test_a_coding_agents_context_grows_by_turn_and_its_subagents_share_a_prompt(self):
        sessions = CONVERSATIONS["coding-agent"].draw(10, math.inf, 1)
        assert sessions == agent_day(AgentParameters(sessions=10, rate=math.inf), 1)
        held = session_scripts(scaled(sessions, 0.01), 1, as_text=False)
        assert all(len(script.turns[0].said) == 200 and not script.system for script in held)
        children = [child for script in held for turn in script.turns for child in turn.subagents]
        assert len(children) > 1
        assert len({tuple(child.system) for child in children}) == 1
        assert len({tuple(child.turns[0].said) for child in children}) == len(children)
        assert all((len(child.system), len(child.turns[0].said)) == (120, 10) for child in children)


class TestScripts:
    def test_all_begin_with_the_system_prompt_and_the_first_turn_is_not_late(self):
        workload = Workload(fixed(3), 5, fixed(4), fixed(2), fixed(6), Pauses(1.0, 0.0, 0.0).draw)
        held = scripts(workload, 0, 4, as_text=False)
        assert len({tuple(script.system) for script in held}) == 1
        assert len(held[0].system) == 5
        for script in held:
            assert [len(turn.said) for turn in script.turns] == [4, 2, 2]
            assert [turn.output_len for turn in script.turns] == [6, 6, 6]
            assert [turn.pause_s > 0 for turn in script.turns] == [False, True, True]

    def test_pauses_are_a_persons_or_a_tools(self):
        source = random.Random(0)
        found = [Pauses(8.0, 0.0, 0.25).draw(source) for _ in range(4000)]
        assert sum(pause == 0 for pause in found) == pytest.approx(1000, rel=0.1)
        assert statistics.fmean(pause for pause in found if pause) == pytest.approx(8.0, rel=0.05)
