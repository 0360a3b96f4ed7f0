"""However tokens arrive, the pieces of text make the whole, and nothing is shown too early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizers.conftest import END
from weft.core.ids import unpack_tokens
from weft.tokenizers.detokenize import IncrementalDetokenizer
from weft.tokenizers.tokenizer import Tokenizer

TOKENS = st.lists(st.integers(0, 620), max_size=40)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(unpack_tokens(tokenizer.encode(text, add_special_tokens=False)))


@given(tokens=TOKENS, data=st.data(), skip_special=st.booleans(), family=st.booleans())
@settings(max_examples=400, deadline=None)
def test_pieces_make_the_whole(tokens, data, skip_special, family, byte_level, sentencepiece) -> None:
    tokenizer = byte_level if family else sentencepiece
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    pieces, rest = [], tokens
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        hold = data.draw(st.integers(0, 12))
        pieces.append(detokenizer.push(rest[:count], hold))
        rest = rest[count:]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special=skip_special)


@given(text=st.text(max_size=40), data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_character_is_split(text, data, byte_level) -> None:
    """Of a valid text, everything shown is the longest run of whole characters, so never U+FFFD."""
    tokens = ids_of(byte_level, text)
    detokenizer = IncrementalDetokenizer(byte_level, skip_special=False)
    shown, raw = "", b""
    for token in tokens:
        hold = data.draw(st.integers(0, 4))
        raw += byte_level.bytes_of(token)
        shown += detokenizer.push([token], hold)
        assert text.startswith(shown)
        if hold == 0:
            assert shown == raw.decode(errors="ignore")
    assert shown + detokenizer.finish() == text


@given(tokens=TOKENS, cut=st.integers(0, 30), skip_special=st.booleans())
@settings(max_examples=300, deadline=None)
def test_held_bytes_can_be_cut(tokens, cut, skip_special, byte_level) -> None:
    """What is held is never shown, so that cutting it leaves exactly the text without those bytes."""
    raw = [byte_level.bytes_of(token) for token in tokens]
    left = max(0, sum(map(len, raw)) - cut)
    visible = b""
    for token, text in zip(tokens, raw, strict=True):
        if not (skip_special and token in byte_level.special_ids):
            visible += text[:left]
        left = max(0, left - len(text))
    detokenizer = IncrementalDetokenizer(byte_level, skip_special=skip_special)
    shown = "".join(detokenizer.push([token], 10**9 if i < len(tokens) - 1 else cut) for i, token in enumerate(tokens))
    assert shown + detokenizer.finish(cut) == visible.decode(errors="replace")


def test_a_held_stop_string_shows_when_it_was_none(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(ids_of(byte_level, "ab<"), 1) == "ab"
    assert detokenizer.push(ids_of(byte_level, "c"), 0) == "<c"


def test_characters_over_several_tokens(byte_level: Tokenizer) -> None:
    byte_tokens = {byte_level.bytes_of(token): token for token in range(byte_level.vocab_size)}
    tokens = [byte_tokens[bytes([byte])] for byte in "😀".encode()]
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", "😀"]
    assert detokenizer.push(tokens[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xe2\x82", b"\x80\x80"])
def test_invalid_bytes_as_all_at_once(bad: bytes, byte_level: Tokenizer) -> None:
    byte_tokens = {byte_level.bytes_of(token): token for token in range(byte_level.vocab_size)}
    tokens = [byte_tokens[bytes([byte])] for byte in b"a" + bad + b"b"]
    detokenizer = IncrementalDetokenizer(byte_level)
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish()
    assert text == byte_level.decode(tokens) == byte_level._backend.decode(tokens)


def test_special_tokens_are_skipped_or_kept(byte_level: Tokenizer) -> None:
    tokens = ids_of(byte_level, f"a{END}b")
    assert IncrementalDetokenizer(byte_level).push(tokens) == "ab"
    assert IncrementalDetokenizer(byte_level, skip_special=False).push(tokens) == f"a{END}b"


def test_leading_space_of_sentencepiece(sentencepiece: Tokenizer) -> None:
    tokens = ids_of(sentencepiece, "the weft")
    assert sentencepiece.bytes_of(tokens[0]) == b" the"
    assert IncrementalDetokenizer(sentencepiece).push(tokens) == "the weft"
    # After a prompt, the space is one between words.
    assert IncrementalDetokenizer(sentencepiece, continues=True).push(tokens) == " the weft"
