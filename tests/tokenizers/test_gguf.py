"""Tokenizers of GGUF files give the ids of the tokenizer.json that they were made from."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import generate_merges

from tests.gguf.forging import ARRAY, F32, U32, entry, forge, string, texts
from tests.gguf.writing import add_tokenizer, distinct
from tests.tokenizers.conftest import CORPUS, sentencepiece_backend
from weft.abi.errors import ModelLoadError, Unsupported, WeftError
from weft.core.ids import unpack_tokens
from weft.tokenizers.gguf import load_gguf
from weft.tokenizers.load import load_directory, load_tokenizer
from weft.tokenizers.tokenizer import Tokenizer

BOS, END, TOOL = "<|begin|>", "<|im_end|>", "<tool_call>"
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    " leading and trailing  ",
    "a\n\n b\r\n\r\n\tc",
    "one//\ntwo ;/\n\n/three.\n\n",
    "don't, WE'LL, it'S 1234567 x=3.14159; $5 <=> ~^|",
    "CamelCase HTTPServer éÉ e\u0301 ½ Ⅷ ١٢٣",
    f"{BOS}user says{END}\n{TOOL}{{}}</s><s>",
    "日本語 と English 混ざる 🙂🙂 \U000e0001",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tied(token: int) -> float:
    return -float(token // 50)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
PUBLISHED: dict[str, tuple[pre_tokenizers.PreTokenizer, bool, bool]] = {
    "gpt-2": (WORDS, False, False),
    "llama-bpe": (split(LLAMA3), True, False),
    "qwen2": (split(QWEN2), False, True),
    "tekken": (split(TEKKEN), True, False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]), False, False),
}
"""By name: pre-tokenizer, `ignore_merges` and NFC of the tokenizer.json of models with it."""


def byte_level(name: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, ignore_merges, nfc = PUBLISHED[name]
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    spec = json.loads(backend.to_str())
    spec["model"]["ignore_merges"] = ignore_merges
    if ignore_merges:
        # Such a token cannot be reached by merges.
        spec["model"]["vocab"]["Ġwarpsxyz"] = len(spec["model"]["vocab"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS, END)])
    backend.add_tokens([AddedToken(TOOL, normalized=False)])
    return backend


def write(
    path: Path,
    backend: tokenizers.Tokenizer,
    kind: str,
    write_more: Callable[..., None] | None = None,
    score: Callable[[int], float] = distinct,
) -> Path:
    """The tokenizer as a GGUF file with no tensors, and with two tokens that are not used."""
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, backend, kind, score, size=max(backend.get_vocab().values()) + 3)
    if write_more is not None:
        write_more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ids(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    return list(unpack_tokens(tokenizer.encode(text, add_special_tokens=special)))


def from_json(folder: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return load_directory(folder)


def check_same(got: Tokenizer, expected: Tokenizer, also: Sequence[str] = ()) -> None:
    for text in [*TEXTS, *also]:
        for special in (False, True):
            assert ids(got, text, special=special) == ids(expected, text, special=special)
        assert got.decode(ids(got, text)) == expected.decode(ids(expected, text))
    assert got.token_bytes[: expected.vocab_size] == expected.token_bytes
    assert (got.special_ids, got.vocab_size) == (expected.special_ids, expected.vocab_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_bpe(name: str, tmp_path: Path) -> None:
    backend = byte_level(name)
    path = write(
        tmp_path / "t.gguf", backend, "gpt2", lambda w: (w.add_tokenizer_pre(name), w.add_add_bos_token(False))
    )
    got = load_gguf(path)
    check_same(got, from_json(tmp_path, backend), [" warpsxyz", "x" * 50])
    for text in TEXTS:
        pieces = got._backend.pre_tokenizer.pre_tokenize_str(text)
        assert pieces == backend.pre_tokenizer.pre_tokenize_str(text)
    assert got._cutter is not None or name in ("tekken", "smollm")
    assert (ids(got, " warpsxyz") == [backend.token_to_id("Ġwarpsxyz")]) is PUBLISHED[name][1]


@pytest.mark.parametrize("add_bos", [None, False, True])
@pytest.mark.parametrize(("name", "default"), [("llama-bpe", True), ("qwen2", False)])
def test_tokens_around_a_text(name: str, default: bool, add_bos: bool | None, tmp_path: Path) -> None:
    backend = byte_level(name)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre(name)
        writer.add_bos_token_id(backend.token_to_id(BOS))
        writer.add_eos_token_id(backend.token_to_id(TOOL))
        writer.add_add_eos_token(True)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    got = load_gguf(write(tmp_path / "t.gguf", backend, "gpt2", more))
    expected = [backend.token_to_id(BOS)] if (default if add_bos is None else add_bos) else []
    assert ids(got, "a", special=True) == [*expected, *ids(got, "a"), backend.token_to_id(TOOL)]
    assert (got.bos_token_id, got.eos_token_id) == (backend.token_to_id(BOS), backend.token_to_id(TOOL))
    assert got.eos_token_ids == [backend.token_to_id(TOOL), backend.token_to_id(END)]
    assert got.special_tokens == {"bos_token": BOS, "eos_token": TOOL}


@pytest.mark.parametrize("text", ["$A", "$B", "$0", "$", "bos:1", "bos_token", "eos_token"])
def test_a_token_around_a_text_may_look_like_a_template(text: str, tmp_path: Path) -> None:
    backend = byte_level("qwen2")
    backend.add_special_tokens([AddedToken(text, normalized=False)])

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(backend.token_to_id(text))
        writer.add_eos_token_id(backend.token_to_id(END))
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    got = load_gguf(write(tmp_path / "t.gguf", backend, "gpt2", more))
    assert ids(got, "ab", special=True) == [backend.token_to_id(text), *ids(got, "ab"), backend.token_to_id(END)]


def test_pieces_of_the_default_by_hand(tmp_path: Path) -> None:
    backend = byte_level("gpt-2")
    path = write(tmp_path / "t.gguf", backend, "gpt2")
    pieces = load_gguf(path)._backend.pre_tokenizer.pre_tokenize_str("ab 12345 it's(2)")
    assert [piece for piece, _ in pieces] == ["ab", "Ġ", "123", "45", "Ġit", "'", "s", "(", "2", ")"]


# SentencePiece


def sentencepiece(*, prefix: bool = True, score: Callable[[int], float] = distinct) -> tokenizers.Tokenizer:
    """As transformers converts such a tokenizer: merges from the scores of the tokens."""
    small = sentencepiece_backend()
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    names = [*("<unk>", "<s>", "</s>"), *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [text for text in trained.get_vocab() if not set(text) & set("😀👍🏽日")]
    vocab = {text: i for i, text in enumerate(dict.fromkeys(names))}
    normal = {text: i for text, i in vocab.items() if i >= 259}
    merges = generate_merges(normal, {text: score(i) for text, i in normal.items()})
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = small.normalizer if prefix else normalizers.Replace(" ", "▁")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken(TOOL, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("score", [distinct, tied])
def test_sentencepiece(score: Callable[[int], float], prefix: bool, tmp_path: Path) -> None:
    backend = sentencepiece(prefix=prefix, score=score)
    path = write(tmp_path / "t.gguf", backend, "llama", lambda w: w.add_add_space_prefix(prefix), score)
    got = load_gguf(path)
    check_same(got, from_json(tmp_path, backend), ["the thread that is woven " * 3])
    assert (got.bos_token_id, got.eos_token_id, got.eos_token_ids) == (1, 2, [2])
    assert got.strips_leading_space is prefix
    merges = [json.loads(tokenizer.to_str())["model"]["merges"] for tokenizer in (got._backend, backend)]
    assert merges[0] == merges[1]


@pytest.mark.parametrize("text", ["▁the▁weft▁is▁the▁thread▁that▁is▁woven", "▁Größe▁日本▁whale", "threethreads▁▁a▁s"])
def test_sentencepiece_by_its_definition(text: str, tmp_path: Path) -> None:
    got = load_gguf(
        write(tmp_path / "t.gguf", sentencepiece(prefix=False), "llama", lambda w: w.add_add_space_prefix(False))
    )
    assert ids(got, text) == by_scores(got, text)


def by_scores(tokenizer: Tokenizer, text: str) -> list[int]:
    """The neighbours whose union has the highest score become one, until no union is a token."""
    pieces = list(text)
    while True:
        unions = {i: tokenizer.token_to_id(a + b) for i, (a, b) in enumerate(itertools.pairwise(pieces))}
        known = [(distinct(token), -i) for i, token in unions.items() if token is not None]
        if not known:
            break
        at = -max(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        token = tokenizer.token_to_id(piece)
        found += [3 + byte for byte in piece.encode()] if token is None else [token]
    return found


# Templates, sampling defaults, and the way from a name


def test_templates_and_sampling_defaults(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("qwen2")
        writer.add_chat_template(
            [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ bos_token }} tools"}]
        )
        writer.add_bos_token_id(3)
        for key, value in {"temp": 0.6, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05}.items():
            writer.add_float32(f"general.sampling.{key}", value)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_int32("general.sampling.penalty_last_n", 64)

    path = write(tmp_path / "t.gguf", byte_level("qwen2"), "gpt2", more)
    got = load_tokenizer(str(path), generation_config=True)
    assert got.chat_template().render([{"role": "user", "content": ""}]) == "plain"
    assert got.chat_template(with_tools=True).source == "{{ bos_token }} tools"
    defaults = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05, "top_k": 20}
    assert got.sampling_defaults == defaults
    assert got.name == str(path)
    assert not load_tokenizer(str(path)).sampling_defaults


def test_a_sampling_default_out_of_range(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.gguf", byte_level("gpt-2"), "gpt2", lambda w: w.add_float32("general.sampling.temp", -1.0)
    )
    with pytest.raises(ModelLoadError, match=r"general\.sampling: temperature is -1\.0"):
        load_gguf(path, generation_config=True)
    load_gguf(path)


# What is refused


def wrong(key: str, kind: int, value: bytes) -> list[bytes]:
    return [entry(f"tokenizer.ggml.{key}", kind, value)]


def floats(*values: float) -> bytes:
    return struct.pack(f"<IQ{len(values)}f", F32, len(values), *values)


def kinds(*values: int) -> bytes:
    return struct.pack(f"<IQ{len(values)}i", 5, len(values), *values)


GPT2 = [entry("tokenizer.ggml.model", 8, string("gpt2")), texts("tokenizer.ggml.merges", "a b")]
LLAMA = [entry("tokenizer.ggml.model", 8, string("llama"))]
TOKENS = texts("tokenizer.ggml.tokens", "a", "b", "ab")
SCORES = wrong("scores", ARRAY, floats(0, 0, 0))
BAD: dict[str, tuple[list[bytes], type[Exception], str]] = {
    "no tokens": (GPT2, ModelLoadError, "has no tokenizer.ggml.tokens"),
    "no model": ([TOKENS], ModelLoadError, "has no tokenizer.ggml.model"),
    "another model": (
        [TOKENS, entry("tokenizer.ggml.model", 8, string("bert"))],
        Unsupported,
        "'bert' is not supported",
    ),
    "another pre": (
        [*GPT2, TOKENS, *wrong("pre", 8, string("falcon"))],
        Unsupported,
        "'falcon' is not supported; .*qwen2",
    ),
    "no merges": ([GPT2[0], TOKENS], ModelLoadError, "has no tokenizer.ggml.merges"),
    "token twice": (
        [*GPT2, texts("tokenizer.ggml.tokens", "a", "b", "a")],
        ModelLoadError,
        "tokens 0 and 2 are both 'a'",
    ),
    "unknown merge": (
        [*GPT2, texts("tokenizer.ggml.tokens", "a", "b")],
        ModelLoadError,
        "entry 0 of .*merges, .a b., is not two tokens",
    ),
    "half a merge": (
        [GPT2[0], TOKENS, texts("tokenizer.ggml.merges", "a b", "ab")],
        ModelLoadError,
        "entry 1 of tokenizer.ggml.merges, .ab.",
    ),
    "too few types": ([*GPT2, TOKENS, *wrong("token_type", ARRAY, kinds(1, 1))], ModelLoadError, "2 entries, .* be 3"),
    "a type of no kind": ([*GPT2, TOKENS, *wrong("token_type", ARRAY, kinds(1, 1, 7))], ModelLoadError, "has 7"),
    "eos beyond": ([*GPT2, TOKENS, *wrong("eos_token_id", U32, b"\3\0\0\0")], ModelLoadError, "is 3, and there are 3"),
    "bos without a token": ([*GPT2, TOKENS, *wrong("add_bos_token", 7, b"\1")], ModelLoadError, "it has no text"),
    "bos that is not used": (
        [
            *GPT2,
            texts("tokenizer.ggml.tokens", "a", "b", "ab", "c"),
            *(*wrong("token_type", ARRAY, kinds(1, 1, 1, 5)), *wrong("bos_token_id", U32, b"\3\0\0\0")),
            *wrong("add_bos_token", 7, b"\1"),
        ],
        ModelLoadError,
        "the bos_token 'c' is of the type of tokens that are not used",
    ),
    "too many merges": (
        [
            *LLAMA,
            texts("tokenizer.ggml.tokens", *("a" * i for i in range(1, 61))),
            *wrong("scores", ARRAY, floats(*range(60))),
        ],
        ModelLoadError,
        "the 60 tokens can be split into others in more than 4 ways each",
    ),
    "no scores": ([*LLAMA, TOKENS], ModelLoadError, "has no tokenizer.ggml.scores"),
    "score not a number": (
        [*LLAMA, TOKENS, *wrong("scores", ARRAY, floats(0, 0, float("nan")))],
        ModelLoadError,
        "token 2 .* score nan",
    ),
    "endless token": (
        [*LLAMA, texts("tokenizer.ggml.tokens", "a", "b", "x" * 300), *SCORES],
        ModelLoadError,
        "token 2 has 300",
    ),
    "normalizer": ([*LLAMA, TOKENS, *SCORES, *wrong("remove_extra_whitespaces", 7, b"\1")], Unsupported, "normalizes"),
    "template of a number": (
        [*GPT2, TOKENS, entry("tokenizer.chat_template", U32, b"\0" * 4)],
        ModelLoadError,
        "string",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    entries, error, words = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(forge(entries))
    with pytest.raises(error, match=words) as caught:
        load_gguf(path)
    assert "bad.gguf" in str(caught.value)


def check_mutated(path: Path, valid: bytes, edits: Sequence[tuple[float, int]]) -> None:
    content = bytearray(valid)
    for place, byte in edits:
        content[int(place * len(content))] = byte
    path.write_bytes(content)
    loaded: Any = None
    try:
        loaded = load_gguf(path, generation_config=True)
    except WeftError as error:
        assert path.name in error.message or "template" in error.message  # noqa: PT017
    if loaded is not None:
        loaded.encode("some text\n<s>", add_special_tokens=True)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("valid")
    more = [lambda w: w.add_bos_token_id(1), lambda w: w.add_chat_template("{{ messages }}")]
    one = write(folder / "a.gguf", byte_level("gpt-2"), "gpt2", more[0])
    return [one.read_bytes(), write(folder / "b.gguf", sentencepiece(), "llama", more[1]).read_bytes()]


EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1), EDITS)
def test_mutated_tokenizers(tmp_path: Path, valid: list[bytes], which: int, edits: list[tuple[float, int]]) -> None:
    check_mutated(tmp_path / "a.gguf", valid[which], edits)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1), EDITS)
def test_many_mutated_tokenizers(
    tmp_path: Path, valid: list[bytes], which: int, edits: list[tuple[float, int]]
) -> None:
    check_mutated(tmp_path / "a.gguf", valid[which], edits)
