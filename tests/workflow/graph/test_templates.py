from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.workflow.graph import Reference, Template, escape, parse_template, templates
from weft.workflow.graph.templates import is_name, parse_reference


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()),
        ("no reference", ("no reference",)),
        ("{{a}}", (Reference("a"),)),
        ("x {{ a.b }} y", ("x ", Reference("a", ("b",)), " y")),
        ("{{a}}{{b}}", (Reference("a"), Reference("b"))),
        ("{{{a}}}", ("{", Reference("a"), "}")),
        ("{{a b}} {{1}} {{}} {a} {{a.}}", ("{{a b}} {{1}} {{}} {a} {{a.}}",)),
        (r"\{{a}} \\{{b}} \\\{{c}}", ("{{a}} \\", Reference("b"), " \\{{c}}")),
        (r"C:\dir {{a}}", ("C:\\dir ", Reference("a"))),
    ],
)
def test_references_are_names_in_double_braces(text: str, parts: tuple[str | Reference, ...]) -> None:
    assert parse_template(text).parts == parts


pieces = st.sampled_from(["{{a}}", "{{", "}}", "\\", "a", " ", "{{a.b}}", "\\{{a}}", "{"])


@given(st.lists(pieces).map("".join))
def test_a_template_is_what_it_is_written_as(text: str) -> None:
    template = parse_template(text)
    assert parse_template(str(template)) == template


@given(st.lists(pieces).map("".join), st.lists(pieces).map("".join))
def test_an_escaped_text_is_itself(text: str, other: str) -> None:
    assert parse_template(escape(text)).parts == ((text,) if text else ())
    joined = Template((text, Reference("a"), other)) if text and other else Template((Reference("a"),))
    assert parse_template(str(joined)) == joined


def test_filling_replaces_references_alone() -> None:
    assert parse_template("{{a}} {{b.c}}!").fill(lambda reference: f"<{reference}>") == "<a> <b.c>!"


@pytest.mark.parametrize("text", ["", "a.", ".a", "1a", "a b", "ä", "a..b", "a\n"])
def test_other_texts_are_no_references(text: str) -> None:
    assert parse_reference(text) is None


def test_names_are_bounded() -> None:
    assert is_name("a" * 64)
    assert not is_name("a" * 65)


def test_many_backslashes_and_braces() -> None:
    """In time that grows with the text: with its square these would take hours."""
    slashes = "\\" * 1_000_000
    assert parse_template(slashes).parts == (slashes,)
    assert parse_template(slashes + "{{a}}").parts == ("\\" * 500_000, Reference("a"))
    assert parse_template(escape(slashes + "{{a}}")).parts == (slashes + "{{a}}",)
    braces = "{{ " * 300_000
    assert parse_template(braces).parts == (braces,)


def test_long_templates_are_not_kept() -> None:
    before = templates._parsed.cache_info().currsize
    for number in range(3):
        parse_template(f"{number}" * (templates.MAX_KEPT_CHARS + 1))
    assert templates._parsed.cache_info().currsize == before
