"""Any server with OpenAI's API. It has none of the features of our engines, and everything else works."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec

from weft.abi.errors import EngineDead, InvalidRequest, Overloaded, UnknownModel, Unsupported, WeftError
from weft.core.lines import async_lines_of
from weft.workflow.backend.gathered import GatheredAnswer
from weft.workflow.backend.token_parts import parts_of, pieces_of
from weft.workflow.graph.schema_check import schema_mistake, unchecked_keywords
from weft.workflow.graph.values import PartRanges
from weft.workflow.run.allowance import bound_of
from weft.workflow.run.backend import CallProgress
from weft.workflow.run.calls import CHAT, AnswerRefused, CallBound, EveryCallRefused, ModelAnswer, ModelRequest
from weft.workflow.run.state import pause_s

CONNECT_S = 10.0
SILENCE_S = 600.0
"""Longest time without a byte of an answer."""
_COUNTED = ("messages", "prompt", "tools", "documents", "chat_template_kwargs", "add_generation_prompt")
"""Fields of a request that are a part of its prompt."""


def http_client(
    url: str, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """A client of a server, whose address may end with `/v1` or not."""
    return httpx.AsyncClient(
        base_url=_base_of(url),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        limits=httpx.Limits(max_connections=None),
        timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
        transport=transport,
    )


def _base_of(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


class OpenAIBackend:
    """Calls over HTTP. The model is the server's only one unless a call names another."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self._base = _base_of(url)
        self._http = http_client(url, api_key, transport)
        self._model = model
        self._cards: list[dict[str, Any]] | None = None
        self._finding = asyncio.Lock()
        self._has_tokenizer = True
        """As far as is known."""

    async def complete(self, request: ModelRequest, started: CallProgress) -> ModelAnswer:
        """As `ModelBackend.complete`; the answer is streamed, because its first piece tells that it has begun. Raises
        `AnswerRefused` for one that does not follow its schema."""
        model = await self.model_of(request)
        fields = request.hinted if request.hints and await self._is_ours() else request.body
        body = {**fields, "model": model, "stream": True, "stream_options": {"include_usage": True}}
        gathered = GatheredAnswer(is_chat=request.endpoint == CHAT)
        try:
            async for chunk in self._events(request.endpoint, body):
                started()
                started.text(gathered.add(chunk))
        except UnknownModel as error:
            if request.body.get("model"):
                raise
            raise await self._refusal_of_all(model, error) from error
        answer = gathered.answer()
        await self._check_schema(body.get("response_format"), answer)
        return answer

    async def _check_schema(self, form: Any, answer: ModelAnswer) -> None:
        """Raise `AnswerRefused` for an answer that is JSON and does not follow the schema that was sent: some servers
        ignore the field. Schemas with keywords that cannot be checked are not."""
        if not isinstance(form, Mapping) or form.get("type") != "json_schema":
            return
        asked = form["json_schema"]
        schema = asked.get("schema", {})
        if asked.get("strict") is False or unchecked_keywords(schema):
            return
        try:
            value = msgspec.json.decode(answer.text)
        except msgspec.DecodeError:
            return  # what it is instead is said where the value is read
        mistake = await asyncio.to_thread(schema_mistake, schema, value)
        if mistake is not None:
            raise AnswerRefused(
                f"the answer does not follow its schema: {mistake}; {self._base} does not hold answers to "
                "response_format, so describe the form in the prompt too",
                answer,
            )

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        """Parts of a text by the model's tokens. Raises `Unsupported` for a server without `/tokenize`, which ours and
        vLLM have, and where a part begins or ends within a character of a server that tells tokens as numbers alone."""
        model = await self.only_model()
        asked = {"model": model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        try:
            answer = await self._json("POST", "/tokenize", asked)
        except UnknownModel as error:
            raise await self._refusal_of_all(model, error) from error
        tokens: list[int] = answer["tokens"]
        strings = answer.get("token_strs")
        pieces = None if strings is None else pieces_of(strings, text)
        if pieces is not None:
            return parts_of(pieces, ranges)
        parts = []
        for start, end in ranges(range(len(tokens) + 1), lambda at: True):
            answer = await self._json("POST", "/detokenize", {"model": model, "tokens": tokens[start:end]})
            parts.append(answer["text"] if "text" in answer else answer["prompt"])
            if parts[-1] not in text:
                raise Unsupported(
                    f"{self._base} does not tell the bytes of its tokens, and {parts[-1][-20:]!r} is no part of the "
                    "text: split at a separator"
                )
        return parts

    async def call_bound(self, request: ModelRequest) -> CallBound | None:
        """As `BoundsCalls.call_bound`, where the server has `/tokenize`, as ours and vLLM have."""
        if not self._has_tokenizer:
            return None
        asked = {name: request.body[name] for name in _COUNTED if name in request.body}
        asked["model"] = await self.model_of(request)
        try:
            found = await self._json("POST", "/tokenize", asked)
            return bound_of(request, found["count"], found.get("max_model_len"))
        except (Unsupported, LookupError, TypeError):
            self._has_tokenizer = False
            return None
        except InvalidRequest:  # this request alone: one that its template refuses, for example
            return None

    async def model_of(self, request: ModelRequest) -> str:
        """As `NamesModels.model_of`: the one that it names, or the only one of the server."""
        named: str | None = request.body.get("model")
        return named or await self.only_model()

    async def only_model(self) -> str:
        """The model of calls that name none. Raises `WeftError`: `EveryCallRefused` where the server has several."""
        if self._model is None:
            names = [model["id"] for model in await self._served()]
            if len(names) != 1:
                raise EveryCallRefused(f"{self._base} serves {_listed(names)}: name one with model", "model")
            self._model = names[0]
        return self._model

    async def _refusal_of_all(self, model: str, error: UnknownModel) -> WeftError:
        """The error of a call without a model of its own, whose model the server does not know."""
        try:
            names = [str(card["id"]) for card in await self._served()]
        except WeftError:
            names = []
        if model in names:  # it is refused for this call alone, such as a chat
            return error
        why = f"; it serves {_listed(names)}: name one with model" if names else f": {error.message}"
        return EveryCallRefused(f"{self._base} does not serve the model {model[:200]!r}{why}", "model")

    async def wait_for_model(self, retries: int) -> str:
        """As `only_model`, of a server that may be away: asked again as a call with so many retries is made again."""
        for attempts in range(retries):
            try:
                return await self.only_model()
            except (EngineDead, Overloaded) as error:
                await asyncio.sleep(pause_s(attempts, error))
        return await self.only_model()

    async def close(self) -> None:
        """Close the connections of the client; calls in progress fail."""
        await self._http.aclose()

    async def _is_ours(self) -> bool:
        """Whether the server is Weft. Others may refuse fields that they do not know."""
        try:
            return any(model.get("owned_by") == "weft" for model in await self._served())
        except InvalidRequest:
            self._cards = []  # it lists no models
            return False

    async def _served(self) -> list[dict[str, Any]]:
        """The cards of the server's models; asked for once."""
        async with self._finding:
            if self._cards is None:
                found = await self._json("GET", "/v1/models")
                cards = found.get("data") if isinstance(found, dict) else None
                if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
                    raise EveryCallRefused(
                        f"{self._base} does not list its models as OpenAI's API does: name one with model", "model"
                    )
                self._cards = cards
        return self._cards

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise lost(self._base, error) from error
        if response.is_error:
            told = refused(response, body)
            is_missing = response.status_code == httpx.codes.NOT_FOUND and not isinstance(told, UnknownModel)
            if is_missing and path == "/tokenize":
                raise Unsupported(
                    f"{self._base} has no /tokenize, so texts cannot be split by tokens: split at a separator"
                )
            raise told
        try:
            return response.json()
        except ValueError:
            raise InvalidRequest(
                f"{self._base}{path} did not answer with JSON: is it the address of a server with OpenAI's API?"
            ) from None

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise refused(response, body)
                async for line in async_lines_of(response.aiter_bytes()):
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data in ("", "[DONE]"):
                        continue
                    event = _event(data)
                    if error := event.get("error"):
                        raise EngineDead(str(error.get("message", error) if isinstance(error, dict) else error))
                    yield event
        except httpx.HTTPError as error:
            raise lost(self._base, error) from error


def _event(data: str) -> dict[str, Any]:
    """An event of a stream. Raises `EngineDead` for a part of one: the server is gone, and no error says so where the
    end of the connection is the end of the answer."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        raise EngineDead("the answer ended within an event") from None


def lost(base: str, error: httpx.HTTPError) -> EngineDead:
    """The error of a request without a response."""
    return EngineDead(f"no answer from {base}: {error or type(error).__name__}")


def refused(response: httpx.Response, body: Mapping[str, Any] | None = None) -> WeftError:
    """The error of a response, which was read, to this body."""
    status = response.status_code
    try:
        told = msgspec.json.decode(response.content)["error"]
        message, code = str(told["message"]), told.get("code")
    except (msgspec.DecodeError, KeyError, TypeError):
        message, code = response.content[:200].decode(errors="replace") or f"status {status}", None
    after = response.headers.get("retry-after", "")
    if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        return Overloaded(message, retry_after_s=float(after) if after.isdecimal() else None)
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return EngineDead(message)
    if status == httpx.codes.UNAUTHORIZED:
        return EveryCallRefused(f"{message} (status {status}): give the server's key as api_key", "api_key")
    names_model = status == httpx.codes.NOT_FOUND and _has_word(message, (body or {}).get("model") or "")
    if code == "model_not_found" or names_model:
        return UnknownModel(f"{message} (status {status})", "model")
    return InvalidRequest(f"{message} (status {status})")


def _has_word(text: str, word: str) -> bool:
    return bool(word) and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) or "no model"
