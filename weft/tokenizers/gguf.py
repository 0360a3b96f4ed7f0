"""From the metadata of a GGUF file to its `Tokenizer`: byte-level BPE (`gpt2`), and BPE by scores with ▁ and bytes
(`llama`, as of SentencePiece).

The tokenizer is put together for the same library, and of the same components, as that of the tokenizer.json from which
such files are converted, so ids are the same. Only the names of pre-tokenizers are in a GGUF file, not their
expressions; unknown names are refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from weft.abi.errors import ModelLoadError, Unsupported
from weft.gguf.file import GgufFile, read_gguf
from weft.gguf.tokens import end_ids, read_tokens, token_id
from weft.tokenizers.generation_config import NAMES, sampling_defaults
from weft.tokenizers.pieces import GPT2, LLAMA3
from weft.tokenizers.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
MAX_ADDED = 1 << 16
"""Of control and user-defined tokens, which are searched for in every text."""
MAX_PIECE_CHARS = 256
"""Of a token of the type `llama`: all ways to split it are tried."""
MAX_MERGES = 4
"""Of a vocabulary of the type `llama`, for each token; that of Llama 2 has 2. Tokens of text have fewer characters."""
END_TEXTS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"})
"""Control tokens that end a turn, a message or a text, named as such by the metadata or not."""
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Name that templates use -> name in the metadata."""
SPECIAL_DEFAULTS = {"llama": {"unknown": 0, "bos": 1, "eos": 2}}
"""Ids of those that the metadata need not name, by type of tokenizer."""
SAMPLING = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
"""Parameter -> name in the metadata, where they differ."""

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """What the name of a pre-tokenizer stands for."""

    splits: tuple[str, ...]
    """Regular expressions whose matches are pieces, one after the other."""
    nfc: bool = False
    """Whether texts are normalized."""
    ignore_merges: bool = False
    """Whether a piece that is a token is that token, without regard to merges."""
    adds_bos: bool = False
    """Whether texts begin with the token bos if the metadata do not say."""


_LLAMA = PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN = PreTokenizer((LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), nfc=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
}
"""By tokenizer.ggml.pre; those of the supported families, and llama.cpp's default."""


def load_gguf(path: Path, name: str = "", *, generation_config: bool = False) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises `ModelLoadError`, or `Unsupported` for another kind of tokenizer.

    `generation_config`: with the sampling defaults of the file.
    """
    file = read_gguf(path)
    texts = list(read_tokens(file))
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) < len(texts):
        twice = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise ModelLoadError(f"{file.path}: tokens {twice} and {ids[texts[twice]]} are both {texts[twice]!r:.100}")
    kinds = _kinds(file, len(texts))
    vocab = {text: i for text, i in ids.items() if kinds[i] != UNUSED}
    defaults = SPECIAL_DEFAULTS.get(file.metadata.text("tokenizer.ggml.model"), {})
    special = {key: token_id(file, kind, len(texts), defaults.get(kind)) for key, kind in SPECIAL.items()}
    named = {key: texts[i] for key, i in special.items() if i is not None}
    try:
        backend, adds_bos = _backend(file, vocab, kinds, named)
        _add_tokens(backend, file, texts, kinds)
        _surround(backend, file, named, adds_bos)
    except (ModelLoadError, Unsupported):
        raise
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"{file.path}: the tokenizer cannot be used: {error}") from error
    ends = [i for text, i in ids.items() if text in END_TEXTS and kinds[i] == CONTROL]
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_token_ids=dict.fromkeys(
            i for i in (special["eos_token"], *end_ids(file, len(texts)), *ends) if i is not None
        ),
        chat_templates=_chat_templates(file),
        sampling_defaults=_sampling_defaults(file) if generation_config else None,
        name=name,
    )


def _kinds(file: GgufFile, count: int) -> Sequence[int]:
    key = "tokenizer.ggml.token_type"
    if key not in file.metadata:
        return [NORMAL] * count
    kinds: list[int] = file.metadata.numbers(key, count).tolist()
    unknown = set(kinds) - set(range(NORMAL, BYTE + 1))
    if unknown:
        raise ModelLoadError(f"{file.path}: {key} has {unknown.pop()}, which is no type of tokens")
    return kinds


def _backend(
    file: GgufFile, vocab: dict[str, int], kinds: Sequence[int], named: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer without added tokens, and whether texts begin with the token bos by default."""
    kind = file.metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(file, vocab)
    if kind == "llama":
        return _sentencepiece(file, vocab, kinds, named.get("unk_token")), True
    raise Unsupported(f"{file.path}: the tokenizer {kind!r} is not supported; there are gpt2 and llama")


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = file.metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise Unsupported(f"{file.path}: the pre-tokenizer {name!r} is not supported; there are {known}")
    pre = PRE_TOKENIZERS[name]
    merges = []
    for i, merge in enumerate(file.metadata.strings("tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelLoadError(
                f"{file.path}: entry {i} of tokenizer.ggml.merges, {merge!r:.100}, is not two tokens that make a third"
            )
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(
    file: GgufFile, vocab: dict[str, int], kinds: Sequence[int], unknown: str | None
) -> tokenizers.Tokenizer:
    meta = file.metadata
    if meta.flag("tokenizer.ggml.remove_extra_whitespaces", False) or "tokenizer.ggml.precompiled_charsmap" in meta:
        raise Unsupported(f"{file.path}: a tokenizer llama that normalizes texts is not supported")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(file, vocab, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", True)
    mark = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark] if prefix else [mark])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(file: GgufFile, vocab: dict[str, int], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Merges of a vocabulary with scores: every way to split a token into two, the highest score first.

    Among equal scores longer halves come first, as in transformers' conversion of such vocabularies.
    """
    scores = file.metadata.numbers("tokenizer.ggml.scores", len(kinds)).tolist()
    found = array("i")  # the token, and its halves: a list of tuples would take ten times as much
    texts = {i: text for text, i in vocab.items()}
    for text, i in vocab.items():
        if kinds[i] != NORMAL:
            continue
        if len(text) > MAX_PIECE_CHARS or scores[i] != scores[i]:
            raise ModelLoadError(
                f"{file.path}: token {i} has {len(text)} characters (at most {MAX_PIECE_CHARS}) and score {scores[i]}"
            )
        for left, right in ((text[:at], text[at:]) for at in range(1, len(text))):
            if left in vocab and right in vocab:
                found.extend((i, vocab[left], vocab[right]))
        if len(found) > 3 * MAX_MERGES * len(kinds):
            raise ModelLoadError(
                f"{file.path}: the {len(kinds)} tokens can be split into others in more than {MAX_MERGES} ways each"
            )
    whole, lefts, rights = np.array(found, np.int64).reshape(-1, 3).T
    chars = np.zeros(len(kinds), np.int64)
    chars[list(texts)] = [len(text) for text in texts.values()]
    keys = (rights, lefts, whole, -chars[rights], -chars[lefts], -np.array(scores)[whole])  # the last decides first
    order = np.lexsort(keys)
    pairs = zip(lefts[order].tolist(), rights[order].tolist(), strict=True)
    return [(texts[left], texts[right]) for left, right in pairs]


def _add_tokens(backend: tokenizers.Tokenizer, file: GgufFile, texts: Sequence[str], kinds: Sequence[int]) -> None:
    """Tokens that are found in texts before anything else. All are in the vocabulary and keep their ids."""
    added = [i for i, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL, USER_DEFINED) and texts[i]]
    if len(added) > MAX_ADDED:
        raise ModelLoadError(f"{file.path} has {len(added)} control and user-defined tokens; there may be {MAX_ADDED}")
    for i in added:
        token = AddedToken(texts[i], special=kinds[i] != USER_DEFINED, normalized=False)
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


def _surround(backend: tokenizers.Tokenizer, file: GgufFile, named: Mapping[str, str], adds_bos: bool) -> None:
    """Put the tokens bos and eos around texts, where the metadata or the kind of tokenizer say so."""
    parts = ["$A"]
    if file.metadata.flag("tokenizer.ggml.add_bos_token", adds_bos):
        parts.insert(0, "bos_token")
    if file.metadata.flag("tokenizer.ggml.add_eos_token", False):
        parts.append("eos_token")
    tokens = []
    for part in [part for part in parts if part != "$A"]:
        text = named.get(part)
        if not text:
            raise ModelLoadError(f"{file.path}: texts begin with the token bos or end with eos, and it has no text")
        token = backend.token_to_id(text)
        if token is None:
            raise ModelLoadError(f"{file.path}: the {part} {text!r:.100} is of the type of tokens that are not used")
        # By another name than its text, which may have a meaning in templates.
        tokens.append({"id": part, "ids": [token], "tokens": [text]})
    if tokens:
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=tokens)


def _chat_templates(file: GgufFile) -> dict[str, str]:
    key = "tokenizer.chat_template"
    names = file.metadata.strings("tokenizer.chat_templates", [])
    keys = {"default": key} | {name: f"{key}.{name}" for name in names}
    return {name: file.metadata.text(key) for name, key in keys.items() if key in file.metadata}


def _sampling_defaults(file: GgufFile) -> dict[str, float]:
    keys = {name: f"general.sampling.{SAMPLING.get(name, name)}" for name in NAMES}
    raw = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    return sampling_defaults(raw, f"{file.path}, general.sampling")
