"""Chat as a program: messages become a prompt, and the completion program does the rest."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES
from weft.programs.builtin import completion
from weft.programs.runtime import Runtime
from weft.programs.types import Caller, ChatArgs, Chunk
from weft.tokenizers.chat_template import ChatTemplate
from weft.tokenizers.messages import normalize, normalize_tools, num_characters
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer, off_loop


async def main(args: ChatArgs, caller: Caller, rt: Runtime) -> AsyncGenerator[Chunk, None]:
    """Chunks of all choices, as `completion.main` gives them. Raises what it and `render` raise."""
    prompt = await render(args, rt.tokenizer, tenant=caller.tenant)
    async with aclosing(completion.main(replace(args.completion, prompt=prompt), caller, rt)) as chunks:
        async for chunk in chunks:
            yield chunk


async def render(args: ChatArgs, tokenizer: Tokenizer, *, tenant: str = "") -> bytes:
    """The prompt of a chat, as packed token ids; the last `truncate_prompt_tokens` of them where that is set.

    Long chats, and those with a template of their own, are rendered and encoded on a thread. Raises `InvalidRequest`
    for messages or a template that cannot be used, `Unsupported` for a model without a template.
    """
    limit = args.truncate_prompt_tokens
    if limit is not None and limit < 1:
        raise InvalidRequest(f"truncate_prompt_tokens must be at least 1, got {limit}", "truncate_prompt_tokens")

    def work() -> bytes:
        return tokenizer.encode(render_text(args, tokenizer), add_special_tokens=False)

    num_chars = num_characters(args.messages) + num_characters(args.tools or ()) + num_characters(args.documents or ())
    if args.chat_template is None and num_chars <= INLINE_CHARS:
        tokens = work()
    else:
        tokens = await off_loop(work, tenant=tenant)
    return tokens if limit is None else tokens[-limit * TOKEN_BYTES :]


def render_text(args: ChatArgs, tokenizer: Tokenizer) -> str:
    """The prompt of a chat, as text. Raises as `render` does."""
    template = (
        tokenizer.chat_template(with_tools=bool(args.tools))
        if args.chat_template is None
        else ChatTemplate(args.chat_template)
    )
    return template.render(
        normalize(args.messages, keep_developer=template.knows_role("developer")),
        tools=None if args.tools is None else normalize_tools(args.tools),
        documents=args.documents,
        add_generation_prompt=args.add_generation_prompt,
        continue_final_message=args.continue_final_message,
        special_tokens=tokenizer.special_tokens,
        variables=args.template_kwargs,
    )
