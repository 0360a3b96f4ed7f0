"""The limit on the log-probabilities of one response.

They make a response large: a request may ask for 257 at each token of each choice, and each takes a few hundred bytes
of memory before the response is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES
from weft.endpoints.models import ActiveModel


def bounded_tokens(
    model: ActiveModel,
    prompts: Sequence[bytes],
    *,
    num_choices: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    echo: bool = False,
) -> int | None:
    """The most tokens that a choice may have: `max_tokens`, or where the request sets none, what
    `server.max_response_logprobs` leaves for it if that is less than the context does. Raises `InvalidRequest` if the
    response could have more log-probabilities.

    `prompts` are packed token ids, and each has `num_choices`. `logprobs` and `prompt_logprobs` are the most probable
    tokens reported at each token beside itself; None: no report. With `echo` each choice repeats its prompt's.
    """
    if logprobs is None and prompt_logprobs is None:
        return max_tokens
    # Streams are counted too: their tokens stay in memory until the client reads them, up to the whole response.
    prompt_tokens = sum(len(prompt) // TOKEN_BYTES for prompt in prompts)
    limit = model.max_response_logprobs
    parts: list[tuple[int, int, str]] = []
    if prompt_logprobs is not None:
        parts.append((prompt_tokens, 1 + prompt_logprobs, f"{prompt_tokens} prompt tokens"))
    if logprobs is not None:
        choices = len(prompts) * num_choices
        if max_tokens is None:
            # Few answers are as long as the context, so a request without a length is not refused for it.
            left = limit - sum(tokens * each for tokens, each, _ in parts)
            most = max(left // (choices * (1 + logprobs)), 1)
            max_tokens = most if most < model.max_context else None
        tokens = choices * (max_tokens or 0) + (num_choices * prompt_tokens if echo else 0)
        parts.append((tokens, 1 + logprobs, f"{tokens} tokens in {choices} choices"))
    count = sum(tokens * each for tokens, each, _ in parts)
    if count <= limit:
        return max_tokens
    sizes = " and ".join(f"{what} with {each} each" for _, each, what in parts)
    raise InvalidRequest(
        f"The response could have {count} log-probabilities ({sizes}); this server allows {limit} in one response "
        "(server.max_response_logprobs). Set a lower max_tokens, or ask for fewer choices, prompts or "
        "log-probabilities.",
        "prompt_logprobs" if logprobs is None else "logprobs",
    )
