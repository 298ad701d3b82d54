"""Copies of a module's buffers as they were before a call: of those that its calls change.

Which these are is found at the first call in training (BatchNorm's statistics are, a mask is not).
A call after that copies those alone, into copies of an earlier call where no one needs them.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ampscope.capture.tensor_table import Copier
from ampscope.capture.tensors import has_own_memory, plain
from ampscope.capture.user_objects import buffers, modules
from ampscope.watcher.models import Root

MOST_SPARE = 2  # sets of copies that wait for the next call
SMALL_BYTES = 1 << 20  # of buffers in all: a copy of more had better release the GIL
_WORDS = {torch.float32, torch.float64, torch.int32, torch.int64}


class CalledModule:
    """A model, or a direct child of one, at its dotted ``path`` below the model."""

    def __init__(self, root: Root, path: str, module: nn.Module) -> None:
        self.root, self.path, self.module = root, path, module
        self._plain = root.plain if not path else module
        self._changing: Changing | None = None  # unknown before the first call in training
        self._spare: list[BufferCopies] = []
        self._first: tuple[dict[str, nn.Parameter | None], str] | None = None  # a parameter

    @property
    def device(self) -> torch.device:
        """Where it is now; a part without parameters is where its model is."""
        if self._first is not None:  # a search goes through all modules, at every call
            parameters, name = self._first
            if name in parameters and (first := parameters[name]) is not None:
                return first.device  # no ``get``: TorchScript's dictionaries have none
        for module in (self.module, self.root.plain):
            for _, part in modules(module):
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        self._first = part._parameters, name
                        return parameter.device
        return torch.device("cpu")

    def copies(self) -> dict[str, Tensor]:
        """Copies of the buffers that a call changes; of all, until that is known. A caller who
        drops them unread may give them back: see :meth:`reuse`."""
        changing = self._changing
        if changing is not None:
            if not changing.names:
                return {}
            if changing.is_current():
                copies = self._spare_copies(changing)
                if changing.copy_to(copies):
                    return copies
        self._spare.clear()
        chosen = None if changing is None else changing.names
        held = {
            name: buffer
            for name, buffer in buffers(self._plain)
            if (chosen is None or name in chosen) and has_own_memory(buffer)
        }
        if chosen is not None:
            self._changing = Changing(self._plain, chosen, held)
        return {name: buffer.detach().clone() for name, buffer in held.items()}

    def _spare_copies(self, changing: Changing) -> BufferCopies:
        """Copies to write to: spare ones of the current stream, or new ones. Another stream may
        still be writing to its own."""
        device = self.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        for place, spare in enumerate(self._spare):
            if spare.stream == stream:
                return self._spare.pop(place)
        made = changing.empty()
        made.stream = stream
        return made

    def reuse(self, copies: dict[str, Tensor]) -> None:
        """No one reads these ``copies`` any more: the next call writes into them."""
        current, has_room = self._changing, len(self._spare) < MOST_SPARE
        if current is None or not has_room or not isinstance(copies, BufferCopies):
            return
        if current.fits(copies):
            self._spare.append(copies)

    def learn(self, before: dict[str, Tensor]) -> None:
        """After the first call in training: which buffers have other values now."""
        if self._changing is not None or not self.module.training:
            return
        now = dict(buffers(self._plain))
        changed = {n: now[n] for n, old in before.items() if n in now and not _same(old, now[n])}
        self._changing = Changing(self._plain, frozenset(changed), changed)


class BufferCopies(dict[str, Tensor]):
    """Copies of buffers by name; ``targets`` is what is written to when they are made anew (see
    :func:`_written`), ``owner`` stands for the buffers that there is room for."""

    def __init__(self, copies: Mapping[str, Tensor], owner: object) -> None:
        super().__init__(copies)
        self.targets = list(map(_written, copies.values()))
        self.addresses: array[int] | None = None  # of these, where a Copier writes to them
        self.owner = owner
        self.stream: torch.cuda.Stream | None = None  # on which they are written


def _written(tensor: Tensor) -> Tensor:
    """``tensor``, or on an accelerator its memory as 32-bit integers: buffers of several dtypes
    are then copied in one launch."""
    if tensor.device.type == "cpu" or tensor.dtype not in _WORDS or not tensor.is_contiguous():
        return tensor
    return tensor.detach().reshape(-1).view(torch.int32)


class Changing:
    """The buffers of ``module`` that its calls change, found once. Small ones in this machine's
    memory are copied by one call of compiled code, others by one call of torch for each dtype, on
    an accelerator for all of 32 and 64 bits together. A walk through all modules and a clone of
    each buffer took 4 % of a step of a small ResNet, which has 63 such buffers."""

    def __init__(self, module: nn.Module, names: frozenset[str], held: dict[str, Tensor]) -> None:
        """``held``: those of ``names`` that can be copied, as they are now."""
        self.names = names
        every = modules(module)
        below = [part._modules for _, part in every]
        self._leaves = [some for some in below if not some]  # of the module tree
        self._children = [some.values() for some in below if some]
        self._known_children = list(itertools.chain.from_iterable(self._children))
        self._names = sorted(
            (n for n in held if held[n].numel()),
            key=lambda n: (str(held[n].device), str(held[n].dtype)),
        )
        self._held = [held[name] for name in self._names]
        self._sources = list(map(_written, self._held))
        paths = [name.rpartition(".") for name in self._names]
        parts = dict(every)
        self._owners = [parts[path]._buffers for path, _, _ in paths]
        self._own_names = [own for _, _, own in paths]
        self._copier = Copier(self._held if _bytes_of(self._held) <= SMALL_BYTES else ())
        self._known = self._facts()
        self._owner = object()  # and not itself: copies outlive the buffers
        kinds = [(source.device, source.dtype) for source in self._sources]
        edges = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
        self._groups = list(zip([0, *edges], [*edges, len(kinds)], strict=True))

    def is_current(self) -> bool:
        """Whether the modules and the buffers are still the same, and the buffers in memory. Where
        the compiled copy is possible, :meth:`copy_to` checks the memory."""
        owners = zip(self._owners, self._own_names, strict=True)
        now = [own in buffers and buffers[own] for buffers, own in owners]  # see ``device``
        children = list(itertools.chain.from_iterable(self._children))
        return (
            not any(self._leaves)
            and len(children) == len(self._known_children)
            and all(map(operator.is_, now, self._held))
            and all(map(operator.is_, children, self._known_children))
            and (self._copier.is_possible or self._facts() == self._known)
        )

    def _facts(self) -> list[tuple[int, torch.Size]]:
        """What would change with the buffers' memory."""
        return [(buffer.data_ptr(), buffer.shape) for buffer in self._held]

    def empty(self) -> BufferCopies:
        """Room for a copy of each."""
        pairs = zip(self._names, self._held, strict=True)
        made = {name: torch.empty_like(buffer, requires_grad=False) for name, buffer in pairs}
        return BufferCopies(made, self._owner)

    def fits(self, copies: BufferCopies) -> bool:
        """Whether ``copies`` came from :meth:`empty`."""
        return copies.owner is self._owner

    def copy_to(self, copies: BufferCopies) -> bool:
        """Write the present values into ``copies``, which :meth:`empty` made. False where a buffer
        is elsewhere now, or of another shape: then nothing is written."""
        if self._copier.is_possible:
            if copies.addresses is None:
                copies.addresses = self._copier.targets(copies.targets)
            return copies.addresses is not None and self._copier.copy_to(copies.addresses)
        with torch.no_grad():
            for first, end in self._groups:
                torch._foreach_copy_(copies.targets[first:end], self._sources[first:end])
        return True


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _same(first: Tensor, second: Tensor) -> bool:
    """Equal, NaN at the same places included."""
    if first.shape != second.shape or not has_own_memory(second):
        return False
    one, other = plain(first), plain(second)
    return bool(((one == other) | ((one != one) & (other != other))).all())
