"""Semantic and native functions make the graphs that JSON makes, and mistakes are found when they are declared."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import pytest

import weft
from tests.workflow.frontend import postponed_annotations
from tests.workflow.frontend.test_flow import same, traced
from tests.workflow.shapes import body, function, graph, llm, mapped
from weft import ops
from weft.workflow.frontend.marks import NeedsValueError
from weft.workflow.frontend.trace import FlowError
from weft.workflow.graph import InvalidGraph


@weft.semantic_function(max_tokens=200)
def write(task: weft.Input, plan: weft.Output, code: weft.Output(stop="END", temperature=0)):
    """You are an engineer. Task: {{task}}. Your plan: {{plan}} Now the code: {{code}}"""


@weft.semantic_function
def test_code(task: weft.Input, code: weft.Input, tests: weft.Output):
    """
    You are a QA engineer.

        Task: {{task}}
    Code: {{ code }}
    Tests: {{tests}}
    """


test_code.__test__ = False


def test_outputs_are_one_conversation() -> None:
    def flow(q: Any) -> Any:
        made = write(q)
        return {"plan": made.plan, "code": made[1]}

    plan = llm("plan", "You are an engineer. Task: {{q}}. Your plan:", max_tokens=200)
    messages = [{"chat": "plan"}, {"role": "user", "content": "Now the code:"}]
    code = {"id": "code", "op": "llm", "messages": messages, "max_tokens": 200, "stop": "END", "temperature": 0}
    same(flow, graph(plan, code, outputs={"plan": "plan", "code": "code"}))
    assert {node.id for node in traced(flow).graph.nodes} == {"write_plan_1", "write_code_1"}


def test_functions_feed_each_other() -> None:
    def flow(q: Any) -> Any:
        return {"out": test_code(f"a {q} game", code=write(q).code)}

    plan = llm("plan", "You are an engineer. Task: {{q}}. Your plan:", max_tokens=200)
    messages = [{"chat": "plan"}, {"role": "user", "content": "Now the code:"}]
    code = {"id": "code", "op": "llm", "messages": messages, "max_tokens": 200, "stop": "END", "temperature": 0}
    text = "You are a QA engineer.\n\n    Task: a {{q}} game\nCode: {{code}}\nTests:"
    same(flow, graph(plan, code, llm("out", text)))


def test_text_goes_on_where_it_is_raw() -> None:
    @weft.semantic_function(raw=True, temperature=0)
    def story(title: weft.Input, begin: weft.Output(max_tokens=9), end: weft.Output, moral: weft.Output(stop=".")):
        """{{title}}
        Once {{begin}}{{end}} And so: {{moral}}"""

    def flow(q: Any) -> Any:
        return story(q)

    begin = {"id": "b", "op": "llm", "prompt": "{{q}}\nOnce ", "max_tokens": 9, "temperature": 0}
    end = {"id": "e", "op": "llm", "prompt": "{{q}}\nOnce {{b}}", "temperature": 0}
    moral = {"id": "m", "op": "llm", "prompt": "{{q}}\nOnce {{b}}{{e}} And so: ", "stop": ".", "temperature": 0}
    same(flow, graph(begin, end, moral, outputs={"begin": "b", "end": "e", "moral": "m"}))


@dataclasses.dataclass
class Verdict:
    winner: str


def test_an_output_overrides_the_fields_of_the_decorator() -> None:
    @weft.semantic_function(model="small", retries=1, stop="x")
    def judge(text: weft.Input, verdict: weft.Output(schema=Verdict, stop=None), why: weft.Output(model="big")):
        """Who wins? {{text}} {{verdict}} Why? {{why}}"""

    def flow(q: Any) -> Any:
        verdict, why = judge(q)
        return {"winner": verdict.winner, "why": why}

    schema = {"type": "object", "properties": {"winner": {"type": "string"}}, "required": ["winner"]}
    schema["additionalProperties"] = False
    verdict = llm("v", "Who wins? {{q}}", model="small", retries=1, schema=schema)
    messages = [{"chat": "v"}, {"role": "user", "content": "Why?"}]
    why = {"id": "w", "op": "llm", "messages": messages, "model": "big", "retries": 1, "stop": "x"}
    same(flow, graph(verdict, why, outputs={"winner": "v.winner", "why": "w"}))


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("a {{snake}} game", "Say: a \\{{snake}} game"),
        ("{{say_1}}", "Say: \\{{say_1}}"),
        ("\\{{snake}}", "Say: \\\\\\{{snake}}"),
        ("{x}", "Say: {x}"),
        ("", "Say: "),
    ],
)
def test_braces_of_a_constant_mean_nothing(value: str, content: str) -> None:
    @weft.semantic_function
    def say(text: weft.Input, answer: weft.Output):
        """Say: {{text}}{{answer}}"""

    same(lambda q: {"out": say(value)}, graph(llm("a", content)))


def test_braces_around_a_constant_do_not_make_a_reference_of_it() -> None:
    @weft.semantic_function
    def say(text: weft.Input, answer: weft.Output):
        """Say: {{{text}}} {{answer}}"""

    same(lambda q: {"out": say("{q}")}, graph(llm("a", "Say: \\{{q}}")))


def test_constants_that_are_no_text_are_data() -> None:
    @weft.semantic_function
    def say(text: weft.Input, answer: weft.Output, count: weft.Input = 3):
        """{{text.title}} {{count}} {{answer}}"""

    data = {"id": "d", "op": "data", "value": {"title": "{{q}}"}}
    three = {"id": "three", "op": "data", "value": 3}
    same(lambda q: {"out": say({"title": "{{q}}"})}, graph(data, three, llm("a", "{{d.title}} {{three}}")))


def test_a_field_of_an_input() -> None:
    @weft.semantic_function
    def say(verdict: weft.Input, answer: weft.Output):
        """{{verdict.winner}} won. {{answer}}"""

    flow = traced(lambda q: say(ops.llm(q, schema={"type": "object", "properties": {"winner": {"type": "string"}}})))
    assert flow.graph.nodes[1].messages[0].content == "{{llm_1.winner}} won."  # type: ignore[union-attr,index]
    with pytest.raises(InvalidGraph, match=r"there is no field 'winner'; there are loser"):
        _ = traced(lambda q: say({"loser": "x"})).graph


def test_annotations_as_texts_and_annotated() -> None:
    @weft.semantic_function
    def plain(text: Annotated[str, weft.Input], answer: Annotated[str, "no role", weft.Output(stop="x")]):
        """{{text}} {{answer}}"""

    for say in (plain, postponed_annotations.say):
        same(lambda q, say=say: {"out": say(q)}, graph(llm("a", "{{q}}", stop="x")))


def test_a_body_of_a_map_is_a_semantic_function() -> None:
    @weft.semantic_function
    def sum_up(part: weft.Input, summary: weft.Output):
        """Sum up: {{part}} {{summary}}"""

    inside = body(llm("s", "Sum up: {{i}}"), value="s")
    same(lambda q: {"out": ops.map(sum_up, q)}, graph(mapped("m", "q", inside)))
    assert list(inspect.signature(sum_up).parameters) == ["part"]


DECLARED: list[tuple[Callable[[], Any], list[str]]] = []


def declared(*mistakes: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(declare: Callable[[], Any]) -> Callable[[], Any]:
        DECLARED.append((declare, list(mistakes)))
        return declare

    return add


@declared(
    "a: has no annotation: annotate it with weft.Input or weft.Output",
    "b: has the annotation <class 'str'>: annotate it with weft.Input or weft.Output",
    "c: the annotation nothing.here cannot be evaluated in its module: name 'nothing' is not defined",
    "_d: is an output, whose name does not begin with _",
    "e: is an output, which has no default value: the model writes it",
    "rest: *rest takes any number of values: name each parameter",
)
def _parameters() -> Any:
    @weft.semantic_function
    def wrong(a, b: str, c: "nothing.here", _d: weft.Output, e: weft.Output = 1, *rest):  # noqa: F821
        """{{a}} {{b}} {{c}} {{_d}} and {{e}}"""


@declared(
    "bees: is not in the text: write {{bees}} where its value belongs",
    "{{bee}}: is not a parameter. Did you mean bees?",
    "c: is an output and stands 2 times in the text: the model writes it once",
    "d: is an output, of which no field can stand in the text: {{d.x}}",
    "the text after the last output, {{d}}, is never read: move or remove it",
)
def _names() -> Any:
    @weft.semantic_function
    def wrong(a: weft.Input, bees: weft.Input, c: weft.Output, d: weft.Output):
        """{{a}} {{bee}} {{c}} and {{c}} and {{d.x}}."""


@declared(
    "a: there is no text before {{a}} for the model to answer",
    "b: there is no text between {{a}} and {{b}} for the model to answer; with raw=True it goes on without one",
)
def _turns() -> Any:
    @weft.semantic_function
    def wrong(a: weft.Output, b: weft.Output):
        """{{a}}
        {{b}}"""


@declared(
    "a: there is no text before {{a}} for the model to answer",
    "a.tools: tools is not supported. Use /v1/chat/completions.",
    "the text after the last output, {{a}}, is never read",
)
def _raw_turns() -> Any:
    @weft.semantic_function(raw=True)
    def wrong(a: weft.Output(tools=[{}])):
        """{{a}} bye"""


@declared(
    "max_token: Unknown field 'max_token'. Did you mean max_tokens or",
    "a.messages: is the text of the docstring",
    "a.n: is not supported in workflows; make several calls, or a map",
    "b.raw: stands in the decorator",
    "b.response_format: cannot be combined with schema",
    "c.schema: <object object at",
)
def _fields() -> Any:
    @weft.semantic_function(max_token=3)
    def wrong(
        a: weft.Output(messages=[], n=2),
        b: weft.Output(raw=True, schema={}, response_format={"type": "text"}),
        c: weft.Output(schema=object()),
    ):
        """Go {{a}} go {{b}} go {{c}}"""


@declared("a: the default value: [1]: nan is not a number of JSON", "there is no output", "there is no docstring")
def _nothing() -> Any:
    @weft.semantic_function
    def wrong(a: weft.Input = (0, float("nan"))):
        pass


@pytest.mark.parametrize(("declare", "mistakes"), DECLARED, ids=lambda value: getattr(value, "__name__", ""))
def test_all_mistakes_of_a_declaration_at_once(declare: Callable[[], Any], mistakes: list[str]) -> None:
    with pytest.raises(FlowError) as caught:
        declare()
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(
        f"test_semantic.py:{declare.__code__.co_firstlineno + _decorator_lines(declare) + 1}: wrong"
    )
    assert len(lines) == len(mistakes)
    for line, mistake in zip(lines, mistakes, strict=True):
        assert line.startswith(f"  {mistake}")


def _decorator_lines(declare: Callable[[], Any]) -> int:
    """Lines from the first decorator to `def`."""
    lines, _ = inspect.getsourcelines(declare)
    return next(number for number, line in enumerate(lines) if line.startswith("def "))


def test_only_functions_are_semantic_functions() -> None:
    with pytest.raises(FlowError, match="a function with a docstring, not"):
        weft.semantic_function(write)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda q: write(), FlowError, "write: missing a required argument: 'task'"),
        (lambda q: write(q, q), FlowError, "write: too many positional arguments"),
        (lambda q: write(q, plan=q), FlowError, "write: plan is an output: the call returns it"),
        (lambda q: write(q.split(",")), NeedsValueError, "write: task is a list and cannot be part of a text: use ops"),
        (lambda q: write([b"x"]), FlowError, r"write: task: \[0\]: a value of builtins.bytes is not JSON: decode it"),
        (lambda q: write(write), FlowError, "write: task: a value of weft.workflow.frontend.semantic.SemanticFunction"),
    ],
)
def test_wrong_calls(wrong: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _ = traced(wrong).graph


def test_outside_a_flow_there_is_no_model_to_call() -> None:
    with pytest.raises(FlowError, match=r"write is a semantic function.* in a function with @weft\.flow"):
        write("a snake game")


@weft.native_function(pure=True, retries=2)
def count(text: str, pure: str = "words") -> int:
    """Words."""
    return len(text.split())


def test_a_native_function_is_a_node_in_a_flow_and_a_function_elsewhere() -> None:
    def flow(q: Any) -> Any:
        return {"out": ops.text(f"{count(q, pure='all')} {ops.function(count, q)}")}

    pure = function("c", "count", text="{{q}}", pure="all") | {"pure": True, "retries": 2}
    plain = function("d", "count", text="{{q}}")
    out = {"id": "t", "op": "text", "template": "{{c}} {{d}}"}
    same(flow, graph(pure, plain, out, outputs={"out": "t"}))
    assert traced(flow).functions["count"]("a b") == 2
    assert count("a b c") == 3
    assert count.__doc__ == "Words."


def test_no_function_has_the_name_of_a_built_in_one() -> None:
    @weft.native_function
    def join(texts: Any) -> str:
        return "".join(texts)

    with pytest.raises(FlowError, match="built-in function 'join': rename this one"):
        _ = traced(lambda q: join(q)).graph
