"""Instrument: what a script's models and batches look like, outside the ops: at first sight, on the
way in, and at the end.

A NaN that came with the data or the initial weights is no fault of any op, so these are looked at
before the first op sees them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.module_paths import unwrapped
from ampscope.capture.script.op_facts import first_bad_index
from ampscope.capture.script.op_taint import PROVENANCE
from ampscope.capture.script.optimizer_facts import evenly
from ampscope.capture.script.optimizer_steps import OptimizerSteps
from ampscope.capture.tensors import (
    HALF,
    all_finite,
    floating_tensors,
    holds_numbers,
    plain,
    readable,
)
from ampscope.capture.user_objects import IdMap, buffers, modules, parameters, parameters_of
from ampscope.numerics.formats import dtype_name
from ampscope.observations import UNSTEPPED, Call, OpUse, Scan

MAX_ALIKE = 10  # models with the same names: a copy for each evaluation, one for each fold
MAX_FIRST_SIGHT_NUMEL = 20_000_000  # weights kept to see what moved by the end
MAX_BATCH_SCANS = 2_000
SAMPLE = 512  # values kept of a half-precision buffer: enough to see a table's coarse steps
UNSTEPPED_LOOKS = 4  # first steps in which parameters without an optimizer are looked for
PLACES = 64  # of a parameter, at which its way over the run is kept


class ScriptScans:
    """Scans of one run, in :attr:`records`."""

    def __init__(self, steps: OptimizerSteps) -> None:
        self.records: list[Scan] = []
        self._steps = steps
        self._first_sight: dict[int, _Seen] = {}
        self._gone: dict[tuple[bool, tuple[str, ...]], _Seen] = {}
        self._alike: Counter[tuple[str, ...]] = Counter()
        self._batches = 0
        self.knows_ops = True  # what no watched op has made is a batch
        # Parameters of no optimizer, seen with a gradient: name, step, some of their numbers then.
        self._unstepped: IdMap[Tensor, tuple[str, int, Tensor]] = IdMap()

    def look_anew(self) -> None:
        """As many batches are looked at from here on as from the start."""
        self._batches = 0

    def before_forward(
        self, root: nn.Module, module: nn.Module, args: object, kwargs: object
    ) -> None:
        """A module is called from outside any other; ``root`` is the outermost that holds it."""
        self._see_model(root)
        if self._batches >= MAX_BATCH_SCANS:
            return
        for n, tensor in enumerate(floating_tensors([args, kwargs])):
            if not tensor.numel():
                continue
            if tensor.grad_fn is not None:
                continue  # computed from weights, such as a prediction that a loss module gets
            comes_new = self.knows_ops and not hasattr(tensor, PROVENANCE)
            if comes_new or not all_finite(tensor):
                self._batches += 1
                name = f"input {n} of {type(module).__name__}"
                self.records.append(scan("batch", "batch", name, tensor, self._steps.count))

    def _see_model(self, root: nn.Module) -> None:
        root = unwrapped(root)
        held = parameters(root)
        if id(root) in self._first_sight or any(p.is_meta or is_lazy(p) for _, p in held):
            return  # where nothing is in memory there is nothing to see yet
        for name, parameter in held:
            self._steps.gradients.names.setdefault(id(parameter), name)
        names = tuple(name for name, _ in held)
        self._alike[names] += 1
        is_one_more = self._alike[names] > MAX_ALIKE  # seen, and looked at only if it lives on
        kept: dict[str, Tensor] = {}
        numel = sum(p.numel() for _, p in held)
        if numel <= MAX_FIRST_SIGHT_NUMEL and not is_one_more:
            values = ((name, readable(p)) for name, p in held)
            kept = {name: value.clone() for name, value in values if value is not None}
        key = id(root)
        gone = weakref.ref(root, lambda _: self._is_gone(key))
        every = modules(root) if kept else []
        self._first_sight[key] = _Seen(
            gone,
            kept,
            [(name, module._parameters) for name, module in every],
            [(name, module._buffers) for name, module in every],
        )
        if not is_one_more:
            weights = self._of_parameters("start", held, {})
            self.records += [*weights, *self._of_buffers("start", buffers(root))]

    def _is_gone(self, key: int) -> None:
        """Nothing is computed here: a model may go in the middle of any op."""
        seen = self._first_sight.pop(key, None)
        if seen is not None and seen.kept:
            self._gone[self._kind_of(seen)] = seen

    def after_step(self) -> None:
        """An optimizer has stepped: which parameters have gradients and belong to none? Looked at
        in the first steps, and in ever fewer of the later ones."""
        step = self._steps.count
        if step > UNSTEPPED_LOOKS and step & (step - 1):
            return
        stepped = self._stepped()
        for seen in list(self._first_sight.values()):
            model = seen.model()
            for name, parameter in [] if model is None else parameters(model):
                if parameter.grad is None or id(parameter) in stepped:
                    continue
                numbers = readable(parameter)
                if numbers is not None and parameter not in self._unstepped:
                    sample = evenly(numbers, PLACES).clone()
                    self._unstepped[parameter] = name, step, sample

    def unstepped(self) -> list[OpUse]:
        """Parameters with gradients that no optimizer has stepped so far. One that has moved since
        then is stepped by the script itself."""
        stepped = self._stepped()
        return [
            OpUse(UNSTEPPED, "", name, "", step)
            for parameter, (name, step, sample) in self._unstepped.items()
            if id(parameter) not in stepped
            and self._steps.count > step
            and _stands(parameter, sample)
        ]

    def at_end(self) -> None:
        """Every model that is still alive, and how far its weights moved; of those that are gone
        with the function that made them the last of its kind, if it moved."""
        for seen in list(self._first_sight.values()):
            model = seen.model()
            if model is None:
                continue
            self.records += self._of_parameters("end", parameters(model), seen.kept)
            self.records += self._of_buffers("end", buffers(model))
            self._gone.pop(self._kind_of(seen), None)
        for seen in list(self._gone.values()):  # a model may go meanwhile
            named = list(_named(seen.parameters))
            if any(_has_moved(p, seen.kept.get(name)) for name, p in named):
                self.records += self._of_parameters("end", named, seen.kept)
                self.records += self._of_buffers("end", _named(seen.buffers))

    def _of_parameters(
        self, moment: str, named: Iterable[tuple[str, Tensor]], kept: dict[str, Tensor]
    ) -> Iterator[Scan]:
        """``frozen`` are those that no optimizer has."""
        trained = self._trained()
        for name, parameter in named:
            if not holds_numbers(parameter):
                continue  # a packed one, or given away to free its memory
            first = kept.get(name)
            now = None if first is None else readable(parameter)
            if first is None or now is None or now.shape != first.shape:
                first = None
            kind = "parameter" if id(parameter) in trained else "frozen"
            yield scan(moment, kind, name, parameter, self._steps.count, first)

    def _of_buffers(self, moment: str, named: Iterable[tuple[str, Tensor]]) -> Iterator[Scan]:
        for name, buffer in named:
            if buffer.is_floating_point() and holds_numbers(buffer) and buffer.numel():
                yield scan(moment, "buffer", name, buffer, self._steps.count)

    def _kind_of(self, seen: _Seen) -> tuple[bool, tuple[str, ...]]:
        """Alike are models with the same names: a trained one and its average are not."""
        trained = self._trained()
        held = (id(t) for _, table in seen.parameters for t in table.values())
        return any(key in trained for key in held), tuple(seen.kept)

    def _stepped(self) -> set[int]:
        """Ids of the parameters of optimizers that have stepped."""
        names = {record.optimizer for record in self._steps.records}
        own = (o for o in self._steps.optimizers if self._steps.optimizer_name(o) in names)
        return {id(p) for o in own for p in parameters_of(o)}

    def _trained(self) -> set[int]:
        """Ids of the parameters that an optimizer has."""
        return {id(p) for o in self._steps.optimizers for p in parameters_of(o)}


@dataclasses.dataclass(slots=True)
class _Seen:
    """A model at its first sight. Its modules' own tables of tensors outlive it, as those of a
    model do that is a local name of ``main()``: the tensors can be read after the script's end."""

    model: weakref.ref[nn.Module]
    kept: dict[str, Tensor]  # values of the parameters; none of a model that is too large
    parameters: list[tuple[str, dict[str, nn.Parameter | None]]]
    buffers: list[tuple[str, dict[str, Tensor | None]]]


def _named(
    tables: Iterable[tuple[str, Mapping[str, Tensor | None]]],
) -> Iterator[tuple[str, Tensor]]:
    """As ``named_parameters`` gives them, each tensor once."""
    seen: set[int] = set()
    for prefix, table in tables:
        for name, tensor in table.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def _stands(parameter: Tensor, sample: Tensor) -> bool:
    numbers = readable(parameter)
    with own_ops():
        return numbers is not None and torch.equal(evenly(numbers, PLACES), sample)


def _has_moved(parameter: Tensor, first: Tensor | None) -> bool:
    now = readable(parameter)
    if now is None or first is None or now.shape != first.shape:
        return False
    with own_ops():
        return not torch.equal(plain(now).detach().float(), plain(first).float())


def scan(
    moment: str, kind: str, name: str, tensor: Tensor, step: int = 0, first: Tensor | None = None
) -> Scan:
    """Facts about one floating-point tensor; ``first`` is what it was at its first sight."""
    with own_ops():  # what ampscope computes is none of the script's ops
        numbers = plain(tensor).detach()
        finite = torch.isfinite(numbers)
        nan, infinite = int(torch.isnan(numbers).sum()), int(torch.isinf(numbers).sum())
        kept = numbers[finite].float()
        half_buffer = tensor.dtype in HALF and kind == "buffer" and tensor.numel() > 1
        is_sampled = kind == "buffer" and moment == "start"
        return Scan(
            moment=moment,
            kind=kind,
            name=name,
            dtype=dtype_name(tensor.dtype),
            total=tensor.numel(),
            nan=nan,
            inf=infinite,
            max_abs=float(kept.abs().max()) if kept.numel() else None,
            step=step,
            change=None if first is None else _relative_change(numbers, first),
            distinct=int(torch.unique(numbers).numel()) if half_buffer else None,
            sample=tuple(evenly(numbers, SAMPLE).float().tolist()) if is_sampled else (),
            std=float(kept.std()) if kept.numel() > 1 else None,
            index=first_bad_index(numbers) if nan or infinite else (),
            displacement=() if first is None else _displacement(numbers, first),
            still=None if first is None else _still_share(numbers, first),
        )


def _relative_change(now: Tensor, first: Tensor) -> float | None:
    """|now - first| / |first| in 2-norms; None when the first sight was zero."""
    before, after = plain(first).double(), plain(now.detach()).double()
    length = float(torch.linalg.vector_norm(before))
    return float(torch.linalg.vector_norm(after - before)) / length if length else None


def _displacement(now: Tensor, first: Tensor) -> tuple[float, ...]:
    """How far some of the values came, in five digits."""
    after, before = (evenly(plain(t), PLACES).double() for t in (now, first))
    return tuple(float(f"{x:.4e}") for x in (after - before).tolist())


def _still_share(now: Tensor, first: Tensor) -> float | None:
    """Share of the values that are as they were, or that value rounded to a half format: all that
    a script did that rounds its weights and whose updates were lost. None of an empty tensor."""
    after, before = plain(now).detach().float(), plain(first).detach().float()
    if after.shape != before.shape or not after.numel():
        return None
    same = after == before
    for half in HALF:
        same |= after == before.to(half).float()
    return float(same.double().mean())


def inputs_call(seq: int, args: object, kwargs: object) -> Call:
    """A sum over what the first model is given first: the same sum in another run of the script
    means that it repeats itself. NaN, as missing values of a table, counts as 0: a sum that is NaN
    would be equal to none."""
    tensors = floating_tensors([args, kwargs])
    numbers = (plain(t).detach().double() for t in tensors)
    total = sum(float(torch.nan_to_num(n, 0.0, 0.0, 0.0).sum()) for n in numbers)
    dtypes = "+".join(sorted({dtype_name(t.dtype) for t in tensors}))
    return Call(seq, 0, "inputs", value=total, dtype=dtypes)
