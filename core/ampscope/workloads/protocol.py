"""`Workload`: what a probe trains. A user's file follows the same protocol as the built-in models.

    from ampscope import Workload

    def build(seed: int) -> Workload:
        model = nn.Linear(8, 2)
        data = [(torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))]
        return Workload(
            model=model,
            batches=data,
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )

The workload says what is trained; the probe decides the precision, the device and the number of
steps. So a workload contains no autocast, no GradScaler, no `.cuda()` and no `.half()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from ampscope.errors import BadInput

# A batch is whatever the loss of the same workload understands: a tensor, or nested tuples, lists
# and dicts of tensors. Only the loss (and a custom step) reads them, hence Any.
Batch: TypeAlias = Any


class TrainingStep(Protocol):
    """A custom training step: one optimizer step on one batch; returns the loss (unscaled).

    `scaler` is always a GradScaler, disabled in modes without loss scaling, so the four calls
    (`scale`, `unscale_`, `step`, `update`) are right in every mode. `autocast()` gives the context
    for the forward pass, a null context in modes without autocast:

        def step(model, batch, optimizer, scaler, autocast):
            optimizer.zero_grad()
            with autocast():
                loss = F.mse_loss(model(batch[0]), batch[1])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss
    """

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        autocast: Callable[[], AbstractContextManager[object]],
        /,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its data, its loss and its optimizer; raises BadInput when a part is of no use.

    batches    an iterable of batches, or a function that returns one. A list, a DataLoader or a
               function is started again when it ends; a generator can be used once only, so the
               probe can make no more steps than it has batches (see `iterate`)
    loss       (model, batch) -> a scalar tensor; calls the model itself
    optimizer  (parameters) -> optimizer; called by the probe, after the model was moved and cast
    step       replaces the default training step (see `TrainingStep`)
    name       how runs are listed; `load` fills it in when it is empty
    """

    model: nn.Module
    batches: Callable[[], Iterable[Batch]] | Iterable[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    step: TrainingStep | None = None
    name: str = ""

    def __post_init__(self) -> None:
        step_fits = self.step is None or callable(self.step)
        for part, fits, wanted in (
            ("model", isinstance(self.model, nn.Module), "a torch.nn.Module"),
            ("batches", _is_source(self.batches), "an iterable, or a function that returns one"),
            ("loss", callable(self.loss), "a function of (model, batch)"),
            ("optimizer", callable(self.optimizer), "a function of the parameters"),
            ("step", step_fits, "a function, or None"),
        ):
            if not fits:
                got = _kind(getattr(self, part))
                raise BadInput(f"`{part}` of the workload must be {wanted}, but it is {got}.")


def iterate(workload: Workload) -> Iterator[Batch]:
    """Batches without end: the source is started again whenever it is used up.

    Raises BadInput when the source has nothing more to give: it was empty, or it is a generator
    that cannot be started again. The message says after how many batches, so a probe that was
    asked for more steps can end there and say why; what it recorded before stays.
    """
    count = 0
    while True:
        before = count
        for batch in _start(workload):
            count += 1
            yield batch
        if count == before:
            raise _ended(workload.name or "the workload", count)


def move(batch: Batch, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
    """The batch on `device`; with `dtype`, floating-point tensors are cast and all others are not.

    Tuples (named ones too), lists and dicts are followed to any depth and keep their type; an
    object that has its own `.to(device)` is asked; anything else is returned unchanged.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, PackedSequence):  # a named tuple whose batch_sizes must stay on the CPU
        to: Callable[..., Batch] = batch.to  # its overloads leave out what it accepts
        return to(device=device, dtype=dtype)
    if isinstance(batch, tuple):
        moved = [move(part, device, dtype) for part in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, list):
        return [move(part, device, dtype) for part in batch]
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)  # keeps defaultdict, OrderedDict and transformers' BatchEncoding
        clone.update({key: move(part, device, dtype) for key, part in batch.items()})
        return clone
    to_device = getattr(batch, "to", None)
    return to_device(device) if callable(to_device) else batch


def _start(workload: Workload) -> Iterator[Batch]:
    source = workload.batches
    if callable(source) and not isinstance(source, Iterable):
        source = source()
        if not (isinstance(source, Iterable) or hasattr(source, "__getitem__")):
            raise BadInput(
                f"`batches` of {workload.name or 'the workload'} is a function, and what it "
                f"returned is {_kind(source)}. It must return an iterable of batches."
            )
    return iter(source)


def _is_source(batches: object) -> bool:
    # A map-style dataset has __getitem__ alone, and iter() follows it.
    return isinstance(batches, Iterable) or callable(batches) or hasattr(batches, "__getitem__")


def _ended(name: str, count: int) -> BadInput:
    if count == 0:
        return BadInput(f"`batches` of {name} is empty: it gave no batch to train on.")
    return BadInput(
        f"`batches` of {name} ended after {count:,} batches and cannot be started again. "
        "Ask for fewer steps, or give a list, a DataLoader or a function that returns an iterator."
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
