"""From what a person types to a Workload: a built-in name, `file.py:build`, `package.module:build`.

    load("lenet", size="small")
    load("mine/vit.py")             # its function `build`
    load("lab.models:build_vit")

The part after the colon is the name of the factory and may be left out when it is `build`. Whatever
a user's code raises becomes a BadInput of one sentence, which names the exception and the line; the
exception itself is its `__cause__`, with the whole traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import random
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ampscope import extensions
from ampscope.errors import AmpscopeError, BadInput
from ampscope.workloads import digit_models, text_models
from ampscope.workloads.catalog import BUILTIN, SIZES, unknown_workload
from ampscope.workloads.protocol import Batch, Workload
from ampscope.workloads.training_data import (
    classification_loss,
    digit_batches,
    enlarge,
    next_character_loss,
    text_batches,
)

_FILE_SPEC = re.compile(r"(?P<path>.+\.py)(?::(?P<function>[^:]*))?")
_DEFAULT_FUNCTION = "build"
_NUMPY_SEEDS = 2**32  # np.random.seed takes 0 to 2^32 - 1
_TEXT_LENGTH = 300  # characters of an exception's own text; the whole is in __cause__
# The model of a size, the sizes, and what is done to the images or which optimizer trains.
_DIGITS: Mapping[str, tuple[Callable[[Any], nn.Module], Mapping[str, Any], Any]] = {
    "lenet": (digit_models.LeNet, digit_models.LENET_SIZES, enlarge),
    "resnet": (digit_models.ResNet, digit_models.RESNET_SIZES, None),
    "mlp": (digit_models.MLP, digit_models.MLP_SIZES, None),
}
_TEXT: Mapping[str, tuple[Callable[[Any], nn.Module], Mapping[str, Any], Any]] = {
    "gpt": (text_models.GPT, text_models.GPT_SIZES, AdamW),
    "rnn": (text_models.RNN, text_models.RNN_SIZES, SGD),
}


def load(spec: str, size: str = "tiny", seed: int = 0, loss_factor: float = 1.0) -> Workload:
    """The workload that `spec` names; raises BadInput with the reason when there is none.

    A user's factory is called with those of `seed` and `size` that it has as parameters.
    """
    if spec in BUILTIN:
        return build_builtin(spec, size, seed, loss_factor)
    if build := extensions.workloads().get(spec):
        return with_loss_factor(extensions.load(build)(spec, seed), loss_factor)
    source, function = _split(spec)
    workload, where = _built(source, function, size, seed)
    if not isinstance(workload, Workload):
        got = "None" if workload is None else f"an object of type {type(workload).__name__}"
        raise BadInput(f"{where} must return an ampscope.Workload, but it returned {got}.")
    if not workload.name:
        workload = replace(workload, name=source.stem if isinstance(source, Path) else source)
    return with_loss_factor(workload, loss_factor)


def load_models(spec: str) -> dict[str, nn.Module]:
    """The models that `file.py:build` makes: a module, a dict of them by name, or a Workload.

    Raises BadInput with the reason when it makes none.
    """
    source, function = _split(spec)
    made, _ = _built(source, function, "tiny", 0)
    if isinstance(made, Workload):
        made = made.model
    parts = made if isinstance(made, dict) else {"model": made}
    models = {str(name): part for name, part in parts.items() if isinstance(part, nn.Module)}
    if len(models) < len(parts) or not models:
        got = "an empty dict" if not parts else type(next(iter(parts.values()))).__name__
        raise BadInput(
            f"{function!r} in {source} must return a torch.nn.Module, or a dict of them, not {got}."
        )
    return models


def _split(spec: str) -> tuple[Path | str, str]:
    """A file's path or a module's name, and the function in it."""
    match = _FILE_SPEC.fullmatch(spec)
    if match:
        return Path(match["path"]).expanduser(), match["function"] or _DEFAULT_FUNCTION
    module, colon, function = spec.partition(":")
    if "/" in module or Path(module).is_file():
        raise BadInput(
            f"{module!r} is not a Python file. A workload of your own is named as "
            "path/to/file.py:build."
        )
    if (colon or "." in module) and all(part.isidentifier() for part in module.split(".")):
        return module, function or _DEFAULT_FUNCTION
    raise BadInput(unknown_workload(spec))


def _built(source: Path | str, function: str, size: str, seed: int) -> tuple[object, str]:
    """What a user's factory builds, and the words that name the factory in a message.

    A file is imported from where it lies, with its folder on `sys.path` until the workload is
    built, so it can import its neighbours; for a module the current folder serves as that folder.
    """
    with _first_on_path(source.parent.resolve() if isinstance(source, Path) else Path.cwd()):
        _seed_all(seed)  # a module may draw its data while it is imported
        module = _import_file(source) if isinstance(source, Path) else _import_module(source)
        file = module.__file__ or module.__name__
        where = f"{function!r} in {file}"
        factory = _find(module, function, file)
        arguments = _arguments(factory, {"seed": seed, "size": size}, where)
        _seed_all(seed)
        try:
            return factory(**arguments), where
        except (Exception, SystemExit) as error:
            raise _failed(where, error, file) from error


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:  # the user's code may have changed the list
            sys.path.remove(entry)


def _import_file(path: Path) -> ModuleType:
    """Always afresh, and under a name of its own: a file called gpt.py or random.py shadows
    nothing."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise BadInput(f"The workload file {path} {what} (current folder: {Path.cwd()}).")
    path = path.resolve()
    name = f"ampscope_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # only for a name that does not end in .py
        raise BadInput(f"Python cannot import {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise _failed(f"Importing {path}", error, str(path)) from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise BadInput(
                f"There is no module {error.name!r} to take the workload {name!r} from. It was "
                f"looked for in {Path.cwd()} and among the installed packages."
            ) from error
        raise _failed(f"Importing {name}", error, None) from error


def _find(module: ModuleType, function: str, file: str) -> Callable[..., object]:
    advice = f"Define `def {function}(seed: int) -> Workload:` in it."
    factory: object = getattr(module, function, None)
    if factory is None:
        raise BadInput(f"{file} has no function {function!r}. {advice}")
    if not callable(factory):
        kind = type(factory).__name__
        raise BadInput(f"{function!r} in {file} is not a function but of type {kind}. {advice}")
    return factory


def _arguments(
    factory: Callable[..., object], offered: dict[str, int | str], where: str
) -> dict[str, int | str]:
    try:
        signature = inspect.signature(factory)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        names = [name for name in offered if takes_all or name in signature.parameters]
        taken = {name: offered[name] for name in names}
        signature.bind(**taken)
    except (TypeError, ValueError) as error:  # ValueError: a built-in without a signature
        raise BadInput(
            f"{where} is called with `seed` (and with `size`, if it has such a parameter), which "
            f"does not fit: {error}."
        ) from error
    return taken


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)


def _failed(what: str, error: BaseException, file: str | None) -> BadInput:
    """One sentence: what failed, at which line, with the exception's type and its own text."""
    if isinstance(error, AmpscopeError):  # a Workload that refused its parts; a sentence already
        return BadInput(f"{what} failed{_line(error, file)}: {error}")
    if isinstance(error, SystemExit):
        return BadInput(f"{what} ended the program{_line(error, file)} (exit status {error.code}).")
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = textwrap.shorten(text, _TEXT_LENGTH, placeholder=" …")  # one line; torch's can be pages
    return BadInput(f"{what} raised {type(error).__name__}{_line(error, file)}: {text}")


def _line(error: BaseException, file: str | None) -> str:
    """The innermost line of the user's file that the error passed through, else the last one."""
    if isinstance(error, SyntaxError) and error.filename:
        own = error.filename == file
        return f" at line {error.lineno}" + ("" if own else f" of {error.filename}")
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if frame.filename == file]
    if own_frames:
        return f" at line {own_frames[-1].lineno}"
    return f" at line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""


def build_builtin(
    name: str, size: str = "tiny", seed: int = 0, loss_factor: float = 1.0
) -> Workload:
    """The workload, on the CPU and in fp32, bit for bit the same one each time. Seeds torch's
    global generator with `seed`; the weights come from it.

    With `loss_factor` the loss is multiplied and the optimizer makes up for it
    (`with_loss_factor`). Raises BadInput for a name, size or factor that there is not.
    """
    if name not in BUILTIN:
        raise BadInput(unknown_workload(name))
    if size not in SIZES:
        known = ", ".join(SIZES)
        raise BadInput(f"Workload {name!r} has no size {size!r}. Choose one of: {known}.")
    torch.manual_seed(seed)
    if name in _DIGITS:
        build, sizes, prepare = _DIGITS[name]
        chosen = sizes[size]
        workload = Workload(
            model=build(chosen),
            batches=digit_batches(seed, chosen.batch_size, prepare),
            loss=classification_loss,
            optimizer=lambda params: SGD(params, lr=chosen.lr, momentum=0.9),
        )
    else:
        build, sizes, optimizer = _TEXT[name]
        chosen = sizes[size]
        workload = Workload(
            model=build(chosen),
            batches=text_batches(seed, chosen.batch_size, chosen.context),
            loss=next_character_loss,
            optimizer=lambda params: optimizer(params, lr=chosen.lr),
        )
    return with_loss_factor(replace(workload, name=f"{name}-{size}"), loss_factor)


def with_loss_factor(workload: Workload, factor: float) -> Workload:
    """`workload` with loss * factor and an optimizer that makes up for it; BadInput if it cannot.
    Any optimizer is accepted, but only SGD and Adam/AdamW are corrected.

    Half precision does not lose gradients because a model is deep or bad but because they are
    small, and a loss that is a mean over much, or one weighted by 1e-6, makes them small. In exact
    arithmetic every step moves the weights as before; what then differs is precision alone. A power
    of two changes no fp32 bit as long as nothing leaves fp32's own range.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise BadInput(f"The loss factor must be a positive number, but it is {factor}.")
    if factor == 1.0:
        return workload
    if workload.step is not None:
        raise BadInput(
            f"{workload.name or 'The workload'} has its own training step, which computes the loss "
            "itself, so a loss factor cannot be applied. Use factor 1, or scale inside that step."
        )
    inner_loss, inner_optimizer = workload.loss, workload.optimizer

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return inner_loss(model, batch) * factor

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return _correct(inner_optimizer(parameters), factor)

    return replace(workload, loss=loss, optimizer=optimizer)


def _correct(optimizer: Optimizer, factor: float) -> Optimizer:
    """SGD moves by lr * (g + decay * w); Adam by lr * m / (sqrt(v) + eps), blind to g's unit.

    Decay that Adam adds to the gradient scales with it; AdamW's, which bypasses it, does not.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD):
            group["lr"] /= factor
            group["weight_decay"] *= factor
        elif isinstance(optimizer, Adam):  # AdamW is a subclass
            group["eps"] *= factor
            if not group["decoupled_weight_decay"]:
                group["weight_decay"] *= factor
    return optimizer
