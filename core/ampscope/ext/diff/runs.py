"""The runs behind ``ampscope diff``: A several times, B, and what tells more where they differ.

    A, its repeats       the noise: forks of one process, like B's
    B
    a simulated device   all of them again, where one of the scripts wants CUDA and there is none
    with torch.compile   all of them again, where one of the scripts compiles
    A and B again        where A does not repeat itself bit for bit: a difference must come back
    the ops of one step  where the first difference is not in the step whose ops were recorded
    A with other seeds   on request, where losses differ: how far they lie apart by chance

A side is a script with its arguments, a Python, variables and a folder (:class:`NewRun`), perhaps
in a worktree of another commit (:func:`worktree`), or a run that was recorded before.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampscope.control import BASELINE, COMPILED, TAPS
from ampscope.errors import BadInput
from ampscope.ext.diff.run_diff import (
    RunDiff,
    TensorValues,
    compared,
    first_output,
    values_of,
    with_histograms,
)
from ampscope.files import TemporaryFolder
from ampscope.launcher.script_runs import NOTHING, ScriptRun, ScriptRuns
from ampscope.observations import COMPILED_NOTE
from ampscope.policy.device_profiles import PROFILES, USUAL
from ampscope.records import AUTO, OP_STEP, SEED_SHIFT, Role, RunInfo, RunSpec
from ampscope.script_ends import lacks_cuda
from ampscope.store.reader import Reader

REPEATS = 3  # of A
MOST_REPEATS = 5  # where it does not repeat itself
SEED_STRIDE = 1_000  # seeds of one script lie closer together
MOST_FRAMES = 200  # steps of a run without digests
_MADE_BY_OPS = ("activation", "loss", "gradient", "buffer")
_GIT_OWN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")  # of a hook around us
# Python orders sets of texts by a hash that is another in each process, unless this is set. Repeats
# come from one process, B from another, so both are given the same.
_SAME_HASHES = {"PYTHONHASHSEED": "0"}
_NO_READINGS = {"AMPSCOPE_TELEMETRY": "0"}  # of the machine beside a run: not compared
_SAME_RULES = {"native": "native", "rehearsal": "cuda"}  # how a machine ran -> how to ask for it
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NewRun:
    """A script that is run now."""

    spec: RunSpec
    name: str  # in sentences
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    control: str = BASELINE


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run that was recorded before, with its repeats."""

    name: str
    ids: tuple[str, ...]
    values: tuple[TensorValues, ...]
    policy: str  # under which it ran, as its machine has it
    rehearsed: str = ""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """What ``ampscope diff`` was asked for."""

    repeats: int = REPEATS
    seeds: int = 0
    tolerance: float = 0.0
    allow_rounding: bool = False


@dataclass(frozen=True, slots=True)
class DiffResult:
    """Two runs against each other, and the runs that were compared."""

    diff: RunDiff
    names: tuple[str, str]
    first_ids: tuple[str, ...]
    second_ids: tuple[str, ...]
    notes: tuple[str, ...]


def run_diff(
    first: NewRun | Recorded, second: NewRun | Recorded, store: Path, options: DiffOptions, say: Say
) -> DiffResult:
    """Run what is to be run, and compare. Raises BadInput for what cannot be run."""
    first, second = as_recorded(first, second), as_recorded(second, first)
    with contextlib.ExitStack() as stack:
        return compared_sides(
            opened(stack, first, store), opened(stack, second, store), options, say
        )


def as_recorded(side: NewRun | Recorded, other: NewRun | Recorded) -> NewRun | Recorded:
    """``side``, under the rules that a recorded ``other`` ran under."""
    if isinstance(side, Recorded) or isinstance(other, NewRun) or side.spec.policy != AUTO:
        return side
    if other.policy not in _SAME_RULES:
        return side
    policy = _SAME_RULES[other.policy]
    return replace(side, spec=replace(side.spec, policy=policy, rehearsed=other.rehearsed))


def recorded(reader: Reader, run_id: str) -> Recorded:
    """A run of the store with the repeats that were made with it. Raises BadInput for a run that
    holds no steps of a training."""
    info = reader.run(run_id)
    if not info.spec.is_training:
        raise BadInput(f"Run {run_id} is a measurement of the machine: it has no steps to compare.")
    group = reader.group(info.spec.group) if info.spec.group else []
    parent = info.spec.parent or info.id
    repeats = [
        r
        for r in group
        if r.id != info.id and parent in (r.id, r.spec.parent) and _repeats(r.spec, info.spec)
    ]
    runs = [info, *repeats]
    return Recorded(
        f"run {info.id}",
        tuple(r.id for r in runs),
        tuple(read_values(reader, r) for r in runs),
        info.machine.policy if info.machine else "",
        info.spec.rehearsed,
    )


def _repeats(one: RunSpec, other: RunSpec) -> bool:
    """Whether two runs of a group were asked for the same, to be compared."""
    same = (one.workload, one.args, one.control, one.settings)
    asked = same == (other.workload, other.args, other.control, other.settings)
    return asked and OP_STEP in dict(one.settings)


def read_values(reader: Reader, info: RunInfo) -> TensorValues:
    """What a stored run holds for a comparison: digests, or histograms where it has none."""
    values = values_of(reader.observations(info.id))
    if not values.steps:
        steps = reader.steps(info.id)
        values = replace(
            values, steps=tuple(s.step for s in steps), losses=tuple(s.loss for s in steps)
        )
    if OP_STEP in dict(info.spec.settings):
        return values
    frames = [
        frame
        for role in (Role.ACTIVATION, Role.WEIGHT_GRAD, Role.WEIGHT)
        for step, last in reader.frame_spans(info.id, role)[:MOST_FRAMES]
        if step == last and (frame := reader.frame(info.id, role, step)) is not None
    ]
    return with_histograms(values, reader.modules(info.id), frames)


@contextlib.contextmanager
def worktree(script: Path, revision: str) -> Iterator[tuple[Path, Path]]:
    """The script as it is in a commit, in a worktree that is taken away again: (its path, the
    folder that stands for the current one). Raises BadInput with what git says."""
    script = script.absolute()
    folder = script.parent
    while not folder.is_dir():  # of a script that only the other commit has
        folder = folder.parent
    top = Path(_git(folder, "rev-parse", "--show-toplevel"))
    commit = _git(top, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", fails=revision)
    inside = script.resolve().relative_to(top.resolve())
    with TemporaryFolder() as name:
        tree = Path(name) / "tree"
        _git(
            top, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(tree), commit
        )
        try:
            if not (tree / inside).is_file():
                raise BadInput(f"There is no file {inside} in commit {revision}.")
            here = Path.cwd().resolve()
            near = here.relative_to(top.resolve()) if here.is_relative_to(top.resolve()) else None
            stands = tree / near if near is not None and (tree / near).is_dir() else tree
            yield tree / inside, stands
        finally:
            with contextlib.suppress(BadInput):
                _git(top, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *args: str, fails: str = "") -> str:
    environment = {k: v for k, v in os.environ.items() if k not in _GIT_OWN}
    try:
        done = subprocess.run(
            ["git", *args],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise BadInput(f"Cannot run git: {error.strerror}.") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        if fails:
            raise BadInput(f"There is no commit {fails} in the repository of {folder}.")
        raise BadInput(f"git {args[0]} failed: {said[-1] if said else done.returncode}")
    return done.stdout.strip()


class SideRuns:
    """One side: its runs so far, and how to make more with the same process."""

    def __init__(self, side: NewRun | Recorded, runs: ScriptRuns | None) -> None:
        self._side = side
        self._runs = runs
        self._baseline = side.control if isinstance(side, NewRun) else BASELINE
        self._control = self._baseline
        self.is_live = runs is not None
        self.name = side.name
        self.ids: list[str] = []
        self.values: list[TensorValues] = []
        self.policy = ""  # under which its runs were made
        self.lacks_device = False  # it wants a CUDA device, and there is none
        self._uncompiled: TensorValues | None = None
        if isinstance(side, Recorded):
            self.ids, self.values, self.policy = list(side.ids), list(side.values), side.policy

    @property
    def is_compiled(self) -> bool:
        """Whether it runs with torch.compile on because one of the sides compiles."""
        return self._control == COMPILED

    @property
    def op_step(self) -> int:
        """The step whose ops are recorded in further runs."""
        return 0 if self._runs is None else int(dict(self._runs.spec.settings).get(OP_STEP, 0))

    def more(self, count: int) -> None:
        """Run until there are so many."""
        while self._runs is not None and len(self.values) < count:
            run = self._made()
            self.ids.append(run.info.id)
            self.values.append(values_of(run.observations))
            self.policy = run.info.machine.policy if run.info.machine else ""
            self.lacks_device = run.lacks_device

    def rehearse(self) -> None:
        """From here on with a simulated CUDA device; the runs so far do not count."""
        if self._runs is not None:
            self._runs.spec = replace(self._runs.spec, policy="cuda")
            self.ids, self.values = [], []

    def compiles(self) -> bool:
        """Whether torch.compile was switched off in the first run."""
        outcome = self.values[0].outcome if self.values else None
        return outcome is not None and COMPILED_NOTE in outcome.notes

    def compiled(self) -> None:
        """From here on with torch.compile on; the runs so far do not count."""
        if self._runs is not None and self._control == BASELINE:
            self._uncompiled = None if self.compiles() else self.values[0]
            self._control = COMPILED
            self.ids, self.values = [], []

    def uncompiled(self, ids: list[str], values: list[TensorValues]) -> None:
        """Without torch.compile again, as in the runs that were made before."""
        self._control, self._uncompiled = self._baseline, None
        self.ids, self.values = ids, values

    @property
    def found_no_device(self) -> bool:
        """Whether torch told the first run that there is no CUDA device."""
        outcome = self.values[0].outcome if self.values else None
        return outcome is not None and lacks_cuda(outcome)

    def with_outputs(self) -> TensorValues | None:
        """A run with torch.compile on and the outputs of its modules: one more, in which they are
        read inside compiled code, or the first of a script that compiles nothing."""
        if self._control != COMPILED or self._uncompiled is not None:
            return self._uncompiled
        self._control = f"{COMPILED};{TAPS}"
        try:
            return values_of(self._made().observations)
        finally:
            self._control = COMPILED

    def with_ops_of(self, step: int) -> TensorValues | None:
        """One more run, in which the ops of ``step`` are recorded."""
        return self._special({OP_STEP: str(step)})

    def with_seed(self, number: int) -> TensorValues | None:
        """One more run, in which each seed that the script sets is another."""
        return self._special({SEED_SHIFT: str(number * SEED_STRIDE)})

    def _special(self, changed: Mapping[str, str]) -> TensorValues | None:
        if self._runs is None:
            return None
        before = self._runs.spec
        settings = {**dict(before.settings), **changed}
        self._runs.spec = replace(before, settings=tuple(settings.items()))
        try:
            return values_of(self._made().observations)
        finally:
            self._runs.spec = before

    def _made(self) -> ScriptRun:
        assert self._runs is not None
        run = self._runs.run(self._control, parent=self.ids[0] if self.ids else "")
        if not run.observations and run.info.message:
            raise BadInput(f"{self._side.name} could not be run: {run.info.message}")
        return run


def compared_sides(first: SideRuns, second: SideRuns, options: DiffOptions, say: Say) -> DiffResult:
    """Make the runs that are missing, and compare."""
    return _Plan(first, second, options, say).result((first.name, second.name))


def opened(stack: contextlib.ExitStack, side: NewRun | Recorded, store: Path) -> SideRuns:
    """A side whose runs can be made until ``stack`` ends."""
    if isinstance(side, Recorded):
        return SideRuns(side, None)
    spec = replace(side.spec, cadence=NOTHING, settings=((OP_STEP, "0"),))
    hashes = {} if "PYTHONHASHSEED" in os.environ else _SAME_HASHES
    variables = {**_NO_READINGS, **hashes, **side.variables}
    runs = ScriptRuns(
        spec, store, private=True, python=side.python, variables=variables, folder=side.folder
    )
    return SideRuns(side, stack.enter_context(runs))


class _Plan:
    """Which runs to make, one after another."""

    def __init__(self, first: SideRuns, second: SideRuns, options: DiffOptions, say: Say) -> None:
        self.first, self.second = first, second
        self.options = options
        self.say = say
        self.seeds: list[TensorValues] = []
        self.notes: list[str] = []

    def result(self, names: tuple[str, str]) -> DiffResult:
        """All runs, and what they say."""
        self._runs()
        found = self._compared()
        if {"rehearsal", "native"} <= {self.first.policy, self.second.policy}:
            if self.first.is_live or self.second.is_live:  # no one chose unequal rules
                found = replace(found, verdict="unknown", reason=self._unequal())
                return self._told(found, names)
            self.notes.append(self._unequal())
        if found.verdict == "different" and found.noise.largest > 0:  # it counts if it comes back
            self.say("A and B again: A does not repeat itself bit for bit")
            self.first.more(MOST_REPEATS)
            self.second.more(2)
            found = self._compared()
        found = self._with_ops(found)
        found = self._with_module(found)
        seeds = self.options.seeds
        if seeds and (found.loss is None or found.loss.first_step is None):
            self.notes.append("No other seeds were run: A and B have no losses that differ.")
            seeds = 0
        for number in range(1, seeds + 1):
            self.say(f"A with other seeds, {number} of {seeds}")
            run = self.first.with_seed(number)
            self.seeds += [] if run is None else [run]
        if self.seeds:
            loss = self._compared().loss
            found = replace(found, loss=loss)
        return self._told(found, names)

    def _told(self, found: RunDiff, names: tuple[str, str]) -> DiffResult:
        ids = tuple(self.first.ids), tuple(self.second.ids)
        return DiffResult(found, names, *ids, tuple(self.notes))

    def _unequal(self) -> str:
        simulated, other = ("A", "B") if self.first.policy == "rehearsal" else ("B", "A")
        return (
            f"{simulated} ran on a simulated CUDA device, {other} under the CPU's own rules, and "
            "what differs may be the rules. Run both the same way: --policy says how."
        )

    def _runs(self) -> None:
        count = self.options.repeats
        self.say("A")
        self.first.more(1)
        if not self.first.lacks_device:
            self.say("B")
            self.second.more(1)
        if self.first.lacks_device or self.second.lacks_device:
            self._rehearse()
        if self.first.compiles() or self.second.compiles():
            self.say("A and B with torch.compile on, which one of them uses")
            self.notes.append(
                "One of the scripts uses torch.compile, so both were run with it on: gradients, "
                "weights and losses are compared."
            )
            sides = (self.first, self.second)
            eager = [(side.ids, side.values) for side in sides]
            for side in sides:
                side.compiled()
                side.more(1)
            if any(side.policy == "rehearsal" and side.found_no_device for side in sides):
                self.notes[-1] = (
                    "One of the scripts uses torch.compile, which has no simulated device to run "
                    "on, so both were compared without it."
                )
                for side, runs in zip(sides, eager, strict=True):
                    side.uncompiled(*runs)
        if self._compared().verdict == "unknown":  # repeats would not change that
            return
        if count > len(self.first.values) and self.first.is_live:
            self.say(f"A again, {count} times in all")
            self.first.more(count)

    def _rehearse(self) -> None:
        """Both sides the same way, whichever of them wants CUDA."""
        asks = "A" if self.first.lacks_device else "B"
        live = [n for n, side in (("A", self.first), ("B", self.second)) if side.is_live]
        run = f"{' and '.join(live)} {'were' if len(live) > 1 else 'was'} run"
        self.say(f"{' and '.join(live)} on a simulated CUDA device: {asks} asks for CUDA")
        for side in (self.first, self.second):
            side.rehearse()
            side.more(1)
        self.notes.append(
            f"{asks} asks for CUDA, and this machine has none, so {run} on a simulated device "
            f"({PROFILES[USUAL].name})."
        )

    def _compared(self) -> RunDiff:
        return compared(
            self.first.values,
            self.second.values,
            seeds=self.seeds,
            tolerance=self.options.tolerance,
            allow_rounding=self.options.allow_rounding,
        )

    def _with_module(self, found: RunDiff) -> RunDiff:
        """The difference with its module, where that runs inside compiled code."""
        wanted = found.first
        if wanted is None or wanted.op is not None or wanted.role not in _MADE_BY_OPS:
            return found
        if not (self.first.is_compiled and self.second.is_compiled):
            return found
        self.say("Outputs of modules, also inside compiled code")
        runs = [side.with_outputs() for side in (self.first, self.second)]
        if runs[0] is None or runs[1] is None:
            return found
        inside = first_output(runs[0], runs[1], wanted.step, wanted.allowed)
        if inside is None:
            return found
        self.notes.append(
            "The module was found by one more run, in which outputs inside compiled code are read: "
            "its last bits may be others."
        )
        beyond = found.beyond_rounding
        return replace(found, first=inside, beyond_rounding=inside if beyond == wanted else beyond)

    def _with_ops(self, found: RunDiff) -> RunDiff:
        """The difference with its op, from one more run of both where it lies in another step."""
        wanted = found.first
        if wanted is None or wanted.op is not None or wanted.role not in _MADE_BY_OPS:
            return found
        if wanted.step == self.first.op_step or not (self.first.is_live and self.second.is_live):
            return found
        self.say(f"A and B again, for the ops of step {wanted.step}")
        runs = [side.with_ops_of(wanted.step) for side in (self.first, self.second)]
        again = compared(
            [run for run in runs[:1] if run is not None],
            [run for run in runs[1:] if run is not None],
            tolerance=max(self.options.tolerance, wanted.allowed),
            allow_rounding=self.options.allow_rounding,
        )
        found_again = again.first
        if found_again is None or (found_again.step, found_again.role) != (
            wanted.step,
            wanted.role,
        ):
            return found
        same = replace(wanted, op=found_again.op, module=found_again.module)
        beyond = found.beyond_rounding
        return replace(found, first=same, beyond_rounding=same if beyond == wanted else beyond)


def ids_of(texts: Sequence[str], store: Path) -> list[str]:
    """Which of ``texts`` name a run of the store."""
    if not store.exists():
        return []
    found = []
    with Reader(store) as reader:
        for text in texts:
            with contextlib.suppress(BadInput):
                reader.run(text)
                found.append(text)
    return found
