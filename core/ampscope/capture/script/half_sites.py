"""Instrument: the places at which numbers become half precision, from the script's first line on.

A cast or a constructor that the script, or a library for it, calls is heard by a wrapper around
torch's own function, which looks at the result's dtype and nothing else unless that is half::

    .half() .bfloat16() .to() .type() .type_as() .copy_()     cast, from what it was given
    torch.zeros, tensor, arange, rand …, *_like, new_*        made
    torch.load, from_numpy, frombuffer, from_dlpack, view     loaded
    nn.Module.half, .to …                                     module, by parameter and buffer
    numpy.float16, looked up on a line that casts             cast, of which no numbers are seen

So a script that prepares its data runs at its own speed, where a mode would cost each op several
microseconds. What no function of Python's does, the op watch sees while it is awake
(:meth:`HalfSites.after_op`): casts by autocast and by autograd, sums in half that live on. The
numbers before and after are compared for a sample of the first calls of each site.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import math
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.utils import _device

import ampscope
from ampscope.capture.failures import Failures
from ampscope.capture.global_hooks import BUFFERS, PARAMETERS
from ampscope.capture.own_ops import is_own, own_ops
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.numpy_half import float16_looked_up
from ampscope.capture.script.op_facts import tensors
from ampscope.capture.script.op_taint import PASSES_ON, is_learned
from ampscope.capture.script.op_watch import RUNNING_SUMS, OpWatch
from ampscope.capture.script.optimizer_steps import OptimizerSteps
from ampscope.capture.script.running_sums import adds_to_what_lives_on
from ampscope.capture.tensors import (
    HALF,
    PLAIN,
    in_backward,
    is_capturing,
    is_fx_tracing,
    opened,
)
from ampscope.capture.user_objects import (
    IdMap,
    modules,
    own_buffers,
    own_parameters,
    parameters_of,
    state_of,
)
from ampscope.numerics.formats import dtype_name
from ampscope.observations import HalfSite
from ampscope.patches import Patches, passes_on, unpatched
from ampscope.source_lines import SourceLines, line_name

MOST_SITES = 2_000
CALLS = 64  # the first ones of a site, of which numbers are looked at
ELEMENTS = 65_536  # … and as many of these at most
KEPT = 4_096  # elements of several calls that wait to be compared together
LARGEST = 1 << 22  # elements of a tensor with gaps, of which a sample takes a copy
MOST_ARRIVED = 10_000  # tensors that may still turn out to be weights or moments
MOST_NAMES = 5
STEPS = 3  # first ones of an optimizer, after which its state is looked at
DEPTH = 4  # of a checkpoint

_CASTS = ("half", "bfloat16", "to", "type", "type_as", "copy_")
# Their numbers come from arguments: made in fp64 as well, they are known before the rounding.
_VALUED = ("tensor", "as_tensor", "asarray", "scalar_tensor", "full", "arange", "linspace",
           "logspace", "full_like", "new_full", "new_tensor")  # fmt: skip
_MADE = ("tensor", "as_tensor", "asarray", "scalar_tensor", "full", "arange", "linspace",
         "logspace", "zeros", "ones", "empty", "eye", "rand", "randn", "randint", "empty_strided",
         "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
         "randint_like", "bartlett_window", "blackman_window", "hamming_window", "hann_window",
         "kaiser_window")  # fmt: skip
_MADE_OF = ("new_tensor", "new_full", "new_zeros", "new_ones", "new_empty")
_CONVERTED = ("tensor", "as_tensor", "asarray", "new_tensor")
# A line that names the type may as well ask for it: ``if x.dtype == np.float16``.
_NUMPY_CAST = re.compile(
    r"astype|dtype\s*=[^=]|\b(?:float16|half)\(|,\s*\w+\.(?:float16|half)\s*\)"
)
_READ = ("from_numpy", "from_dlpack", "frombuffer")
_PLAIN_ARGUMENTS = (bool, int, float, list, tuple, range, type(None), str, torch.Size, torch.dtype,
                    torch.device, torch.layout)  # fmt: skip
_UNSET = ("zeros", "empty", "rand", "randn", "randint", "new_zeros", "new_empty", "empty_strided",
          "zeros_like", "empty_like", "rand_like", "randn_like", "randint_like")  # fmt: skip
# What ampscope computes, and what torch.cuda tries out, is none of the script's.
_OTHERS = (str(Path(ampscope.__file__).parent), str(Path(torch.cuda.__file__).parent))
_PASSER = "__torch_function__"  # name of what passes a call on
_PASSES = 12  # frames in which one does so
_WHAT = "where numbers become half precision"

_PLAIN = frozenset(
    {Tensor, nn.Parameter, int, float, bool, list, tuple, str, type(None), torch.Size, torch.dtype,
     torch.device}
)  # fmt: skip
_TORCHS = (
    getattr(Tensor.__torch_function__, "__func__", None),
    torch._C._disabled_torch_function_impl,
)


class HalfSites:
    """Listens inside :meth:`watching`; :meth:`records` gives the list."""

    def __init__(
        self, lines: SourceLines, paths: ModulePaths, watch: OpWatch, steps: OptimizerSteps
    ) -> None:
        self.enabled = True
        self.failures = Failures()
        self._lines = lines
        self._paths = paths
        self._watch = watch
        self._steps = steps
        self._sites: dict[tuple[str, ...], _Site] = {}
        self._files: dict[str, None] = {}
        self._stepped: IdMap[Any, int] = IdMap()  # steps of each optimizer that were looked at
        # Sites of which no more is looked at, by the instruction of the user's that calls.
        self._closed: dict[tuple[int, int], _Site] = {}
        self._codes: list[Any] = []
        self._arrived: OrderedDict[int, tuple[_Site, int]] = OrderedDict()  # by address
        self._known: dict[int, tuple[str, str]] = {}  # address: role and name
        self._known_at: tuple[int, ...] = ()
        self._pending: list[_Cast] = []  # casts by autocast whose op is not seen yet
        self._autocast_lines: set[str] = set()
        self._here = _Here()

    def records(self) -> list[HalfSite]:
        """All sites so far, in the order of their first calls."""
        with self.failures.contained(_WHAT):
            return [site.record() for site in list(self._sites.values())]
        return []

    def files(self) -> list[str]:
        """Of the script's own, that hold a site."""
        return list(self._files)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hears of every cast and constructor while entered."""
        _device._device_constructors()  # torch's table of them, made before they are replaced
        with contextlib.ExitStack() as stack:
            patches = stack.enter_context(Patches())
            for owner, names, heard in (
                (Tensor, _CASTS, self._cast), (Tensor, ("view",), self._read),
                (Tensor, _MADE_OF, self._made), (torch, _MADE, self._made),
                (torch, _READ, self._read), (torch._utils, ("_rebuild_tensor",), self._read),
            ):  # fmt: skip
                for name in names:
                    patches.replace(owner, name, self._listens(owner, name, heard))
            stack.enter_context(float16_looked_up(self._numpy_type))
            patches.wrap(torch.jit, "script", _unheard_call)
            patches.wrap(torch, "set_default_dtype", self._set_default)
            patches.wrap(nn.Module, "_apply", self._apply)
            patches.wrap(nn.Module, "load_state_dict", functools.partial(self._loads, "weights"))
            patches.wrap(Optimizer, "load_state_dict", functools.partial(self._loads, "moments"))
            hooks = torch.autograd.graph.saved_tensors_hooks
            patches.wrap(hooks, "__init__", self._saves)
            hook = self.failures.hook
            stack.enter_context(PARAMETERS.subscribe(hook(_WHAT, self._registered("weights"))))
            stack.enter_context(BUFFERS.subscribe(hook(_WHAT, self._registered("buffers"))))
            yield
        self._arrived.clear()
        self._known.clear()

    def after_op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op of the script's that the op watch is awake for."""
        name = func._opname
        is_cast = name in ("_to_copy", "copy_")
        if self._pending and not is_cast and name not in PASSES_ON:
            self._settle(name)
        if not isinstance(out, Tensor) or out.dtype not in HALF or not self.enabled:
            return
        source = args[1] if name == "copy_" else args[0] if args else None
        if is_cast:
            if not isinstance(source, Tensor) or source.dtype is out.dtype or self._is_heard():
                return
            self._op_cast(name, source, out)
        elif name in RUNNING_SUMS and isinstance(source, Tensor):
            is_sum = not in_backward() and not self._watch.in_optimizer
            if is_sum and source.dtype is out.dtype and adds_to_what_lives_on(name, args):
                self._site("sum", self._watch.place(), name, out.dtype, "").calls += 1
        else:
            given = [t for t in tensors(args, kwargs) if t.is_floating_point()]
            if given and all(t.dtype not in HALF for t in given) and not self._is_heard():
                place = self._watch.place()
                self._site(self._kind("cast"), place, name, out.dtype, "").calls += 1

    def stepped(self, optimizer: Any) -> None:
        """``optimizer`` has made a step; its line still runs. Its weights and moments in half are
        rounded by it."""
        steps = (self._stepped.get(optimizer) or 0) + 1
        if optimizer is None or steps > STEPS or not self.enabled:
            return
        self._stepped[optimizer] = steps
        place, kind = self._lines.where(), type(optimizer).__name__
        known = self._known_tensors()
        found = [("weights", p, p) for p in parameters_of(optimizer)]
        found += [("moments", p, t) for p, held in state_of(optimizer) for t in held.values()]
        for role, parameter, tensor in found:
            if isinstance(tensor, Tensor) and tensor.dtype in HALF:
                site = self._site("state", place, kind, tensor.dtype, role)
                site.name(known.get(_address(parameter), ("", ""))[1])
                site.calls += 1

    # What the wrappers hear.

    def _listens(self, owner: Any, name: str, heard: Callable[..., None]) -> Callable[[Any], Any]:
        """Makes a wrapper that calls ``heard`` with what gave a tensor in half."""
        place = "Tensor." if owner is Tensor else ""
        op = place + name if place else "torch.load" if owner is torch._utils else f"torch.{name}"
        looks = functools.partial(self._looks, op, heard)
        given = 1 if name == "copy_" else 0  # which argument the numbers come from
        # What a call looks up is near: preparation may make hundreds of thousands of them.
        fp16, bf16, tensor, frame = torch.float16, torch.bfloat16, Tensor, sys._getframe
        modes, closed, plain = torch._C._len_torch_function_stack, self._closed, _PLAIN

        def make(original: Any) -> Any:
            # The name passes on who asks, to a device that is stood in for.
            @functools.wraps(original)
            def __torch_function__(*args: Any, **kwargs: Any) -> Any:  # noqa: N807
                known = not args or (type(args[0]) in plain and type(args[-1]) in plain)
                if not known and any(map(_has_its_own, args)):
                    with unpatched(owner, name):
                        return original(*args, **kwargs)
                result = original(*args, **kwargs)
                if type(result) is not tensor or modes():
                    looks(original, args, kwargs, result)
                elif (dtype := result.dtype) is fp16 or dtype is bf16:
                    source = args[given] if len(args) > given else None
                    if type(source) is not tensor or source.dtype is not dtype:
                        caller = frame(1)
                        site = closed.get((id(caller.f_code), caller.f_lasti))
                        if site is None:
                            looks(original, args, kwargs, result)
                        else:
                            site.calls += 1
                return result

            if owner is not torch._utils:  # as it is found again where it is unpickled
                __torch_function__.__module__ = "torch"
                __torch_function__.__qualname__ = place + name
            return passes_on(__torch_function__)

        return make

    def _looks(
        self,
        op: str,
        heard: Callable[..., None],
        original: Any,
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> None:
        """A result that is in half, or one whose dtype may not be asked for so simply."""
        if torch.compiler.is_compiling() or not self.enabled or is_own():
            return
        caller = sys._getframe(2)
        with self.failures.contained(_WHAT):
            if not isinstance(result, Tensor) or result.dtype not in HALF or _cannot_look():
                return
            if not result.numel():
                return
            site = self._closed.get((id(caller.f_code), caller.f_lasti))
            if site is not None:
                given = args[op == "Tensor.copy_" :][:1]
                if not (isinstance(given and given[0], Tensor) and given[0].dtype is result.dtype):
                    site.calls += 1
                return
            if caller.f_code.co_name == _PASSER and _is_passed_on(caller):
                return  # the wrapper that the script called hears it
            if caller.f_code.co_filename.startswith(_OTHERS) and not self._lines.is_user(
                caller.f_code
            ):
                return
            heard(op, original, args, kwargs, result)

    def _cast(self, op: str, original: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        source = args[0]
        if op == "Tensor.copy_":
            source = args[1] if len(args) > 1 else kwargs.get("src")
        if isinstance(source, Tensor) and source.dtype is not result.dtype:
            applies = self._here.applies
            if applies and op != "Tensor.copy_":
                role, name = applies[-1].role_of(source)
                self._heard("module", applies[0].op, role, source, result, name)
            else:
                self._heard(self._kind("cast"), op, None, source, result)

    def _made(self, op: str, original: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        name = op.partition(".")[2]
        if any(isinstance(a, Tensor) and a.dtype is result.dtype for a in args[:1]):
            return
        source = args[1 if name == "new_tensor" else 0] if args else None
        if name in _CONVERTED and isinstance(source, Tensor):
            self._heard(self._kind("cast"), op, None, source, result)
            return
        is_array = type(source).__module__ == "numpy"
        if is_array and str(getattr(source, "dtype", "")) == "float16":
            self._heard("loaded", op, None, None, result)
            return
        role = "" if name in _UNSET else "data" if is_array else "constants"
        before = None
        is_known = all(map(_may_be_read_twice, (*args, *kwargs.values())))
        if name in _VALUED and is_known and result.numel() <= ELEMENTS and type(result) in PLAIN:
            kept = {k: v for k, v in kwargs.items() if k not in ("requires_grad", "out")}
            before = functools.partial(original, *args, **{**kept, "dtype": torch.float64})
        self._heard("made", op, role, before, result)

    def _read(self, op: str, original: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        source = args[0] if args else None
        if isinstance(source, Tensor) and source.dtype is result.dtype:
            return
        if op == "torch.load":
            between = _outside(sys._getframe(1), "_utils.py").f_code.co_filename
            op = "torch.utils.data.DataLoader" if between.endswith("reductions.py") else op
        self._heard("loaded", op, None, None, result)

    def _heard(
        self, kind: str, op: str, role: str | None, before: Any, result: Tensor, name: str = ""
    ) -> None:
        place = self._lines.where()
        if not place[0]:
            return
        if role is None:
            role, name = self._role(kind, before, result)
        site = self._site(kind, place, op, result.dtype, role)
        site.calls += 1
        site.name(name)
        self._arrived[_address(result)] = site, result.numel()
        if len(self._arrived) > MOST_ARRIVED:
            self._arrived.popitem(last=False)
        if site.is_open:
            source = before if before is None or isinstance(before, Tensor) else before()
            site.measure(source, result)
        elif len(self._closed) < MOST_SITES and not self._here.applies:
            caller = _outside(sys._getframe(1))
            if self._lines.is_user(caller.f_code):
                self._closed[id(caller.f_code), caller.f_lasti] = site
                self._codes.append(caller.f_code)  # no other gets its id

    # Where it stands, and what it makes half.

    def _site(
        self, kind: str, place: tuple[str, int], op: str, dtype: torch.dtype, role: str
    ) -> _Site:
        key = (kind, line_name(place), op, dtype_name(dtype), role)
        site = self._sites.get(key)
        if site is None:
            site = _Site(*key, self._steps.count, not self._watch.trains)
            if place[0] and len(self._sites) < MOST_SITES:
                self._sites[key] = site
                self._files[place[0]] = None
        return site

    def _kind(self, kind: str) -> str:
        """That of a cast which runs now."""
        if self._here.saving:
            return "saved"
        if self._watch.in_optimizer:
            return "state"
        node = torch._C._current_autograd_node()
        if self._watch.functions or isinstance(node, BackwardCFunction):
            return "function"
        return kind

    def _role(self, kind: str, before: Any, result: Tensor) -> tuple[str, str]:
        """What becomes half, as far as that shows, and its name."""
        if kind == "saved":
            return "saved activations", self._paths.path(self._paths.current())
        if self._here.loading:
            return self._here.loading, ""
        known = self._known_tensors()
        for tensor in (before, result):
            if isinstance(tensor, Tensor):
                found = known.get(_address(tensor))
                if found is not None:
                    return found
                if isinstance(tensor, nn.Parameter):
                    return "weights", ""
        if in_backward():
            return "gradients", ""
        if not isinstance(before, Tensor):
            return ("data" if not self._watch.trains else ""), ""
        if before.dtype is torch.bool:
            return "masks", ""
        if not before.is_floating_point():
            return "whole numbers", ""
        if before.requires_grad and not before.dim():
            return "loss", ""
        if self._paths.stack or before.requires_grad:
            return "activations", self._paths.path(self._paths.current())
        if self._watch.trains and (found := self._copied(before)) is not None:
            return found
        return ("" if is_learned(before) else "data"), ""

    def _copied(self, tensor: Tensor) -> tuple[str, str] | None:
        """What ``tensor`` is a copy of, as of a checkpoint that is on its way to a file."""
        known = self._known_tensors()
        if not _address(tensor) or not 0 < tensor.numel() <= ELEMENTS or tensor.is_cuda:
            return None
        for optimizer in self._steps.optimizers:
            held = [t for _, state in state_of(optimizer) for t in state.values()]
            for one in (*held, *parameters_of(optimizer)):
                is_alike = isinstance(one, Tensor) and one.shape == tensor.shape and one.dim() > 0
                if is_alike and one.is_cpu and torch.equal(one.detach(), tensor) and tensor.any():
                    return known.get(_address(one))
        return None

    def _known_tensors(self) -> dict[int, tuple[str, str]]:
        """Weights, buffers and moments by their address; made anew once in each step."""
        optimizers = self._steps.optimizers
        registered = self._paths.registered()
        at = (self._steps.count, len(registered), len(optimizers), len(self._paths.roots))
        if at != self._known_at:
            self._known_at, known = at, {}
            named: dict[int, str] = {}
            held = [(self._paths.path(m), m) for m in (*self._paths.models(), *registered)]
            for path, module in held:
                for name, tensor in own_buffers(module):
                    known[_address(tensor)] = "buffers", _joined(path, name)
                for name, tensor in own_parameters(module):
                    named[_address(tensor)] = _joined(path, name)
                    known[_address(tensor)] = "weights", _joined(path, name)
            for optimizer in optimizers:
                for parameter in parameters_of(optimizer):
                    known.setdefault(_address(parameter), ("weights", ""))
                for parameter, state in state_of(optimizer):
                    name = named.get(_address(parameter), "")
                    for tensor in state.values():
                        if isinstance(tensor, Tensor) and tensor.dim():
                            known[_address(tensor)] = "moments", name
            known.pop(0, None)
            self._known = known
        return self._known

    # What is heard beside casts and constructors.

    def _set_default(self, original: Any, dtype: Any) -> Any:
        result = original(dtype)
        with self.failures.contained(_WHAT):
            default = torch.get_default_dtype()
            if default in HALF and self.enabled:
                place = self._lines.where()
                self._site("made", place, "torch.set_default_dtype", default, "").calls += 1
        return result

    def _numpy_type(self, half: Any, frame: FrameType) -> Any:
        """NumPy's float16 is looked up in ``frame``, to cast to it where the line reads so."""
        with self.failures.contained(_WHAT):
            if self.enabled and self._lines.is_user(frame.f_code):
                place = frame.f_code.co_filename, frame.f_lineno
                if _NUMPY_CAST.search(linecache.getline(*place)):
                    role = "" if self._watch.trains else "data"
                    self._site("cast", place, "numpy.float16", torch.float16, role).calls += 1
        return half

    def _apply(self, original: Any, module: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
        applies = self._here.applies
        applies.append(_Apply(module, applies[0] if applies else None, fn))
        try:
            return original(module, fn, *args, **kwargs)
        finally:
            applies.pop()

    def _loads(
        self, role: str, original: Any, holder: Any, state_dict: Any, *args: Any, **kw: Any
    ) -> Any:
        with self.failures.contained(_WHAT):
            for tensor in _held(state_dict, 0):
                found = self._arrived.get(_address(tensor))
                if found is not None and found[1] == tensor.numel():
                    found[0].role = role
        before, self._here.loading = self._here.loading, role
        try:
            return original(holder, state_dict, *args, **kw)
        finally:
            self._here.loading = before

    def _saves(self, original: Any, hooks: Any, pack_hook: Any, *args: Any, **kwargs: Any) -> Any:
        here = self._here

        def packed(tensor: Any) -> Any:
            here.saving += 1
            try:
                return pack_hook(tensor)
            finally:
                here.saving -= 1

        return original(hooks, packed, *args, **kwargs)

    def _registered(self, role: str) -> Callable[[nn.Module, str, Any], None]:
        def registered(module: nn.Module, name: str, tensor: Any) -> None:
            if isinstance(tensor, Tensor) and tensor.dtype in HALF:
                found = self._arrived.get(_address(tensor))
                if found is not None and found[1] == tensor.numel():
                    found[0].role = role
                    found[0].name(name)

        return registered

    # What the op watch sees.

    def _is_heard(self) -> bool:
        """Whether the op runs inside a function that a wrapper listens to."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == __file__ and code.co_name == _PASSER:
                return True
            if self._lines.is_user(code):
                return False
            frame = frame.f_back
        return False

    def _op_cast(self, name: str, source: Tensor, out: Tensor) -> None:
        place = self._watch.place()
        if not place[0]:
            return
        kind = self._kind("cast")
        role, path = self._role(kind, source, out)
        if kind == "cast" and in_backward():
            kind = "autocast" if line_name(place) in self._autocast_lines else kind
        elif (
            kind == "cast" and name == "_to_copy" and self._watch.autocast == dtype_name(out.dtype)
        ):
            self._autocast_lines.add(line_name(place))
            path = self._paths.path(self._paths.current()) or path
            self._pending.append(_Cast(place, source, out, role, path))
            return
        site = self._site(kind, place, name, out.dtype, role)
        site.calls += 1
        site.name(path)
        if site.is_open:
            site.measure(source, out)

    def _settle(self, op: str) -> None:
        """The op for which autocast has cast is ``op``."""
        pending, self._pending = self._pending, []
        for cast in pending:
            site = self._site("autocast", cast.place, op, cast.out.dtype, cast.role)
            site.calls += 1
            site.name(cast.path)
            if site.is_open:
                site.measure(cast.source, cast.out)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Constructors are torch's own inside; for what reads Python code and must find no wrapper."""
    with contextlib.ExitStack() as stack:
        for name in (*_MADE, *_READ):
            stack.enter_context(unpatched(torch, name))
        yield


def _unheard_call(original: Any, *args: Any, **kwargs: Any) -> Any:
    with unheard():
        return original(*args, **kwargs)


class _Here(threading.local):
    """What runs in this thread."""

    saving = 0  # functions of the script's that pack a saved tensor
    loading = ""  # role of what a ``load_state_dict`` takes

    def __init__(self) -> None:
        self.applies: list[_Apply] = []


class _Apply:
    """A module whose own tensors are about to be changed, within that of ``outermost``."""

    def __init__(self, module: nn.Module, outermost: _Apply | None, fn: Any) -> None:
        self.module = module
        self.op = str(getattr(fn, "__qualname__", "")).partition(".<locals>")[0] or "Module._apply"
        self._outermost = outermost
        self._paths: dict[int, str] | None = None  # of the outermost: by id of a module inside
        self._named: dict[int, tuple[str, str]] | None = None

    def role_of(self, tensor: Tensor) -> tuple[str, str]:
        """ "weights" or "buffers" and the dotted name below the outermost module; the rest are
        gradients."""
        if self._named is None:
            path = (self._outermost or self).paths().get(id(self.module), "")
            own: list[tuple[str, str, Tensor]] = []
            own += [("weights", *held) for held in own_parameters(self.module)]
            own += [("buffers", *held) for held in own_buffers(self.module)]
            self._named = {_address(t): (role, _joined(path, name)) for role, name, t in own}
        return self._named.get(_address(tensor), ("gradients", ""))

    def paths(self) -> dict[int, str]:
        """Dotted names of the modules inside, which the call keeps alive."""
        if self._paths is None:
            self._paths = {id(m): path for path, m in modules(self.module)}
        return self._paths


class _Cast:
    """A cast by autocast; the op that it is for comes next."""

    __slots__ = ("out", "path", "place", "role", "source")

    def __init__(
        self, place: tuple[str, int], source: Tensor, out: Tensor, role: str, path: str
    ) -> None:
        self.place, self.source, self.out, self.role, self.path = place, source, out, role, path


class _Site:
    """A site and what was counted of it."""

    def __init__(
        self, kind: str, line: str, op: str, dtype: str, role: str, step: int, prepares: bool
    ) -> None:
        self.kind, self.line, self.op, self.dtype, self.role = kind, line, op, dtype, role
        self.calls = 0
        self.is_open = True  # numbers are still looked at
        self._step, self._prepares = step, prepares
        self._names: dict[str, None] = {}
        self._looked_at = 0  # calls
        self._elements = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._counts = _Counts()

    def name(self, name: str) -> None:
        """A parameter, buffer or module that it makes half."""
        if name and len(self._names) < MOST_NAMES:
            self._names[name] = None

    def measure(self, before: Tensor | None, after: Tensor) -> None:
        """Compare a sample of one call; ``before`` is None where nothing is known of it."""
        self._looked_at += 1
        if before is not None:
            with own_ops(), torch.no_grad():
                was, now = _sample(before), _sample(after)
                if was is not None and now is not None and was.shape == now.shape:
                    self._waiting.append((was, now))
                    self._elements += len(was)
                    if sum(len(one) for one, _ in self._waiting) >= KEPT:
                        self._counts = self._counted()
                        self._waiting.clear()
        self.is_open = self._looked_at < CALLS and self._elements < ELEMENTS

    def _counted(self) -> _Counts:
        """With what waits."""
        if not self._waiting:
            return self._counts
        was = torch.cat([was.double() for was, _ in self._waiting])
        now = torch.cat([now.double() for _, now in self._waiting])
        return self._counts.added(was, now)

    def record(self) -> HalfSite:
        """As it is now."""
        counts = self._counted()
        role = self.role
        is_free = role in ("", "data", "constants")
        if is_free and counts.whole and counts.distinct > 2 and counts.largest > 1:
            role = "whole numbers"
        return HalfSite(
            kind=self.kind,
            line=self.line,
            op=self.op,
            dtype=self.dtype,
            role=role,
            step=self._step,
            prepares=self._prepares,
            calls=self.calls,
            elements=counts.elements,
            changed=counts.changed,
            zeroed=counts.zeroed,
            infinite=counts.infinite,
            merged=counts.merged,
            distinct=counts.distinct,
            whole=counts.whole and counts.elements > 0,
            largest=counts.largest if counts.elements else None,
            error=counts.error,
            names=tuple(self._names),
        )


class _Counts:
    """Of pairs of numbers, before and after; immutable."""

    def __init__(self) -> None:
        self.elements = self.changed = self.zeroed = self.infinite = 0
        self.merged = self.distinct = 0
        self.whole = True
        self.largest = 0.0
        self._squares = self._errors = 0.0

    @property
    def error(self) -> float | None:
        """2-norm of the differences over that of the numbers, of those finite before and after."""
        return math.sqrt(self._errors / self._squares) if self._squares else None

    def added(self, was: Tensor, now: Tensor) -> _Counts:
        """With these, in fp64."""
        new = _Counts()
        finite = was.isfinite()
        both = finite & now.isfinite()
        new.elements = self.elements + len(was)
        new.changed = self.changed + int(((was != now) & finite).sum())
        new.zeroed = self.zeroed + int(((was != 0) & (now == 0)).sum())
        new.infinite = self.infinite + int((finite & now.isinf()).sum())
        distinct = _distinct(was[finite])
        new.distinct = self.distinct + distinct
        new.merged = self.merged + distinct - _distinct(now[finite])
        new.whole = self.whole and bool((was[finite] == was[finite].floor()).all())
        largest = float(was[finite].abs().max()) if bool(finite.any()) else 0.0
        new.largest = max(self.largest, largest)
        new._squares = self._squares + float(was[both].square().sum())
        new._errors = self._errors + float((was - now)[both].square().sum())
        return new


def _sample(tensor: Tensor) -> Tensor | None:
    """At most :data:`ELEMENTS` of its numbers, evenly spaced; None where none can be read."""
    numbers = opened(tensor)
    if numbers is None or numbers.is_complex():
        return None
    numbers = numbers.detach()
    if numbers.numel() > LARGEST and not numbers.is_contiguous():
        return None
    flat = numbers.reshape(-1)
    return flat[:: max(1, -(-len(flat) // ELEMENTS))].to("cpu", copy=True)


def _may_be_read_twice(argument: Any) -> bool:
    """An argument of a constructor that is no object of the user's own."""
    kind = type(argument)
    return kind in _PLAIN_ARGUMENTS or kind.__module__ == "numpy" or isinstance(argument, Tensor)


def _distinct(values: Tensor) -> int:
    ordered = values.sort().values
    return int((ordered[1:] != ordered[:-1]).sum()) + min(1, len(values))


def _has_its_own(value: object) -> bool:
    """Whether torch asks the class of ``value`` what a call does: it may look the function up in a
    table of its own, as parameters without a shape do."""
    asked = getattr(type(value), "__torch_function__", None)
    return asked is not None and getattr(asked, "__func__", asked) not in _TORCHS


def _cannot_look() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or is_fx_tracing()
        or is_capturing()
        or bool(torch._C._functorch.peek_interpreter_stack())
    )


def _address(tensor: Tensor) -> int:
    """Of its first number; 0 where it has none."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it stands for a value that is not there
        return 0


def _is_passed_on(frame: FrameType | None) -> bool:
    """Whether a mode or a class of tensors passes on here what a wrapper was called for."""
    for _ in range(_PASSES):
        if frame is None:
            return False
        if frame.f_code.co_filename == __file__ and frame.f_code.co_name == _PASSER:
            return True
        frame = frame.f_back
    return False


def _outside(frame: FrameType, *endings: str) -> FrameType:
    """The first frame from ``frame`` on that is not of this module, nor of a file ending so."""
    while frame.f_code.co_filename.endswith((__file__, *endings)) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _held(value: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in half of a checkpoint."""
    if isinstance(value, Tensor):
        if value.dtype in HALF:
            yield value
    elif depth < DEPTH and type(value) in (dict, OrderedDict, list, tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _held(part, depth + 1)
