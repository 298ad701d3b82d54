"""Training in processes that a script starts: each is followed, and recorded as a rank of its own.

PyTorch's own examples train in children: ``torch.multiprocessing.spawn``, ``mp.Process``, and the
launchers ``torchrun`` and ``accelerate launch``, also with one process. A child that makes an
optimizer step registers a run of its own, in a group of the launching run's. When the launching run
has made no step itself, it takes over what one rank recorded (:func:`of_one_rank`).

How a child comes under the watch depends on how it is started: the target of a ``Process`` is
wrapped; a command that starts this Python on a script of the user's becomes

    python -m ampscope.runner.script_ranks --store FILE --run LAUNCHER --index 0 -- train.py ARGS…

Such a command may be a launcher in its turn, as DeepSpeed's runner starts one per node: unless it
is started as a rank, what it starts is followed as well (``--launches``).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import multiprocessing.process
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ampscope.analysis.ranks import first_at_fault
from ampscope.analysis.run_view import RunView
from ampscope.capture.failures import in_words
from ampscope.observations import Observation, Outcome
from ampscope.patches import Patches
from ampscope.records import Machine, RunInfo, RunSpec, State
from ampscope.runner.device import limit_memory, machine_of_script
from ampscope.runner.script_main import arguments, seed_all
from ampscope.runner.script_recorder import ScriptRecorder, ScriptWriting
from ampscope.runner.script_text import execute, module_of, put_folder_first
from ampscope.script_ends import MAX_TEXT
from ampscope.source_lines import SourceLines
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

if TYPE_CHECKING:
    from ampscope.runner.script import ScriptResult


# What a started process runs that trains nothing: workers of a DataLoader, and the servers that
# multiprocessing starts for its own queues and shared values.
_HELPERS = ("torch.utils.data.", "multiprocessing.", "concurrent.")
_LAUNCHED = ("RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")  # in the environment of a rank
_ALONE = ("-u", "-O", "-OO", "-B", "-E", "-s", "-S", "-I", "-P")  # Python's options without a value
_SELF = "ampscope.runner.script_ranks"  # also where it runs as __main__
WAIT_S, POLL_S = 5.0, 0.05  # for ranks that end together with the process that started them
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Ranks:
    """Follows the processes that a script starts while :meth:`watching`."""

    def __init__(
        self, store: Path, run_id: str, spec: RunSpec, policy: str, act: Callable[..., Any]
    ) -> None:
        """``act`` is :func:`ampscope.runner.script.run_action`, for :func:`follow`."""
        self._act = act
        path = str(store.absolute())
        self._ticket = Ticket(path, run_id, policy, spec.workload, 0, 1)
        self._lines = SourceLines(str(Path(spec.workload).resolve().parent))
        self._owner = os.getpid()
        self.started = 0  # processes that are followed
        self._world = 1
        self._follows = False  # the process that starts now is followed

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap what starts processes."""
        with Patches() as patches:
            patches.wrap(multiprocessing.process.BaseProcess, "start", self._process)
            patches.wrap(multiprocessing.spawn, "get_preparation_data", self._prepared)
            patches.wrap(subprocess.Popen, "__init__", self._command)
            spawning = sys.modules.get("torch.multiprocessing.spawn")
            if spawning is not None:
                patches.wrap(spawning, "start_processes", self._several)
            yield

    def _next(self) -> Ticket:
        # Linux tells a child of the end of a thread: one that is not the main one may end earlier.
        bound = threading.current_thread() is threading.main_thread()
        ticket = dataclasses.replace(
            self._ticket, index=self.started, world=self._world, bound=bound
        )
        self.started += 1
        return ticket

    def _several(
        self, original: Any, fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **kw: Any
    ) -> Any:
        before, self._world = self._world, nprocs
        try:
            return original(fn, args, nprocs, *more, **kw)
        finally:
            self._world = before

    def _process(self, original: Any, process: Any) -> None:
        target = getattr(process, "_target", None)
        if os.getpid() != self._owner or target is None or is_helper(process):
            original(process)
            return
        process._target = _Followed(target, self._next(), self._act)
        self._follows = True
        try:
            original(process)
        finally:
            self._follows = False
            process._target = target

    def _prepared(self, original: Any, name: str) -> Any:
        """What a spawned process is told first."""
        told = original(name)
        return told | {"ampscope": _Imported()} if self._follows else told

    def _command(self, original: Any, popen: Any, args: Any, *more: Any, **kwargs: Any) -> None:
        if os.getpid() == self._owner and isinstance(args, list | tuple):
            args = self._followed(list(map(os.fspath, args)), kwargs) or args
        original(popen, args, *more, **kwargs)

    def _followed(self, command: list[Any], kwargs: dict[str, Any]) -> list[str] | None:
        """The command that starts the same under the watch; None for any other program."""
        if not command or not all(isinstance(part, str) for part in command):
            return None
        if kwargs.get("shell") or kwargs.get("executable") or not _is_this_python(command[0]):
            return None
        place = 1
        while place < len(command) and command[place] in _ALONE:
            place += 1
        rest = command[place:]
        environment = kwargs.get("env") or os.environ
        launched = any(name in environment for name in _LAUNCHED)
        if rest[:1] == ["-m"]:
            if len(rest) < 2 or rest[1].startswith("ampscope"):
                return None
            if not launched and not self._is_own_module(rest[1], kwargs.get("cwd") or os.getcwd()):
                return None
        elif not rest or not self._is_script(rest[0]):
            return None
        ticket = self._next()
        return [
            *command[:place], "-m", _SELF, "--store", ticket.store, "--run", ticket.run_id,
            "--policy", ticket.policy, "--index", str(ticket.index),
            *(["--bound"] if ticket.bound else []), *([] if launched else ["--launches"]),
            "--", *rest,
        ]  # fmt: skip

    def _is_own_module(self, name: str, folder: Any) -> bool:
        """Whether a module is the user's, or of the package of the module that runs: a launcher
        starts another one of its own."""
        package = name.partition(".")[0]
        if package == module_of(self._ticket.workload).partition(".")[0]:
            return True
        found = PathFinder.find_spec(package, [os.fspath(folder), *sys.path])  # imports nothing
        if found is None:
            return False
        origin = found.origin or next(iter(found.submodule_search_locations or ()), "")
        return bool(origin) and self._lines.is_user(compile("", origin, "exec"))

    def _is_script(self, path: str) -> bool:
        if not path.endswith(".py") or not os.path.isfile(path):
            return False
        return self._lines.is_user(compile("", os.path.abspath(path), "exec"))


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a followed child must know of the run that starts it."""

    store: str
    run_id: str
    policy: str
    workload: str
    index: int  # in the order in which children were started
    world: int
    bound: bool = True  # it is to end with the thread that starts it


def is_helper(process: Any) -> bool:
    """Whether a ``Process`` is one that a library starts for itself."""
    target = getattr(process, "_target", None)
    owner = getattr(target, "__module__", None) or type(process).__module__
    runs_target = type(process).run is multiprocessing.process.BaseProcess.run
    return owner.startswith(_HELPERS) and runs_target


def _is_this_python(command: str) -> bool:
    if command == sys.executable:
        return True
    return os.path.isabs(command) and os.path.realpath(command) == os.path.realpath(sys.executable)


class _Followed:
    """A process's target under the watch. It is pickled where the process is spawned."""

    def __init__(self, target: Callable[..., Any], ticket: Ticket, act: Callable[..., Any]) -> None:
        self._target = target
        self._ticket = ticket
        self._act = act

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return follow(self._ticket, self._act, lambda: self._target(*args, **kwargs))


class _Imported:
    """A spawned process that unpickles it imports what follows it, where it can. It does that
    before it runs the script, which may make errors of warnings or empty ``sys.path``."""

    def __reduce__(self) -> Any:
        return exec, (_IMPORT,)


_IMPORT = """try:
    import ampscope.runner.script
except Exception:
    pass  # the process trains on, unrecorded
"""


def main() -> None:
    """Run a script that a launcher starts."""
    from ampscope.runner.script import run_action

    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--launches", action="store_true")
    split = sys.argv.index("--")
    found, rest = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if rest[0] == "-m":
        workload, args = f"-m {rest[1]}", rest[2:]
    else:
        workload, args = os.path.abspath(rest[0]), rest[1:]
    sys.argv = arguments(workload, args)
    put_folder_first(workload)
    ticket = Ticket(found.store, found.run, found.policy, workload, found.index, 1, found.bound)

    def action() -> None:
        seed_all()
        execute(workload)

    follow(ticket, run_action, action, launches=found.launches)


def follow(
    ticket: Ticket, act: Callable[..., Any], action: Callable[[], Any], *, launches: bool = False
) -> Any:
    """Call ``action`` under the watch and the launching run's control; returns what it returns, and
    raises what it raises. At a limit of the run the process ends with status 0. If it ``launches``,
    the processes that it starts are followed in turn. A rank that cannot be recorded trains without
    the watch. Nothing is imported here: in a forked child the script may have put another function
    in the place of ``__import__``."""
    end_with_launching_process(ticket)
    store = Path(ticket.store)
    launcher: RunInfo | None = None
    try:
        with Reader(store) as reader:
            launcher = reader.run(ticket.run_id)
    except Exception as error:
        _tell(error, "is not recorded, and trains without what this run changes")
    if launcher is None:
        return action()
    spec = dataclasses.replace(launcher.spec, workload=ticket.workload)
    ranks = Ranks(store, ticket.run_id, spec, ticket.policy, act) if launches else None
    limit_memory(spec.memory_limit_mib, "cuda" if ticket.policy == "cuda" else "cpu")
    record = _Record(ticket, spec, launcher.machine, ranks)
    return act(spec, ticket.policy, record.step, record.close, action, ranks)


def end_with_launching_process(ticket: Ticket) -> None:
    """If this process is bound to it."""
    if ticket.bound:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _Record:
    """The run of one rank; it is registered with the first optimizer step. ``ranks`` follow what a
    launcher starts, whose error is no more than that a rank had one."""

    def __init__(
        self, ticket: Ticket, spec: RunSpec, machine: Machine | None, ranks: Ranks | None
    ) -> None:
        self._ticket = ticket
        self._spec = dataclasses.replace(spec, parent=ticket.run_id, group=group_of(ticket.run_id))
        self._machine = machine
        self._ranks = ranks
        self._writer: RunWriter | None = None
        self._writing: Any = None
        self._has_failed = False

    def step(self, recorder: ScriptRecorder) -> None:
        """An optimizer step ended, taken or skipped."""
        with self._training_goes_on():
            self._open(recorder.device)
            self._writing.write_if_due(recorder)

    def close(self, result: ScriptResult) -> None:
        """The process has ended, or its target has."""
        with self._training_goes_on():
            self._close(result)

    @contextlib.contextmanager
    def _training_goes_on(self) -> Iterator[None]:
        """Also where it cannot be recorded, which is said once."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                _tell(error)
            self._has_failed = True

    def _close(self, result: ScriptResult) -> None:
        outcome = result.outcome
        trains = outcome.steps or outcome.backwards or outcome.forwards
        launched = self._ranks is not None and self._ranks.started
        failed = outcome.ended == "exception" and not launched
        if self._writer is None and not trains and not failed:
            return
        self._open(result.device)
        self._writing.write(result.observations, result.measured, last=True)
        assert self._writer is not None
        self._writer.finish(State.FINISHED, "", result.traceback)
        self._writer.close()

    def _open(self, device: torch.device) -> None:
        if self._writer is not None:
            return
        rank, world = _place(self._ticket)
        spec = dataclasses.replace(self._spec, rank=rank, world=world)
        self._writer = RunWriter.create(Path(self._ticket.store), spec)
        # On a machine with GPUs each rank has its own.
        machine = None if self._ticket.policy == "cuda" else self._machine
        self._writer.start(machine or machine_of_script(spec, device))
        self._writing = ScriptWriting(self._writer)


def _tell(error: Exception, lacks: str = "is not recorded in full") -> None:
    with contextlib.suppress(Exception):
        os.write(2, f"ampscope: this rank {lacks}: {in_words(error)}\n".encode())


def _place(ticket: Ticket) -> tuple[int, int]:
    """(rank, how many ranks) of this process: as torch.distributed knows them, else as the launcher
    put them into the environment, else in the order in which the ranks were started."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank = int(os.environ.get("RANK", ticket.index))
    return rank, int(os.environ.get("WORLD_SIZE", ticket.world))


def of_one_rank(
    store: Path, run_id: str, own: Sequence[Observation], wanted: int | None = None
) -> list[Observation] | None:
    """What one rank of the run recorded, closed with how the run itself ended: the ``wanted`` one,
    else the one whose own numbers were the first to go wrong (:func:`first_at_fault`), else the
    first that has trained, else the first that has raised, for its launcher only says that a child
    failed. A run that makes steps itself is one of the ranks where it trains together with those
    that it has started, as under Lightning's launcher. None where there is no rank to take."""
    outcome = own[-1]
    if not isinstance(outcome, Outcome):
        return None
    with Reader(store) as reader:
        ranks = _ended_ranks(reader, run_id, WAIT_S if outcome.steps else 0.0)
        ended = [(r, list(reader.observations(r.id))) for r in ranks]
        ended = [(r, s) for r, s in ended if s and isinstance(s[-1], Outcome)]
        if outcome.steps:
            ended = _with_launcher(reader.run(run_id), own, ended)
    if not ended:
        return None
    found = first_at_fault([(r, RunView(r.spec.control, r.id, s)) for r, s in ended])
    if wanted is None:
        place = found.place if found else 0
    else:
        place = next((n for n, (r, _) in enumerate(ended) if r.spec.rank == wanted), 0)
    info, observations = ended[place]
    rank, world = observations[-1], _world([r for r, _ in ended])
    assert isinstance(rank, Outcome)
    told = f"Judged by rank {info.spec.rank} of {world}, in a process of its own."
    if found is not None and found.place == place and world > 1:
        told += f" {found.sentence}"
    launchers = () if rank is outcome else outcome.notes
    notes = (*rank.notes, *launchers, told)
    joined = dataclasses.replace(rank, notes=notes, rank=info.spec.rank, ranks=world)
    if outcome.ended in ("exit", "exception") and rank.ended != "exception":
        if any(r.state is State.LOST for r in ranks):  # killed: only what started it says so
            errors = {f.name: getattr(outcome, f.name) for f in _ERRORS}
            said = outcome.error_text.strip().partition("\n")[0][:MAX_TEXT]
            dead = f"A rank's process was killed{f': {said}' if said else ''}."
            notes = (*joined.notes, dead)
            joined = dataclasses.replace(joined, ended=outcome.ended, notes=notes, **errors)
        elif rank.ended in ("returned", "exit") and not rank.exit_code:  # another rank failed
            joined = dataclasses.replace(joined, ended="exit", exit_code=outcome.exit_code)
    return [*observations[:-1], joined]


_ERRORS = [f for f in dataclasses.fields(Outcome) if f.name.startswith(("error_", "exit_"))]


def machine_of_rank(store: Path, run_id: str, rank: int) -> Machine | None:
    """Where a rank of the run was."""
    with Reader(store) as reader:
        ranks = reader.group(group_of(run_id))
    return next((r.machine for r in ranks if r.spec.rank == rank), None)


def steps_of_ranks(store: Path, run_id: str) -> int:
    """Optimizer steps of the rank that came farthest; 0 without ranks."""
    with Reader(store) as reader:
        return max((r.steps_done for r in reader.group(group_of(run_id))), default=0)


def group_of(run_id: str) -> str:
    """The group of the ranks that a run has started."""
    return f"{run_id}-ranks"


def _ended_ranks(reader: Reader, run_id: str, wait_s: float) -> list[RunInfo]:
    """Those that have trained first, by rank. One that is about to end gets ``wait_s`` for it."""
    deadline = time.monotonic() + wait_s
    while True:
        ranks = reader.group(group_of(run_id))
        if not any(r.state.is_active for r in ranks) or time.monotonic() > deadline:
            return sorted(ranks, key=lambda r: (not r.steps_done, r.spec.rank, r.created))
        time.sleep(POLL_S)


def _with_launcher(
    info: RunInfo, own: Sequence[Observation], ranks: list[tuple[RunInfo, list[Observation]]]
) -> list[tuple[RunInfo, list[Observation]]]:
    """The ranks of a training in which the launching run is the one that is missing among them, and
    that run first; none where it is no such training."""
    together = [(r, s) for r, s in ranks if r.spec.world > 1]
    world = _world([r for r, _ in together]) if together else 1
    there = {r.spec.rank for r, _ in together}
    missing = next((rank for rank in range(world) if rank not in there), None)
    if not together or missing is None:
        return []
    spec = dataclasses.replace(info.spec, rank=missing, world=world)
    return [(dataclasses.replace(info, spec=spec, ended=time.time()), list(own)), *together]


def _world(ranks: Sequence[RunInfo]) -> int:
    return max(len({r.spec.rank for r in ranks}), *(r.spec.world for r in ranks))


class Processes:
    """Counts the processes that were started while :meth:`watching` and that may train. They are
    not watched, and must not write to the run's store: a forked child inherits every patch and the
    open store. It keeps the patches, which do no harm, and loses the watch; what it does is not
    recorded."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        self.owner = os.getpid()
        self.started = 0
        self._on_fork = on_fork
        self._counting = True  # a fork that is made now counts by itself

    @property
    def is_own(self) -> bool:
        """Whether this is the script's own process and no fork of it."""
        return os.getpid() == self.owner

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count, and switch the watch off in children."""
        with Patches() as patches:
            patches.wrap(multiprocessing.process.BaseProcess, "start", self._counted)
            _current.append(self)
            try:
                yield
            finally:
                _current.remove(self)

    def forked(self) -> None:
        """The script's process was forked, by multiprocessing or by the script itself."""
        self.started += self._counting

    def _counted(self, original: Any, process: Any) -> None:
        self.started += not is_helper(process)
        self._counting, before = False, self._counting
        try:
            original(process)
        finally:
            self._counting = before


_current: list[Processes] = []


def _in_child() -> None:
    for processes in _current:
        processes._on_fork()


def _in_parent() -> None:
    for processes in _current:
        processes.forked()


# Cannot be taken back; without a script that runs, there is nothing to do in it.
os.register_at_fork(after_in_child=_in_child, after_in_parent=_in_parent)


if __name__ == "__main__":
    # What is pickled for a spawned process must be found there: __main__ becomes the script.
    from ampscope.runner import script_ranks

    script_ranks.main()
