"""Which GPU a run asks for: the same words, and the same refusal, for every framework."""

from __future__ import annotations

from ampscope.errors import BadInput


def wanted_gpu(device: str, count: int, framework: str) -> int | None:
    """Number of the GPU that "cuda" or "cuda:N" means, of ``count`` that ``framework`` sees; None
    for "auto" and "cpu". Raises BadInput for one that is not there."""
    if not device.startswith("cuda"):
        return None
    number = int(device.partition(":")[2] or 0)
    if number >= count:
        gpus = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        raise BadInput(f"There is no device {device!r}: {framework} here sees {gpus}.")
    return number
