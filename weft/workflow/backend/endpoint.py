"""Models of this process: calls go to the functions that answer the server's endpoints, without HTTP."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.core.wire import OperationUsage
from weft.endpoints.models import ActiveModel, Models
from weft.endpoints.prompts import chat_prompt_of
from weft.endpoints.record import Record, namespace_of
from weft.endpoints.schemas.chat import ChatRequest, ChatResponse
from weft.endpoints.schemas.completion import CompletionRequest, CompletionResponse
from weft.endpoints.table import ENDPOINTS
from weft.endpoints.writers import StreamEvents
from weft.programs.retains import OnRetained
from weft.tokenizers import chats
from weft.tokenizers.tokenizer import off_loop
from weft.workflow.actuals import CallUsage
from weft.workflow.analysis.prompts import PromptTokens
from weft.workflow.backend.gathered import GatheredAnswer
from weft.workflow.backend.prompt_tokens import TokenizerPrompts
from weft.workflow.backend.token_parts import parts_of
from weft.workflow.graph.values import PartRanges
from weft.workflow.planner.place import PlanEngine
from weft.workflow.run.allowance import bound_of
from weft.workflow.run.backend import CallProgress
from weft.workflow.run.calls import CHAT, CallBound, ModelAnswer, ModelRequest, PromptFound
from weft.workflow.run.keeper import KeptPrefix
from weft.workflow.run.pins import KvPrefix
from weft.workflow.run.planning import PlanSources

MAX_COUNTED_CHARS = 4096
"""Of a value of a row that is longer, plans count the tokens of the beginning: a plan must not take longer than the
calls that it orders."""
MAX_ENCODED = 64
"""Chats whose tokens wait for their calls."""


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
        self._encoded: dict[int, tuple[Mapping[str, Any], chats.EncodedChat]] = {}
        """By the identity of their bodies, chats that were encoded for a digest and not yet sent; the last few."""

    async def complete(self, request: ModelRequest, started: CallProgress) -> ModelAnswer:
        """As `ModelBackend.complete`. A call begins when it gets its first place in a batch."""
        endpoint = ENDPOINTS[request.endpoint]
        record = Record(
            request_id=f"{self._name}-{next(self._numbers)}",
            started_s=time.monotonic(),
            tenant=self._tenant,
            route=request.endpoint,
            on_start=lambda start: started(
                PromptFound(start.num_prompt_tokens, start.num_cached_tokens, start.num_continued_tokens)
            ),
            on_first_token=started.first_token,
            replica=request.advice.replica,
            prompt=self._encoded.pop(id(request.body), (None, None))[1],
        )
        following = request.advice.next_turn
        if following is not None:
            record.wait_kind = following.wait_kind
            record.expected_in_s = following.in_s
        fields = {**self._fields, **request.hinted}
        if started.wants_text:
            fields |= {"stream": True, "stream_options": None}
        reply = await endpoint.create(endpoint.decode(fields, self._models), record, self._models)
        if isinstance(reply, ChatResponse):
            answer = _chatted(reply)
        elif isinstance(reply, CompletionResponse):
            answer = _completed(reply)
        else:
            assert isinstance(reply, AsyncGenerator)
            answer = await _streamed(reply, started, is_chat=request.endpoint == CHAT)
        return answer._replace(usage=_usage(record))

    def retain(self, prefix: KvPrefix, pinned_part: float, told: OnRetained) -> KeptPrefix:
        """As `KeepsPrefixes.retain`."""
        salt = self._fields.get("cache_salt") if prefix.salt is None else prefix.salt
        runtime = self._models.find(prefix.model or self._fields.get("model")).runtimes[prefix.replica]
        return runtime.retains.retain(self._tenant, namespace_of(self._tenant, salt), prefix.tokens, pinned_part, told)

    async def prompt_digest(self, request: ModelRequest) -> str:
        """A digest of the prompt's token ids."""
        _, tokens = await self._prompt(request)
        return hashlib.sha256(tokens).hexdigest()

    async def call_bound(self, request: ModelRequest) -> CallBound:
        """As `BoundsCalls.call_bound`."""
        model, tokens = await self._prompt(request)
        return bound_of(request, len(tokens) // TOKEN_BYTES, model.max_context)

    async def _prompt(self, request: ModelRequest) -> tuple[ActiveModel, bytes]:
        """The model of a request, and the prompt's token ids, rendered and tokenized as the endpoint does it."""
        asked = ENDPOINTS[request.endpoint].decode({**self._fields, **request.body}, self._models)
        assert isinstance(asked, (ChatRequest, CompletionRequest))
        model = self._models.find(asked.model)
        tokenizer = model.tokenizer
        special = asked.add_special_tokens
        if isinstance(asked, ChatRequest):
            prompt = chat_prompt_of(asked)
            encoded = await chats.encode(prompt, tokenizer, add_special_tokens=special, tenant=self._tenant)
            tokens = encoded.tokens
            self._encoded[id(request.body)] = request.body, encoded
            if len(self._encoded) > MAX_ENCODED:  # of calls whose answers were in the prompt cache
                del self._encoded[next(iter(self._encoded))]
        else:
            text = request.body["prompt"]
            tokens = await tokenizer.encode_async(text, add_special_tokens=special, tenant=self._tenant)
        return model, tokens

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        """Parts of a text by the tokens of the model of `fields`, else of the first one."""
        name = self._fields.get("model")
        tokenizer = (self._models[0] if name is None else self._models.find(name)).tokenizer
        packed = await tokenizer.encode_async(text, add_special_tokens=False, tenant=self._tenant)

        def parts() -> list[str]:
            return parts_of([tokenizer.bytes_of(token) for token in unpack_tokens(packed)], ranges)

        return await off_loop(parts, tenant=self._tenant)


def sources_of_models(models: Models, model: str) -> PlanSources:
    """What plans of runs on these models are made for, as far as their engines answer; `model` is that of calls that
    name none."""
    prompts: dict[int, TokenizerPrompts] = {}

    def tokens(name: str) -> PromptTokens:
        tokenizer = models.find(name).tokenizer
        return prompts.setdefault(id(tokenizer), TokenizerPrompts(tokenizer, MAX_COUNTED_CHARS))

    engines = []
    for active in models:
        for replica, engine in enumerate(active.engine.engines):
            if not engine.ready:
                continue
            info = engine.info
            kv_tokens = info.num_device_pages * info.page_size
            engines += [
                PlanEngine(
                    served,
                    kv_tokens,
                    page_size=info.page_size,
                    max_step_tokens=info.max_step_tokens,
                    forward=info.forward,
                    replica=replica,
                )
                for served in active.names
            ]
    return PlanSources(tokens, engines, model)


def _chatted(reply: ChatResponse) -> ModelAnswer:
    (choice,) = reply.choices
    message = choice.message
    calls = () if isinstance(message.tool_calls, msgspec.UnsetType) else tuple(msgspec.to_builtins(message.tool_calls))
    return ModelAnswer(message.content or "", choice.finish_reason, calls)


def _completed(reply: CompletionResponse) -> ModelAnswer:
    (choice,) = reply.choices
    return ModelAnswer(choice.text, choice.finish_reason or "stop")


async def _streamed(
    events: AsyncGenerator[StreamEvents, None], progress: CallProgress, *, is_chat: bool
) -> ModelAnswer:
    gathered = GatheredAnswer(is_chat=is_chat)
    async with aclosing(events):
        async for each in events:
            for value in each.values:
                progress.text(gathered.add(msgspec.to_builtins(value)))
    return gathered.answer()


def _usage(record: Record) -> CallUsage:
    found = record.usage or OperationUsage()
    return CallUsage(
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        min(found.num_continued_tokens, record.cached_tokens),
        found.num_prefill_tokens,
    )
