"""The built-in workloads as data: what the command line and the dashboard offer. Imports no torch.

    >>> BUILTIN["lenet"].parameters["small"]
    431080

The parameter counts are shown to a person before a probe is started; a test compares each with
the model that is really built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SIZES = ("tiny", "small", "medium")


@dataclass(frozen=True, slots=True)
class BuiltinInfo:
    """One built-in workload: its key, a title, one sentence, its sizes and their parameters."""

    name: str
    title: str
    sentence: str
    sizes: tuple[str, ...]
    parameters: Mapping[str, int]


def _info(name: str, title: str, sentence: str, *parameters: int) -> BuiltinInfo:
    by_size = MappingProxyType(dict(zip(SIZES, parameters, strict=True)))
    return BuiltinInfo(name, title, sentence, SIZES, by_size)


_ALL = (
    _info(
        "gpt",
        "GPT",
        "A transformer that learns to continue Python source text, character by character.",
        314_912,
        4_820_064,
        28_531_296,
    ),
    _info(
        "lenet",
        "LeNet",
        "Two convolutions and two linear layers that learn to read handwritten digits.",
        12_118,
        431_080,
        29_842_410,
    ),
    _info(
        "resnet",
        "ResNet",
        "Residual convolutions with batch normalisation that learn to read handwritten digits.",
        0,
        0,
        0,
    ),
    _info(
        "mlp",
        "MLP",
        "Linear layers and ReLU that learn to read handwritten digits; the fastest of all.",
        0,
        0,
        0,
    ),
    _info(
        "rnn",
        "Recurrent network",
        "A gated recurrent cell built on linear layers, on the characters of Python source text.",
        0,
        0,
        0,
    ),
)
BUILTIN: Mapping[str, BuiltinInfo] = MappingProxyType({info.name: info for info in _ALL})
