"""What a script's models and batches look like: at first sight, on the way in, and at the end.

A NaN that came with the data or the initial weights is no fault of any op, so these are looked at
before the first op sees them.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from ampscope.capture.script.attempts import Attempts
from ampscope.capture.script.op_marks import MAKER
from ampscope.capture.script.scans import scan, scan_model
from ampscope.capture.tensors import (
    all_finite,
    floating_tensors,
    holds_numbers,
    plain,
    readable,
)
from ampscope.formats import dtype_name
from ampscope.observations import Call, Scan

MAX_FIRST_SIGHT_NUMEL = 20_000_000  # weights kept to see what moved by the end
MAX_BATCH_SCANS = 2_000


class ScriptScans:
    """Scans of one run, in :attr:`records`."""

    def __init__(self, attempts: Attempts) -> None:
        self.records: list[Scan] = []
        self._attempts = attempts
        self._first_sight: dict[int, tuple[weakref.ref[nn.Module], dict[str, Tensor]]] = {}
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
            leaf = tensor.grad_fn is None and not hasattr(tensor, MAKER)
            if leaf or not all_finite(tensor):
                self._batches += 1
                name = f"input {n} of {type(module).__name__}"
                self._add("batch", "batch", name, tensor)

    def at_end(self) -> None:
        """Every model that is still alive, and how far its weights moved."""
        trained = self._trained()
        for ref, kept in self._first_sight.values():
            model = ref()
            if model is None:
                continue
            for name, parameter in model.named_parameters():
                now = readable(parameter)
                if now is None:
                    continue  # a packed one, or given away to free its memory
                first = kept.get(name)
                same = first is not None and first.shape == now.shape
                kind = "parameter" if id(parameter) in trained else "frozen"
                self._add("end", kind, name, parameter, first if same else None)
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point() and buffer.numel() and holds_numbers(buffer):
                    self._add("end", "buffer", name, buffer)

    def _see_model(self, root: nn.Module) -> None:
        if id(root) in self._first_sight or any(p.is_meta for p in root.parameters()):
            return  # where nothing is in memory there is nothing to see yet
        kept: dict[str, Tensor] = {}
        if sum(p.numel() for p in root.parameters()) <= MAX_FIRST_SIGHT_NUMEL:
            held = ((n, readable(p)) for n, p in root.named_parameters())
            kept = {n: values.clone() for n, values in held if values is not None}
        self._first_sight[id(root)] = (weakref.ref(root), kept)
        self.records += scan_model("start", root, self._trained(), self._attempts.count)
        for name, parameter in root.named_parameters():
            self._attempts.names.setdefault(id(parameter), name)

    def _trained(self) -> set[int]:
        """Ids of the parameters that an optimizer has."""
        groups = (g for o in self._attempts.optimizers for g in o.param_groups)
        return {id(p) for group in groups for p in group["params"]}

    def _add(
        self, moment: str, kind: str, name: str, tensor: Tensor, first: Tensor | None = None
    ) -> None:
        self.records.append(scan(moment, kind, name, tensor, self._attempts.count, first))


def inputs_call(seq: int, args: object, kwargs: object) -> Call:
    """A sum over what the first model is given first: the same sum in another run of the script
    tells that it repeats itself."""
    tensors = floating_tensors([args, kwargs])
    total = sum(float(plain(t).detach().double().sum()) for t in tensors)
    dtypes = "+".join(sorted({dtype_name(t.dtype) for t in tensors}))
    return Call(seq, 0, "inputs", value=total, dtype=dtypes)
