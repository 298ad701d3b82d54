"""From what a person types to a Workload: a built-in name, `file.py:build`, `package.module:build`.

    load("lenet", size="small")
    load("mine/vit.py")             # its function `build`
    load("lab.models:build_vit")

The part after the colon is the name of the factory and may be left out when it is `build`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.workloads.builtin import build_builtin
from ampscope.workloads.catalog import BUILTIN, unknown_workload
from ampscope.workloads.factory import call_factory, import_source, on_path
from ampscope.workloads.protocol import Workload
from ampscope.workloads.scaling import with_loss_factor

_FILE_SPEC = re.compile(r"(?P<path>.+\.py)(?::(?P<function>[^:]*))?")
_DEFAULT_FUNCTION = "build"


def load(spec: str, size: str = "tiny", seed: int = 0, loss_factor: float = 1.0) -> Workload:
    """The workload that `spec` names; raises BadInput with the reason when there is none.

    A user's factory is called with those of `seed` and `size` that it has as parameters.
    """
    if spec in BUILTIN:
        return build_builtin(spec, size, seed, loss_factor)
    source, function = _split(spec)
    folder = source.parent.resolve() if isinstance(source, Path) else Path.cwd()
    with on_path(folder):
        module = import_source(source, seed)
        workload = call_factory(module, function, size, seed)
    if not workload.name:
        workload = replace(workload, name=source.stem if isinstance(source, Path) else source)
    return with_loss_factor(workload, loss_factor)


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
