"""Long texts cut into pieces whose ids, joined, are those of the whole text.

Owns where a text may be cut. A tokenizer needs some 150 bytes for each character that it encodes at once, and keeps
its thread until the end; with pieces both are bounded. A cut is right where nothing on one side can change the ids of
the other:

- *Space cuts* lie between an ASCII letter and one space with an ASCII letter behind it; *line cuts* between the end of
  a line that ends with no white space and a letter; *mark cuts* between a Chinese, Japanese or Korean letter and a
  punctuation mark of those scripts, which are often written without spaces.
- No added token contains, begins or ends with what stands at a cut.
- Normalizers change a character by itself, or compose it with marks that follow, and neither side of a cut is a mark.
- Pre-tokenizers split there. A regular expression is trusted where all its alternatives are in `_ALTERNATIVES`: each of
  them ends at a cut, and matches a text that ends there as one that goes on. None looks backwards.
- Merges work within what pre-tokenizers leave. Where they leave the whole text, no token of the vocabulary may span a
  cut: then no merge does, and merges on either side do not see each other.

Any other tokenizer has no cuts, and encodes texts in one piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tokenizers

PIECE_CHARS = 32 * 1024
"""Characters of a piece, up to the next cut."""
_WINDOW = 64 * 1024
"""Characters searched for a cut before other threads may have the interpreter."""

_SPACE_CUT = r"(?<=[A-Za-z])(?= [A-Za-z])"
_LINE_CUT = r"(?<=\S\n)(?=[A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣])"
_CJK_MARKS = "。、，！？；："
_MARK_CUT = rf"(?<=[ぁ-ゖァ-ヺ一-龥가-힣])(?=[{_CJK_MARKS}])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
)
_WEFT_TINY = (
    r"'(?:WORDS)(?!\p{L})| (?:WORDS)(?![\p{L}\p{N}_'-])|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)* ?|\n+|\s"
)
_WORDS = re.compile(r"(?<=\(\?:)[a-z]+(?:\|[a-z]+)+(?=\))")


class Cutter:
    """Where texts for one tokenizer may be cut."""

    def __init__(self, *, lines: bool, marks: bool, drops_space: bool):
        """`lines`, `marks`: with line cuts, with mark cuts. `drops_space`: pieces behind a cut begin without its space,
        as the tokenizer puts one before every text."""
        self._place = re.compile("|".join([_SPACE_CUT, *([_LINE_CUT] * lines), *([_MARK_CUT] * marks)]))
        self._skip = int(drops_space)

    def pieces(self, text: str) -> Iterator[str]:
        """The text, piece by piece; longer ones than `PIECE_CHARS` where it has no cut for long."""
        start = 0
        while start < len(text):
            end = self._next(text, start + PIECE_CHARS)
            yield text[start:end]
            start = end + self._skip

    def _next(self, text: str, start: int) -> int:
        """The first cut from there on, or the end of the text."""
        for begin in range(start, len(text), _WINDOW):
            # What stands behind a cut is looked at two characters far.
            found = self._place.search(text, begin, begin + _WINDOW + 2)
            if found is not None:
                return found.start()
        return len(text)


def cutter_of(backend: tokenizers.Tokenizer) -> Cutter | None:
    """Where texts for a tokenizer may be cut; None where nothing is known of it."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.continuing_subword_prefix:
        return None
    if model.end_of_word_suffix or not _fits(backend.get_added_tokens_decoder().values()):
        return None
    rules = [_rule(step) for step in (*_steps(backend.normalizer), *_steps(backend.pre_tokenizer))]
    if any(rule is None for rule in rules):
        return None
    known = [rule for rule in rules if rule is not None]
    mark = next((rule.mark for rule in known if rule.mark), " ")
    whole = not any(rule.splits for rule in known)
    if whole and (model.ignore_merges or not _separates(backend.get_vocab(with_added_tokens=False), mark)):
        return None
    prefixes = any(rule.prefixes for rule in known)
    lines = any(rule.splits_lines for rule in known) and not prefixes
    added = "".join(token.content for token in backend.get_added_tokens_decoder().values())
    marks = lines and not set(_CJK_MARKS).intersection(added)
    return Cutter(lines=lines, marks=marks, drops_space=any(rule.drops_space for rule in known))


class _Rule(NamedTuple):
    """What one normalizer or pre-tokenizer does at a cut."""

    splits: bool = False
    """Whether it separates what a space cut does."""
    splits_lines: bool = False
    """Whether it separates what line cuts and mark cuts do."""
    mark: str = ""
    """What it makes of a space."""
    prefixes: bool = False
    """Whether it puts a space before texts that begin with none."""
    drops_space: bool = False
    """Whether it puts one before texts that begin with a space, too."""


def _steps(component: Any) -> list[Mapping[str, Any]]:
    if component is None:
        return []
    try:
        spec = json.loads(component.__getstate__())
    except Exception:  # the library raises bare exceptions for components written in Python
        return [{"type": "custom"}]
    steps: list[Mapping[str, Any]] = spec.get("normalizers") or spec.get("pretokenizers") or [spec]
    return steps


def _rule(step: Mapping[str, Any]) -> _Rule | None:
    """None: not known to be right at cuts."""
    match step:
        case {"type": "NFC"} | {"type": "Digits"}:
            return _Rule()
        case {"type": "Prepend", "prepend": "▁"}:
            return _Rule(prefixes=True, drops_space=True)
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return _Rule(mark="▁")
        case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": str(scheme), "split": bool(split)}:
            return _Rule(splits=split, mark="▁", prefixes=scheme != "never")
        case {"type": "ByteLevel", "add_prefix_space": bool(prefixes), "use_regex": bool(splits)}:
            return _Rule(splits=splits, splits_lines=splits, mark="Ġ", prefixes=prefixes)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            alternatives = set(_alternatives(regex))
            splits = any(map(alternatives.issuperset, _ANY_LETTER))
            return _Rule(splits=splits, splits_lines=splits) if alternatives <= _ALTERNATIVES else None
        case _:
            return None


def _alternatives(regex: str) -> list[str]:
    """What stands between the outermost bars of a regular expression, with lists of words made equal."""
    found, depth, in_class, part = [], 0, False, ""
    for item in re.findall(r"\\.|.", _WORDS.sub("WORDS", regex), re.DOTALL):
        if item in "[]":
            in_class = item == "["
        elif not in_class:
            depth += {"(": 1, ")": -1}.get(item, 0)
        if item == "|" and not depth and not in_class:
            found.append(part)
            part = ""
        else:
            part += item
    return [*found, part]


_ALTERNATIVES = frozenset(part for regex in (GPT2, LLAMA3, _O200K, _WEFT_TINY) for part in _alternatives(regex))
_ANY_LETTER = ({r" ?\p{L}+"}, {r"[^\r\n\p{L}\p{N}]?\p{L}+"}, {r"\p{L}+"}, set(_alternatives(_O200K)[:2]))
"""Alternatives of which each of these groups takes every letter, so that no cut is in a part that nothing matches."""


def _fits(added: Iterable[tokenizers.AddedToken]) -> bool:
    """Whether no added token can stand at a cut."""
    for content in (token.content for token in added):
        blank = content.replace("▁", " ")
        if blank.isspace() and blank != " ":
            continue  # a cut has a letter on each side of its space, or behind its line
        if any(map(str.isspace, blank)) or content[:1].isalpha() or content[-1:].isalpha():
            return False
    return True


def _separates(vocab: Iterable[str], mark: str) -> bool:
    """Whether no token spans a space cut, and both sides of one are tokens by themselves."""
    spans = re.compile(f"[A-Za-z]{re.escape(mark)}")
    tokens = set(vocab)
    letters = map(chr, (*range(ord("A"), ord("Z") + 1), *range(ord("a"), ord("z") + 1)))
    return mark in tokens and tokens.issuperset(letters) and not any(map(spans.search, tokens))
