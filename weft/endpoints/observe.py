"""Observes the chunks of one request, for its usage, its metrics and its log line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

import msgspec

from weft.core.wire import OperationUsage
from weft.endpoints.record import Record
from weft.endpoints.schemas.common import PromptTokensDetails, UsageInfo
from weft.metrics import ModelMetrics
from weft.programs.types import Chunk


class Observer:
    """Sees every chunk of a request once, in order, and then the end of the request: `with observer:` around reading
    the chunks, and `see` for each; `watch` does both."""

    def __init__(self, record: Record, metrics: ModelMetrics, *, num_prompts: int, n: int, prompt_tokens: int):
        self._record = record
        self._metrics = metrics
        self._n = n
        self._num_choices = num_prompts * n
        self._last_s: dict[int, float] = {}
        self._prompts: dict[int, OperationUsage] = {}
        """Index of the prompt -> the usage of its first choice; the other choices are forks."""
        self._ended: set[int] = set()
        self._queued_s: float | None = None
        record.prompt_tokens = prompt_tokens

    async def watch(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        """Pass the chunks on after counting each. The request ends with the chunks. Closes them."""
        with self:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self.see(chunk)
                    yield chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The request has ended, by this error if there is one."""
        self.close(error)

    def see(self, chunk: Chunk) -> None:
        """Count the tokens of a chunk and record its time."""
        record, count = self._record, len(chunk.tokens)
        if count:
            now = time.monotonic()
            if record.first_token_s is None:
                record.first_token_s = now - record.started_s
                record.mark("first_token")
                if record.on_first_token is not None:
                    record.on_first_token()
                self._metrics.time_to_first_token.observe(record.first_token_s)
            last = self._last_s.get(chunk.index)
            if last is not None:
                self._metrics.inter_token.observe((now - last) / count, count)
            elif count > 1 and chunk.score is None:
                # The tokens of a beam arrive together, so the time between them is not measured.
                self._metrics.inter_token.observe(0.0, count - 1)
            self._last_s[chunk.index] = now
            record.completion_tokens += count
        if chunk.usage is not None:
            self._see_usage(chunk.index, chunk.usage)
        if chunk.finish_reason is not None:
            self._ended.add(chunk.index)
            self._metrics.finished.add(chunk.finish_reason)

    def _see_usage(self, index: int, usage: OperationUsage) -> None:
        prompt, choice = divmod(index, self._n)
        if choice == 0:
            self._prompts[prompt] = usage
            if prompt == 0:
                self._record.usage = usage
            self._queued_s = max(self._queued_s or 0.0, usage.queued_s)
            self._record.cached_tokens = sum(usage.num_cached_tokens for usage in self._prompts.values())

    def usage(self, unsaid_tokens: int = 0) -> UsageInfo:
        """Usage so far, without `unsaid_tokens`, which were seen but are not in the answer yet.

        Each prompt counts once; where its tokens came from is what its first choice found.
        """
        record = self._record
        num_tokens = record.completion_tokens - unsaid_tokens
        known = len(self._prompts) * self._n == self._num_choices or len(self._ended) == self._num_choices
        return UsageInfo(
            record.prompt_tokens,
            num_tokens,
            record.prompt_tokens + num_tokens,
            self._details() if known else msgspec.UNSET,
        )

    def _details(self) -> PromptTokensDetails:
        usages = list(self._prompts.values())
        cached = min(self._record.cached_tokens, self._record.prompt_tokens)
        computed = self._record.prompt_tokens - cached
        recomputed = min(sum(usage.num_recomputed_tokens for usage in usages), computed)
        return PromptTokensDetails(
            cached_tokens=cached,
            continued_tokens=min(sum(usage.num_continued_tokens for usage in usages), cached),
            host_tokens=min(sum(usage.num_host_tokens for usage in usages), cached),
            recomputed_tokens=recomputed,
            new_tokens=computed - recomputed,
            first_different_token=usages[0].first_different_token if self._num_choices == self._n and usages else None,
        )

    def close(self, error: BaseException | None) -> None:
        """Record the end of the request; `error` is None for a success."""
        metrics, record = self._metrics, self._record
        metrics.request_prompt_tokens.observe(record.prompt_tokens)
        metrics.request_generation_tokens.observe(record.completion_tokens)
        if self._queued_s is not None:
            metrics.queue_time.observe(self._queued_s)
        if error is None:
            metrics.e2e.observe(time.monotonic() - record.started_s)
            return
        unfinished = self._num_choices - len(self._ended)
        if unfinished:
            aborted = not isinstance(error, Exception)
            metrics.finished.add("abort" if aborted else "error", amount=unfinished)
