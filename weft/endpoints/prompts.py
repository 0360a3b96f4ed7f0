"""Converts the prompts of requests to packed token ids that fit the model.

Owns the four forms of `prompt` and `input`, truncation, and the message about prompts that are too long. It does not
block the event loop: texts that cannot fit are refused before tokenization, long texts are tokenized on a thread, and
ids are packed only when their number is known to fit.
"""

from __future__ import annotations

import asyncio
from array import array
from copy import copy
from typing import cast

from weft.abi.errors import ContextTooLong, InvalidRequest
from weft.core.ids import TOKEN_BYTES
from weft.endpoints.models import ActiveModel
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.tokens import TokenizeRequest
from weft.tokenizers.chats import ChatPrompt
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer

PromptField = str | list[str | int | list[int]]
_ENTRY_CHARS = 64
"""Cost of an entry of a list beside its text or ids, in characters."""


class Fit:
    """The number of prompt tokens that a request may have, and whether more are truncated.

    Raises `InvalidRequest` for a `keep_last` of 0, which would keep no token.
    """

    def __init__(self, model: ActiveModel, *, max_tokens: int | None, keep_last: int | None, param: str):
        self.vocab_size = model.engine.info.vocab_size
        self.context = model.max_context
        self.max_tokens = max_tokens
        """Requested output tokens; None: as many as fit in the context."""
        self.param = param
        if keep_last == 0:
            raise InvalidRequest(
                f"truncate_prompt_tokens is 0, which keeps nothing of {param}. Give 1 or more, or -1 to keep as many "
                "tokens as fit.",
                "truncate_prompt_tokens",
            )
        room = self.context - (1 if max_tokens is None else max_tokens)
        self.keep_last = max(room, 1) if keep_last == -1 else keep_last
        """Number of prompt tokens kept from the end; None: all."""
        self.max_chars = model.longest_prompt
        self._text_limit = model.max_text_chars

    def at(self, number: int) -> Fit:
        """The same rules for prompt `number` of several; its errors name that prompt."""
        own = copy(self)
        own.param = f"{self.param}[{number}]"
        return own

    def check_text(self, text: str) -> None:
        """Raise for a text that cannot fit, or that is too long to be tokenized, without tokenizing it."""
        if self.keep_last is None and len(text) > self.max_chars:
            raise ContextTooLong(
                f"This model's context is {self.context} tokens, which a prompt of {len(text)} characters exceeds. "
                "Shorten it, or set truncate_prompt_tokens.",
                self.param,
            )
        check_text(text, self._text_limit, self.param)

    def check_count(self, num_tokens: int) -> None:
        """Raise `InvalidRequest` for no tokens, and `ContextTooLong` for more than fit together with the output."""
        if num_tokens < 1:
            raise InvalidRequest(f"{self.param} is empty: there is not one token to start from.", self.param)
        wanted = self.max_tokens
        if num_tokens + (1 if wanted is None else wanted) <= self.context:
            return
        room = self.context - num_tokens
        sizes = f"This model's context is {self.context} tokens; the prompt has {num_tokens}"
        if room > 0 and wanted is not None:
            raise ContextTooLong(
                f"{sizes} and max_tokens asks for {wanted} more. Lower max_tokens to at most {room}, shorten the "
                "prompt, or set truncate_prompt_tokens.",
                self.param,
            )
        need = "" if wanted == 0 else ", which leaves no room for output"
        raise ContextTooLong(f"{sizes}{need}. Shorten the prompt, or set truncate_prompt_tokens.", self.param)

    def packed(self, tokens: bytes) -> bytes:
        """Packed ids, truncated if the request says so. Raises like `check_count`."""
        if self.keep_last is not None:
            tokens = tokens[-self.keep_last * TOKEN_BYTES :]
        self.check_count(len(tokens) // TOKEN_BYTES)
        return tokens

    def ids(self, tokens: list[int]) -> bytes:
        """Check the caller's token ids against the vocabulary, truncate and pack them. Raises like `check_count`."""
        if self.keep_last is not None:
            tokens = tokens[-self.keep_last :]
        self.check_count(len(tokens))
        if set(map(type, tokens)) != {int}:
            raise _mixture(self.param)
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise InvalidRequest(
                f"{self.param} names token {bad}; this model has tokens 0 to {self.vocab_size - 1}.", self.param
            )
        return array("i", tokens).tobytes()


def check_text(text: str, max_chars: int, param: str) -> None:
    """Raise `InvalidRequest` for a text that is too long to be tokenized; time and memory grow with its length."""
    if len(text) > max_chars:
        raise InvalidRequest(
            f"{param} has {len(text)} characters as text, and this server tokenizes at most {max_chars} at once "
            "(server.max_text_chars). Send less of it.",
            param,
        )


def as_prompts(field: PromptField, param: str, max_prompts: int) -> list[str | list[int]]:
    """The prompts of a `prompt` or `input` field, each a text or token ids. Raises `InvalidRequest`."""
    if isinstance(field, str):
        return [field]
    if not field:
        raise InvalidRequest(f"{param} is an empty list.", param)
    # The first entry decides the form: `Fit.ids` checks the others once their number is known to fit.
    if isinstance(field[0], int):
        return [cast(list[int], field)]
    if len(field) > max_prompts:
        raise InvalidRequest(f"{param} has {len(field)} entries, at most {max_prompts} in one request.", param)
    prompts: list[str | list[int]] = []
    for entry in field:
        if isinstance(entry, int) or type(entry) is not type(field[0]):
            raise _mixture(param)
        prompts.append(entry)
    return prompts


def _mixture(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be one text, texts, token ids, or token id lists, not a mixture.", param)


def chat_prompt_of(body: ChatRequest | TokenizeRequest) -> ChatPrompt:
    """The input of the chat template. A message that is continued opens no new turn unless the request says so."""
    named = {name: getattr(body, name, None) for name in ("reasoning_effort", "verbosity")}
    opens = body.add_generation_prompt
    return ChatPrompt(
        messages=body.messages or [],
        tools=body.tools or None,
        documents=body.documents or None,
        add_generation_prompt=not body.continue_final_message if opens is None else opens,
        continue_final_message=body.continue_final_message,
        template_kwargs={name: value for name, value in named.items() if value is not None} | body.chat_template_kwargs,
    )


def forget_inputs(body: ChatRequest) -> None:
    """Free what only the chat template reads, since the request lives as long as its answer takes. Nested lists take
    more than twenty times the memory of their JSON, and nothing counts it."""
    for values in (body.messages, body.tools, body.documents, body.chat_template_kwargs):
        values.clear()


async def tokenize(
    prompts: list[str | list[int]], tokenizer: Tokenizer, fit: Fit, *, add_special: bool, tenant: str
) -> list[bytes]:
    """Packed token ids of every prompt; raises unless all fit. Yields to the event loop between portions of a list."""
    result, portion = [], 0
    for number, prompt in enumerate(prompts):
        portion += _ENTRY_CHARS + len(prompt)
        if portion > INLINE_CHARS:
            await asyncio.sleep(0)
            portion = _ENTRY_CHARS + len(prompt)
        own = fit.at(number) if len(prompts) > 1 else fit
        if isinstance(prompt, str):
            own.check_text(prompt)
            encoded = await tokenizer.encode_async(prompt, add_special_tokens=add_special, tenant=tenant)
            result.append(own.packed(encoded))
        else:
            result.append(own.ids(prompt))
    return result
