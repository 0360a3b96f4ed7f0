"""Next-token distributions, and sampling from them inside the program.

Log-probabilities are the model's own, in nats. A distribution holds those of the `k` most probable tokens only.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from weft.abi.errors import InvalidRequest

_ID = struct.Struct("<i")


class _Packed:
    """A distribution as packed bytes. A field is unpacked at its first use: most loops need only the most probable
    token, and unpacking hundreds of numbers costs more than the call itself."""

    __slots__ = ("_packed",)
    _packed: tuple[bytes, bytes, bytes] | None
    """Ids (int32; negative ids at the end are padding); log-probabilities (float32); log-probabilities of the given
    tokens (float32). None if the constructor set the fields."""

    def __getattr__(self, name: str) -> Any:
        """Unpack a field at its first use."""
        if name == "_packed":
            return None
        if self._packed is None or name not in ("ids", "logprobs", "given"):
            raise AttributeError(f"a distribution has no {name}", name=name, obj=self)
        ids, logprobs, given = self._packed
        value: tuple[float, ...]
        if name == "ids":
            value = struct.unpack(f"<{len(ids) // 4}i", ids)
            if value and value[-1] < 0:
                value = tuple(token for token in value if token >= 0)
        elif name == "logprobs":
            value = struct.unpack(f"<{len(logprobs) // 4}f", logprobs)[: len(self.ids)]
        else:
            value = struct.unpack(f"<{len(given) // 4}f", given)
        object.__setattr__(self, name, value)
        return value


@dataclass(frozen=True, slots=True)
class Dist(_Packed):
    """The most probable next tokens, most probable first."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    given: tuple[float, ...] = ()
    """Log-probabilities of the given tokens, in their order."""

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Pairs of token and log-probability."""
        return iter(zip(self.ids, self.logprobs, strict=True))

    def max_index(self) -> int:
        """The id of the most probable token."""
        if self._packed is not None and self._packed[0]:
            first: int = _ID.unpack_from(self._packed[0])[0]
            if first >= 0:
                return first
        self._check()
        return self.ids[0]

    def logprob(self, token: int) -> float:
        """The log-probability of a token; minus infinity for a token that is not in the distribution."""
        return self.logprobs[self.ids.index(token)] if token in self.ids else -math.inf

    def probs(self) -> list[float]:
        """Probabilities under the model, in the order of `ids`. Their sum is below 1 if tokens are left out."""
        return [math.exp(logprob) for logprob in self.logprobs]

    @property
    def entropy(self) -> float:
        """Entropy in nats of the known tokens, normalised to a sum of 1."""
        self._check()
        weights = self._weights(1.0)
        total = sum(weights)
        return -sum(weight / total * math.log(weight / total) for weight in weights if weight > 0)

    def keep(self, allowed: Collection[int] | Callable[[int], bool]) -> Dist:
        """A distribution of the allowed tokens only. `allowed` is a set, a grammar's `Allowed`, or a predicate."""
        is_allowed = allowed if callable(allowed) else allowed.__contains__
        return self._only([at for at, token in enumerate(self.ids) if is_allowed(token)])

    def top_k(self, k: int) -> Dist:
        """A distribution of the `k` most probable tokens only."""
        return self._only(range(min(k, len(self.ids))))

    def top_p(self, p: float) -> Dist:
        """A distribution of the fewest tokens that hold the share `p` of the known probability; at least one token."""
        weights = self._weights(1.0)
        limit, total, count = p * sum(weights), 0.0, 0
        for weight in weights:
            count += 1
            total += weight
            if total >= limit:
                break
        return self._only(range(count))

    def sample(self, temperature: float = 1.0, rng: random.Random | None = None) -> int:
        """Sample one of the known tokens. Temperature 0 takes the most probable one."""
        self._check()
        if temperature <= 0:
            return self.ids[0]
        weights = self._weights(temperature)
        return (rng or random).choices(self.ids, weights)[0]

    def _only(self, places: Collection[int] | range) -> Dist:
        return Dist(tuple(self.ids[at] for at in places), tuple(self.logprobs[at] for at in places), self.given)

    def _weights(self, temperature: float) -> list[float]:
        """Weights proportional to the probabilities; the largest is 1, so that none overflows."""
        best = max(self.logprobs, default=0.0)
        return [math.exp((logprob - best) / temperature) for logprob in self.logprobs]

    def _check(self) -> None:
        if not self.ids:
            raise InvalidRequest("the distribution is empty: none of the known tokens is allowed; ask for a larger k")


def unpack_dist(ids: bytes, logprobs: bytes, given: bytes = b"") -> Dist:
    """A distribution from its packed parts. Negative ids are padding."""
    dist = Dist.__new__(Dist)
    object.__setattr__(dist, "_packed", (ids, logprobs, given))
    return dist
