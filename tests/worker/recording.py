"""A stand-in for a device's graphs: what torch's dispatcher and Triton's launches did is recorded, and done again.

As on a device, Python is not asked again: branches, sizes and numbers that came from the host are what they were at the
capture, and every result goes where it went then. Before each replay, whatever the recorded operations had written to
memory of their own is overwritten, so that nothing is right because it was right before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

POISON = {torch.bool: True, torch.int64: 3, torch.int32: 3, torch.uint8: 3}
"""Integers that are wrong but lead to no foreign memory."""

Replayed = Callable[[], None]


class RecordingBackend:
    """`graphs.GraphBackend`. Made by `recording_backend`, which has Triton's launches recorded as well."""

    def __init__(self) -> None:
        self.graphs: list[Recording] = []
        self.current: Recording | None = None
        self.refuse: Exception | None = None

    def capture(self, body: Callable[[], None]) -> Recording:
        if self.refuse is not None:
            raise self.refuse
        self.current = recording = Recording()
        try:
            with recording:
                body()
        finally:
            self.current = None
        recording.poison()
        self.graphs.append(recording)
        return recording


class Recording(TorchDispatchMode):
    """`graphs.Graph`."""

    def __init__(self) -> None:
        super().__init__()
        self._again: list[Replayed] = []
        self._own: dict[int, Tensor] = {}
        """By the address of their storage: tensors that are alive as long as this is."""
        self.num_launches = 0

    def replay(self) -> None:
        self.poison()
        for again in self._again:
            again()

    def poison(self) -> None:
        for tensor in self._own.values():
            whole = tensor.new_empty(0).set_(tensor.untyped_storage())
            whole.fill_(POISON.get(tensor.dtype, float("nan")))

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_launches += 1
        with _disable_current_modes():
            kernel[grid](*args, **kwargs)
        self._again.append(lambda: kernel[grid](*args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise AssertionError(f"{func} depends on data: a device would have to be waited for")
        out = func(*args, **kwargs)
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.numel()]
        fresh = [tensor for tensor in made if _address(tensor) not in given]
        if func._schema.is_mutable:
            self._again.append(lambda: func(*args, **kwargs))
        elif fresh:
            assert len(fresh) == len(made), f"{func} returns both views and new tensors"
            self._own |= {_address(tensor): tensor for tensor in fresh}
            if "empty" not in str(func):
                self._again.append(lambda: _copy_all(made, func(*args, **kwargs)))
        return out


class _Launcher:
    """Stands for a kernel."""

    def __init__(self, kernel: Any, backend: RecordingBackend):
        self._kernel = kernel
        self._backend = backend

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            if self._backend.current is None:
                self._kernel[grid](*args, **kwargs)
            else:
                self._backend.current.launch(self._kernel, grid, args, kwargs)

        return launch


class _Kernels:
    """Stands for a module of kernels."""

    def __init__(self, module: Any, backend: RecordingBackend):
        for name, value in vars(module).items():
            is_kernel = hasattr(value, "fn") and not name.startswith("_")
            setattr(self, name, _Launcher(value, backend) if is_kernel else value)


@contextmanager
def recording_backend() -> Iterator[RecordingBackend]:
    from weft.kernels.triton import attention, ops

    backend = RecordingBackend()
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, ops):
            patch.setattr(module, "device", _Kernels(module.device, backend))
        yield backend


def _copy_all(into: list[Tensor], out: Any) -> None:
    found = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.numel()]
    for target, source in zip(into, found, strict=True):
        target.copy_(source)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
