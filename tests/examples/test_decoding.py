"""Programs that decide about tokens: what they promise of the tokens that come out."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from tests.examples.help import Lab, reference

STORY = "Write a story about Ada and a lamp."
PASSAGE = "Text: Quillon lives in Brimsel.\n\nWhere does Quillon live?"


def greedy(lab: Lab, prompt: str, count: int, system: str | None = None) -> list[int]:
    """What transformers writes, without the end of sequence."""
    tokens = lab.encode(lab.chat(prompt, system))
    inputs = torch.tensor([tokens])
    found = (
        reference().generate(inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)[0, len(tokens) :].tolist()
    )
    return found[: found.index(2)] if 2 in found else found


def logprobs(tokens: list[int]) -> torch.Tensor:
    """Of what follows a text."""
    with torch.inference_mode():
        return torch.log_softmax(reference()(torch.tensor([tokens])).logits[0, -1], dim=-1)


def test_text_completion_streams_what_it_returns(lab: Lab) -> None:
    result, pieces = lab.told("text_completion", {"prompt": "Once there was a", "max_tokens": 24, "temperature": 0})
    assert "".join(pieces) == result["text"]
    assert len(pieces) > 5
    tokens = lab.encode("Once there was a")
    expected = reference().generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert result["text"] == lab.tokenizer.decode(expected[0, len(tokens) :].tolist(), skip_special=True)
    assert (result["reason"], result["prompt_tokens"], result["output_tokens"]) == ("length", len(tokens), 24)


@pytest.mark.parametrize("name", ["speculative_decoding", "jacobi_decoding"])
@pytest.mark.parametrize("prompt", [PASSAGE, STORY, "Repeat: green lamp, old kite, red drum, blue car"])
def test_guessing_gives_the_greedy_tokens_in_fewer_passes(lab: Lab, name: str, prompt: str) -> None:
    result = lab.example(name, {"prompt": prompt, "max_tokens": 48})
    assert result["tokens"] == greedy(lab, prompt, 48)
    needed = len(result["tokens"]) + (len(result["tokens"]) < 48)  # one more for the end of sequence
    assert result["passes"] <= needed
    if prompt == PASSAGE:
        assert result["passes"] <= needed * (0.6 if name == "speculative_decoding" else 0.95)
    elif name == "jacobi_decoding" and prompt == STORY:
        assert result["passes"] < needed


@pytest.mark.parametrize("options", [{"match": 1, "draft": 1}, {"match": 3, "draft": 20}, {"max_tokens": 1}])
def test_any_draft_gives_the_greedy_tokens(lab: Lab, options: dict[str, int]) -> None:
    result = lab.example("speculative_decoding", {"prompt": PASSAGE, "max_tokens": 40} | options)
    assert result["tokens"] == greedy(lab, PASSAGE, options.get("max_tokens", 40))


@pytest.mark.parametrize("block", [1, 3, 20])
def test_any_block_gives_the_greedy_tokens(lab: Lab, block: int) -> None:
    """Of 20 guesses: more than a page."""
    result = lab.example("jacobi_decoding", {"prompt": PASSAGE, "block": block, "max_tokens": 20})
    assert result["tokens"] == greedy(lab, PASSAGE, 20)


def test_the_beams_are_those_of_transformers(lab: Lab) -> None:
    prompt = lab.encode(lab.chat("Who are you?"))
    found = lab.example("beam_search", {"prompt": "Who are you?", "width": 3, "max_tokens": 14})
    expected = reference().generate(
        torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=14, do_sample=False,
        pad_token_id=0, early_stopping=False, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    rows = [row[len(prompt) :] for row in expected.sequences.tolist()]
    rows = [row[: row.index(2) + 1] if 2 in row else row for row in rows]
    assert [beam["tokens"] for beam in found] == rows
    assert [beam["score"] for beam in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-5)


def test_ebnf_text_is_of_the_language_and_what_the_engine_would_write(lab: Lab) -> None:
    result = lab.example("ebnf_decoding")
    record = json.loads(result["text"])
    assert list(record) == ["name", "city", "age"]
    assert record == {"name": "Nora", "city": "Oslo", "age": 34}
    assert result["complete"]
    assert result["forced"] > 0
    # A language that the model would not speak by itself: numbers, signs and brackets, of bounded depth.
    grammar = 'root ::= term ([+*] term)+ "."\nterm ::= [1-9] [0-9]? | "(" [1-9] "-" [1-9] ")"'
    found = lab.example("ebnf_decoding", {"prompt": STORY, "grammar": grammar, "max_tokens": 40})
    text = found["text"]
    term = r"([1-9][0-9]?|\([1-9]-[1-9]\))"
    assert re.fullmatch(rf"{term}([+*]{term})*([+*]{term})\.", text) or not found["complete"]
    source = (
        "from weft.sdk import Context, ebnf, greedy\nasync def main(args):\n ctx = Context().user(args[0])\n"
        " return (await ctx.generate(greedy(), grammar=ebnf(args[1]), max_tokens=40)).tokens"
    )
    tokens = [token for token in lab.source(source, args=[STORY, grammar])[0] if token != 2]
    assert found["tokens"] == tokens


def test_a_watermark_is_found_where_it_is_and_only_there(lab: Lab) -> None:
    marked = lab.example("watermarking")
    assert marked["p_value"] < 1e-4
    assert lab.example("watermarking", {"detect": marked["tokens"]})["p_value"] == marked["p_value"]
    # From the text alone: its tokens are found again.
    assert lab.example("watermarking", {"detect": marked["text"]})["p_value"] < 1e-4
    # Another key finds nothing, nor is there anything to find without a mark.
    assert lab.example("watermarking", {"detect": marked["tokens"], "key": 7})["p_value"] > 1e-2
    for seed in (1, 2):
        assert lab.example("watermarking", {"bias": 0, "seed": seed})["p_value"] > 1e-2


def test_green_lists_have_their_share(lab: Lab) -> None:
    """Over random pairs, for the detector's arithmetic to be right."""
    pairs = [(at * 7919) % 2048 for at in range(6000)]
    result = lab.example("watermarking", {"detect": pairs})
    assert abs(result["green"] / result["pairs"] - 0.25) < 3 * math.sqrt(0.25 * 0.75 / result["pairs"])


def test_invalid_output_is_given_up_at_once_and_tried_again(lab: Lab) -> None:
    pattern = r'\{"name": "Nora", "age": 34\}'
    results = [
        lab.example("output_validation", {"pattern": pattern, "temperature": 2.2, "seed": seed, "tries": 3})
        for seed in (1, 10, 20, 30)
    ]
    assert all(re.fullmatch(pattern, result["text"]) for result in results)
    assert max(result["tries"] for result in results) > 1
    again = [result for result in results if result["tries"] > 1]
    # A try ends with its first wrong token, long before its 64.
    assert all(0 < result["wasted"] <= 20 * result["tries"] for result in again)
    impossible = lab.example("output_validation", {"pattern": "[0-9]{5}", "tries": 2})
    assert impossible["constrained"]
    assert re.fullmatch("[0-9]{5}", impossible["text"])
    assert impossible["wasted"] == 2  # one token of each try was enough


def test_contrastive_decoding_is_its_formula(lab: Lab) -> None:
    result = lab.example("contrastive_decoding")
    text, question = "You are called Otto.", "Who are you?"
    informed, blind = lab.encode(lab.chat(f"{text}\n\n{question}")), lab.encode(lab.chat(question))
    expected: list[int] = []
    while len(expected) < 24:
        likely, other = logprobs(informed + expected), logprobs(blind + expected)
        scores = torch.where(likely >= likely.max() + math.log(0.1), 1.5 * likely - 0.5 * other, -math.inf)
        if int(scores.argmax()) == 2:
            break
        expected.append(int(scores.argmax()))
    assert result["tokens"] == expected
    assert (result["text"], result["greedy"]) == ("I am Otto.", "I am Weft Tiny, a small language model.")
    plain = lab.example("contrastive_decoding", {"weight": 0})
    assert plain["text"] == plain["greedy"] == result["greedy"]


def test_a_healed_prompt_goes_on_as_if_it_had_not_been_cut(lab: Lab) -> None:
    text = lab.chat(STORY) + "Once there was a knight named Ada."
    cut = text[: text.index("ight named")]
    result = lab.example("token_healing", {"prompt": cut, "max_tokens": 8})
    assert result["healed"].startswith("ight named Ada")
    assert not result["plain"].startswith("ight")
    assert result["considered"] > 1
    # A prompt that ends where a token ends goes on as it would; the token taken back counts.
    whole = lab.example("token_healing", {"prompt": lab.chat(STORY), "max_tokens": 6})
    assert whole["plain"].startswith(whole["healed"])
    assert whole["healed"] != ""


def test_the_best_of_n_is_the_best(lab: Lab) -> None:
    one = lab.example("best_of_n", {"n": 1, "max_tokens": 32})
    four = lab.example("best_of_n", {"n": 4, "max_tokens": 32})
    assert four["scores"][0] == pytest.approx(one["scores"][0])
    assert len(set(four["scores"])) == 4
    # The text is that of the highest score: its mean log-probability, computed elsewhere.
    prompt, written = lab.encode(lab.chat(STORY)), lab.encode(four["text"])
    found = [float(logprobs(prompt + written[:at])[token]) for at, token in enumerate(written)]
    assert sum(found) / len(found) == pytest.approx(max(four["scores"]), abs=0.05)
    assert four["tokens"] == len(prompt) + 32


def test_the_answer_of_most_samples_is_given(lab: Lab) -> None:
    result: dict[str, Any] = lab.example("self_consistency")
    votes = result["votes"]
    assert sum(votes.values()) == 8
    assert len(votes) > 1
    assert votes[result["answer"]] == max(votes.values())
    assert result["answer"] == "The train of Oslo is 9."
