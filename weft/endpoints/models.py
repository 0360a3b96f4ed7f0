"""The served models by name: each has an engine, a tokenizer and a runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from weft.abi.errors import EngineDead, InvalidRequest, UnknownModel
from weft.cluster.replicas import ReplicaSet
from weft.config import ServerConfig
from weft.core.wire import Event
from weft.endpoints.dialect import Dialect
from weft.engine.client import EngineClient
from weft.metrics import ModelMetrics
from weft.programs.runtime import Runtime
from weft.tokenizers.tokenizer import Tokenizer

MAX_LISTED_NAMES = 20
_SHRINKING = 4
"""Bound on the factor by which Unicode normalisation shortens a text."""


class ServedModel:
    """One or more engines and the names under which clients request their model. Metrics use the first name."""

    def __init__(
        self,
        names: list[str],
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        root: str = "",
        stamp: Callable[[], str] = str,
        more_engines: Sequence[EngineClient] = (),
        max_waiting: int | None = None,
    ):
        """`max_waiting`: generations that may wait for one of the engines; None: not known here."""
        if not names:
            raise ValueError("a served model needs a name")
        self.names = names
        self.engines = (engine, *more_engines)
        self.tokenizer = tokenizer
        self.root = root.rstrip("/").rpartition("/")[2] or names[0]
        """The name of the model without its folder, which clients must not see."""
        self.created = int(time.time())
        self.max_waiting = max_waiting
        self.stamp = stamp
        """Returns what tells the weights and defaults of sampling from others, when they are there."""


class ActiveModel:
    """A served model in use: its runtime and its metrics. Used from one event loop."""

    def __init__(
        self,
        served: ServedModel,
        config: ServerConfig,
        dialect: Dialect,
        metrics: ModelMetrics,
        on_event: Callable[[Event], None],
    ):
        """`on_event` receives the engine's events that do not belong to an operation."""
        self.names = served.names
        self.engine = ReplicaSet(served.engines)
        """All engines of the model, as one."""
        self.tokenizer = served.tokenizer
        self.root = served.root
        self._stamp = served.stamp
        self.created = served.created
        self.max_waiting = served.max_waiting
        self.metrics = metrics
        self.dialect = dialect
        self.longest_token = max(map(len, served.tokenizer.token_bytes), default=1)
        """Length of the longest token in bytes; no token has more characters."""
        self.was_ready = False
        """Whether the engine has answered since the server started."""
        self.max_response_logprobs = config.max_response_logprobs
        self._max_text_chars = config.max_text_chars
        self._waits_for_engine = config.engine_wait_s > 0
        self.runtimes = tuple(
            Runtime(engine, served.tokenizer, on_event=on_event, engine_wait_s=config.engine_wait_s)
            for engine in served.engines
        )
        """One for each engine."""

    @property
    def runtime(self) -> Runtime:
        """That of the first engine."""
        return self.runtimes[0]

    @property
    def recovers(self) -> bool:
        """Whether requests wait for the engine while it restarts."""
        return self.was_ready and self._waits_for_engine

    @property
    def weights(self) -> str:
        """What answers depend on besides requests: weights and precision, the longest answer, and the parsers of its
        text. Raises `EngineDead` while the engine starts."""
        info, dialect = self.engine.info, self.dialect
        parsers = f"{dialect.tool_form} {dialect.reasoning}"
        return f"{self.root} {self._stamp()} {info.dtype} {info.max_context} {parsers}"

    @property
    def max_context(self) -> int:
        """Length of the longest sequence in tokens. Raises `EngineDead` while the engine starts."""
        return self.engine.info.max_context

    @property
    def longest_prompt(self) -> int:
        """Upper bound on characters of a prompt that fits the context. Raises `EngineDead` while the engine starts."""
        return _SHRINKING * self.max_context * self.longest_token

    @property
    def max_text_chars(self) -> int:
        """Length in characters of the longest text that is tokenized. Raises `EngineDead` while the engine starts."""
        return self.longest_prompt if self._max_text_chars is None else self._max_text_chars


class Models:
    """All served models, in the order of configuration."""

    def __init__(self, models: Iterable[ActiveModel]):
        """Raises `ValueError` if two models have the same name."""
        self._models = list(models)
        self.by_name = {name: model for model in self._models for name in model.names}
        if len(self.by_name) != sum(len(model.names) for model in self._models):
            raise ValueError("two models are served under the same name")

    def __iter__(self) -> Iterator[ActiveModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, number: int) -> ActiveModel:
        return self._models[number]

    @property
    def ready(self) -> bool:
        """Whether an engine of each model answers."""
        return all(model.engine.ready for model in self._models)

    def find(self, name: str | None) -> ActiveModel:
        """The model of a served name. None names the only model.

        Raises `UnknownModel`, and `InvalidRequest` for None if there are several models.
        """
        if name is None:
            if len(self._models) == 1:
                return self._models[0]
            raise InvalidRequest(f"model is required; {self._served()}.", "model")
        model = self.by_name.get(name)
        if model is None:
            raise UnknownModel(f"The model {name[:200]!r} is not served here; {self._served()}.", "model")
        return model

    def sampling_defaults(self, name: object) -> Mapping[str, float]:
        """Sampling parameters that the model of a served name recommends; empty for a name that is not served."""
        if name is None and len(self._models) == 1:
            return self._models[0].tokenizer.sampling_defaults
        model = self.by_name.get(name) if isinstance(name, str) else None
        return {} if model is None else model.tokenizer.sampling_defaults

    def usable(self, name: str | None) -> ActiveModel:
        """Like `find`, but raises `EngineDead` if the model's engine does not answer."""
        model = self.find(name)
        if not model.engine.ready:
            raise EngineDead("the engine is starting or restarting; try again shortly")
        return model

    def recoverable(self, name: str | None) -> ActiveModel:
        """Like `usable`, but also returns a model whose engine restarts, if requests wait for the restart."""
        model = self.find(name)
        return model if model.recovers else self.usable(name)

    def _served(self) -> str:
        names = sorted(self.by_name)
        more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
        return "served: " + ", ".join(names[:MAX_LISTED_NAMES]) + more
