"""The form in which a model writes tool calls and reasoning, from its chat template or the configuration.

Owns the markers by which a form is recognised. `weft.text` parses the forms; `weft.endpoints.grammars` has their
grammars.
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
"""(text in a chat template, form of the model's tool calls); the first entry found decides."""
OTHER_SIGNS = ("<function=", "<arg_key>")
"""Texts in templates of other forms, which share markers with the forms above."""
NAMED_ARGUMENTS = "[ARGS]"
"""Marker of newer Mistral models, in the template and between a call's name and arguments."""
CALL_ID = "[CALL_ID]"
"""Marker of those Mistral models that write an id between a call's name and arguments."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes tool calls and reasoning."""

    tool_form: ToolForm | None = None
    named_arguments: bool = False
    """Whether calls have Mistral's newer form, a name and its arguments, instead of a list of objects."""
    call_ids: bool = False
    """Whether, in that form, the model writes an id after each name."""
    reasoning: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    """Marker -> id, for markers that are special tokens. Text contains them only if special tokens are kept."""

    def hides(self, *, calls: bool) -> bool:
        """Whether a text without special tokens lacks markers of reasoning or calls."""
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
