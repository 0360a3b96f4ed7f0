"""A conversation as packed token ids that fit the model, rendered on a thread where it is long."""

from __future__ import annotations

from weft.core.errors import Unsupported
from weft.programs.builtin import chat
from weft.programs.types import ChatArgs
from weft.server.prompts import Fit
from weft.server.record import Record
from weft.server.schemas.chat import ChatRequest
from weft.server.schemas.service import TokenizeRequest
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer, off_loop


def chat_args(body: ChatRequest | TokenizeRequest) -> ChatArgs:
    """What the chat template sees. A message that is continued opens no new turn unless the request says so."""
    opens = body.add_generation_prompt
    return ChatArgs(
        messages=body.messages or [],
        tools=body.tools or None,
        documents=body.documents or None,
        add_generation_prompt=not body.continue_final_message if opens is None else opens,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )


async def render(args: ChatArgs, tokenizer: Tokenizer, fit: Fit, record: Record, *, add_special: bool) -> bytes:
    """The prompt. Raises what the template raises, and `ContextTooLong`."""

    def work() -> bytes:
        text = chat.render_text(args, tokenizer)
        fit.check_text(text)
        return tokenizer.encode(text, add_special_tokens=add_special)

    # The body's size bounds everything in it, and is known without a walk over the messages.
    return fit.packed(work() if record.body_bytes <= INLINE_CHARS else await off_loop(work))


def check_tools(body: ChatRequest) -> None:
    """Refuse tools that the model would be told of, but whose calls nobody would read from its answer."""
    choice = body.tool_choice
    if choice not in (None, "none", "auto"):
        raise Unsupported(
            "tool_choice can only be none in this release: tool calls are not parsed from the answer.", "tool_choice"
        )
    if body.tools and choice != "none":
        raise Unsupported(
            'tools are only rendered into the prompt in this release, with "tool_choice": "none"; calls are not '
            "parsed from the answer. Set that, or leave tools out.",
            "tools",
        )
