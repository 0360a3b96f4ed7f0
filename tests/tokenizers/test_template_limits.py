"""Templates that would run for ever or fill the memory end in an error, soon and without filling it."""

import tracemalloc

import pytest

from weft.abi.errors import ContextTooLong, InvalidRequest
from weft.tokenizers.chat_template import ChatTemplate
from weft.tokenizers.limits import MAX_TEMPLATE_CHARS, TemplateBudget, TemplateLimit

TALK = [{"role": "user", "content": "hello " * 200}]
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = DOUBLED %}{% endfor %}"

BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that reject all": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "huge range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "range beyond integers": "{% for a in range(10 ** 300) %}{% endfor %}",
    "recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "exponential macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "mapped ranges": "{% for i in range(9999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "long product": "{{ 'ab' * 10 ** 11 }}",
    "long product, other way": "{{ 10 ** 11 * 'ab' }}",
    "list product": "{{ ([0] * 10 ** 11) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "growing number": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling with +": DOUBLE.replace("DOUBLED", "ns.x + ns.x"),
    "doubling with ~": DOUBLE.replace("DOUBLED", "ns.x ~ ns.x"),
    "doubling with *": DOUBLE.replace("DOUBLED", "ns.x * 2"),
    "doubling with %": DOUBLE.replace("DOUBLED", "'%s%s' % (ns.x, ns.x)"),
    "doubling with format": DOUBLE.replace("DOUBLED", "'{0}{0}'.format(ns.x)"),
    "doubling with format filter": DOUBLE.replace("DOUBLED", "'%s%s' | format(ns.x, ns.x)"),
    "doubling with join": DOUBLE.replace("DOUBLED", "[ns.x, ns.x] | join"),
    "doubling with join method": DOUBLE.replace("DOUBLED", "''.join([ns.x, ns.x])"),
    "doubling with replace": DOUBLE.replace("DOUBLED", "ns.x | replace('ab', 'abab')"),
    "doubling with replace method": DOUBLE.replace("DOUBLED", "ns.x.replace('ab', 'abab')"),
    "doubling in a block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling in a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE.replace("DOUBLED", "f(ns.x)"),
    "doubling lists": DOUBLE.replace("'ab'", "[1]").replace("DOUBLED", "ns.x + ns.x"),
    "nested lists, written": DOUBLE.replace("DOUBLED", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nested lists, as JSON": DOUBLE.replace("DOUBLED", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "nested lists, as string": DOUBLE.replace("DOUBLED", "[ns.x, ns.x]") + "{{ ns.x | string | length }}",
    "nested lists, joined": DOUBLE.replace("DOUBLED", "[ns.x, ns.x]") + "{{ 'a' ~ ns.x }}",
    "nested dicts, as JSON": DOUBLE.replace("DOUBLED", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "lists of lists in sum": "{{ ([[1] * 1000] * 1000) | sum(start=[]) | length }}",
    "wide format": "{{ '%10000000000d' % 1 }}",
    "starred format": "{{ '%*d' % (10 ** 10, 1) }}",
    "many wide formats": "{{ ('%99999d' * 9999) % range(9999) | list }}",
    "wide format method": "{{ '{:10000000000}'.format(1) }}",
    "nested format method": "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "format map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "format attribute": "{{ ('{:10000000000}' | attr('format'))(1) }}",
    "wide center": "{{ 'a' | center(10 ** 11) }}",
    "wide center method": "{{ 'a'.center(10 ** 11) }}",
    "wide ljust": "{{ 'a'.ljust(10 ** 11) }}",
    "wide zfill": "{{ 'a'.zfill(10 ** 11) }}",
    "expanding tabs": "{{ ('\\t' * 1000).expandtabs(10 ** 9) }}",
    "wide indent": "{{ ('\\n' * 99999) | indent(10 ** 9) }}",
    "wide JSON": "{{ [1, 2] | tojson(indent=10 ** 11) }}",
    "wide batch": "{{ [1] | batch(10 ** 11, 0) | list }}",
    "wide slice": "{{ [1] | slice(10 ** 11) | list }}",
    "quadratic replace": "{% set x = 'a' * 10 ** 6 %}{{ x.replace('a', x) }}",
    "quadratic replace filter": "{% set x = 'a' * 10 ** 6 %}{{ x | replace('a', x) }}",
    "quadratic join": "{% set x = 'a' * 10 ** 6 %}{{ x.join(x) }}",
    "searching a long text": "{% set x = 'a' * 10 ** 7 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "testing a long text": "{% set x = 'a' * 10 ** 7 %}{{ range(99999) | map('string') | select('in', x) | list }}",
    "slicing a long text": "{% set x = 'a' * 10 ** 7 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "splitting a long text": "{% set x = 'a ' * 10 ** 6 %}{% for i in range(9999) %}{{ x.split()[0] }}{% endfor %}",
    "literal text": "{% for i in range(99999) %}" + "text " * 9999 + "{% endfor %}",
    "output": "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "deep nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "long date": "{{ strftime_now('%c' * 10 ** 6) }}",
}


MANY_STEPS = [name for name in BOMBS if "loops" in name or "macro" in name or "mapped" in name or "nested" in name]


@pytest.mark.parametrize("bomb", MANY_STEPS)
def test_endless_work_ends(bomb: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(BOMBS[bomb]).render(TALK)


@pytest.mark.parametrize("bomb", [name for name in BOMBS if name not in MANY_STEPS])
def test_memory_stays_small(bomb: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="chat template"):
            ChatTemplate(BOMBS[bomb]).render(TALK)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * 2**20


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__class__.__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum() }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(escape: str) -> None:
    before = repr(TALK)
    try:
        text = ChatTemplate(escape).render(TALK)
    except InvalidRequest:
        text = ""
    assert text == ""
    assert repr(TALK) == before


def test_a_text_longer_than_any_context_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients shorten their history then, as for a context that is a little too long."""
    for source in ("{{ messages[0].content }}", "{{ messages[0].content + messages[0].content }}"):
        monkeypatch.setattr("weft.tokenizers.chat_template.MAX_OUTPUT_CHARS", 1000)
        monkeypatch.setattr("weft.tokenizers.limits.MAX_OUTPUT_CHARS", 1500)
        with pytest.raises(ContextTooLong, match="more of these messages than any context holds"):
            ChatTemplate(source).render([{"role": "user", "content": "x" * 1001}])


def test_long_templates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="characters, at most"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))


def test_long_chats_are_not() -> None:
    """Two thousand messages of a thousand characters, through a template that looks at each several times."""
    from tests.tokenizers.templates import HEADERS, REASONING

    roles = ["user", "assistant"]
    chat = [{"role": roles[i % 2], "content": f"<think>{i}</think>" + "word " * 200} for i in range(2000)]
    for source in (REASONING, HEADERS):
        assert len(ChatTemplate(source).render(chat, special_tokens={"bos_token": ""})) > 2_000_000


def test_budget_counts_steps_and_characters() -> None:
    budget = TemplateBudget(10)
    for _ in range(9):
        budget.spend()
    budget.spend(127)
    with pytest.raises(TemplateLimit, match="10 steps"):
        budget.spend()
    with pytest.raises(TemplateLimit):
        TemplateBudget(10).spend(128 * 10)
