"""Programs that say what each token sees: against transformers with the same mask, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.examples.help import Lab, reference

STORY = "Write a story about Ada and a lamp."
Sees = Callable[[int, int], bool]
NEAR = 1e-5
"""Log-probabilities travel as float32."""


def masked(tokens: list[int], positions: list[int], sees: Sees) -> torch.Tensor:
    """Log-probabilities [n, vocabulary] where token i sees token j if `sees(i, j)`."""
    n = len(tokens)
    seen = torch.tensor([[sees(i, j) for j in range(n)] for i in range(n)])
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~seen, -math.inf)
    with torch.inference_mode():
        out = reference()(torch.tensor([tokens]), attention_mask=mask, position_ids=torch.tensor([positions]))
    return torch.log_softmax(out.logits[0], dim=-1)


def check(prompt: list[int], result: dict[str, Any], sees: Sees, positions: list[int] | None = None) -> None:
    """Every token is the likeliest one, and as likely as the program says."""
    written = result["tokens"]
    text = prompt + written
    found = masked(text, positions or list(range(len(text))), sees)[len(prompt) - 1 :]
    assert found[: len(written)].argmax(dim=-1).tolist() == written
    expected = [float(found[at, token]) for at, token in enumerate(written)]
    assert result["logprobs"] == pytest.approx(expected, abs=NEAR)


@pytest.mark.parametrize("window", [1, 7, 16, 24, 300])
def test_a_window(lab: Lab, window: int) -> None:
    result = lab.example("windowed_attention", {"prompt": STORY, "window": window, "max_tokens": 60})
    check(lab.encode(lab.chat(STORY)), result, lambda i, j: i - window < j <= i)
    size = lab.engine.info.page_size
    assert result["pages"] <= -(-window // size) + 1


@pytest.mark.parametrize(("sinks", "window"), [(4, 12), (1, 24), (16, 16), (20, 5), (0, 9), (4, 300)])
def test_sinks_and_a_window(lab: Lab, sinks: int, window: int) -> None:
    args = {"prompt": STORY, "sinks": sinks, "window": window, "max_tokens": 60}
    result = lab.example("attention_sink", args)
    check(lab.encode(lab.chat(STORY)), result, lambda i, j: j <= i and (j < sinks or j > i - window))
    size = lab.engine.info.page_size
    assert result["pages"] <= -(-window // size) + 1 + -(-sinks // size)


def test_sinks_make_a_difference(lab: Lab) -> None:
    args = {"prompt": STORY, "window": 8, "max_tokens": 40}
    with_sinks = lab.example("attention_sink", args | {"sinks": 4})
    without = lab.example("windowed_attention", args)
    assert with_sinks["tokens"] != without["tokens"]


def test_a_text_longer_than_its_pages(lab: Lab) -> None:
    """As many tokens as would need 12 pages, in 4."""
    result = lab.example(
        "attention_sink", {"prompt": "Tell me something.", "sinks": 4, "window": 32, "max_tokens": 180}
    )
    assert result["pages"] <= 4


@pytest.mark.parametrize("branch", [0, 1])
def test_parts_see_themselves_and_what_is_above_them(lab: Lab, branch: int) -> None:
    parts = [
        [0, "<|im_start|>user\nRead this and answer the question. It is about people and where they live."],
        [1, "\nNora lives in Oslo. She works as a baker."],
        [1, "\nMax lives in Rome. He is 34 years old and likes to swim."],
        [2, "\nHow old is Max?<|im_end|>\n<|im_start|>assistant\n"],
    ]
    if branch:
        # The question is about the root: it sees neither person.
        parts[-1][0] = 1
    result = lab.example("hierarchical_attention", {"parts": parts, "max_tokens": 16})
    tokens: list[int] = []
    part_of: list[int] = []
    for at, (_, text) in enumerate(parts):
        tokens += lab.encode(str(text))
        part_of += [at] * (len(tokens) - len(part_of))
    part_of += [len(parts) - 1] * len(result["tokens"])
    above = [{0}, {0, 1}, {0, 2}, {0, 3} if branch else {0, 2, 3}]
    check(tokens, result, lambda i, j: j <= i and part_of[j] in above[part_of[i]])
    assert result["sees"] == (2 if branch else 3)
    assert ("34" in result["text"]) == (not branch)


def test_a_prefix_is_imported_and_changes_nothing(lab: Lab) -> None:
    document = "Quillon lives in Brimsel. Quillon is 71 years old. Quillon works as a farmer."
    args = {"document": document, "question": "How old is Quillon?", "name": "facts"}
    first = lab.example("prefix_caching", args)
    again = lab.example("prefix_caching", args)
    other = lab.example("prefix_caching", args | {"question": "Where does Quillon live?"})
    long = lab.example("prefix_caching", args | {"question": "Write a story about Ada and a lamp.", "max_tokens": 60})
    assert [result["imported"] for result in (first, again, other, long)] == [False, True, True, True]
    assert again["tokens"] == first["tokens"]
    assert again["computed"] < first["computed"] / 2
    asked = ("How old is Quillon?", "Where does Quillon live?", "Write a story about Ada and a lamp.")
    for result, question in zip((first, other, long), asked, strict=True):
        # What a model writes that computes all of it.
        parts = (f"<|im_start|>user\nText: {document}\n\n", f"Question: {question}<|im_end|>\n<|im_start|>assistant\n")
        tokens = [token for part in parts for token in lab.encode(part)]
        found = reference().generate(torch.tensor([tokens]), max_new_tokens=60, do_sample=False, pad_token_id=0)
        expected = found[0, len(tokens) :].tolist()
        assert result["tokens"] == (expected[: expected.index(2)] if 2 in expected else expected)
    assert "71" in first["text"]
    # Another text is not found under the name, and a forgotten one not either.
    assert not lab.example("prefix_caching", args | {"document": "Nora is 30 years old."})["imported"]
    assert lab.example("prefix_caching", args | {"forget": True}) is None
    assert not lab.example("prefix_caching", args)["imported"]


def test_modules_equal_their_recomputation(lab: Lab) -> None:
    """A module sees itself, the question sees everything that is used: at the places that the list of all gives."""
    modules = [
        ["rules", "<|im_start|>system\nYou answer questions about texts.<|im_end|>\n<|im_start|>user\n"],
        ["quillon", "Quillon lives in Brimsel. He is 71 years old. "],
        ["mira", "Mira lives in Tornhold. She works as a baker. "],
    ]
    question = "How old is Quillon?"
    tail = lab.encode(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n")
    for number, use in enumerate((["rules", "quillon", "mira"], ["rules", "mira", "quillon"], ["rules", "quillon"])):
        result = lab.example("modular_caching", {"modules": modules, "use": use, "question": question})
        assert sorted(result["reused"] + result["computed"]) == sorted(use)
        assert (result["computed"] == []) == (number > 0)
        tokens: list[int] = []
        positions: list[int] = []
        part_of: list[int] = []
        place = 0
        for at, (name, text) in enumerate(modules):
            part = lab.encode(text)
            if name in use:
                tokens += part
                positions += range(place, place + len(part))
                part_of += [at] * len(part)
            place += len(part)
        written = tail + result["tokens"]
        positions += range(place, place + len(written))
        part_of += [-1] * len(written)
        found = masked(tokens + written, positions, lambda i, j: j <= i and part_of[i] in (-1, part_of[j]))  # noqa: B023
        first = found[len(tokens) + len(tail) - 1]
        assert first.topk(8).indices.tolist() == result["first"]["ids"]
        assert result["first"]["logprobs"] == pytest.approx(first.topk(8).values.tolist(), abs=NEAR)
        choices = found[len(tokens) + len(tail) - 1 : -1].argmax(dim=-1).tolist()
        assert choices == result["tokens"]
        assert "71" in result["text"]
