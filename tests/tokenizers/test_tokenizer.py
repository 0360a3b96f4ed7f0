"""Ids and texts equal transformers', whatever the files say about special tokens."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.tokenizers.conftest import BOS, CORPUS, END, EOS, START
from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.tokenizers.load import load_directory, load_tokenizer
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer

KINDS = [
    "plain",
    "bos from post-processor",
    "bos from config",
    "config forbids bos",
    "bos and eos from config",
    "tokens only in config",
    "special tokens map",
    "sentencepiece",
]
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    " leading and trailing ",
    f"{START}user\nhello{END}\n{START}assistant\n",
    f"{BOS}doubled?{EOS}",
    "<think now>not special</think now>",
    "a<|pad|>  b<|extra|>c<listed>d<|tool|><|more|>",
    "</s><s> in text",
    "\x00\x7f\x80\xa0\xad\ufffd",
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[Tokenizer, object]:
    folder = folders[request.param]
    return load_directory(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_transformers(pair, add_special_tokens: bool) -> None:
    ours, theirs = pair
    for text in TEXTS:
        packed = ours.encode(text, add_special_tokens=add_special_tokens)
        assert list(unpack_tokens(packed)) == theirs.encode(text, add_special_tokens=add_special_tokens), text


def test_special_tokens_equal_transformers(pair) -> None:
    ours, theirs = pair
    assert ours.special_ids == frozenset(theirs.all_special_ids) | {
        token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == [theirs.eos_token_id]
    assert ours.vocab_size == len(theirs)
    named = {name: text for name, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    assert {name: ours.special_tokens[name] for name in named} == named


@pytest.mark.parametrize("skip_special", [True, False])
def test_decoding_equals_transformers(pair, skip_special: bool) -> None:
    ours, theirs = pair
    for text in TEXTS:
        ids = theirs.encode(text)
        expected = theirs.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=skip_special) == expected, text


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_survives(text: str, byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        if tokenizer is sentencepiece and "▁" in text:
            continue  # stands for a space there
        ids = unpack_tokens(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.bytes_of, ids)).decode().removeprefix(" " * (tokenizer is sentencepiece)) == text


def test_special_tokens_in_text_are_parsed(byte_level: Tokenizer) -> None:
    ids = unpack_tokens(byte_level.encode(f"a{END}b", add_special_tokens=False))
    assert byte_level.token_to_id(END) in ids


def test_lone_surrogate_is_the_callers_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("half \ud83d of a pair")


def test_ids_without_a_token_have_no_text(byte_level: Tokenizer) -> None:
    last = byte_level.vocab_size
    assert byte_level.decode([last, -1, 10**6]) == ""
    assert byte_level.bytes_of(last) == b""
    assert byte_level.id_to_token(last) is None
    assert byte_level.id_to_token(0) == BOS


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    from tests.tokenizers.conftest import byte_level_backend, save

    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_directory(save(tmp_path, backend))
    assert tokenizer.decode(unpack_tokens(tokenizer.encode("x " * 50))) == "x " * 50


async def _ticks_while(task: asyncio.Task[bytes]) -> int:
    ticks = 0
    while not task.done():
        await asyncio.sleep(0)
        ticks += 1
    return ticks


def test_long_texts_leave_the_loop_free(byte_level: Tokenizer) -> None:
    text = "\n".join(CORPUS) * 100
    assert len(text) > 10 * INLINE_CHARS

    async def run() -> int:
        await byte_level.encode_async("start the threads " * INLINE_CHARS)
        task = asyncio.create_task(byte_level.encode_async(text))
        ticks = await _ticks_while(task)
        assert task.result() == byte_level.encode(text)
        return ticks

    # With the work on the loop, or on a thread that keeps the interpreter's lock, there would be two or three.
    assert asyncio.run(run()) > 10


def test_short_texts_need_no_thread(byte_level: Tokenizer) -> None:
    async def run() -> int:
        return await _ticks_while(asyncio.create_task(byte_level.encode_async("short")))

    assert asyncio.run(run()) == 1


def test_embedded_model() -> None:
    tokenizer = load_tokenizer("weft-tiny")
    assert tokenizer.vocab_size == 2048
    assert tokenizer.has_chat_template
    packed = tokenizer.encode("Hello")
    assert len(packed) % TOKEN_BYTES == 0
    assert tokenizer.decode(unpack_tokens(packed)) == "Hello"
