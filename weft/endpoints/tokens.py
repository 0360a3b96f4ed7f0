"""`/tokenize` and `/detokenize`: the token ids that the model would receive, without running it."""

from __future__ import annotations

from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.endpoints.errors import require
from weft.endpoints.generate import INLINE_DETAILS
from weft.endpoints.models import ActiveModel, Models
from weft.endpoints.prompts import chat_prompt_of, check_text
from weft.endpoints.record import Record
from weft.endpoints.schemas.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from weft.tokenizers import chats
from weft.tokenizers.tokenizer import INLINE_CHARS, off_loop


async def tokenize(body: TokenizeRequest, record: Record, models: Models) -> TokenizeResponse:
    """Token ids of a text or a conversation, also of one that is longer than the context."""
    require((body.prompt is None) != (body.messages is None), "Give either prompt or messages.", "prompt")
    require(body.messages is not None or not body.tools, "tools need messages.", "tools")
    model = models.usable(body.model)
    record.model = model.names[0]
    packed = await _encode(body, model, record)
    record.prompt_tokens = record.num_details = len(packed) // TOKEN_BYTES

    def work() -> TokenizeResponse:
        ids = unpack_tokens(packed).tolist()
        strings = None
        if body.return_token_strs:
            strings = [model.tokenizer.id_to_token(token) or "" for token in ids]
        return TokenizeResponse(count=len(ids), max_model_len=model.max_context, tokens=ids, token_strs=strings)

    return work() if record.num_details <= INLINE_DETAILS else await off_loop(work, tenant=record.tenant)


async def _encode(body: TokenizeRequest, model: ActiveModel, record: Record) -> bytes:
    if body.prompt is not None:
        check_text(body.prompt, model.max_text_chars, "prompt")
        special = body.add_special_tokens is not False
        return await model.tokenizer.encode_async(body.prompt, add_special_tokens=special, tenant=record.tenant)

    encoded = await chats.encode(
        chat_prompt_of(body),
        model.tokenizer,
        num_chars=record.body_bytes,
        check=lambda text: check_text(text, model.max_text_chars, "messages"),
        add_special_tokens=bool(body.add_special_tokens),
        tenant=record.tenant,
    )
    return encoded.tokens


async def detokenize(body: DetokenizeRequest, record: Record, models: Models) -> DetokenizeResponse:
    """The text of token ids. Raises `InvalidRequest` for ids that the tokenizer does not have."""
    model = models.usable(body.model)
    record.model = model.names[0]
    tokenizer = model.tokenizer

    def work() -> str:
        bad = next((token for token in body.tokens if not 0 <= token < tokenizer.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"tokens has {bad}; this model has tokens 0 to {tokenizer.vocab_size - 1}.", "tokens")
        return tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)

    text = work() if len(body.tokens) <= INLINE_CHARS else await off_loop(work, tenant=record.tenant)
    return DetokenizeResponse(prompt=text)
