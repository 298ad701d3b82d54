"""Where TF32 is switched, and a control that holds it off against a script that asks for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def tf32_state() -> tuple[Any, ...]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    new = (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    return (*new, matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision())


def flags() -> tuple[Any, ...]:
    """Matmul and cudnn as torch's documentation asks for them, and the three newer switches."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    newer = {matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision}
    return matmul.allow_tf32, cudnn.allow_tf32, newer


def stays_fp32(control: Callable[[], AbstractContextManager[object]]) -> None:
    """Whatever is asked for within; afterwards all is as it was."""
    _as_torch_begins()
    before, onednn = tf32_state(), torch.backends.mkldnn.matmul
    with control():
        _ask_for_tf32()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
            assert flags() == (False, False, {"ieee"})
        weight = torch.ones(2, 2, requires_grad=True)
        inside = []
        output = torch.ones(2, 2) @ weight
        output.register_hook(lambda _: inside.append((*flags(), onednn.fp32_precision)))
        output.sum().backward()
    assert inside == [(False, False, {"ieee"}, "ieee")]
    assert tf32_state() == before
    assert onednn.fp32_precision == torch.backends.fp32_precision == "none"


def _as_torch_begins() -> None:
    """The old switches raise where other tests of the process have left the new ones mixed."""
    backends = torch.backends
    for switch in (backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul, backends):
        switch.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = False, True
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"


def _ask_for_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    torch.backends.fp32_precision = "tf32"
