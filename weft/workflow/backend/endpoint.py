"""Models of this process: calls go to the functions that answer the server's endpoints, without HTTP."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.core.ids import unpack_tokens
from weft.endpoints.models import Models
from weft.endpoints.prompts import chat_prompt_of
from weft.endpoints.record import Record
from weft.endpoints.schemas.chat import ChatRequest, ChatResponse
from weft.endpoints.schemas.common import UsageInfo
from weft.endpoints.schemas.completion import CompletionRequest, CompletionResponse
from weft.endpoints.table import ENDPOINTS
from weft.tokenizers import chats
from weft.workflow.analysis.prompts import PromptTokens
from weft.workflow.backend.prompt_tokens import TokenizerPrompts
from weft.workflow.planner.place import PlanEngine
from weft.workflow.run.calls import CallUsage, ModelAnswer, ModelRequest
from weft.workflow.run.planning import PlanSources

MAX_COUNTED_CHARS = 4096
"""Of a value of a row that is longer, plans count the tokens of the beginning: a plan must not take longer than the
calls that it orders."""


@dataclass(slots=True)
class _CallRecord(Record):
    """The record of a call, which tells when its first token came."""

    on_start: Callable[[], None] = lambda: None

    def mark(self, what: str) -> None:
        """As `Record.mark`."""
        if what == "first_token":
            self.on_start()
        Record.mark(self, what)


class EndpointBackend:
    """Calls of one tenant at the models of this process."""

    def __init__(
        self, models: Models, tenant: str = "", name: str = "workflow", fields: Mapping[str, Any] | None = None
    ):
        """`fields` are those of every call that does not give its own, such as `model`."""
        self._fields = fields or {}
        self._models = models
        self._tenant = tenant
        self._name = name
        self._numbers = itertools.count()

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        """As `ModelBackend.complete`."""
        endpoint = ENDPOINTS[request.endpoint]
        record = _CallRecord(
            request_id=f"{self._name}-{next(self._numbers)}",
            started_s=time.monotonic(),
            tenant=self._tenant,
            route=request.endpoint,
            on_start=started,
        )
        body = endpoint.decode({**self._fields, **request.hinted}, self._models)
        reply = await endpoint.create(body, record, self._models)
        assert isinstance(reply, (ChatResponse, CompletionResponse))
        return _completed(reply) if isinstance(reply, CompletionResponse) else _chatted(reply)

    async def prompt_digest(self, request: ModelRequest) -> str:
        """As `KnowsTokens.prompt_digest`."""
        asked = ENDPOINTS[request.endpoint].decode({**self._fields, **request.body}, self._models)
        assert isinstance(asked, (ChatRequest, CompletionRequest))
        tokenizer = self._models.find(asked.model).tokenizer
        special = asked.add_special_tokens
        if isinstance(asked, ChatRequest):
            prompt = chat_prompt_of(asked)
            tokens = (await chats.encode(prompt, tokenizer, add_special_tokens=special, tenant=self._tenant)).tokens
        else:
            text = request.body["prompt"]
            tokens = await tokenizer.encode_async(text, add_special_tokens=special, tenant=self._tenant)
        return hashlib.sha256(tokens).hexdigest()

    async def split(self, text: str, ranges: Callable[[int], list[tuple[int, int]]]) -> list[str]:
        """As `ModelBackend.split`, by the tokens of the model of `fields`, else of the first one. A character
        in several tokens is in the part in which it begins."""
        name = self._fields.get("model")
        tokenizer = (self._models[0] if name is None else self._models.find(name)).tokenizer
        packed = await tokenizer.encode_async(text, add_special_tokens=False, tenant=self._tenant)
        pieces = [tokenizer.bytes_of(token) for token in unpack_tokens(packed)]
        whole = b"".join(pieces)
        ends = [0, *itertools.accumulate(map(len, pieces))]
        cuts = [next((at for at in range(end, len(whole)) if whole[at] & 0xC0 != 0x80), len(whole)) for end in ends]
        return [whole[cuts[start] : cuts[end]].decode(errors="replace") for start, end in ranges(len(pieces))]


def plan_sources(models: Models, model: str) -> PlanSources:
    """What plans of runs on these models are made for, as far as their engines answer; `model` is that of calls that
    name none."""
    prompts: dict[int, TokenizerPrompts] = {}

    def tokens(name: str) -> PromptTokens:
        tokenizer = models.find(name).tokenizer
        return prompts.setdefault(id(tokenizer), TokenizerPrompts(tokenizer, MAX_COUNTED_CHARS))

    engines = []
    for active in models:
        if not active.engine.ready:
            continue
        info = active.engine.info
        kv_tokens = info.num_device_pages * info.page_size
        engines += [
            PlanEngine(
                served,
                kv_tokens,
                page_size=info.page_size,
                max_step_tokens=info.max_step_tokens,
                forward=info.forward,
            )
            for served in active.names
        ]
    return PlanSources(tokens, engines, model)


def _chatted(reply: ChatResponse) -> ModelAnswer:
    (choice,) = reply.choices
    message = choice.message
    calls = () if isinstance(message.tool_calls, msgspec.UnsetType) else tuple(msgspec.to_builtins(message.tool_calls))
    return ModelAnswer(message.content or "", choice.finish_reason, calls, _usage(reply.usage))


def _completed(reply: CompletionResponse) -> ModelAnswer:
    (choice,) = reply.choices
    return ModelAnswer(choice.text, choice.finish_reason or "stop", (), _usage(reply.usage))


def _usage(used: UsageInfo | msgspec.UnsetType | None) -> CallUsage:
    if not isinstance(used, UsageInfo):
        return CallUsage()
    details = used.prompt_tokens_details
    return CallUsage(used.prompt_tokens, details.cached_tokens if details else 0, used.completion_tokens)
