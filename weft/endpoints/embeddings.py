"""`/v1/embeddings`: texts or token ids to vectors."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Literal

from weft.core.ids import TOKEN_BYTES
from weft.endpoints.errors import require
from weft.endpoints.generate import PROMPTS_AT_ONCE, built
from weft.endpoints.models import ActiveModel, Models
from weft.endpoints.prompts import Fit, as_prompts, tokenize
from weft.endpoints.record import Record
from weft.endpoints.schemas.embedding import (
    MAX_INPUTS,
    EmbeddingItem,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
)
from weft.programs.builtin import embedding
from weft.programs.types import Caller, EmbeddingArgs, EmbeddingResult

NUMBERS_PER_DETAIL = 32
"""Numbers of vectors that take as long to write as what is told of a token."""


async def create(body: EmbeddingRequest, record: Record, models: Models) -> EmbeddingResponse:
    """Compute one vector per input, in the order of the inputs."""
    model = models.recoverable(body.model)
    record.model = model.names[0]
    hidden_size = model.engine.info.hidden_size
    require(
        body.dimensions is None or body.dimensions <= hidden_size,
        f"dimensions is {body.dimensions}; this model's vectors have {hidden_size} numbers.",
        "dimensions",
    )
    fit = Fit(model, max_tokens=0, keep_last=body.truncate_prompt_tokens, param="input")
    inputs = as_prompts(body.input, "input", MAX_INPUTS)
    packed = await tokenize(inputs, model.tokenizer, fit, add_special=body.add_special_tokens, tenant=record.tenant)
    record.prompt_tokens = sum(len(prompt) // TOKEN_BYTES for prompt in packed)
    results = await _embed(body, record.caller(priority=body.priority), model, packed)

    def build() -> EmbeddingResponse:
        data = [
            EmbeddingItem(index=index, embedding=_written(result.embedding, body.encoding_format))
            for index, result in enumerate(results)
        ]
        usage = EmbeddingUsage(record.prompt_tokens, record.prompt_tokens)
        return EmbeddingResponse(data=data, model=body.model or model.names[0], usage=usage)

    num_numbers = sum(len(result.embedding) for result in results)
    return await built(build, record, num_told=num_numbers // NUMBERS_PER_DETAIL)


async def _embed(
    body: EmbeddingRequest, caller: Caller, model: ActiveModel, packed: list[bytes]
) -> list[EmbeddingResult]:
    results: list[EmbeddingResult | None] = [None] * len(packed)
    waiting = list(enumerate(packed))[::-1]

    async def run_inputs() -> None:
        while waiting:
            number, prompt = waiting.pop()
            args = EmbeddingArgs(prompt=prompt, dimensions=body.dimensions)
            with model.engine.placed(prompt, caller.namespace, session=body.session_id, max_output=1) as placed:
                results[number] = await embedding.main(args, caller, model.runtimes[placed.engine])

    tasks = [asyncio.create_task(run_inputs()) for _ in range(min(PROMPTS_AT_ONCE, len(packed)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [result for result in results if result is not None]


def _written(vector: list[float], form: Literal["float", "base64"]) -> list[float] | str:
    return vector if form == "float" else base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
