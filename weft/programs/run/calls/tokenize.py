"""The Tokenize trait: text to tokens and back, the vocabulary, chat messages to a prompt.

Owns where the work runs: short texts at once, long ones on a thread. `weft.programs.run.context` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.programs.run.calls.call_kinds import answer_by_task
from weft.programs.run.calls.view import UNREADABLE, RunView, check_size, text_of
from weft.programs.run.messages import reason
from weft.tokenizers.chats import ChatPrompt, render
from weft.tokenizers.tokenizer import INLINE_CHARS, off_loop

MAX_TEXT_BYTES = 4 << 20
"""Of a text, of tokens, of messages to render."""
INLINE_TOKENS = 2048
"""Tokens that become text at once: about a millisecond."""


class _RenderArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False


_render_args = msgspec.json.Decoder(_RenderArgs)
_messages = msgspec.json.Decoder(list[dict[str, Any]])


class TokenizeCalls:
    """Calls of the trait for one run."""

    def __init__(self, view: RunView):
        self._calls = view.calls
        self._model = view.model
        self._tenant = view.caller.tenant
        self._charge = view.outlet.charge

    def tokenize(self, call: int, special: int, text: bytes) -> None:
        """Answer with the packed token ids of a text."""
        check_size(text, MAX_TEXT_BYTES, "text")
        words = text_of(text, "text")
        encode = partial(self._model.tokenizer.encode, words, add_special_tokens=bool(special))
        self._answer(call, lambda: (encode(),), len(text), inline=len(words) <= INLINE_CHARS)

    def detokenize(self, call: int, skip_special: int, tokens: bytes) -> None:
        """Answer with the text of packed token ids, as UTF-8."""
        check_size(tokens, MAX_TEXT_BYTES, "tokens")
        check_tokens(tokens)
        decode = partial(self._model.tokenizer.decode, unpack_tokens(tokens), skip_special=bool(skip_special))
        self._answer(call, lambda: (decode().encode(),), len(tokens), inline=len(tokens) <= INLINE_TOKENS * TOKEN_BYTES)

    def vocabulary(self, call: int) -> None:
        """The bytes of every token."""
        answer_by_task(self._calls, call, self._model.vocabulary())

    def render(self, call: int, generation_prompt: int, messages: bytes, options: bytes) -> None:
        """Chat messages to the text of a prompt."""
        check_size(messages, MAX_TEXT_BYTES, "messages")
        check_size(options, MAX_TEXT_BYTES, "options")
        held = len(messages) + len(options)

        def read() -> ChatPrompt:
            try:
                chat = _messages.decode(messages)
                return _chat_prompt(chat, _render_args.decode(options or b"{}"), bool(generation_prompt))
            except UNREADABLE as error:
                raise InvalidRequest(f"the messages cannot be rendered: {reason(error)}", "messages") from error

        if held > INLINE_CHARS:
            self._answer(call, lambda: self._rendered(read()), held, inline=False)
            return
        args = read()
        # A template of the program's own may take as long as a template may; that of the model does not with so little.
        self._answer(call, lambda: self._rendered(args), held, inline=args.chat_template is None)

    def _rendered(self, args: ChatPrompt) -> tuple[bytes, ...]:
        return (render(args, self._model.tokenizer).encode(),)

    def _answer(self, call: int, work: Callable[[], tuple[bytes, ...]], held: int, *, inline: bool) -> None:
        if inline:
            self._calls.check_free(call)
            self._calls.result(call, *work())
        else:
            answer_by_task(self._calls, call, off_loop(work, tenant=self._tenant, charge=self._charge), held=held)


def check_tokens(tokens: bytes) -> int:
    """How many there are. Raises `InvalidRequest` for bytes that are no int32 ids."""
    count, rest = divmod(len(tokens), TOKEN_BYTES)
    if rest:
        raise InvalidRequest(f"{len(tokens)} bytes are not a whole number of int32 token ids", "tokens")
    return count


def _chat_prompt(chat: list[dict[str, Any]], args: _RenderArgs, generation_prompt: bool) -> ChatPrompt:
    return ChatPrompt(
        messages=chat,
        tools=args.tools,
        documents=args.documents,
        chat_template=args.chat_template,
        add_generation_prompt=generation_prompt,
        continue_final_message=args.continue_final_message,
        template_kwargs=args.template_kwargs or {},
    )
