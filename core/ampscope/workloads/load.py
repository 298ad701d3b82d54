"""From what a person types to a Workload: a built-in name, `file.py:build`, `package.module:build`.

    load("lenet", size="small")
    load("mine/vit.py")             # its function `build`
    load("lab.models:build_vit")

The part after the colon is the name of the factory and may be left out when it is `build`.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from torch import nn

from ampscope.errors import BadInput
from ampscope.workloads.builtin import build_builtin
from ampscope.workloads.catalog import BUILTIN, SHARED, unknown_workload
from ampscope.workloads.factory import built, call_factory, import_source, on_path
from ampscope.workloads.protocol import Workload
from ampscope.workloads.scaling import with_loss_factor
from ampscope.workloads.shared import build_shared

_FILE_SPEC = re.compile(r"(?P<path>.+\.py)(?::(?P<function>[^:]*))?")
_DEFAULT_FUNCTION = "build"


def load(spec: str, size: str = "tiny", seed: int = 0, loss_factor: float = 1.0) -> Workload:
    """The workload that `spec` names; raises BadInput with the reason when there is none.

    A user's factory is called with those of `seed` and `size` that it has as parameters.
    """
    if spec in BUILTIN:
        return build_builtin(spec, size, seed, loss_factor)
    if spec in SHARED:
        return with_loss_factor(build_shared(spec, seed), loss_factor)
    source, function = _split(spec)
    with _importable(source):
        module = import_source(source, seed)
        workload = call_factory(module, function, size, seed)
    if not workload.name:
        workload = replace(workload, name=source.stem if isinstance(source, Path) else source)
    return with_loss_factor(workload, loss_factor)


def load_models(spec: str) -> dict[str, nn.Module]:
    """The models that `file.py:build` makes: a module, a dict of them by name, or a Workload.

    Raises BadInput with the reason when it makes none.
    """
    source, function = _split(spec)
    with _importable(source):
        made = built(import_source(source, 0), function, "tiny", 0)
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


def _importable(source: Path | str) -> AbstractContextManager[None]:
    return on_path(source.parent.resolve() if isinstance(source, Path) else Path.cwd())


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
