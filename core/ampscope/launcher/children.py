"""Child processes that measure: one for a run at once, and one that has loaded torch and waits.

Python and torch take 3 to 4 s to load, a lesson's measurement often less than one. So a page that
will soon be asked for one says :func:`expect`, and the imports pass while its reader thinks.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ampscope.errors import AmpscopeError
from ampscope.privacy import forget
from ampscope.pythons import TORCH, framework, python_for, with_package
from ampscope.records import RunSpec, State
from ampscope.runner.run_server import PARENT
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

MAX_WORDS = 4_000  # of the end of what a child said
IDLE_S = 300.0  # a child that waits holds 300 MB
_SECRETS = ("AMPSCOPE_CLASSROOM_", "AMPSCOPE_TOKEN")
_NATIVE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# Beginnings of the sentences that may mean: memory ran out.
SIGKILLED = "The script was killed (SIGKILL)"
NOT_STARTED = "The machine could not start a further process"

_lock = threading.Lock()
_waiting: dict[Path, Child] = {}


def spawn(spec: RunSpec, store: Path, run_id: str, *, bound: bool = False) -> None:
    """A process for the run: the one that waits, if one does. A ``bound`` one ends with this
    process. Raises OSError, BadInput."""
    environment = ends_with_us(child_environment()) if bound else child_environment()
    if spec.framework != TORCH:
        python = python_for(spec.framework)
        module = f"{framework(spec.framework).package}.child"
        Child(store, module, python, with_package(environment), run_id)
        return
    if bound:
        Child(store, "ampscope.runner", sys.executable, environment, run_id)
        return
    with _lock:
        ready = _waiting.pop(store.absolute(), None)
        if ready is None or not ready.takes(run_id):
            _child(store, run_id)


def expect(store: Path, idle_s: float = IDLE_S) -> None:
    """Have one process load torch and wait ``idle_s`` for a run of this store."""
    store = store.absolute()
    with _lock:
        if store in _waiting:
            return
        _waiting[store] = child = _child(store)
    timer = threading.Timer(idle_s, _let_go, [store, child])
    timer.daemon = True
    timer.start()


def _child(store: Path, run_id: str = "") -> Child:
    return Child(store, "ampscope.runner", sys.executable, child_environment(), run_id)


def _let_go(store: Path, child: Child) -> None:
    with _lock:
        if _waiting.get(store) is child:
            _waiting.pop(store).dismiss()


class Child:
    """A process that has a run, or, with an empty ``run_id``, waits to be given one."""

    def __init__(
        self, store: Path, module: str, python: str, environment: dict[str, str], run_id: str
    ) -> None:
        self.store, self.run_id = store, run_id
        of_run = ["--run", run_id] if run_id else []
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # the thread that waits closes it
        self._process = subprocess.Popen(
            [*started(module, python), "--store", str(store.absolute()), *of_run],
            stdin=subprocess.DEVNULL if run_id else subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C reaches the parent only; it asks the child to stop
            env=environment,
        )
        # A process must wait for it: an ended child stays a zombie, and Popen warns of one left.
        name = f"ampscope-run-{run_id}" if run_id else "ampscope-standby"
        threading.Thread(target=self._wait, name=name, daemon=True).start()

    def takes(self, run_id: str) -> bool:
        """Give it its run; False where it is gone."""
        pipe = self._process.stdin
        assert pipe is not None
        self.run_id = run_id
        try:
            with pipe:
                pipe.write(f"{run_id}\n".encode())
        except OSError:
            self.run_id = ""
        return bool(self.run_id)

    def dismiss(self) -> None:
        """End the waiting child, once no process can give it a run any more."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _wait(self) -> None:
        with self._words:
            status = self._process.wait()
            if self.run_id:
                forget(self.run_id)
                self._say_how_it_died(status, end_of(self._words.fileno(), MAX_WORDS))

    def _say_how_it_died(self, status: int, words: str) -> None:
        """A child that crashed in native code, or could not even start, has not said so itself. One
        that was killed is left alone: a reader shows it as lost."""
        if status in (0, -signal.SIGKILL, -signal.SIGTERM):
            return
        with contextlib.suppress(AmpscopeError):  # a store that is gone needs no last words
            sentence = last_words(str(status), words, "The run")
            close_if_open(self.store, self.run_id, State.FAILED, sentence, words)


def started(module: str, python: str = sys.executable) -> list[str]:
    """The command that runs a module of this package, wherever the user stands.

    Plain ``-m`` puts the current folder first on the import path: a random.py among a user's
    downloads would be run in place of Python's own. Another Python may be too old to know ``-P``.
    """
    return [python, *(["-P"] if python == sys.executable else []), "-m", module]


def child_environment() -> dict[str, str]:
    """The child's environment. libgomp's threads spin while they wait; on a machine that also does
    something else, that made a small GPT's step 20 times slower (measured, 2 cores), so they sleep
    unless the user decided otherwise. The secrets of a dashboard stay with its server."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    return {"OMP_WAIT_POLICY": "PASSIVE", **own, "PYTHONUNBUFFERED": "1"}


def ends_with_us(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a child that ends with this process, also where that is killed. The system
    tells of the end of a thread: a child that another thread starts is not bound."""
    is_main = threading.current_thread() is threading.main_thread()
    return {**environment, PARENT: str(os.getpid())} if is_main else environment


def close_if_open(
    store: Path, run_id: str, state: State, message: str, traceback: str = ""
) -> None:
    """A child that died without reporting an error leaves its run open: say so in its place."""
    with Reader(store) as reader:
        if reader.run(run_id).ended is not None:
            return
    writer = RunWriter(store, run_id)
    writer.finish(state, message, traceback)
    writer.close()


def last_words(answer: str, output: str, who: str = "The script") -> str:
    """What became of a process that could not write how it ended, in one sentence.

    ``who`` it was. ``answer`` is the fork server's: an exit status, negative for a signal, or a
    word of its own.

    >>> last_words("-11", "")
    "The script's process crashed in native code (SIGSEGV)."
    """
    lines = [line for line in output.strip().splitlines() if line.strip()]
    said = f" Its last line: {lines[-1][:200]}" if lines else ""
    match answer:
        case "hung":
            return f"The script hung in native code and was ended after its time limit.{said}"
        case "flooded":
            return "The script was ended because it printed more than 256 MiB."
        case "nofork":
            return f"{NOT_STARTED}: memory or process limit reached."
        case _ if answer.startswith("gone"):
            return f"The process that starts the runs ended early ({answer}). Is memory short?"
    status = int(answer or 0)
    if status == -signal.SIGKILL:
        return f"{SIGKILLED}: by itself, by a user, or by the system because memory ran out.{said}"
    if status < 0:
        name = signal.Signals(-status).name
        native = -status in _NATIVE
        how = f"crashed in native code ({name})" if native else f"was ended by {name}"
        return f"{who}'s process {how}.{said}"
    return f"{who}'s process exited without reporting an error (status {status}).{said}"


PART_BYTES = 1 << 20


class Followed:
    """A script's output: hands what is new in ``path`` to ``write``.

    It goes to files rather than pipes: however much a script prints, and whatever process holds its
    output, no process waits for a reader.
    """

    def __init__(self, path: Path, write: Callable[[bytes], object]) -> None:
        self._path = path
        self._write = write
        self._at = 0

    def drain(self) -> None:
        """Everything up to the file's end."""
        if not self._path.exists():
            return
        with self._path.open("rb") as handle:
            handle.seek(self._at)
            while part := handle.read(PART_BYTES):
                self._at += len(part)
                self._write(part)


def as_text(show: Callable[[str], None]) -> Callable[[bytes], None]:
    """``show`` for bytes: a character that is cut in two by a read stays whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(part: bytes) -> None:
        show(decoder.decode(part))

    return write


class HeldTraceback:
    """Hands text on to ``show`` as it comes, and holds it back from the first traceback on until
    :meth:`release` or :meth:`drop`; a script that goes on printing after one is not held for
    long."""

    _BEGINS = "Traceback (most recent call last):"
    _MOST = 2**16  # characters

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._held = ""
        self._is_open = False

    def __call__(self, text: str) -> None:
        self._held += text
        at = self._held.find(self._BEGINS)
        line = self._held.rfind("\n", 0, at if at >= 0 else None) + 1
        is_cut = at < 0 and line < len(self._held) and self._BEGINS.startswith(self._held[line:])
        self._hand_on(line if at >= 0 or is_cut else len(self._held))
        if self._is_open or len(self._held) > self._MOST:
            self.release()

    def release(self) -> None:
        """Show what is held back, and hold back no more."""
        self._is_open = True
        self._hand_on(len(self._held))

    def drop(self) -> None:
        """Forget what is held back."""
        self._held = ""

    def _hand_on(self, length: int) -> None:
        if length:
            self._show(self._held[:length])
        self._held = self._held[length:]


def head(path: Path, size: int) -> bytes:
    """The first ``size`` bytes of ``path``."""
    with path.open("rb") as handle:
        return handle.read(size)


def tail(path: Path, size: int) -> str:
    """The last ``size`` bytes of ``path``; "" when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as handle:
        return end_of(handle.fileno(), size)


def end_of(descriptor: int, size: int) -> str:
    """The last ``size`` bytes of an open file, no matter which process writes to it."""
    whole = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, max(0, whole - size)).decode(errors="replace")
