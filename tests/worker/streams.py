"""A stand-in for the streams of a CUDA device: what they are told to do is noted, in order, and done at once.

Each thing done knows what it comes after: what its stream had before, and what that stream was told to wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Stream:
    """Of a device that has a default one and those that were made."""

    def __init__(self, streams: Streams, name: str):
        self.streams = streams
        self.name = name
        self.past: set[int] = set()
        """Numbers of the things that are done before whatever this stream is given next."""

    def wait_stream(self, other: Stream) -> None:
        self.past |= other.past

    def wait_event(self, event: Event) -> None:
        self.past |= event.past

    def record_event(self) -> Event:
        event = Event(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.streams.seen |= self.past


class Event:
    """Of a stream."""

    def __init__(self, streams: Streams):
        self.streams = streams
        self.past: set[int] = set()

    def record(self, stream: Stream | None = None) -> None:
        self.past = set((stream or self.streams.current).past)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.streams.current).wait_event(self)

    def synchronize(self) -> None:
        self.streams.seen |= self.past

    def query(self) -> bool:
        if found := self.streams.is_done():
            self.synchronize()
        return found


class Streams:
    """All of a device."""

    def __init__(self) -> None:
        self.current = Stream(self, "default")
        self.done: list[tuple[str, str, set[int]]] = []
        """What was done, on which stream, after which others (by their place here)."""
        self.seen: set[int] = set()
        """What the host has seen to be done: it is done before whatever the host asks for next."""
        self.is_done: Callable[[], bool] = lambda: True
        """The answer of an event that is asked."""
        self._numbers = itertools.count(1)

    def note(self, what: str) -> int:
        """Something is done on the current stream."""
        number = len(self.done)
        self.done.append((what, self.current.name, self.current.past | self.seen))
        self.current.past.add(number)
        return number

    def make(self, *args: Any, **options: Any) -> Stream:
        return Stream(self, f"stream {next(self._numbers)}")

    def event(self, *args: Any, **options: Any) -> Event:
        return Event(self)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def streams() -> Iterator[Streams]:
    """In place of torch's."""
    device = Streams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", device.make)
        patch.setattr(torch.cuda, "Event", device.event)
        patch.setattr(torch.cuda, "stream", device.use)
        patch.setattr(torch.cuda, "current_stream", lambda place=None: device.current)
        yield device
