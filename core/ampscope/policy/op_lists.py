"""Autocast's op lists of PyTorch, PaddlePaddle and TensorFlow in one table with common words.

PyTorch's are those of :mod:`ampscope.policy.autocast_lists`, which a test compares with the torch
at hand. The others come from a dated file that names the versions it was read from;
benchmarks/remake_op_lists.py makes it again. Imports no framework.

    half        inputs are cast to half before the op runs
    fp32        inputs are cast to fp32
    widest      inputs are cast to the widest dtype among them
    as it comes the op runs in the dtype that its inputs have
    refused     the op raises
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ampscope.policy.autocast_lists import CPU_LISTS, CUDA_LISTS, TORCH_VERSION

MEANINGS = ("half", "fp32", "widest", "as it comes", "refused")
_TORCH = {
    "lower_precision_fp": "half",
    "fp32": "fp32",
    "fp32_set_opt_dtype": "fp32",
    "fp32_append_dtype": "fp32",
    "promote": "widest",
    "banned": "refused",
}
_PADDLE = {"white": "half", "black": "fp32"}
# TensorFlow rewrites a graph: infer and clear follow their neighbours, clear between halves only.
_TENSORFLOW = {"allow": "half", "infer": "as it comes", "deny": "fp32", "clear": "as it comes"}


@dataclass(frozen=True, slots=True)
class ListedOp:
    """One op in one list; ``word`` is the framework's own name of the list."""

    framework: str  # "PyTorch 2.13.0"
    where: str  # "CUDA", "CPU", "fp16 O1", "fp16 graph"
    op: str
    word: str
    meaning: str  # one of MEANINGS
    condition: str = ""


@cache
def listed_ops() -> tuple[ListedOp, ...]:
    """Every op of every list, by framework, place and name."""
    found = [*_torch(), *_paddle(), *_tensorflow()]
    return tuple(sorted(found, key=lambda o: (o.framework, o.where, o.op)))


def made_on() -> str:
    """The day on which the lists of Paddle and TensorFlow were read."""
    return str(_file()["made"])


def _torch() -> list[ListedOp]:
    return [
        ListedOp(f"PyTorch {TORCH_VERSION}", where, op, word, _TORCH[word])
        for where, lists in (("CUDA", CUDA_LISTS), ("CPU", CPU_LISTS))
        for word, ops in lists.items()
        for op in ops
    ]


def _paddle() -> list[ListedOp]:
    paddle = _file()["paddle"]
    shown = {"float16": "fp16", "bfloat16": "bf16"}
    return [
        ListedOp(f"Paddle {paddle['version']}", f"{shown[dtype]} {level}", op, word, _PADDLE[word])
        for word, dtypes in paddle["lists"].items()
        for dtype, levels in dtypes.items()
        for level, ops in levels.items()
        for op in ops
    ]


def _tensorflow() -> list[ListedOp]:
    flow = _file()["tensorflow"]
    name, condition = f"TensorFlow {flow['version']}", "on CUDA, by version or kind of op"
    return [
        ListedOp(name, "fp16 graph", op, word, _TENSORFLOW[word], given)
        for word, parts in flow["lists"].items()
        for part, given in (("always", ""), ("conditional", condition))
        for op in parts[part]
    ]


@cache
def _file() -> dict[str, dict[str, dict[str, dict[str, dict[str, list[str]]]]]]:
    text = resources.files("ampscope.policy").joinpath("op_lists.json").read_text(encoding="utf-8")
    content: dict[str, dict[str, dict[str, dict[str, dict[str, list[str]]]]]] = json.loads(text)
    return content
