"""How a model writes calls of tools and reasoning, found in its chat template or set in the configuration.

Owns the signs by which a form is recognised. `weft.text` reads the forms; `weft.endpoints.grammars` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.abi.errors import Unsupported
from weft.config import ReasoningParserName, ToolCallParserName
from weft.text import reasoning
from weft.text.tool_calls import PARSERS
from weft.tokenizers.tokenizer import Tokenizer

ToolForm = Literal["hermes", "llama3_json", "mistral"]

SIGNS: tuple[tuple[str, ToolForm], ...] = (
    (PARSERS["hermes"].marker, "hermes"),
    (PARSERS["llama3_json"].marker, "llama3_json"),
    (PARSERS["mistral"].marker, "mistral"),
)
"""What a template has in it whose model writes calls so; the first one counts."""
OTHER_SIGNS = ("<function=", "<arg_key>")
"""Of forms that begin like one above and are none of them."""
NAMED_ARGUMENTS = "[ARGS]"
"""Of newer models of Mistral's, in the template and in the call."""
CALL_ID = "[CALL_ID]"
"""Of some of those: between the name and the arguments the model writes an id of its own."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes tool calls and reasoning."""

    tool_form: ToolForm | None = None
    named_arguments: bool = False
    """Mistral's newer form, a name and its arguments, instead of a list of objects."""
    call_ids: bool = False
    """In that form, whether the model writes an id behind each name."""
    reasoning: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    """Markers that are special tokens, with their ids: left out of the text unless that is asked for."""

    def hides(self, *, calls: bool) -> bool:
        """Whether a text without special tokens lacks what reasoning or calls are recognised by."""
        marks = [reasoning.OPEN, reasoning.CLOSE] if self.reasoning else []
        if calls and self.tool_form is not None:
            marks += [PARSERS[self.tool_form].marker, CALL_ID, NAMED_ARGUMENTS, "</tool_call>"]
        return any(mark in self.special for mark in marks)


def dialect_of(
    tokenizer: Tokenizer, tool_call_parser: ToolCallParserName = "auto", reasoning_parser: ReasoningParserName = "auto"
) -> Dialect:
    """The dialect of the model with this tokenizer. The settings are those of `ServerConfig`."""
    try:
        template = tokenizer.chat_template(with_tools=True).source
    except Unsupported:
        template = ""
    form: ToolForm | None
    if tool_call_parser == "auto":
        form = _form_in(template)
    else:
        form = None if tool_call_parser == "none" else tool_call_parser
    marks = (reasoning.OPEN, reasoning.CLOSE, CALL_ID, NAMED_ARGUMENTS, "</tool_call>", *(sign for sign, _ in SIGNS))
    ids = {mark: tokenizer.token_to_id(mark) for mark in marks}
    return Dialect(
        tool_form=form,
        named_arguments=NAMED_ARGUMENTS in template,
        call_ids=CALL_ID in template,
        reasoning=reasoning_parser == "think" or (reasoning_parser == "auto" and reasoning.OPEN in template),
        special={mark: token for mark, token in ids.items() if token is not None and token in tokenizer.special_ids},
    )


def _form_in(template: str) -> ToolForm | None:
    if any(sign in template for sign in OTHER_SIGNS):
        return None
    return next((form for sign, form in SIGNS if sign in template), None)
