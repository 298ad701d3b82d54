"""What a run was, in words: its file's name, whose rules it followed, why it has no histograms."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from ampscope.policy.device_profiles import PROFILES, USUAL
from ampscope.records import Machine, RunInfo


@dataclass(frozen=True, slots=True)
class Rules:
    """Whose rules: ``name`` in a line of facts, ``what`` they are made of."""

    name: str
    what: str


_CUDA = Rules("CUDA", "CUDA")
_OWN = Rules("the CPU's own rules", "the CPU's own autocast lists and kernels")
_RULES: Mapping[tuple[str, str], Rules] = MappingProxyType(
    {
        ("torch", "cuda"): _CUDA,
        ("torch", "native"): _OWN,
        ("torch", "rehearsal"): Rules(
            "CUDA's rules, rehearsed on a CPU",
            "CUDA's autocast lists and Tensor Core arithmetic, rehearsed on a CPU",
        ),
        ("keras", "cuda"): _CUDA,
        # Keras has no autocast: a layer computes in the dtype that its policy names.
        ("keras", "native"): Rules(
            "the CPU's own rules", "Keras's dtype policies and the CPU's own kernels"
        ),
        ("paddle", "cuda"): _CUDA,
        ("paddle", "native"): _OWN,
        # Paddle's lists are its own, and half precision is fp32 numbers rounded to it.
        ("paddle", "rehearsal"): Rules(
            "Paddle's rules for CUDA, rehearsed on a CPU",
            "Paddle's autocast lists for CUDA, in fp32 rounded to half, rehearsed on a CPU",
        ),
    }
)


def rules(run: RunInfo) -> str:
    """Under whose rules a run took place, in few words."""
    return _of(run, run.machine).name if run.machine is not None else "not started"


def rules_in_full(run: RunInfo) -> str:
    """Under whose rules a run took place, and what these rules consist of."""
    return _of(run, run.machine).what if run.machine is not None else "not started"


def file_name(workload: str) -> str:
    """Of a file its name only: full paths are long and reveal more than a report needs."""
    path, is_file, entry = workload.rpartition(".py")
    return f"{PurePath(path).name}.py{entry}" if is_file else workload


def why_no_histograms(run: RunInfo) -> str:
    """The reason, and how to get some."""
    if run.spec.kind == "script":
        return "They are taken of scripts whose modules run in half precision, as far as they go."
    if run.spec.kind == "watch":
        return "Watch it with every=10 or another number of steps: every=0 takes none."
    return (
        "The probe was started with --histogram-every 0, or it made no step. Start it with "
        "--histogram-every 1 to see its numbers."
    )


def _of(run: RunInfo, machine: Machine) -> Rules:
    device = run.spec.rehearsed or USUAL
    if (
        run.spec.kind == "script"  # a probe needs no device to be stood in for
        and (machine.framework, machine.policy) == ("torch", "rehearsal")
        and device in PROFILES
    ):
        name = f"CUDA ({device.upper()}) rehearsed on a CPU"
        return Rules(name, f"{name}, by CUDA's autocast lists and Tensor Core arithmetic")
    named = Rules(machine.policy, machine.policy)
    return _RULES.get((machine.framework, machine.policy), named)


def script_command(run: RunInfo, extra: str = "") -> str:
    """The command that diagnoses the script of ``run`` again, with the options ``extra``."""
    spec = run.spec
    policy = " --policy cuda" if spec.policy == "cuda" else ""
    if policy and spec.rehearsed in PROFILES.keys() - {USUAL}:
        policy += f" --as {spec.rehearsed}"
    words = shlex.join([*spec.workload.split(" ", 1), *spec.args])
    if not spec.workload.startswith("-m "):
        words = shlex.join([spec.workload, *spec.args])
    return f"ampscope diagnose{policy}{extra} {words}"
