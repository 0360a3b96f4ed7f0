"""Values that need no host: distributions, stop conditions, grammars, and what the package exports."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import random
import struct
import subprocess
import sys

import llguidance
import pytest

import weft.sdk
from weft.core.grammar import Grammar as EngineGrammar
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import OperationUsage
from weft.sdk import (
    Dist,
    InvalidRequest,
    Sampler,
    Stop,
    Usage,
    choice,
    ebnf,
    greedy,
    json_object,
    json_schema,
    lark,
    min_p,
    multinomial,
    regex,
    top_k,
    top_p,
)
from weft.sdk.dist import unpack_dist
from weft.sdk.grammar import Allowed
from weft.sdk.sampling import stopping

DIST = Dist((7, 3, 9), tuple(math.log(p) for p in (0.5, 0.3, 0.1)))


def test_looking_at_a_distribution() -> None:
    assert (DIST.max_index(), len(DIST), dict(DIST)[3]) == (7, 3, math.log(0.3))
    assert DIST.probs() == pytest.approx([0.5, 0.3, 0.1])
    assert (DIST.logprob(9), DIST.logprob(1)) == (math.log(0.1), -math.inf)
    assert Dist((1, 2), (-1.0, -1.0)).entropy == pytest.approx(math.log(2))


def test_a_distribution_as_it_came_is_what_it_says() -> None:
    def came() -> Dist:
        return unpack_dist(struct.pack("<4i", 7, 3, 9, -1), struct.pack("<4f", -0.5, -1, -2, math.nan), b"")

    said = Dist((7, 3, 9), (-0.5, -1.0, -2.0))
    assert came().max_index() == 7
    assert (came().logprobs, came().ids, came().given) == (said.logprobs, said.ids, said.given)
    assert came() == said
    assert hash(came()) == hash(said)
    assert repr(came()) == repr(said)
    assert dataclasses.asdict(came()) == dataclasses.asdict(said)
    assert pickle.loads(pickle.dumps(came())) == dataclasses.replace(came()) == copy.deepcopy(came()) == said
    assert came().top_k(2) == said.top_k(2)
    for nothing in (unpack_dist(b"", b""), unpack_dist(struct.pack("<i", -1), struct.pack("<f", math.nan))):
        assert nothing == Dist((), ())
        with pytest.raises(InvalidRequest, match="empty"):
            nothing.max_index()
    with pytest.raises(AttributeError, match="has no best"):
        came().best  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError):
        came().ids = ()  # type: ignore[misc]


def test_narrowing_a_distribution() -> None:
    assert DIST.keep({3, 9}).ids == (3, 9)
    assert DIST.keep(lambda token: token > 8).ids == (9,)
    assert DIST.keep(Allowed(bytes([1 << 3]))).ids == (3,)
    assert DIST.top_k(2).ids == (7, 3)
    assert [DIST.top_p(p).ids for p in (0.1, 0.6, 1.0)] == [(7,), (7, 3), (7, 3, 9)]


def test_drawing_from_a_distribution() -> None:
    rng = random.Random(1)
    drawn = [DIST.sample(rng=rng) for _ in range(9000)]
    assert drawn.count(7) / 9000 == pytest.approx(5 / 9, abs=0.02)
    assert {DIST.sample(0.0) for _ in range(5)} == {7}
    assert DIST.sample(1e-3) == 7
    for use in (Dist((), ()).sample, Dist((), ()).max_index):
        with pytest.raises(InvalidRequest, match="empty"):
            use()


@pytest.mark.parametrize(
    "sampler",
    [
        greedy(),
        multinomial(0.5, seed=1),
        top_k(5),
        top_p(0.5, 0.7),
        min_p(0.1),
        Sampler(logit_bias={1: 2.0}, allowed_token_ids=(1, 2), bad_words=[[1]], logprobs=3),
    ],
)
def test_samplers_are_the_engines(sampler: Sampler) -> None:
    fields = sampler.to_json()
    assert fields
    fields["logit_bias"] = {int(key): value for key, value in fields.get("logit_bias", {}).items()}
    params = SamplingParams(**fields)
    params.validate(100)
    for name in fields:
        assert getattr(params, name) == getattr(sampler, name) or list(getattr(sampler, name)) == getattr(params, name)
    assert Sampler().to_json() == {}


def test_the_librarys_fields_and_defaults_are_the_engines() -> None:
    names = SamplingParams.__struct_fields__
    assert Sampler.__slots__ == names
    for name in set(names) - {"logit_bias", "bad_words"}:
        assert getattr(Sampler(), name) == getattr(SamplingParams(), name)
    assert set(Stop(strings="x", token_ids=[1]).to_json()) <= set(StopParams.__struct_fields__)
    assert Usage.__slots__ == OperationUsage.__struct_fields__


def test_stop_conditions_from_what_is_given() -> None:
    assert stopping(None, 3) == Stop(max_tokens=3)
    assert stopping("x", None) == Stop(strings=("x",))
    assert stopping(["x", "y"], 2) == Stop(strings=("x", "y"), max_tokens=2)
    given = Stop(token_ids=[1], max_tokens=9)
    assert stopping(given, None) is given
    assert stopping(given, 1).max_tokens == 1


def test_grammars_are_the_engines() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["é"]}}}
    for mine, engines in (
        (json_schema(schema), EngineGrammar.json_schema(schema)),
        (json_object(), EngineGrammar.json_object()),
        (regex("a+"), EngineGrammar.regex("a+")),
        (choice(["a", 'b"']), EngineGrammar.choice(["a", 'b"'])),
        (lark('start: "a"'), EngineGrammar.lark('start: "a"')),
    ):
        assert mine.to_json() == {"kind": engines.kind, "text": engines.text}
    for options in ([], "ab"):
        with pytest.raises(InvalidRequest):
            choice(options)


RULES = """
# sums
root   ::= sum "\\n"?
sum    ::= Item (("+" | "-") Item)*   # of items
Item   ::= [0-9]+ | "(" sum ")" | a-b{2,3}
a-b    ::= "x/" [^/"]
"""


def test_ebnf_becomes_a_grammar_that_the_engine_compiles() -> None:
    text = ebnf(RULES).text
    assert "start : r_sum" in text
    error = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(text), None)
    assert not error, error


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ('a ::= "x"', "no rule root"),
        ("root ::= other", "line 1 .* other"),
        ('"x"\nroot ::= "a"', "before any rule"),
        ('root ::= "x', "unterminated"),
        ("root ::= &", "unexpected character: &"),
    ],
)
def test_ebnf_that_is_none(rules: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ebnf(rules)


def test_everything_exported_is_there_and_imports_are_lazy() -> None:
    for name in weft.sdk.__all__:
        assert getattr(weft.sdk, name) is not None
    with pytest.raises(AttributeError, match="has no nothing"):
        _ = weft.sdk.nothing
    check = (
        "import sys, weft.sdk; print([m for m in sys.modules if m.startswith('weft.sdk.')], 'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_the_library_needs_the_standard_library_only() -> None:
    check = (
        "import sys; import weft.sdk; weft.sdk.preload();"
        "names = {name.partition('.')[0] for name in sys.modules};"
        "print(sorted(names & {'numpy', 'msgspec', 'torch', 'httpx', 'zmq'}),"
        "sorted({'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('weft')}))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['weft', 'weft.abi', 'weft.sdk', 'weft.text', 'weft.version']"
