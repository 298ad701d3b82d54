"""TensorFlow's automatic mixed-precision graph rewrite on a CPU: each op's dtype before and after.

    report(python_for("keras"))

The rewrite runs in a process of its own, because with some settings it ends the process. In the
same way a check shows what TF_ENABLE_AUTO_MIXED_PRECISION=1, which articles recommend, does here.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass

from ampscope.errors import AmpscopeError
from ampscope.policy.op_lists import listed_ops
from ampscope.pythons import run_in

CHILD = "ampscope.ext.frameworks.keras.graph_rewrite_child"
TIME_LIMIT_S = 120.0
MODES = ("fp16", "bf16")
# Without it the pass for CPUs emulates fp16 by casting back and forth, and fails on small graphs.
NO_EMULATION = {"TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16": "0"}
VARIABLE = "TF_ENABLE_AUTO_MIXED_PRECISION"
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RewrittenOp:
    """One op of the optimized graph."""

    name: str
    type: str
    before: str  # dtype, "" for an op that the rewrite added
    after: str
    list: str  # allow, infer, deny or clear of the fp16 lists; "" in none, or under bf16


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What the rewrite did; ``error`` says in a sentence why there are no ops."""

    mode: str
    version: str = ""
    ops: tuple[RewrittenOp, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class VariableCheck:
    """What TF_ENABLE_AUTO_MIXED_PRECISION=1 did to the same graph."""

    does_something: bool | None  # None: it could not be tried
    sentence: str


def report(python: str, *, as_json: bool = False) -> str:
    """Both rewrites and the check of the variable, as tables or one JSON object."""
    rewrites, check = [rewritten(mode, python) for mode in MODES], check_variable(python)
    if as_json:
        found = {"rewrites": [asdict(r) for r in rewrites], "variable": asdict(check)}
        return json.dumps(found)
    lines = []
    for rewrite in rewrites:
        changed = sum(op.before != op.after for op in rewrite.ops)
        of_all = f"{changed} of {len(rewrite.ops)} ops changed"
        lines.append(f"{rewrite.mode}: {rewrite.error or of_all}")
        lines += [
            f"  {op.type:24} {op.list:6} {op.before or '(added)':10} {op.after:22} {op.name}"
            for op in rewrite.ops
        ]
    return "\n".join([*lines, check.sentence])


def rewritten(mode: str, python: str) -> Rewrite:
    """The rewrite under ``python``; ``mode`` is fp16 or bf16."""
    try:
        version, ops = _child(mode, python, NO_EMULATION)
    except AmpscopeError as error:
        return Rewrite(mode, error=str(error))
    words = _fp16_lists() if mode == "fp16" else {}
    records = (RewrittenOp(n, kind, b, a, words.get(kind, "")) for n, kind, b, a in ops)
    return Rewrite(mode, version, tuple(records))


def check_variable(python: str) -> VariableCheck:
    """The optimizer's own defaults, with the variable and without it."""
    try:
        version, plain = _child("env", python, {VARIABLE: "0"})
        _, switched = _child("env", python, {VARIABLE: "1"})
    except AmpscopeError as error:
        return VariableCheck(None, str(error))
    half = sum(any(word in op[3] for word in _HALF) for op in switched)
    if sorted(plain) == sorted(switched):
        return VariableCheck(
            False,
            f"{VARIABLE}=1 does nothing here: TensorFlow {version} optimizes the same graph into "
            "the same ops and dtypes with it and without. Use a dtype policy of Keras instead.",
        )
    return VariableCheck(
        True,
        f"{VARIABLE}=1 changes the graph in TensorFlow {version}: {half} of {len(switched)} ops "
        "are in half precision.",
    )


def _child(mode: str, python: str, variables: dict[str, str]) -> tuple[str, list[list[str]]]:
    """(version, ops). Raises AmpscopeError with one sentence."""
    status, out, err = run_in(
        python, "-m", CHILD, mode, timeout_s=TIME_LIMIT_S, CUDA_VISIBLE_DEVICES="-1", **variables
    )
    if status == -1000:
        raise AmpscopeError(f"The graph rewrite could not be run: {err}.")
    if status < 0:
        name = signal.Signals(-status).name
        raise AmpscopeError(f"TensorFlow's graph rewrite to {mode} ended its process with {name}.")
    if status:
        last = (err.strip().splitlines() or ["no message"])[-1][:300]
        raise AmpscopeError(f"TensorFlow's graph rewrite to {mode} failed: {last}")
    answer = json.loads(out.strip().splitlines()[-1])
    return answer["version"], answer["ops"]


def _fp16_lists() -> dict[str, str]:
    """The list's own word by type of op."""
    return {op.op: op.word for op in listed_ops() if op.framework.startswith("TensorFlow")}
