"""Ids of long texts, encoded in pieces, equal those of the same texts in one piece, for every family of tokenizers."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizers.conftest import CORPUS, byte_level_backend, sentencepiece_backend
from weft.core.ids import unpack_tokens
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.threads import FairThreads
from weft.tokenizers import pieces, tokenizer
from weft.tokenizers.load import load_tokenizer
from weft.tokenizers.pieces import _O200K, LLAMA3, PIECE_CHARS, cutter_of
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer

QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = f"{_O200K}|{LLAMA3.split('|', 8)[-1]}"
DIGITS = [pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}"), "isolated")]
SPECIAL = ["<|begin|>", "<|eot|>"]


def trained(
    *steps: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None, mark: str = "Ġ"
) -> tokenizers.Tokenizer:
    """A BPE with many merges, over pre-tokenizers."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    backend.decoder = decoders.ByteLevel() if mark == "Ġ" else decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if mark == "Ġ" else [mark, *map(chr, range(33, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator([*CORPUS, SOURCE], trainer)
    ids = [(token, backend.token_to_id(token)) for token in SPECIAL]
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A <|eot|>", special_tokens=ids)
    return backend


def split(regex: str) -> tokenizers.Tokenizer:
    isolated = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
    nfc = normalizers.NFC() if regex == QWEN2 else None
    return trained(isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), normalizer=nfc)


def metaspace(scheme: str, *, splits: bool) -> tokenizers.Tokenizer:
    return trained(pre_tokenizers.Metaspace(prepend_scheme=scheme, split=splits), mark="▁")


def llama2() -> tokenizers.Tokenizer:
    """Without a pre-tokenizer: merges see the whole text."""
    backend = metaspace("always", splits=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    return backend


def gemma() -> tokenizers.Tokenizer:
    """As llama2, without a space before texts, and with runs of spaces as added tokens."""
    backend = llama2()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_tokens([tokenizers.AddedToken("▁" * n, normalized=False) for n in (2, 3)])
    backend.add_tokens([tokenizers.AddedToken("\n\n", normalized=False)])
    return backend


def unsplit() -> tokenizers.Tokenizer:
    backend = metaspace("first", splits=True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def without_regex() -> tokenizers.Tokenizer:
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


SOURCE = Path(__file__).read_text(encoding="utf-8")
FAMILIES = {
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with prefix": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: split(LLAMA3),
    "qwen2": lambda: split(QWEN2),
    "o200k": lambda: split(O200K),
    "digits first": lambda: trained(*DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama2": llama2,
    "gemma": gemma,
    "no regex": without_regex,
    "metaspace unsplit": unsplit,
    "metaspace always": lambda: metaspace("always", splits=True),
    "metaspace first": lambda: metaspace("first", splits=True),
    "metaspace never": lambda: metaspace("never", splits=True),
    "bytes": lambda: byte_tokenizer()._backend,
    "weft-tiny": lambda: load_tokenizer("weft-tiny")._backend,
}


@functools.cache
def family(name: str) -> Tokenizer:
    return Tokenizer(FAMILIES[name]())


PIECES = (
    " a¦b ¦the¦ the¦\n¦\n\n¦\r\n¦ \n¦  ¦\t¦'s¦ 's¦'S¦!¦...¦ ?¦12345¦\u65e5\u672c¦\u3002\n\u65e5¦\u8a9e\n¦"
    "\xe9¦e\u0301¦\u0301¦\u0416\n\u0430¦<|begin|>¦<|eot|>¦<s>¦</s>¦<|im_start|>¦<think now>¦\u2581¦"
    "\u2581\u2581¦\xa0¦_x¦-¦\u03a3¦\xdf¦\x00¦\U0001f600¦i am¦can't¦A B¦x.y¦{\n¦},\n  ¦\u01c5¦\ufb01¦"
    "我们。你们，¦語、¦！？¦가；¦は：は¦。。¦語」。¦語1。¦\u3099。¦"
    "語\nЖ\nа¦\u2028¦\u200b¦\uac00\n\uac01¦\x1c\n"
)
PARTS = st.one_of(st.sampled_from(PIECES.split("¦")), st.text(max_size=6))


def check_family(name: str, num_texts: int) -> None:
    ours = family(name)

    @settings(max_examples=num_texts, deadline=None, derandomize=True, database=None)
    @given(parts=st.lists(PARTS, min_size=1, max_size=60), special=st.booleans())
    def check(parts: list[str], special: bool) -> None:
        text = "".join(parts)
        expected = ours._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        found = unpack_tokens(ours.encode(text, add_special_tokens=special)).tolist()
        assert found == expected, text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARS", 1)
        patch.setattr(tokenizer, "PIECE_CHARS", 1)
        patch.setattr(pieces, "_WINDOW", 3)
        assert ours._cutter is not None
        assert ours._around is not None
        assert len(list(ours._cutter.pieces("a b c"))) == 3, "the test would compare whole texts"
        check()


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    check_family(name, 60)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2", "o200k", "digits first", "weft-tiny"])
@pytest.mark.parametrize("text", ["我们去市场，买了一条鱼。", "彼は言った\n", "바다로갔다！"])
def test_texts_without_spaces_have_cuts(name: str, text: str) -> None:
    cutter = family(name)._cutter
    assert cutter is not None
    whole = text * (5 * PIECE_CHARS // len(text))
    found = list(cutter.pieces(whole))
    assert "".join(found) == whole
    assert max(map(len, found)) <= PIECE_CHARS + len(text)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_many_whole_texts(name: str) -> None:
    check_family(name, 5000)


def spanning() -> tokenizers.Tokenizer:
    """Merges see the whole text, and one joins the end of a word with the next space."""
    vocab = {char: i for i, char in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "aĠ"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0)], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


@pytest.mark.parametrize(
    "make",
    [
        byte_level_backend,  # has an added token with a space
        sentencepiece_backend,  # has no token for some letters
        spanning,
        unigram,
        lambda: split(LLAMA3 + r"|\p{L}+ \p{L}+"),
        lambda: split(r"\p{N}"),
        lambda: trained(pre_tokenizers.BertPreTokenizer()),
        lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFKC()),
    ],
)
def test_without_knowledge_of_cuts_texts_are_encoded_whole(make: Callable[[], tokenizers.Tokenizer]) -> None:
    backend = make()
    assert cutter_of(backend) is None
    assert cutter_of(load_tokenizer("weft-tiny")._backend) is not None


def test_a_short_text_is_not_behind_the_pieces_of_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = FairThreads(1, per_tenant=1, name="test")
    monkeypatch.setattr(tokenizer, "_threads", lambda: threads)
    ours = family("bytes")
    long, short = "a b " * PIECE_CHARS, "c d " * INLINE_CHARS

    async def run() -> None:
        theirs = asyncio.create_task(ours.encode_async(long, tenant="theirs"))
        await asyncio.sleep(0)
        mine = asyncio.create_task(ours.encode_async(short, tenant="mine"))
        assert await mine == ours.encode(short)
        assert not theirs.done()
        assert await theirs == ours.encode(long)

    asyncio.run(run())
    threads.close()


MEMORY = """
import sys
from weft.tokenizers.load import load_tokenizer

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

ours = load_tokenizer("weft-tiny")
text = "The weft is woven across many warps, to make one cloth of 42 threads.\\n" * (int(sys.argv[1]) // 70)
ours.encode("warm up " * 10_000)
before = kib("VmRSS")
assert len(ours.encode(text)) > len(text)
print((kib("VmHWM") - before) >> 10, (kib("VmRSS") - before) >> 10)
"""


def memory_mib(num_chars: int) -> tuple[int, int]:
    """What a process grows by while it encodes a text, and what is left of that afterwards."""
    command = [sys.executable, "-c", MEMORY, str(num_chars)]
    most, left = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    return int(most), int(left)


def test_memory_does_not_grow_with_the_text() -> None:
    most, _ = memory_mib(500_000)  # some 80 MiB in one piece
    assert most < 30


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_memory_is_given_back() -> None:
    most, left = memory_mib(30_000_000)  # some 4800 and 2500 MiB in one piece
    assert most < 400
    assert left < 100
