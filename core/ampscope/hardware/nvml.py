"""One conversation with NVML: start it, put a question, bear every refusal, end it.

NVML refuses a question with "Not Supported" on many consumer, virtual and integrated GPUs; that is
an answer, and comes back as None. The two errors stay inside this room: ``gpu`` turns them into
sentences. Error codes are those of nvmlReturn_t in nvml.h (NVIDIA's NVML API reference).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

# The GPU is lost, requires a reset, or was not found: it answers nothing more.
GONE_CODES = frozenset({15, 16, 28})

INIT_SENTENCES: dict[int, str] = {
    4: "The NVIDIA driver refuses access: this user, or this container, has no permission.",
    9: "The NVIDIA driver is installed but not loaded: load its kernel module or restart.",
    12: "No NVIDIA driver was found (no NVML library), so there is no CUDA here.",
    18: "The NVIDIA library and its kernel module differ in version: restart the machine.",
}


class Nvml(Protocol):
    """What is used of ``pynvml`` by name; all other functions are looked up when they are asked."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802  # NVML's own name

    def nvmlShutdown(self) -> None: ...  # noqa: N802  # NVML's own name

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802  # NVML's own name


class GpuLostError(Exception):
    """The GPU stopped answering; the text is NVML's."""


class NvmlStartError(Exception):
    """NVML cannot be used; the text is one sentence for a person."""


class Conversation:
    """NVML between nvmlInit and nvmlShutdown."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def ask(self, functions: tuple[str, ...], *arguments: object) -> Any:
        """Answer of the first function that has one, or None. Raises GpuLostError."""
        for function in functions:
            call = getattr(self._nvml, function, None)  # an older nvidia-ml-py may lack it
            try:
                if call is not None:
                    return call(*arguments)
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) in GONE_CODES:
                    raise GpuLostError(str(error)) from error
            except UnicodeDecodeError:  # a driver that returns garbage for a name
                continue
        return None

    def handle(self, index: int) -> Any:
        """Handle of GPU ``index``. Raises GpuLostError: without one nothing can be asked."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            raise GpuLostError(str(error)) from error


@contextlib.contextmanager
def conversation(nvml: Nvml | None = None) -> Iterator[Conversation]:
    """Start NVML and end it again; ``nvml`` replaces ``pynvml``. Raises NvmlStartError."""
    module = _pynvml() if nvml is None else nvml
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        sentence = INIT_SENTENCES.get(getattr(error, "value", 0))
        raise NvmlStartError(
            sentence or f"NVML does not start ({error}). Try nvidia-smi."
        ) from error
    try:
        yield Conversation(module)
    finally:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()


def _pynvml() -> Nvml:
    try:
        import pynvml
    except ImportError as error:
        sentence = "GPUs cannot be read without nvidia-ml-py: pip install nvidia-ml-py"
        raise NvmlStartError(sentence) from error
    module: Nvml = pynvml
    return module
