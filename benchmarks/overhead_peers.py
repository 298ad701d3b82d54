"""What else is used to look into a training, each as its documentation says to use it.

They record less: counts of exponents in 256 bins without subnormals (`bincount`), the first NaN of
a backward pass (`detect_anomaly`), smallest and largest magnitudes of module inputs, outputs and
weights (Transformers' `DebugUnderflowOverflow`), linear histograms of parameter gradients alone
(`wandb.watch`, TensorBoard).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from overhead_contestants import Contestant, Session
from torch import Tensor, nn

MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}


def peers(session: Session) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Those that can be imported, and for the others why not."""
    found = {
        "plain torch.bincount": Contestant(_once(session), partial(_bincount, session)),
        "torch detect_anomaly": Contestant(
            _once(session),
            _anomaly,
        ),
    }
    absent: dict[str, str] = {}
    for name, make in (
        ("DebugUnderflowOverflow", _debug_underflow_overflow),
        ("wandb.watch", _wandb),
        ("TensorBoard gradients", _tensorboard),
        ("Cockpit GradHist1d", _cockpit),
    ):
        try:
            found[name] = make(session)
        except ImportError as error:
            absent[name] = str(error)
    return found, absent


@contextlib.contextmanager
def _anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow, which is what is measured
        anomaly = torch.autograd.detect_anomaly(check_nan=True)
    with anomaly:
        yield


def _once(session: Session) -> Any:
    return lambda number: session.step()


@contextlib.contextmanager
def _bincount(session: Session) -> Iterator[None]:
    """Exponents of outputs, their gradients and parameter gradients, with nothing of ampscope."""

    def count(tensor: Tensor) -> None:
        bits = tensor.detach().reshape(-1)
        integers = torch.int32 if tensor.dtype is torch.float32 else torch.int16
        mask = 0xFF if tensor.dtype is not torch.float16 else 0x1F
        shifted = (bits.view(integers) >> MANTISSA[tensor.dtype]) & mask
        torch.bincount(shifted, minlength=256)

    def after(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            count(output)
            if output.requires_grad:
                output.register_hook(count)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    leaves = [m for m in session.model.modules() if not list(m.children())]
    handles = [module.register_forward_hook(after) for module in leaves]
    handles += [
        p.register_post_accumulate_grad_hook(lambda p: count(p.grad))  # type: ignore[no-untyped-call]  # as above
        for p in session.model.parameters()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _debug_underflow_overflow(session: Session) -> Contestant:
    from transformers.debug_utils import DebugUnderflowOverflow

    @contextlib.contextmanager
    def attached() -> Iterator[None]:
        before = {id(m): dict(m._forward_hooks) for m in session.model.modules()}
        DebugUnderflowOverflow(session.model)
        try:
            yield
        finally:  # it has no way to be taken off
            for module in session.model.modules():
                module._forward_hooks.clear()
                module._forward_hooks.update(before[id(module)])

    return Contestant(_once(session), attached)


def _wandb(session: Session) -> Contestant:
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(mode="offline", dir=tempfile.mkdtemp(prefix="ampscope-wandb-"))

    @contextlib.contextmanager
    def attached() -> Iterator[None]:
        run.watch(session.model, log="gradients", log_freq=1)
        try:
            yield
        finally:
            run.unwatch(session.model)

    def step(_: int) -> None:
        session.step()
        run.log({"step": 1})

    return Contestant(step, attached)


def _tensorboard(session: Session) -> Contestant:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tempfile.mkdtemp(prefix="ampscope-tensorboard-"))

    def step(number: int) -> None:
        session.step()
        for name, parameter in session.model.named_parameters():
            if parameter.grad is not None:
                writer.add_histogram(name, parameter.grad, number)

    return Contestant(step)


def _cockpit(session: Session) -> Contestant:
    """Cockpit's 1-d histogram is of each sample's gradient, which BackPACK has to compute: that
    needs a model of BackPACK's own modules, which none of these is."""
    import cockpit.quantities  # fails where setuptools has no pkg_resources any more

    raise ImportError(f"{cockpit.quantities.GradHist1d.__name__} needs BackPACK's own modules")
