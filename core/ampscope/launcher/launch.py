"""Start a probe as a child process, which outlives its parent unless it is bound to it, and follow
it through the store."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

from ampscope import extensions
from ampscope.errors import AmpscopeError, BadInput
from ampscope.launcher.children import spawn
from ampscope.measurements import KINDS
from ampscope.policy.autocast_lists import PRECISIONS, resolve
from ampscope.privacy import leave
from ampscope.pythons import TORCH, framework
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.workloads.catalog import BUILTIN, SIZES, unknown_workload

POLL_S = 0.1
MAX_STEPS = 1_000_000
MAX_SEEDS = 20
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
_FILE = re.compile(r"(?P<path>.+\.py)(:[^:]*)?")
_MODULE = re.compile(r"[^\W\d]\w*(\.\w+)*(:\w*)?")


def launch(spec: RunSpec, store: Path, *, bound: bool = False) -> str:
    """Register the run as queued, start its process, return the run's id. A ``bound`` run's process
    is ended when this one ends, however that happens.

    Raises BadInput for a spec that cannot work, StoreError when the store cannot be written.
    """
    spec = checked(spec)
    writer = RunWriter.create(store, spec)
    try:
        leave(writer.run_id, spec)
        spawn(spec, store, writer.run_id, bound=bound)
    except OSError as error:
        writer.finish(State.FAILED, f"Could not start Python: {error.strerror}.")
        raise AmpscopeError(f"Could not start Python: {error.strerror}.") from error
    finally:
        writer.close()
    return writer.run_id


def follow(store: Path, run_id: str, poll_s: float = POLL_S) -> Iterator[RunInfo]:
    """The run's state again and again; the last item is its final one."""
    with Reader(store) as reader:
        while True:
            info = reader.run(run_id)
            yield info
            if not info.state.is_active:
                return
            time.sleep(poll_s)


def checked(spec: RunSpec) -> RunSpec:
    """The spec itself, before a process is started for it. Raises BadInput with what is wrong and
    what would be right."""
    _check_numbers(spec)
    if not spec.is_training and spec.kind not in KINDS:
        raise BadInput(f"The extension that measures {spec.kind!r} is not here.")
    _check_precisions(spec)
    if spec.framework != TORCH:
        checks = f"{framework(spec.framework).package}.checks"
        checked_elsewhere: RunSpec = extensions.load(f"{checks}:checked")(spec)
        return checked_elsewhere
    if spec.size not in SIZES:
        raise BadInput(f"There is no size called {spec.size!r}. Use one of: {', '.join(SIZES)}.")
    if spec.policy not in ("auto", "cuda", "native"):
        raise BadInput(f"There is no policy called {spec.policy!r}. Use auto, cuda or native.")
    check_device(spec.device)
    if spec.device == "cpu":
        for name in spec.precisions:
            resolve(name, "cpu")  # the child does the same for the device that it finds
    if not spec.is_training and KINDS[spec.kind].check:
        extensions.load(KINDS[spec.kind].check)(spec)
    elif spec.kind != "bench":  # which measures the machine alone
        _check_workload(spec.workload)
    return spec


def check_memory_limit(framework_name: str, limit_mib: int) -> None:
    """PyTorch's processes alone are bounded. Raises BadInput for a limit elsewhere."""
    if limit_mib and framework_name != TORCH:
        title = framework(framework_name).title
        raise BadInput(f"A memory limit is for PyTorch alone; with {title} leave it at 0.")


def check_device(device: str) -> None:
    """Raises BadInput for a word that names no device."""
    if not _DEVICE.fullmatch(device):
        raise BadInput(f"There is no device called {device!r}. Use auto, cpu, cuda or cuda:N.")


def _check_precisions(spec: RunSpec) -> None:
    least = 0 if spec.is_training else KINDS[spec.kind].least_precisions
    names = spec.precisions if least else (spec.precision,)
    if len(names) == 1 < least:
        raise BadInput("A comparison takes at least two precisions, for example fp32,bf16.")
    wrong = [name for name in names if name not in PRECISIONS]
    if wrong or not names:
        raise BadInput(
            f"There is no precision called {(wrong or [''])[0]!r}. Use one of: "
            f"{', '.join(PRECISIONS)}."
        )


def _check_workload(name: str) -> None:
    """What can be said without running the user's code; the child says the rest."""
    if not name:
        raise BadInput("Name a workload, for example gpt, or path/to/file.py:build.")
    if name in BUILTIN or name in extensions.workloads():
        return
    file = _FILE.fullmatch(name)
    if file is not None:
        path = Path(file["path"]).expanduser()
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise BadInput(f"The workload file {path} {what}.")
    elif not (_MODULE.fullmatch(name) and (":" in name or "." in name)):
        raise BadInput(unknown_workload(name))


def _check_numbers(spec: RunSpec) -> None:
    if not 1 <= spec.steps <= MAX_STEPS:
        raise BadInput(f"Steps must be from 1 to {MAX_STEPS:,}, not {spec.steps:,}.")
    if not 1 <= spec.seeds <= MAX_SEEDS:
        raise BadInput(f"Seeds must be from 1 to {MAX_SEEDS}, not {spec.seeds}.")
    if min(spec.batch, spec.multiple_of) < 0:
        raise BadInput("A batch size and what it is a multiple of cannot be negative.")
    if not 0 <= spec.seed < 2**63:
        raise BadInput(f"The seed must be from 0 to 2^63 - 1, not {spec.seed}.")
    if not spec.time_limit_s > 0:
        raise BadInput(f"The time limit must be more than 0 s, not {spec.time_limit_s:g} s.")
    if spec.memory_limit_mib < 0:
        raise BadInput("The memory limit must be 0 (none) or a number of MiB.")
    if not (math.isfinite(spec.loss_factor) and spec.loss_factor > 0):
        raise BadInput(f"The loss factor must be a positive number, not {spec.loss_factor:g}.")
    cadence = spec.cadence
    if min(cadence.histogram, cadence.trace, cadence.shadow) < 0:
        raise BadInput("A cadence is a number of steps: 1 every step, 10 every tenth, 0 never.")
    scaler = spec.scaler
    if not (math.isfinite(scaler.init_scale) and scaler.init_scale > 0):
        raise BadInput(f"The initial loss scale must be positive, not {scaler.init_scale:g}.")
    if not 1 < scaler.growth_factor < math.inf:
        raise BadInput(f"The growth factor must be above 1, not {scaler.growth_factor:g}.")
    if not 0 < scaler.backoff_factor < 1:
        raise BadInput(
            f"The backoff factor must lie between 0 and 1, not {scaler.backoff_factor:g}."
        )
    if scaler.growth_interval < 1:
        raise BadInput("The growth interval must be at least 1 step.")
