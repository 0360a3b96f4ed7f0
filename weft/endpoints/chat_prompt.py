"""A conversation as packed token ids that fit the model, rendered on a thread where it is long."""

from __future__ import annotations

from typing import NamedTuple

from weft.endpoints.prompts import Fit
from weft.endpoints.record import Record
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.tokens import TokenizeRequest
from weft.programs.builtin import chat
from weft.programs.types import ChatArgs
from weft.text import reasoning
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer, off_loop


def chat_args(body: ChatRequest | TokenizeRequest) -> ChatArgs:
    """What the chat template sees. A message that is continued opens no new turn unless the request says so."""
    named = {name: getattr(body, name, None) for name in ("reasoning_effort", "verbosity")}
    opens = body.add_generation_prompt
    return ChatArgs(
        messages=body.messages or [],
        tools=body.tools or None,
        documents=body.documents or None,
        add_generation_prompt=not body.continue_final_message if opens is None else opens,
        continue_final_message=body.continue_final_message,
        template_kwargs={name: value for name, value in named.items() if value is not None} | body.chat_template_kwargs,
    )


class Rendered(NamedTuple):
    """A rendered chat, tokenized."""

    tokens: bytes
    opens_reasoning: bool
    """Whether the answer begins inside the model's reasoning."""


async def render(args: ChatArgs, tokenizer: Tokenizer, fit: Fit, record: Record, *, add_special: bool) -> Rendered:
    """The prompt. Raises what the template raises, and `ContextTooLong`."""

    def work() -> Rendered:
        text = chat.render_text(args, tokenizer)
        fit.check_text(text)
        tokens = tokenizer.encode(text, add_special_tokens=add_special)
        return Rendered(tokens, text.rstrip().endswith(reasoning.OPEN))

    # The body's size bounds everything in it, and is known without a walk over the messages.
    rendered = work() if record.body_bytes <= INLINE_CHARS else await off_loop(work, tenant=record.tenant)
    return rendered._replace(tokens=fit.packed(rendered.tokens))
