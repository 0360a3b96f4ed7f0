"""GBNF as Lark: the engine's matcher, over bytes, accepts what an expression of Python's says that it should."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from weft.sdk import InvalidRequest
from weft.text.gbnf import to_lark

LONGEST = 5


class Bytes:
    """A vocabulary of bytes."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def language(rules: str, alphabet: str) -> set[str]:
    """All texts of the grammar over these characters, up to a length."""
    lark = to_lark(rules)
    matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
    found, edge = set(), [("", matcher)]
    for _ in range(LONGEST + 1):
        found |= {text for text, at in edge if at.is_accepting()}
        edge = [
            (text + char, after)
            for text, at in edge
            for char in alphabet
            if (after := at.deep_copy()).try_consume_tokens(list(char.encode())) == len(char.encode())
        ]
    return found


def matched(pattern: str, alphabet: str) -> set[str]:
    texts = ("".join(chars) for n in range(LONGEST + 1) for chars in itertools.product(alphabet, repeat=n))
    return {text for text in texts if re.fullmatch(pattern, text, re.S)}


@pytest.mark.parametrize(
    ("rules", "pattern", "alphabet"),
    [
        ('root ::= "a" [b-d]* "\\n"', "a[b-d]*\n", "abd\n"),
        ('root ::= "\\x41" [\\x42-\\x43] "\\u00e9"?', "A[BC]é?", "ABCDé"),
        ('root ::= "\\U0001F9F5" | [\\U0001F600-\\U0001F602]+', "🧵|[😀-😂]+", "🧵😁😃"),
        ('root ::= "\\"" "\\\\" "\\t"', '"\\\\\t', '"\\\t'),
        ('root ::= ["\\\\/\\[\\]]+', r'["\\/\[\]]+', '"\\/[]x'),
        (r"root ::= [^\"\\\x00-\x1F]{2}", r'[^"\\\x00-\x1f]{2}', '"\\\n\x00ab'),
        ("root ::= [a&&b]+ [b~~c]*", "[a&b]+[b~c]*", "a&b~"),
        ("root ::= [a-c-]+ [-.] [^a-b^]", r"[a-c\-]+[-.][^ab^]", "ab-.^x"),
        ("root ::= [+*/.?(){}|$^-]+", r"[+*/.?(){}|$^\-]+", "+./$^|a"),
        ('root ::= . "x" .', ".x.", "xé\n"),
        ('root ::= "a"{2,3} "b"{ 1 } [c]{1,} "d"{0,1}', "a{2,3}bc+d?", "abcd"),
        ('root ::= ("a" |\n  "b"\n )+ # "c"\n# root ::= "d"\n', "[ab]+", "abcd"),
        ('root ::= "a" ("b" | ) "c" | ', "ab?c|", "abc"),
        ('root ::= ("a"? "b"*)+ "c"', "(a?b*)+c", "abc"),
        ('root ::= x x\n\n  x ::= y |\n y "-"\ny ::= "z"', "(z-?){2}", "z-"),
        ('root ::= start End\nstart ::= "s"\r\nEnd ::= "e"\r\n', "se", "se"),
        ('root ::= aB a-b a_b a-B\naB ::= "1"\na-b ::= "2"\na_b ::= "3"\na-B::="4"', "1234", "1234"),
        ('root ::= "::=" | "a/b" | "[x]"', r"::=|a/b|\[x\]", ":=a/b[x]"),
        ('root ::= ""', "", "a"),
        ('root ::= "\\x7F" [\\x7F]?', "\x7f{1,2}", "\x7fa"),
    ],
)  # fmt: skip
def test_the_language_is_the_one_that_is_meant(rules: str, pattern: str, alphabet: str) -> None:
    expected = matched(pattern, alphabet)
    assert language(rules, alphabet) == expected
    assert expected
    assert len(expected) < sum(len(alphabet) ** n for n in range(LONGEST + 1))


def test_what_regular_expressions_cannot_say() -> None:
    def nested(text: str) -> bool:
        return not text or (text[0] == "(" and text[-1] == ")" and nested(text[1:-1]))

    expected = {text for text in matched("[()]*", "()") if nested(text)}
    assert language('root ::= "(" root ")" | ""', "()") == expected


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ("", "no rule root"),
        ('a ::= "x"', "no rule root"),
        ('root ::= "a"\nb ::= c', "line 2 .* refers to an undefined rule: c"),
        ('root ::= "a"\nb ::= "c"\nb ::= "d"', "line 3 .* second time: b"),
        ('root ::= "a\n"', "line 1 .* unterminated"),
        ('root ::= "a"\n  | [a-', "line 2 .* unterminated"),
        ("root ::= []", "line 1 .* empty class"),
        ("root ::= [^]a]", "line 1 .* empty class"),
        ("root ::= [z-a]", "line 1 .* ends before it begins: z-a"),
        ('root ::=\n\n"\\d"', r"line 3 .* unknown escape: \\d"),
        ('root ::= "\\x4"', r"line 1 .* escape of an invalid character: \\x4"),
        ('root ::= "\\ud83e"', r"invalid character: \\ud83e"),
        ('root ::= "\\UFFFFFFFF"', r"invalid character: \\UFFFFFFFF"),
        ('root ::= ("a"\nb ::= "c")', "line 1 .* does not close"),
        ('root ::= ("a"', "line 1 .* does not close"),
        ('root ::= "a")', "line 1 .* not opened"),
        ('root ::= * "a"', r"line 1 .* has \* without an item before it"),
        ('root ::= "a"+*', r"line 1 .* has \* without an item before it"),
        ('root ::= "a"{x}', "line 1 .* invalid repetition"),
        ('root ::= "a"{2', "line 1 .* invalid repetition"),
        ('::= "a"\nroot ::= "b"', "line 1 .* without a rule's name"),
        ('root ::= "a" ::= "b"', "line 1 .* without a rule's name"),
        ("root ::= <think>", "line 1 .* unexpected character: <"),
    ],
)
def test_what_is_no_grammar_says_where(rules: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        to_lark(rules)


def test_names_that_differ_in_dashes_alone_are_told_apart_in_linear_space() -> None:
    names = ["-" * count + "_" * (12 - count) for count in range(13)]
    names += ["".join("-_"[number >> bit & 1] for bit in range(12)) for number in range(4000)]
    names = ["a" + name for name in dict.fromkeys(names)]
    text = "root ::= " + " | ".join(names) + "\n" + "".join(f'{name} ::= "x"\n' for name in names)
    lark = to_lark(text)
    assert len(lark) < 4 * len(text)
    rules = [line.partition(":")[0] for line in lark.splitlines() if ":" in line and not line.startswith("%")]
    assert len(set(rules)) == len(rules) > len(names)
