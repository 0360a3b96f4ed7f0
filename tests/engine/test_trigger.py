"""Grammars that hold from a marker on: the text before it is free, and costs no masks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from weft import LLM, Grammar
from weft.core.grammar import Trigger
from weft.core.ids import unpack_tokens
from weft.endpoints.dialect import Dialect
from weft.endpoints.grammars import CallableTool, Calls, triggered_grammar
from weft.engine.grammar import Grammars
from weft.engine.guide import Guide
from weft.tokenizers.load import load_tokenizer

STRICT = CallableTool(
    "weather", {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}, True
)
LOOSE = CallableTool("now", {"type": "object", "properties": {}})
TOKENIZER = load_tokenizer("weft-tiny")
MARKER = TOKENIZER.token_to_id("<tool_call>")
END = TOKENIZER.token_to_id("</tool_call>")
CALL = '{"name": "now", "arguments": {"a": [1, {"b": "}"}]}}</tool_call>'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-tiny", dtype="float32", device="cpu", num_pages=400, max_context=1024, threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(TOKENIZER.token_bytes, TOKENIZER.special_ids, TOKENIZER.eos_token_ids, TOKENIZER.encode)
    yield grammars
    grammars.close()


def grammar(form: str = "hermes", *, only_one: bool = False, reasoning: bool = False, opened: bool = False) -> Grammar:
    dialect = Dialect(form, reasoning=reasoning)
    return triggered_grammar(dialect, Calls([STRICT, LOOSE], only_one), reasoning_opened=opened)


def encode(text: str) -> list[int]:
    return unpack_tokens(TOKENIZER.encode(text, add_special_tokens=False)).tolist()


def letters(text: str) -> list[int]:
    """The text in tokens of one byte, so that no token holds a marker."""
    single = {data: token for token, data in enumerate(TOKENIZER.token_bytes) if len(data) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


def allowed(guide: Guide) -> set[bytes] | None:
    """The tokens that the mask leaves; None where there is no mask."""
    if guide.matcher is None:
        return None
    bits = np.unpackbits(np.frombuffer(guide.matcher.compute_bitmask(), np.uint8), bitorder="little")
    return {TOKENIZER.bytes_of(token) for token in np.flatnonzero(bits).tolist()}


def follow(guide: Guide, tokens: list[int]) -> list[bool]:
    """Whether each token but the first had a mask; every one must have been allowed by it."""
    masked = []
    for token in tokens:
        masked.append(guide.matcher is not None)
        left = allowed(guide)
        assert left is None or TOKENIZER.bytes_of(token) in left, TOKENIZER.bytes_of(token)
        assert not guide.push(token)
        assert not guide.error
    return masked


def test_plain_text_needs_no_mask(grammars: Grammars) -> None:
    guide = grammars.guide(grammar())
    text = "Once upon a time there was a cat, and 3 > 2."
    assert not any(follow(guide, encode(text)))
    assert guide.matcher is None


def test_text_that_only_begins_as_a_marker_is_free_again(grammars: Grammars) -> None:
    guide = grammars.guide(grammar())
    masked = follow(guide, letters("a <tool_cat> b"))
    assert masked == [letter in "<tool_ca" and 2 < at <= 11 for at, letter in enumerate("a <tool_cat> b")]
    assert guide.matcher is None


def assert_a_call_follows(guide: Guide) -> None:
    left = allowed(guide)
    assert left is not None
    assert all(data.lstrip().startswith(b"{") or not data.strip() for data in left)
    follow(guide, encode('{"name": "'))
    left = allowed(guide)
    assert left is not None
    assert all(b'weather"'.startswith(data) or b'now"'.startswith(data[:4]) for data in left)


@pytest.mark.parametrize("cut", [encode, letters])
def test_a_call_is_held_from_its_marker_on(grammars: Grammars, cut) -> None:
    guide = grammars.guide(grammar())
    follow(guide, cut("So: <tool_call>"))
    assert_a_call_follows(guide)


@pytest.mark.parametrize("cut", [encode, letters])
def test_after_a_call_the_text_is_free_until_the_next(grammars: Grammars, cut) -> None:
    guide = grammars.guide(grammar())
    follow(guide, cut("<tool_call>") + encode(f"{CALL}\n"))
    assert guide.matcher is None
    follow(guide, cut("and <tool_call>") + encode(f"{CALL} and"))
    assert guide.matcher is None


def test_one_call_ends_the_text(grammars: Grammars) -> None:
    guide = grammars.guide(grammar(only_one=True))
    *first, last = encode(f"So: <tool_call>{CALL}")
    follow(guide, first)
    assert guide.push(last)


def test_strict_arguments_follow_their_schema(grammars: Grammars) -> None:
    guide = grammars.guide(grammar())
    follow(guide, encode('<tool_call>{"name": "weather", "arguments": {"city": "'))
    left = allowed(guide)
    assert left
    assert all(b'Oslo"'.startswith(data) or data.startswith(b'Oslo"') for data in left)


@pytest.mark.parametrize(
    ("opened", "text"),
    [(False, "<think>Perhaps <tool_call>x"), (True, "Perhaps <tool_call>x"), (False, " \n<think>a</thin <tool_call>")],
)
def test_a_marker_in_reasoning_means_nothing(grammars: Grammars, opened: bool, text: str) -> None:
    guide = grammars.guide(grammar(reasoning=True, opened=opened))
    assert not any(follow(guide, letters(text)))
    follow(guide, letters("</think>\n<tool_call>"))
    assert guide.matcher is not None


def test_an_answer_without_reasoning_is_read_for_markers(grammars: Grammars) -> None:
    guide = grammars.guide(grammar(reasoning=True))
    follow(guide, encode("<tool_call>"))
    assert guide.matcher is not None


@pytest.mark.parametrize("before", ["", " \n\n", "<", "<think>Hm.</think>"])
@pytest.mark.parametrize("cut", [encode, letters])
def test_a_call_behind_reasoning_that_may_come_is_held_from_its_marker_on(grammars: Grammars, cut, before: str) -> None:
    """Also where the tokens of the marker might begin the opening tag of the reasoning."""
    guide = grammars.guide(grammar(reasoning=True))
    follow(guide, letters(before) + cut("<tool_call>"))
    assert_a_call_follows(guide)


@pytest.mark.parametrize("reasoning", [False, True])
def test_half_a_character_before_a_marker_is_free_text(reasoning: bool) -> None:
    """A token that ends a character and begins the marker, so that no text begins with it."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"\xa9<", b"\xa9<tool_call>", b"<|end|>"]
    grammars = Grammars(tokens, [258], [258], lambda text: np.array([*text.encode()], np.int32).tobytes())
    try:
        for rest in ([256, *b"tool_call>"], [257], [256, *b"b>", *b"<tool_call>"]):
            guide = grammars.guide(grammar(reasoning=reasoning))
            for token in [*b"caf\xc3", *rest, *b'{"name": "']:
                assert not guide.push(token)
                assert not guide.error
            assert guide.matcher is not None
            bits = np.unpackbits(np.frombuffer(guide.matcher.compute_bitmask(), np.uint8), bitorder="little")
            assert np.flatnonzero(bits).tolist() == sorted(b"wn")
    finally:
        grammars.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_call_of_a_model_that_wants_to_write_something_else(llm: LLM, seed: int) -> None:
    """A model that opens calls at random and writes noise: all calls that come to an end parse and are offered."""
    # The end comes where nothing else is left: as a part of strings, the text could not be cut there.
    bias = {MARKER: 25.0, END: -60.0}
    (result,) = llm.generate(
        "Hi", grammar=grammar(), max_tokens=600, temperature=3.0, seed=seed, logit_bias=bias, ignore_eos=True
    )
    *calls, rest = result.text.split("</tool_call>")
    assert len(calls) + rest.count("<tool_call>") > 0
    for text in calls:
        call = json.loads(text.partition("<tool_call>")[2])
        assert call["name"] in ("weather", "now")
        assert isinstance(call["arguments"], dict)
        assert call["name"] == "now" or call["arguments"]["city"] == "Oslo"


def test_masks_are_made_only_from_the_marker_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of plain text bind no mask; its tokens are those of the request without a grammar."""
    made = []
    original = Grammars.masks

    def count(self, step, flight):
        late = original(self, step, flight)
        made.append((len(late.samplers), len(late.free)))
        return late

    monkeypatch.setattr(Grammars, "masks", count)
    never = {MARKER: -100.0}
    plain = llm.generate("Once upon a time", max_tokens=40, temperature=0, logit_bias=never)[0]
    held = llm.generate("Once upon a time", max_tokens=40, temperature=0, logit_bias=never, grammar=grammar())[0]
    assert held.token_ids == plain.token_ids
    assert "<" not in held.text
    assert sum(masks for masks, _ in made) == 0
    assert sum(free for _, free in made) >= 40


def test_a_trigger_is_part_of_a_grammar() -> None:
    assert Grammar.lark("start: FREE", Trigger("<a>")) != Grammar.lark("start: FREE")
