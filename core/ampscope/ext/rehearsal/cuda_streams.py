"""Streams and events of a simulated device: everything on a CPU happens in order."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, Self

import torch

from ampscope.ext.rehearsal.current_device import (
    ChosenDevice,
    device_named,
    index_of,
    set_device,
)

_numbers = itertools.count(1)
_thread = threading.local()  # its current streams


class Stream:
    """``torch.cuda.Stream``, and ``torch.Stream`` of the device."""

    def __init__(
        self, device: Any = None, priority: int = 0, *args: object, number: int | None = None,
        **kwargs: object,
    ) -> None:  # fmt: skip
        self.device = device_named("cuda" if device is None else device)
        self.device_index = self.device.index or 0
        self.device_type = 1  # c10::DeviceType::CUDA
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_numbers) if number is None else number
        self._around: list[Any] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __enter__(self) -> Self:
        self._around.append(StreamContext(self))
        self._around[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._around.pop().__exit__(*error)

    def query(self) -> bool:
        """Everything has been done."""
        return True

    def synchronize(self, *args: object) -> None:
        """There is nothing to wait for."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        made = event or Event()
        made.record()
        return made


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: a stream of another library."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: object) -> None:
        super().__init__(device, number=stream_ptr)


class StreamContext(ChosenDevice):
    """``torch.cuda.stream``: another current stream inside, on that stream's device."""

    def __init__(self, stream: Stream | None) -> None:
        super().__init__(None if stream is None else stream.device)
        self.stream = stream
        self._streams_before: list[dict[int, Stream]] = []

    def __enter__(self) -> None:
        super().__enter__()
        self._streams_before.append(_streams())
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _thread.streams = self._streams_before.pop()


def _streams() -> dict[int, Stream]:
    """This thread's current stream of each device that has another than the default."""
    found: dict[int, Stream] = getattr(_thread, "streams", {})
    return found


def reset_streams() -> None:
    """The default stream of each device is the current one of this thread."""
    _thread.streams = {}


def set_stream(stream: Stream) -> None:
    """``torch.cuda.set_stream``: it also makes the stream's device the current one."""
    _thread.streams = {**_streams(), stream.device_index: stream}
    set_device(stream.device)


def current_stream(device: Any = None) -> Stream:
    """``torch.cuda.current_stream``."""
    return _streams().get(index_of(device)) or default_stream(device)


def default_stream(device: Any = None) -> Stream:
    """``torch.cuda.default_stream``."""
    return Stream(torch.device("cuda", index_of(device)), number=0)


class Event:
    """Takes the time of the processor."""

    def __init__(self, device: Any = None, *args: object, **kwargs: object) -> None:
        is_device = device is not None and not isinstance(device, bool)
        self.device = device_named(device if is_device else "cuda")
        self.at = 0.0

    def record(self, *args: object) -> None:
        """It happens now."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events."""
        return 1e3 * (end.at - self.at)

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self, *args: object) -> None:
        """There is nothing to wait for."""

    wait = synchronize
