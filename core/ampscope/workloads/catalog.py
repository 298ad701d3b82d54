"""The workloads that can be named: the built-in ones as data, which the command line and the
dashboard offer, and whether a path names a script or a workload's file. Imports no torch.

    >>> BUILTIN["lenet"].parameters["small"]
    431080

The parameter counts are shown to a person before a probe is started; a test compares each with
the model that is really built.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

SIZES = ("tiny", "small", "medium")
BUILDER = "build"  # the function that a workload's file has


@dataclass(frozen=True, slots=True)
class BuiltinInfo:
    """One built-in workload: its key, a title, one sentence, and its parameters by size."""

    name: str
    title: str
    sentence: str
    parameters: Mapping[str, int]


def _info(name: str, title: str, sentence: str, *parameters: int) -> BuiltinInfo:
    by_size = MappingProxyType(dict(zip(SIZES, parameters, strict=True)))
    return BuiltinInfo(name, title, sentence, by_size)


_ALL = (
    _info(
        "gpt",
        "GPT",
        "A transformer that learns to continue Python source text, character by character.",
        314_464,
        4_821_088,
        28_536_416,
    ),
    _info(
        "lenet",
        "LeNet",
        "Two convolutions and two linear layers that learn to read handwritten digits.",
        20_522,
        431_080,
        29_850_506,
    ),
    _info(
        "resnet",
        "ResNet",
        "Residual convolutions with batch normalisation that learn to read handwritten digits.",
        19_706,
        272_186,
        29_772_802,
    ),
    _info(
        "mlp",
        "MLP",
        "Linear layers and ReLU that learn to read handwritten digits; the fastest of all.",
        8_970,
        563_722,
        29_786_890,
    ),
    _info(
        "rnn",
        "Recurrent network",
        "A gated recurrent cell built on linear layers, on the characters of Python source text.",
        27_936,
        1_046_112,
        29_641_248,
    ),
)
BUILTIN: Mapping[str, BuiltinInfo] = MappingProxyType({info.name: info for info in _ALL})


def unknown_workload(name: str) -> str:
    """The sentence for a name that there is not, with near matches and the whole list."""
    near = get_close_matches(name.lower(), BUILTIN, n=2)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"There is no workload {name!r}.{guess} Built in are {', '.join(sorted(BUILTIN))}; a file "
        "of your own is named as path/to/file.py:build or package.module:build."
    )


def is_script(workload: str) -> bool:
    """A Python file, named without ``:function``, in which nothing is called ``build`` at the top
    level."""
    path = Path(workload).expanduser()
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return True  # the run says what is wrong with it
    names = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return BUILDER not in names
