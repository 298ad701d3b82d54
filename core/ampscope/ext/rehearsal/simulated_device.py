"""A CUDA device for scripts that ask for one, on a machine that has none.

Much training code enters its AMP branch only where CUDA is. Inside :func:`simulated_cuda` such a
script finds a device: ``torch.cuda.is_available()`` is true, ``.cuda()``, ``.to("cuda")`` and
``device="cuda"`` work, and ``tensor.device`` answers ``cuda:0`` for what was put there and for what
was computed from it. The numbers are computed on the CPU. Autocast and GradScaler are redirected
elsewhere (:mod:`ampscope.runner.script_device`), CUDA's lists and the arithmetic of its Tensor
Cores by ``ampscope.policy``.

How it works: a TorchFunctionMode sees each public torch function and each attribute of a tensor
that Python asks for, in the threads that the script starts, too. There is one device, or one for
each rank that a launcher has started on this machine. A tensor on the device carries a mark in its
``__dict__``, which results inherit; it is left out of pickles. ampscope's own code and torch's
inner code are told the truth by ``torch.cuda``.

Ops in half that CUDA has and a CPU has not are computed in fp32, and their results rounded. What
cannot be rehearsed raises :class:`CannotRehearseError` with a sentence, such as CUDA graphs.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Final

import torch
import torch.utils._device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from ampscope.ext.rehearsal.cuda_answers import answering, old_type_name
from ampscope.ext.rehearsal.current_device import asked_by_torch, device_named, name_of
from ampscope.patches import Patches, within
from ampscope.policy.device_profiles import DeviceProfile

_MARK: Final = "_ampscope_device"
_CPU: Final = torch.device("cpu")
# Modules that pass on what another asks, and torch's own that make tensors on a script's behalf.
_PASS_ON: Final = (__name__, "torch._tensor", "torch.overrides", "torch.utils._device")
_AS_THE_SCRIPT: Final = (
    "torch.nn.modules.", "torch.nn.init", "torch.nn.functional", "torch.nn.utils.",
    "torch.utils.data.", "torch.functional",
)  # fmt: skip
# What a CPU raises of ops in half that CUDA has: FFTs and what reads their complex results, rrelu.
# Of other such ops see `tensor_core`.
_ON_CUDA_ALONE: Final = (
    "Unsupported dtype Half", "MKL FFT doesn't support tensors of type: Half",
    "rrelu_with_noise_out_cpu", "not implemented for 'ComplexHalf'",
)  # fmt: skip


@contextlib.contextmanager
def simulated_cuda(profile: DeviceProfile) -> Iterator[CudaMode]:
    """A script finds one CUDA device inside; after it torch is as before. For a machine without a
    real one: whether there is one is not asked here, which would start CUDA."""
    mode = CudaMode()
    with contextlib.ExitStack() as stack:
        patches = stack.enter_context(Patches())
        for owner, name, wrapper in _WRAPPED:
            patches.wrap(owner, name, functools.partial(wrapper, mode))
        for owner, name, make in _REPLACED:
            patches.replace(owner, name, make)
        patches.wrap(torch, "compile", functools.partial(_eager, stack))
        with answering(profile), mode:
            yield mode


def _eager(stack: contextlib.ExitStack, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.compile``: what is compiled runs as eager code, for a graph would hold no marks."""
    import torch._dynamo.eval_frame as dynamo  # 1 s, and few scripts compile

    if dynamo._stance.stance != "force_eager":
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        warnings.warn("torch.compile is not rehearsed: the eager code runs.", stacklevel=3)
    return original(*args, **kwargs)


def device_of(tensor: Tensor) -> torch.device | None:
    """The device that the tensor was put on; None for one that is on the CPU for the script too."""
    found = place_of(tensor)
    return None if found == _CPU else found


def place_of(tensor: Tensor) -> torch.device | None:
    """A CUDA device; the CPU where the tensor would be there on a machine with CUDA, too; None
    where that is not certain, as of what came out of a file or of another process."""
    found: torch.device | None = getattr(tensor, "__dict__", {}).get(_MARK)
    return found


class CudaMode(TorchFunctionMode):
    """Redirects what asks for CUDA to the CPU, and remembers which tensors are there."""

    def __init__(self) -> None:
        super().__init__()
        self.was_used = False  # something was put on the device
        # The script has asked where a tensor is of which that is not certain. What it does next may
        # follow from the answer, so no mistake in devices is called one from here on.
        self.has_guessed = False
        self.rounded: dict[str, None] = {}  # names of ops in half that were computed in fp32
        # Called before each function from the first one on that meets half precision, until it
        # answers with true.
        self.on_half: Callable[[], bool] | None = None
        self._has_met_half = False
        self._own = threading.local()
        self.nccl_groups: weakref.WeakSet[Any] = weakref.WeakSet()  # they are of gloo
        # Where DistributedDataParallel with one device, and DataParallel, move their inputs.
        self.inputs_to: weakref.WeakKeyDictionary[Any, torch.device] = weakref.WeakKeyDictionary()

    @property
    def default(self) -> torch.device | None:
        """This thread's, of ``torch.set_default_device("cuda")``."""
        found: torch.device | None = getattr(self._own, "default", None)
        return found

    @default.setter
    def default(self, device: torch.device | None) -> None:
        self._own.default = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func, kwargs = within(func), kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function with its device redirected; the result is where the script expects it."""
        if self.on_half is not None:
            self._look_for_half((args, kwargs.values()))
        if _REDIRECTED.isdisjoint(kwargs) and func not in _factories():
            place = _one_place((*args, *kwargs.values()) if kwargs else args)
            if place is not _UNDECIDED:
                return self._computed(func, args, kwargs, None if place == _CPU else place, place)
        asked = kwargs.get("device")
        args, kwargs, target = _on_the_cpu(args, kwargs)
        target, place = self._destination(func, args, kwargs, asked, target)
        if kwargs.get("generator") is not None and func in _factories():
            _check_generator(kwargs["generator"], target)
        return self._computed(func, args, kwargs, target, place)

    def _destination(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Any,
        target: torch.device | None,
    ) -> tuple[torch.device | None, torch.device | None]:  # fmt: skip
        """The device that the result is put on, and where else it is, if that is certain."""
        is_factory = func in _factories()
        if func is torch.from_numpy or (is_factory and not _follows(func, args)):
            target = self.default if target is None else target
            return target, _CPU if target is None and _is_for_the_script() else None
        if target is not None:
            return target, _CPU if asked == "cpu" else None
        tensors = _tensors((*args, *kwargs.values()))
        place = _place(func, tensors)
        if place is None or place == _CPU:
            return self.default if is_factory else None, place
        if func in _one_device():
            self.check_one_device(func, place, tensors)
        return place, place

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        target: torch.device | None, place: torch.device | None,
    ) -> Any:  # fmt: skip
        """What the function returns, put on the device ``target``, or else where ``place`` says."""
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if target is None or not any(text in str(error) for text in _ON_CUDA_ALONE):
                raise
            self.rounded[str(getattr(func, "__name__", func))] = None
            result = _in_fp32(func, args, kwargs)
        if self.on_half is not None:
            self._look_for_half(((result,),))
        if target is not None and target.type == "cuda":
            self.was_used = True
            _mark(result, target, args[0] if args else None)
        elif place is not None:
            _mark(result, place, args[0] if args else None)
        return result

    def _look_for_half(self, groups: Iterable[Iterable[Any]]) -> None:
        """Tell of half precision, once it is among these values or autocast is on."""
        self._has_met_half = self._has_met_half or _autocasts("cpu") or _takes_half(groups)
        on_half = self.on_half  # another thread may be here, too
        if self._has_met_half and on_half is not None and on_half():
            self.on_half = None

    def check_one_device(self, func: Any, device: torch.device, tensors: list[Tensor]) -> None:
        """torch's own error where a tensor that is on the CPU for certain meets one on the device.
        One without dimensions counts as a number, and one without elements may be left out."""
        if self.has_guessed:
            return
        for tensor in tensors:
            if place_of(tensor) != _CPU or tensor.dim() == 0 or tensor.numel() == 0:
                continue
            if _asked_by_ampscope():
                return
            name = getattr(func, "__name__", str(func))
            if name.startswith("conv"):
                kinds = [t.type() for t in tensors[:2]]
                kinds = [
                    k.replace("torch.", "torch.cuda.", 1) if device_of(t) else k
                    for k, t in zip(kinds, tensors, strict=False)
                ]
                raise RuntimeError(
                    f"Input type ({kinds[0]}) and weight type ({kinds[-1]}) should be the same"
                )
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device} and cpu! (when checking the arguments of {name})"
            )


# Half formats of CUDA alone, and the formats that replace them on a CPU.
_WIDER: Final = {torch.float16: torch.float32, torch.complex32: torch.complex64}
_NARROWER: Final = {wide: half for half, wide in _WIDER.items()}


def _in_fp32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of its half arguments in fp32, its results rounded to half once; autograd goes
    the same way back."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(_NARROWER.get(tensor.dtype, tensor.dtype))

    wide_args, wide_kwargs = tree_map_only(Tensor, wide, (args, kwargs))
    with _CufftSizes():  # type: ignore[no-untyped-call]  # torch's is untyped
        result = func(*wide_args, **wide_kwargs)
    if args and result is wide_args[0]:  # in place
        return args[0].copy_(result)
    return tree_map_only(Tensor, rounded, result)


class _CufftSizes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own hook is untyped
    """In half, cuFFT transforms sizes that are powers of two, and refuses others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _FFTS:
            sizes = [args[0].shape[dim] for dim in args[1]]
            if func.overloadpacket is torch.ops.aten._fft_c2r:
                sizes[-1] = args[3]
            if any(size & (size - 1) for size in sizes):
                raise RuntimeError(
                    "cuFFT only supports dimensions whose sizes are powers of two when computing "
                    f"in half precision, but got a signal size of{sizes}"
                )
        return func(*args, **(kwargs or {}))


_FFTS: Final = (torch.ops.aten._fft_r2c, torch.ops.aten._fft_c2c, torch.ops.aten._fft_c2r)


def _on_the_cpu(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
    """A call as a CPU can make it, and the device that it asks for."""
    asked = kwargs.get("device")
    target = device_named(asked) if asked is not None else None
    if target is not None and target.type == "cuda":
        kwargs = {**kwargs, "device": "cpu"}
    if any(type(a) is torch.device and a.type == "cuda" for a in args):
        target = next(a for a in args if type(a) is torch.device)
        args = tuple(_CPU if type(a) is torch.device else a for a in args)
    if kwargs.get("pin_memory"):
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    return args, kwargs, target


def _follows(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a factory's result is where the tensors are that it is given. A list of tensors makes
    none that does, and a tensor that tells a size neither."""
    name = func.__name__
    if name in ("tensor", "as_tensor", "asarray"):
        return bool(args) and isinstance(args[0], Tensor)
    return bool(name.startswith(("sparse_", "nested_")))


_UNDECIDED: Final = torch.device("meta")
_REDIRECTED: Final = frozenset({"device", "pin_memory", "generator"})
_PLAIN: Final = frozenset({Tensor, nn.Parameter})  # no class that a script may have made
_VALUES: Final = frozenset({int, float, bool, complex, str, type(None), torch.dtype, slice})


def _one_place(values: tuple[Any, ...]) -> torch.device | None:
    """Where all tensors among simple values are, which most functions are called with; None where
    that is certain of none of them. :data:`_UNDECIDED` where they are in several places, where
    there is no tensor, and for values of other kinds."""
    found: torch.device | None = _UNDECIDED
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            place = value.__dict__.get(_MARK)
            if found is _UNDECIDED:
                found = place
            elif place is not found and place != found:
                return _UNDECIDED
        elif kind not in _VALUES:
            return _UNDECIDED
    return found


_HALVES: Final = frozenset({torch.float16, torch.bfloat16, torch.complex32})
_autocasts: Final = torch.is_autocast_enabled  # a script's own question is answered for its device


def _takes_half(groups: Iterable[Iterable[Any]]) -> bool:
    """Whether a tensor in half is among values, or one of a class of the script's own, which is not
    asked; lists and tuples are looked into."""
    for values in groups:
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                if value.dtype in _HALVES:
                    return True
            elif kind not in _VALUES:
                if isinstance(value, Tensor):
                    return True
                if isinstance(value, list | tuple) and _takes_half((value,)):
                    return True
    return False


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among arguments, and in lists and tuples of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(tuple(value))
    return found


def _place(func: Any, tensors: list[Tensor]) -> torch.device | None:
    """Where the result of a function of these tensors is; None where that is not certain."""
    places = [place_of(tensor) for tensor in tensors]
    if func in _as_the_first():
        return places[0] if places else None
    there = next((place for place in places if place is not None and place != _CPU), None)
    if there is None:
        return _CPU if places and None not in places else None
    if places[0] == _CPU and tensors[0].dim() and func not in _one_device():
        are_numbers = all(not device_of(one) or one.dim() == 0 for one in tensors)
        return _CPU if are_numbers else there  # such as a size that was computed on the device
    return there


def _common(values: tuple[Any, ...]) -> torch.device | None:
    """The device of the first tensor that is on one."""
    return next((found for one in _tensors(values) if (found := device_of(one))), None)


def _mark(result: Any, device: torch.device | None, first: Any = None) -> None:
    """Put what a function returned on ``device``; an in-place function returns its first argument,
    which stays where it is."""
    if isinstance(result, Tensor):
        if result is first:
            return
        if device is None:
            result.__dict__.pop(_MARK, None)
        elif device != _CPU or type(result) in _PLAIN:  # no fake one
            result.__dict__[_MARK] = device
    elif isinstance(result, list | tuple):
        for one in result:
            _mark(one, device)


def _check_generator(generator: Any, target: torch.device | None) -> None:
    """torch's own error for a generator of another device than the numbers are made on."""
    expected = "cpu" if target is None else target.type
    if generator.device.type != expected:
        raise RuntimeError(
            f"Expected a '{expected}' device type for generator but found '{generator.device.type}'"
        )


def _moved(
    mode: CudaMode, tensor: Tensor, device: torch.device, is_certain: bool = False,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """``tensor.to`` another device makes a copy; to its own it does what is left to do.

    ``is_certain``: the script says "cpu" itself. A CPU that another tensor or an object names may
    be one that CUDA would not give.
    """
    if device.type not in ("cpu", "cuda"):  # such as meta
        return torch.Tensor.to(tensor, device=device, **kwargs)
    target = device if device.type == "cuda" else None
    mode.was_used |= target is not None
    if device_of(tensor) == target:
        result: Tensor = torch.Tensor.to(tensor, **kwargs) if kwargs else tensor
    else:
        result = torch.Tensor.to(tensor, **{**kwargs, "copy": True, "device": "cpu"})
    if result is not tensor:
        _mark(result, _CPU if target is None and is_certain else target)
    elif target is None and not is_certain:
        _mark(tensor, None)
    return result


def _to(mode: CudaMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    named = kwargs
    names = ("non_blocking", "copy")  # may stand last, without their names
    while rest and isinstance(rest[-1], bool):
        bools = sum(isinstance(value, bool) for value in rest)
        named = {names[bools - 1]: rest.pop(), **named}
    other = rest[0] if rest else named.get("other")
    copies = {"copy": True} if named.get("copy") else {}
    if isinstance(other, Tensor):
        place = place_of(other)
        return _moved(mode, tensor, place or _CPU, place == _CPU, dtype=other.dtype, **copies)
    known = {k: v for k, v in named.items() if k != "copy"}
    device, dtype, _, memory_format = _parse_to(mode, torch._C._nn._parse_to, tuple(rest), known)
    if device is None:
        return mode.call(func, args, kwargs)
    left = {"dtype": dtype, "memory_format": memory_format}
    left = {name: value for name, value in left.items() if value is not None} | copies
    asked = rest[0] if rest else named.get("device")
    return _moved(mode, tensor, device_named(device), isinstance(asked, str), **left)


def _parse_to(mode: CudaMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the arguments of ``to`` mean, for tensors and modules: the device stays the one asked
    for, and a number, which torch takes for the accelerator that it has, is a CUDA device."""

    def named(asked: Any) -> Any:
        is_device = isinstance(asked, torch.device | int) and not isinstance(asked, bool)
        return str(device_named(asked)) if is_device else asked

    return func(*map(named, args[:1]), *args[1:], **{k: named(v) for k, v in kwargs.items()})


def _device(mode: CudaMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.device(0)`` is the first CUDA device."""
    if len(args) == 1 and type(args[0]) is int and not kwargs:
        args = ("cuda", *args)
    return func(*args, **kwargs)


def _cuda(mode: CudaMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    asked = args[1] if len(args) > 1 else kwargs.get("device")
    return _moved(mode, args[0], device_named("cuda" if asked is None else asked))


def _cpu(mode: CudaMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _moved(mode, args[0], _CPU, is_certain=True)


def _get_device(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    found = _told(mode, args[0])
    return func(*args, **kwargs) if found is None else found


def _is_cuda(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> bool:
    return _told(mode, args[0]) is not None


def _is_cpu(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> bool:
    return _told(mode, args[0]) is None


def _index(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> int:
    found = device_of(args[0])
    return -1 if found is None else found.index or 0


def _told(mode: CudaMode, tensor: Tensor) -> torch.device | None:
    """What who asks is told: ampscope that all is on the CPU."""
    asker = _asker()
    if asker.startswith("ampscope."):
        return None
    if place_of(tensor) is None and not asker.startswith("torch."):
        mode.has_guessed = True
    return device_of(tensor)


def _asker() -> str:
    """The module that calls torch; ampscope's modes pass on what a script asks, and so do the
    Python methods of torch.Tensor and ``with torch.device``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = name_of(frame)
        if frame.f_code.co_name != "__torch_function__" and name not in _PASS_ON:
            return name
        frame = frame.f_back
    return ""


def _asked_by_ampscope() -> bool:
    return _asker().startswith("ampscope.")


def _is_for_the_script() -> bool:
    """Whether a script, a library, or a module or data set of torch makes a tensor. Others of
    torch's own code may do what it would not do with CUDA."""
    name = _asker()
    return not name.startswith(("ampscope.", "torch.")) or name.startswith(_AS_THE_SCRIPT)


def _set_data(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    func(*args, **kwargs)
    _mark(args[0], place_of(args[1]))


def _pin_memory(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    if device_of(args[0]) is not None:
        name = args[0].type().replace("torch.", "torch.cuda.", 1)
        raise RuntimeError(f"cannot pin '{name}' only dense CPU tensors can be pinned")
    return args[0]


def _type(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    asked = args[1] if len(args) > 1 else kwargs.get("dtype")
    if asked is None:
        name: str = func(args[0])
        is_there = device_of(args[0]) is not None and not _asked_by_ampscope()
        return name.replace("torch.", "torch.cuda.", 1) if is_there else name
    if name := old_type_name(asked):
        result = func(args[0], name.replace("cuda.", ""))
        if result is args[0]:
            return _moved(mode, result, device_named("cuda"))
        _mark(result, device_named("cuda"), args[0])
        return result
    return mode.call(func, args, kwargs)


def _numpy(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    """NumPy cannot read the memory of a device: torch's own error."""
    place = device_of(args[0])
    if place is not None and not kwargs.get("force") and not _asked_by_ampscope():
        raise TypeError(
            f"can't convert {place} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )
    return func(*args, **kwargs)


def _repr(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    if device_of(args[0]) is None:
        return func(*args, **kwargs)
    with mode:  # the text asks for the device
        text: str = torch._tensor_str._str(args[0], **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return text


def _format(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    if device_of(args[0]) is None or args[0].dim() == 0:
        return func(*args, **kwargs)
    return object.__format__(_repr(mode, func, args[:1], {}), *args[1:])


def _get_item(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The result is where the tensor is; an index may be on the CPU, or a number on the device."""
    place = place_of(args[0])
    of_indices = _common(tuple(one for one in _tensors(args[1:]) if one.dim()))
    if place == _CPU and of_indices and not mode.has_guessed and not _asked_by_ampscope():
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    place = of_indices if place is None else place
    result = func(*args, **kwargs)
    _mark(result, place)
    return result


def _pack(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``_pack_padded_sequence`` and ``_pad_packed_sequence``: their lengths stay on the CPU."""
    data, lengths = mode.call(func, args, kwargs)
    _mark(lengths, _CPU)
    return data, lengths


def _storage(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Storages say their device themselves (:data:`_REPLACED`)."""
    found, place = func(*args, **kwargs), device_of(args[0])
    if place is not None:
        getattr(found, "_untyped_storage", found).__dict__[_MARK] = place
    return found


def _as_it_is(mode: CudaMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A fact that is the same on every device, such as a shape; no tensor is returned."""
    return func(*args, **kwargs)


_FACTS: Final = "dtype shape ndim layout requires_grad is_leaf grad_fn is_sparse is_meta"
_ASKED: Final = "size dim numel stride element_size is_contiguous is_floating_point __len__"
# Functions and attributes of tensors that need more than their device redirected.
_Special = Callable[[CudaMode, Any, Any, Any], Any]
_SPECIAL: Final[dict[Any, _Special]] = {
    **{getattr(Tensor, name).__get__: _as_it_is for name in _FACTS.split()},
    **{getattr(Tensor, name): _as_it_is for name in _ASKED.split()},
    torch.device: _device,
    Tensor.to: _to,
    torch._C._nn._parse_to: _parse_to,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.type: _type,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.__repr__: _repr,
    Tensor.__getitem__: _get_item,
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _pack,
    Tensor.__format__: _format,
    Tensor.storage: _storage,
    Tensor.untyped_storage: _storage,
    Tensor.pin_memory: _pin_memory,
    Tensor.is_pinned: lambda *_: False,
    Tensor.get_device: _index,
    Tensor.device.__get__: _get_device,
    Tensor.is_cuda.__get__: _is_cuda,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: _is_cpu,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}


# Functions whose CUDA kernels take tensors of one device alone; a CPU tensor without dimensions may
# be among them in arithmetic. A function that is not here lets a mistake in devices pass.
_POINTWISE: Final = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide",
    "remainder", "fmod", "pow", "maximum", "minimum", "atan2", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_and", "logical_or", "logical_xor", "addcmul", "addcdiv", "lerp", "where",
    "masked_fill",
)  # fmt: skip
_OPERATORS: Final = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv",
    "itruediv", "div", "rdiv", "idiv", "pow", "rpow", "ipow", "eq", "ne", "lt", "le", "gt", "ge",
    "matmul", "rmatmul", "and", "or", "xor",
)  # fmt: skip
_WHOLE: Final = (
    "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addbmm", "linear", "bilinear", "conv1d",
    "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding",
    "layer_norm", "group_norm", "batch_norm", "cross_entropy", "nll_loss", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "scaled_dot_product_attention", "cat", "concat", "stack", "gather", "index_select",
    "scatter_add", "index_add",
)  # fmt: skip


@functools.cache
def _one_device() -> frozenset[Any]:
    names = [n + end for n in (*_POINTWISE, *_WHOLE) for end in ("", "_")]
    names += [f"__{name}__" for name in _OPERATORS]
    owners = (torch, Tensor, nn.functional, torch._C._nn)
    return frozenset(getattr(o, name) for o in owners for name in names if hasattr(o, name))


@functools.cache
def _as_the_first() -> frozenset[Any]:
    """Views of their first argument, in the shape of another."""
    return frozenset(getattr(Tensor, n) for n in ("expand_as", "view_as", "reshape_as"))


@functools.cache
def _factories() -> Any:
    from torch.utils import _device  # its list is made when it is first asked for

    return _device._device_constructors()


def _start_thread(mode: CudaMode, original: Any, thread: threading.Thread) -> None:
    """A mode belongs to the thread that entered it."""
    run = thread.run

    def run_inside() -> None:
        del thread.run  # it holds the thread itself
        with mode:
            run()

    thread.run = run_inside  # type: ignore[method-assign]  # also of a class with its own run
    original(thread)


def _run_backward(mode: CudaMode, original: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:  # hooks and functions of the script run inside
        return original(*args, **kwargs)


def _parameter(
    mode: CudaMode, original: Any, kind: Any, data: Any = None, *args: Any, **kwargs: Any
) -> Any:
    made = original(kind, data, *args, **kwargs)
    if isinstance(data, Tensor):
        _mark(made, place_of(data), data)
    return made


def _load(mode: CudaMode, original: Any, *args: Any, **kwargs: Any) -> Any:
    place = args[1] if len(args) > 1 else kwargs.get("map_location")
    if isinstance(place, dict):
        place = next((v for v in place.values()), None)
    on_cuda = isinstance(place, str | torch.device) and device_named(place).type == "cuda"
    loaded = original(args[0], **{**kwargs, "map_location": "cpu"})
    if on_cuda:
        _mark_all(loaded, device_named("cuda"))
    return loaded


def _rebuilt(mode: CudaMode, original: Any, *args: Any) -> Any:
    """Out of a pickle: where the tensor was is not known."""
    tensor = original(*args)
    _mark(tensor, None)
    return tensor


def _pickled_state(mode: CudaMode, original: Any, tensor: Any) -> Any:
    found = original(tensor)
    return {k: v for k, v in found.items() if k != _MARK} if isinstance(found, dict) else found


def _data_loader(mode: CudaMode, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.pin_memory = False


def _from_workers(mode: CudaMode, original: Any, self: Any, *args: Any) -> Any:
    found = original(self, *args)  # forked ones cannot use CUDA
    own = getattr(self._workers[0], "_start_method", None)
    if (own or multiprocessing.get_start_method()) == "fork":
        _mark_all(found, _CPU)
    return found


def _enter_device(mode: CudaMode, original: Any, context: Any) -> None:
    mode.default = device_named(context.device) if context.device.type == "cuda" else None
    if mode.default is None:
        original(context)


def _leave_device(mode: CudaMode, original: Any, context: Any, *error: Any) -> None:
    mode.default = None
    if context.device.type != "cuda":
        original(context, *error)


def _default_tensor_type(mode: CudaMode, original: Any, asked: Any) -> None:
    name = old_type_name(asked)
    original(name.replace("cuda.", "") or asked)
    mode.default = device_named("cuda") if name else None


def _new_group(mode: CudaMode, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``init_process_group``, whose first argument is the backend, or ``new_group``, whose third
    is; without one it has that of the first group."""
    world = torch.distributed.group.WORLD
    asked = [a for a in (*args[:3], kwargs.get("backend")) if isinstance(a, str)]
    is_nccl = "nccl" in asked or (not asked and world is not None and world in mode.nccl_groups)
    args = tuple(a.replace("nccl", "gloo") if a in asked else a for a in args)
    if isinstance(kwargs.get("backend"), str):
        kwargs["backend"] = kwargs["backend"].replace("nccl", "gloo")
    kwargs.pop("device_id", None)
    made = original(*args, **kwargs)
    made_group = torch.distributed.group.WORLD if made is None else made
    if is_nccl and isinstance(made_group, torch.distributed.ProcessGroup):
        mode.nccl_groups.add(made_group)
    return made


def _backend(mode: CudaMode, original: Any, group: Any = None) -> Any:
    """What the script asked for: it often chooses the device of its tensors by it."""
    own = torch.distributed.group.WORLD if group is None else group
    if own is not None and own in mode.nccl_groups and not asked_by_torch():
        return torch.distributed.Backend.NCCL
    return original(group)


def _distributed_parallel(
    mode: CudaMode, original: Any, self: Any, module: Any, *args: Any, **kwargs: Any
) -> None:
    devices = args[0] if args else kwargs.get("device_ids")
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")}
    original(self, module, *([None] * len(args[:2])), *args[2:], **kwargs)
    if devices:
        mode.inputs_to[self] = device_named(devices[0])


def _data_parallel(mode: CudaMode, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    mode.inputs_to[self] = device_named("cuda")


def _parallel_forward(mode: CudaMode, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    place = mode.inputs_to.get(self)
    if place is not None:
        args, kwargs = tree_map_only(Tensor, lambda one: _moved(mode, one, place), (args, kwargs))
    return original(self, *args, **kwargs)


def _function_apply(original: Any) -> Any:
    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.__func__(kind, *args, **kwargs)
        device = _common(args)
        for one in _tensors((result,)) if device is not None else ():
            if place_of(one) != _CPU:  # it has moved its result there
                _mark(one, device)
        return result

    return classmethod(apply)


def _mark_all(value: Any, device: torch.device) -> None:
    """Every tensor in what was loaded."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            _mark_all(one, device)
    else:
        _mark(value, device)


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]  # torch's own class
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__mro__[1])


def _generator(original: Any) -> Any:
    class Generator(original, metaclass=_AnyGenerator):  # type: ignore[misc]  # torch's own class
        """Draws on the CPU, and says which device it was asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = original.__new__(cls, "cpu")
            made._place = device_named(device)
            return made

        def __init__(self, device: Any = "cpu") -> None:
            """Made by ``__new__``."""

        @property
        def device(self) -> torch.device:
            place: torch.device = self._place
            return place

    Generator.__module__, Generator.__qualname__ = original.__module__, original.__qualname__
    return Generator


def _told_by_storage(answer: Callable[[torch.device], Any]) -> Callable[[Any], Any]:
    """A property of storages, for one whose tensor is on the device."""

    def make(original: Any) -> Any:
        def get(storage: Any) -> Any:
            own = getattr(storage, "_untyped_storage", storage)
            place = own.__dict__.get(_MARK)
            return original.__get__(storage) if place is None or asked_by_torch() else answer(place)

        return property(get)

    return make


# Owner, name and wrapper of what makes or moves tensors and is no function of torch that a mode
# sees. A wrapper is called with the mode and the original.
_WRAPPED: Final[tuple[tuple[Any, str, Callable[..., Any]], ...]] = (
    (threading.Thread, "start", _start_thread),
    (torch.autograd, "_engine_run_backward", _run_backward),
    (nn.Parameter, "__new__", _parameter),
    (nn.Buffer, "__new__", _parameter),
    (torch, "load", _load),
    (torch._utils, "_rebuild_tensor", _rebuilt),
    (torch._utils, "_get_obj_state", _pickled_state),
    (dataloader.DataLoader, "__init__", _data_loader),
    (dataloader._MultiProcessingDataLoaderIter, "_process_data", _from_workers),
    (torch.utils._device.DeviceContext, "__enter__", _enter_device),
    (torch.utils._device.DeviceContext, "__exit__", _leave_device),
    (torch, "set_default_tensor_type", _default_tensor_type),
    (nn.DataParallel, "__init__", _data_parallel),
    (nn.DataParallel, "forward", _parallel_forward),
    *(
        (
            (torch.distributed, "init_process_group", _new_group),
            (torch.distributed, "new_group", _new_group),
            (torch.distributed, "get_backend", _backend),
            (nn.parallel.DistributedDataParallel, "__init__", _distributed_parallel),
            (nn.parallel.DistributedDataParallel, "forward", _parallel_forward),
        )
        if torch.distributed.is_available()
        else ()
    ),
)
# Owner, name and what makes the replacement of the original.
_REPLACED: Final[tuple[tuple[Any, str, Callable[[Any], Any]], ...]] = (
    (torch.autograd.Function, "apply", _function_apply),
    (torch, "Generator", _generator),
    (torch.UntypedStorage, "device", _told_by_storage(lambda place: place)),
    (torch.TypedStorage, "device", _told_by_storage(lambda place: place)),
    (torch.UntypedStorage, "is_cuda", _told_by_storage(lambda place: True)),
    (torch.TypedStorage, "is_cuda", _told_by_storage(lambda place: True)),
    # Its C++ parser takes no other class for a stream, before any mode is asked.
    (Tensor, "record_stream", lambda original: lambda tensor, stream: None),
)
