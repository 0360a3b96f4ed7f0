"""Who answers a terminal chat: an engine in this process, or a server. One seam, two implementations."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weft.core.errors import WeftError

if TYPE_CHECKING:
    import httpx

    from weft.config import EngineConfig

Message = Mapping[str, str]

CONNECT_S = 10.0


class Talker(Protocol):
    """Gives the assistant's next turn. Closing the iterator stops it."""

    @property
    def name(self) -> str:
        """The model, for the greeting."""
        ...

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[str, None, None]:
        """The pieces of the answer, as they come. Raises `WeftError`."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class LocalTalker:
    """An engine in this process."""

    def __init__(self, config: EngineConfig):
        from weft.cli.local import local_llm

        self.name = config.model
        self._llm = local_llm(config)

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[str, None, None]:
        """The pieces of the answer."""
        for chunk in self._llm.stream_chat(messages, **options):
            if chunk.text:
                yield chunk.text

    def close(self) -> None:
        """Free the model."""
        self._llm.close()


class RemoteTalker:
    """A server with OpenAI's API. Asks it for its model where none is named."""

    def __init__(self, url: str, model: str | None, api_key: str | None, client: httpx.Client | None = None):
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = client or httpx.Client(headers=headers, timeout=timeout)
        self.name = model or self._first_model()

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[str, None, None]:
        """The pieces of the answer."""
        import httpx

        body = {"model": self.name, "messages": list(messages), "stream": True, **options}
        try:
            with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise WeftError(_problem(response))
                for line in response.iter_lines():
                    yield from _pieces(line)
        except httpx.HTTPError as error:
            raise WeftError(f"{self._url} does not answer: {error}") from error

    def close(self) -> None:
        """Close the connection."""
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
            raise WeftError(f"{self._url}/v1/models does not list models as OpenAI's API does; name one") from error
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
