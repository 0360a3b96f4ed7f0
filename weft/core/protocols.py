"""The seam to the device. `weft.worker` has the real worker, `weft.sim` one that only takes time, `weft.testing` a fake
one."""

from __future__ import annotations

from typing import Protocol

import msgspec

from weft.core.step import LateInputs, Step, StepHandle


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker offers its scheduler."""

    vocab_size: int
    hidden_size: int
    page_size: int
    """Tokens of a page, 8 to 32."""
    num_device_pages: int
    num_host_pages: int
    num_slots: int
    """Device slots: the sequences that can be sampled at once."""
    num_embed_slots: int
    max_context: int
    """Longest sequence the model's positions allow, in tokens."""
    bytes_per_page: int
    """KV bytes of a page over all layers."""
    device: str
    dtype: str
    quantization: str | None = None
    """Of the layers' weights, or the types of blocks that they stay in; None: they have `dtype`."""
    has_windows: bool = False
    """Some layers see no further back than a number of tokens."""


class Worker(Protocol):
    """The device side: carries out steps, in the order they are launched.

    `launch` returns at once. Its forward half starts when earlier steps are done; its sampling half also waits for
    `bind`, which must be called exactly once for every launched step.
    """

    @property
    def spec(self) -> WorkerSpec:
        """Sizes and shapes of the worker; they never change."""
        ...

    def launch(self, step: Step) -> StepHandle:
        """Start a step. Never blocks on the device."""
        ...

    def bind(self, handle: StepHandle, late: LateInputs) -> None:
        """Give a launched step the masks of its sampling half."""
        ...

    def close(self) -> None:
        """Finish what was launched and give back the device's memory. Idempotent."""
        ...
