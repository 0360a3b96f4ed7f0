"""The model behind a terminal chat: an engine in this process, or a server, behind one protocol."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weft.abi.errors import WeftError
from weft.config import EMBEDDED_MODEL
from weft.core.lines import lines_of

if TYPE_CHECKING:
    import httpx

    from weft.config import EngineConfig

Message = Mapping[str, str]

CONNECT_S = 10.0
ABOUT_EMBEDDED_MODEL = (
    "It is a demonstration model with 5 million parameters, for small talk, short stories, JSON and tools.\n"
    "It knows nothing about the world; `weft chat MODEL` uses another model"
)


class Talker(Protocol):
    """A source of answers in a conversation."""

    @property
    def name(self) -> str:
        """The name of the model."""
        ...

    @property
    def description(self) -> str:
        """Description of the model, for the greeting."""
        ...

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[str, None, None]:
        """Yield the pieces of the assistant's next message as they arrive; closing the generator stops it.

        Raises `WeftError`.
        """
        ...

    def close(self) -> None:
        """Free the model or close the connection. Idempotent."""
        ...


class LocalTalker:
    """An engine in this process."""

    def __init__(self, config: EngineConfig):
        from weft.cli.local import local_llm

        self.name = config.model
        self._llm = local_llm(config)
        info = self._llm.info
        self.description = f"{self.name}, {info.dtype} on {info.device}, with a context of {info.max_context} tokens"
        if config.model == EMBEDDED_MODEL:
            self.description += f".\n{ABOUT_EMBEDDED_MODEL}"

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[str, None, None]:
        """Generate the pieces of the answer in this process. Raises `WeftError`."""
        for chunk in self._llm.stream_chat(messages, **options):
            for delta in chunk.deltas:  # of the answer alone, as a server's: reasoning is not said again in later turns
                if delta.get("content"):
                    yield delta["content"]

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self._llm.close()


class RemoteTalker:
    """A server with OpenAI's API. Without a model name it uses the first model of the server."""

    def __init__(self, url: str, model: str | None, api_key: str | None, client: httpx.Client | None = None):
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = client or httpx.Client(headers=headers, timeout=timeout)
        self.name = model or self._first_model()
        self.description = f"{self.name} at {self._url}"

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[str, None, None]:
        """Stream the pieces of the answer from the server. Raises `WeftError`."""
        import httpx

        body = {"model": self.name, "messages": list(messages), "stream": True, **options}
        try:
            with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise WeftError(_problem(response))
                for line in lines_of(response.iter_bytes()):
                    yield from _pieces(line)
        except httpx.HTTPError as error:
            raise WeftError(f"{self._url} does not answer: {error}") from error

    def close(self) -> None:
        """Close the connections of the HTTP client. Idempotent."""
        self._client.close()

    def _first_model(self) -> str:
        import httpx

        try:
            response = self._client.get(f"{self._url}/v1/models")
            if response.status_code != httpx.codes.OK:
                raise WeftError(_problem(response))
            name: str = response.json()["data"][0]["id"]
        except httpx.HTTPError as error:
            raise WeftError(f"no server answers at {self._url}: {error}; start one with `weft serve`") from error
        except (ValueError, LookupError, TypeError) as error:
            raise WeftError(f"{self._url}/v1/models does not list models as OpenAI's API does; name a model") from error
        return name


def _pieces(line: str) -> Iterator[str]:
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise WeftError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            yield text


def _problem(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    return f"the server answered {response.status_code}: {message}"
