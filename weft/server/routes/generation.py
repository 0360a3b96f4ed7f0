"""What chat and completions share, from a request's arguments to its running programs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from starlette.requests import Request

from weft.core.ids import TOKEN_BYTES
from weft.endpoints.generate import Args, chunks_of
from weft.endpoints.models import Model
from weft.endpoints.observe import Observer
from weft.endpoints.schemas.common import GenerationRequest
from weft.endpoints.writers import Head
from weft.programs.types import Chunk
from weft.server.record import record_of


class Run(NamedTuple):
    """The programs of a request. Whoever reads `chunks` closes them."""

    head: Head
    observer: Observer
    chunks: AsyncGenerator[Chunk, None]


def begin(request: Request, body: GenerationRequest, model: Model, args: Sequence[Args], kind: str) -> Run:
    """Run a program for each of `args`; the answer's id begins with `kind`."""
    record = record_of(request)
    prompt_tokens = sum(len(arg.prompt) // TOKEN_BYTES for arg in args)
    caller = record.caller(cache_salt=body.cache_salt, priority=body.priority)
    return Run(
        Head(id=f"{kind}-{record.request_id}", created=int(time.time()), model=body.model or model.names[0]),
        Observer(record, model.metrics, num_prompts=len(args), n=body.n, prompt_tokens=prompt_tokens),
        chunks_of(args, body.n, caller, model.runtime),
    )
