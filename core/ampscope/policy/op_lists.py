"""Autocast's op lists of PyTorch, PaddlePaddle and TensorFlow in one table with common words.

PyTorch's are those of :mod:`ampscope.policy.autocast_lists`, which a test compares with the torch
at hand. The others come from a dated file that names the versions it was read from;
benchmarks/remake_op_lists.py makes it again. Imports no framework.

    half        inputs are cast to half before the op runs
    fp32        inputs are cast to fp32
    widest      inputs are cast to the widest dtype among them
    as it comes the op runs in the dtype that its inputs have
    refused     the op raises

A verdict from a CPU also says where that computes otherwise than CUDA (:data:`GAPS`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from ampscope.control import LISTS
from ampscope.policy.autocast_lists import CPU_LISTS, CUDA_LISTS, TORCH_VERSION

MEANINGS = (*LISTS, "refused")
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


@cache
def listed_ops() -> tuple[ListedOp, ...]:
    """Every op of every list, by framework, place and name; those of CUDA in PyTorch first."""
    found = [*_torch(), *_paddle(), *_tensorflow()]
    return tuple(
        sorted(
            found,
            key=lambda o: (
                not o.framework.startswith("PyTorch"),
                o.framework,
                o.where != "CUDA",
                o.where,
                o.op,
            ),
        )
    )


@dataclass(frozen=True, slots=True)
class ListedOp:
    """One op in one list; ``word`` is the framework's own name of the list."""

    framework: str  # "PyTorch 2.13.0"
    where: str  # "CUDA", "CPU", "fp16 O1", "fp16 graph"
    op: str
    word: str
    meaning: str  # one of MEANINGS
    condition: str = ""


def made_on() -> str:
    """The day on which the lists of Paddle and TensorFlow were read."""
    return str(_file()["made"])


def list_words(torch_list: str | None) -> str:
    """What autocast's list of that name in torch's source does: ``half`` of ``lower_precision_fp``;
    "" without a list."""
    return _TORCH.get(torch_list or "", "")


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


@dataclass(frozen=True, slots=True)
class Gap:
    """Where a CPU computes otherwise than CUDA: one difference, as data, without torch.

    ``policies`` are those of the CPU run that it concerns: ``rehearsal`` is CUDA's autocast lists
    and Tensor Core arithmetic on a CPU, ``native`` the CPU's own rules and kernels. A gap is *met*
    by a run in which an op ran that it is about, and matters to a finding that rests on that op, or
    on no single op::

        >>> [gap.id for gap in met_by({("aten.mm", "fp16"), ("aten.relu", "fp16")}, "rehearsal")]
        ['split_k']
    """

    id: str
    ops: frozenset[str]
    dtypes: frozenset[str]
    policies: frozenset[str]
    text: str


HALF: Final = frozenset({"fp16", "bf16"})
_MATMULS: Final = frozenset(
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
                 "_addmm_activation", "linear", "matmul")
)  # fmt: skip
_CONVOLUTIONS: Final = frozenset(
    {"aten.convolution", "aten.convolution_backward", "aten.mkldnn_convolution"}
)
_SUMS_INTO_ROWS: Final = frozenset(
    f"aten.{name}"
    for name in ("embedding_dense_backward", "_embedding_bag_backward", "index_put", "index_put_",
                 "_index_put_impl_", "_embedding_bag_dense_backward", "_coalesce")
)  # fmt: skip
_ATOMIC: Final = frozenset(
    f"aten.{name}" for name in ("index_add", "index_add_", "scatter_add", "scatter_add_")
)
RNN: Final = (
    "rnn"  # what a run calls the "op" of a recurrent module: its parts are ops of all kinds
)
_BOTH: Final = frozenset({"rehearsal", "native"})
GAPS: Final[tuple[Gap, ...]] = (
    Gap(
        "split_k", _MATMULS, HALF, _BOTH,
        "On CUDA a matmul split along K may add its partial sums in half, unless "
        "allow_fp16_reduced_precision_reduction (or that of bf16) is off, and can overflow or "
        "round where this CPU, which adds in fp32, did not.",
    ),
    Gap(
        "rnn", frozenset({RNN}), HALF, _BOTH,
        "cuDNN computes a recurrent layer in one kernel with fp32 inside; here each of its gates "
        "is rounded to half. Under bf16 autocast torch's cuDNN wrapper casts a recurrent layer to "
        "fp16, not to bf16.",
    ),
    Gap(
        "tf32_convolution", _CONVOLUTIONS, frozenset({"fp32"}), _BOTH,
        "CUDA computes fp32 convolutions in TF32 (10 bits of mantissa) unless "
        "torch.backends.cudnn.allow_tf32 is off; this CPU computed them in exact fp32.",
    ),
    Gap(
        "embedding_sum", _SUMS_INTO_ROWS, HALF, frozenset({"native"}),
        "This CPU adds the gradients of one row in half, value by value; CUDA adds them in fp32 "
        "(embedding, EmbeddingBag, sparse gradients, indexing with rows of up to 32 elements). "
        "What this op lost here is a fault of CPU arithmetic: with --policy cuda it is computed as "
        "CUDA does.",
    ),
    Gap(
        "atomic_sum", _ATOMIC, HALF, frozenset({"native"}),
        "CUDA adds these in half by atomicAdd, value by value, and stagnates at 2,048 (fp16) or "
        "256 (bf16) equal terms; this CPU may add them in fp32.",
    ),
    Gap(
        "atomic_order", _ATOMIC, HALF, frozenset({"rehearsal"}),
        "CUDA adds these in half by atomicAdd in an order that changes from run to run; here the "
        "order is fixed.",
    ),
)  # fmt: skip
_BY_ID: Final = {gap.id: gap for gap in GAPS}
# Said of a finding at that very op alone: a run that is healthy or fails elsewhere is not about it.
_OF_ONE_OP: Final = frozenset({"embedding_sum"})


def met_by(ops: Iterable[tuple[str, str]], policy: str = "") -> tuple[Gap, ...]:
    """The gaps that a run met: ``ops`` are pairs of an op's name and a dtype of its inputs. Those
    of one policy, or of any."""
    seen = set(ops)
    return tuple(
        gap
        for gap in GAPS
        if (not policy or policy in gap.policies)
        and any(op in gap.ops and dtype in gap.dtypes for op, dtype in seen)
    )


def concerned(op: str, dtype: str) -> bool:
    """Whether any gap is about this op in this dtype: what a run has to note."""
    return any(op in gap.ops and dtype in gap.dtypes for gap in GAPS)


def texts(ids: Iterable[str], policy: str, op: str = "") -> list[str]:
    """What to say beside a verdict on a run that met these gaps. ``op`` is the op that the finding
    rests on; "" where it rests on none in particular."""
    found = [_BY_ID[name] for name in ids if name in _BY_ID]
    return [
        gap.text
        for gap in found
        if policy in gap.policies and (op in gap.ops if op else gap.id not in _OF_ONE_OP)
    ]
