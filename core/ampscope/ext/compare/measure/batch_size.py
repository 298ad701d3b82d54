"""The largest batch that fits, for each precision: extrapolated from two small trials, then
verified.

    try the workload's own batch and twice that: memory = fixed + samples times so much
    start at the prediction; step away from it, each stride twice the last, until one size fits and
    a larger one does not; halve the distance until they are neighbours
    then time some smaller sizes, for the curve of throughput

Trials run in child processes (:class:`Trials`), whose own part is here too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo  # 30 MiB that every optimizer imports, before the limit is set

from ampscope.errors import AmpscopeError, BadInput, Cancelled
from ampscope.measure.live_bytes import LiveBytes
from ampscope.measure.timing import Limit, summary
from ampscope.measure.training_steps import batch_of, batch_size, timed_step
from ampscope.records import BatchPrediction, BatchTrial, LargestBatch, RunSpec
from ampscope.runner.device import limit_memory
from ampscope.runner.probe import prepare
from ampscope.runner.run_server import die_with_parent
from ampscope.runner.training import training_step
from ampscope.store.writer import RunWriter

MOST_SAMPLES = 1 << 20
SAME_SHARE = 0.95  # of the free memory; contexts and caches of others move a little
FAR = 8  # times the largest trial that a prediction rests on
CURVE_SIZES = 5  # smaller sizes that are timed, each half of the next


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Search for every precision in turn; one sentence on what was not proved."""
    limit = Limit(spec.time_limit_s)
    trials = Trials(device, _bound(spec, 0) if device.type == "cpu" else 0)
    free_at_first = trials.free_bytes() if device.type == "cuda" else 0
    limit_bytes = _bound(spec, free_at_first)
    notes = []
    for place, name in enumerate(spec.precisions):
        share = limit.left_s() / (len(spec.precisions) - place)
        search = _Search(
            dataclasses.replace(spec, precision=name),
            trials,
            writer,
            limit,
            limit.left_s() - share,
            is_cancelled,
        )
        notes += search.run(limit_bytes)
    if free_at_first and (free := trials.free_bytes()) < SAME_SHARE * free_at_first:
        notes.append(
            f"Of the GPU {free_at_first / 2**20:,.0f} MiB were free at the beginning and "
            f"{free / 2**20:,.0f} at the end: another process filled it meanwhile. Search again."
        )
    return " ".join(notes)


def _bound(spec: RunSpec, free_bytes: int) -> int:
    """Bytes that training may take: those asked for, of a GPU no more than its ``free_bytes``."""
    bounds = [bound for bound in (spec.memory_limit_mib * 2**20, free_bytes) if bound]
    if not bounds:
        raise BadInput("On a CPU say how much memory training may take: --memory-limit MIB.")
    return min(bounds)


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes that are tried: multiples of ``step``, or powers of two where it is 0."""

    step: int

    def samples(self, place: int) -> int:
        return place * self.step if self.step else 2 ** (place - 1) if place else 0

    def place(self, samples: float) -> int:
        """Of the largest size that is not above ``samples``."""
        if samples < 1:
            return 0
        return int(samples // self.step) if self.step else int(samples).bit_length()


class _Search:
    """For one precision. ``reserved_s`` belongs to the precisions after it."""

    def __init__(
        self, spec: RunSpec, trials: Trials, writer: RunWriter, limit: Limit, reserved_s: float,
        is_cancelled: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._spec, self._trials, self._writer = spec, trials, writer
        self._limit, self._reserved_s, self._is_cancelled = limit, reserved_s, is_cancelled
        self._grid = Grid(spec.multiple_of)
        self._made: dict[int, BatchTrial] = {}
        self._prediction: BatchPrediction | None = None

    def run(self, limit_bytes: int) -> list[str]:
        """Search and write what was found; sentences on what was not proved."""
        name, too_long = self._spec.precision, ""
        base = self._run_trial(self._spec.batch)
        low, start = (base.samples if base.fits else 0), None
        high = None if base.fits else base.samples
        fails: int | None = None
        fits, is_proved = self._grid.place(low), False
        try:
            if base.fits:
                twice = self._run_trial(base.samples * 2)
                low, high = (twice.samples, None) if twice.fits else (low, twice.samples)
                start = self._predicted(base, twice, limit_bytes)
                if start is not None and self._grid.samples(start) > FAR * twice.samples:
                    # At a few samples the optimizer's step may need most: look nearer to the end.
                    nearer = self._run_trial(self._grid.samples(start) // FAR)
                    if nearer.fits:
                        low, start = nearer.samples, self._predicted(twice, nearer, limit_bytes)
                if self._prediction is not None:
                    self._writer.add_result(self._prediction)
            fits, fails = self._grid.place(low), None if high is None else self._grid.place(high)
            if fails is not None and self._grid.samples(fails) < (high or 0):
                fails += 1  # the size that failed lies between two of the grid
            fits, fails, is_proved = self._narrowed(fits, fails, start)
        except TookTooLong as error:
            too_long = f" {error}"
            fits = max(
                (self._grid.place(m.samples) for m in self._made.values() if m.fits), default=0
            )
        too_many = None if fails is None else self._grid.samples(fails)
        largest = self._grid.samples(fits)
        self._writer.add_result(LargestBatch(name, largest, too_many, len(self._made)))
        if is_proved:
            self._curve(largest)
        self._writer.flush()
        return [] if is_proved else [f"{name}: the time limit ended the search early.{too_long}"]

    def _narrowed(
        self, fits: int, fails: int | None, start: int | None
    ) -> tuple[int, int | None, bool]:
        """Places of the grid: the largest that fits and the smallest that does not."""
        stride = 1
        top = self._grid.place(MOST_SAMPLES)
        place = start if start is not None else fits + 1
        while fails is None or fails - fits > 1:
            if fits >= top:
                return fits, None, True
            if self._left_s() < 0:
                return fits, fails, False
            upper = top if fails is None else fails - 1
            place = min(max(place, fits + 1), upper)
            if self._run_trial(self._grid.samples(place)).fits:
                fits = place
                place = fits + stride if fails is None else (fits + fails) // 2
            else:
                fails = place
                place = max(fails - stride, (fits + fails) // 2)
            stride *= 2
        return fits, fails, True

    def _predicted(self, base: BatchTrial, twice: BatchTrial, limit_bytes: int) -> int | None:
        peaks = [t.device_peak or t.peak_bytes or 0 for t in (base, twice)]
        grown = twice.samples - base.samples
        per_sample = (peaks[1] - peaks[0]) // grown if twice.fits and grown > 0 else 0
        if per_sample <= 0:
            return None
        fixed = max(peaks[0] - per_sample * base.samples, 0)
        place = self._grid.place(min((limit_bytes - fixed) / per_sample, MOST_SAMPLES))
        largest = self._grid.samples(place)
        self._prediction = BatchPrediction(
            self._spec.precision, fixed, per_sample, limit_bytes, largest
        )
        return place

    def _curve(self, largest: int) -> None:
        size = largest
        for _ in range(CURVE_SIZES):
            size //= 2
            if size < 1 or self._left_s() < 0:
                return
            try:
                self._run_trial(size)
            except TookTooLong:
                return

    def _run_trial(self, samples: int) -> BatchTrial:
        if self._is_cancelled():
            raise Cancelled(f"Cancelled after {len(self._made)} trials.")
        if samples in self._made:
            return self._made[samples]
        made = self._trials.attempt(self._spec, samples, self._limit.left_s())
        self._made[made.samples] = made
        self._writer.add_result(made)
        self._writer.flush()
        return made

    def _left_s(self) -> float:
        return self._limit.left_s() - self._reserved_s


# Trials of a batch search, each in a child process that may run out of memory.
#
# A server process imports torch once and forks for every trial (multiprocessing's forkserver); it
# runs nothing that starts threads, so a fork of it is sound.


_UNDER_A_LIMIT = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
GRACE_S = 5.0  # for a child that has answered to end


class TookTooLong(BadInput):
    """A trial did not end in its time."""


class Trials:
    """Runs trials on one device; ``limit_bytes`` bounds a CPU's, 0 for none."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device, self._limit = device, limit_bytes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ampscope.ext.compare.measure.batch_size"])

    def attempt(self, spec: RunSpec, samples: int, time_limit_s: float) -> BatchTrial:
        """With ``samples`` a step, 0 for as many as the workload gives. Raises BadInput for what is
        wrong with the workload at any size, and where a trial takes longer than it may."""
        ours, theirs = self._context.Pipe(duplex=False)
        child = self._context.Process(
            target=in_child,
            args=(theirs, spec, str(self._device), samples, self._limit),
            daemon=True,
        )
        with _without_main():
            child.start()
        theirs.close()
        try:
            if not ours.poll(max(time_limit_s, 1.0)):
                child.kill()
                raise TookTooLong(
                    f"A trial with {samples:,} samples took more than {time_limit_s:.0f} s. Raise "
                    "--time-limit, or search with a smaller workload."
                )
            answer = ours.recv_bytes()
        except EOFError:
            child.join(GRACE_S)
            return self._died(spec, samples, child.exitcode)
        finally:
            ours.close()
            if child.is_alive():
                child.join(GRACE_S)
                child.kill()
        return _read(answer)

    def _died(self, spec: RunSpec, samples: int, status: int | None) -> BatchTrial:
        """The process exited without reporting an error. The kernel kills what takes too much
        memory; under a limit a library below torch may also take a failed allocation for a pointer.
        Raises BadInput for any other end: a crash is no answer."""
        number = -(status or 0)
        names = {s.value: s.name for s in signal.Signals}
        was_killed = number in names
        how = f"was ended by {names[number]}" if was_killed else f"exited with status {status}"
        if number not in (_UNDER_A_LIMIT if self._limit else (signal.SIGKILL,)):
            raise BadInput(f"A trial with {samples:,} samples {how} without reporting an error.")
        why = f"{NO_MEMORY} The process {how}."
        return BatchTrial(spec.precision, samples, False, None, None, None, why, time.time())

    def free_bytes(self) -> int:
        """Of a GPU, asked in a child: a context here would take some of it for the whole search."""
        ours, theirs = self._context.Pipe(duplex=False)
        child = self._context.Process(target=tell_free, args=(theirs, str(self._device)))
        with _without_main():
            child.start()
        theirs.close()
        try:
            return int(json.loads(ours.recv_bytes()))
        except EOFError:
            raise BadInput(f"{self._device} does not answer. Look at it with nvidia-smi.") from None
        finally:
            ours.close()
            child.join(GRACE_S)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """multiprocessing runs the file of the module __main__ again in every child, for what is
    defined there. Nothing of ours is, and in an embedding program that file may be anything."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _read(answer: bytes) -> BatchTrial:
    from ampscope.store.codec import decode_result

    content = json.loads(answer)
    if "wrong" in content:
        raise BadInput(content["wrong"])
    found = decode_result("BatchTrial", json.dumps(content["try"]))
    assert isinstance(found, BatchTrial)
    return found


# One trial of a batch search: a few training steps with so many samples, in a process of its own.
#
# Running out of memory ends this process and nothing else. On a CPU the process may allocate as
# much as the user says above what it holds once torch is loaded (RLIMIT_DATA); on CUDA the device
# decides. The answer goes back as one line of JSON, never as a pickle.


TIMED_S = 1.0  # of steps, after the one whose memory is followed
MOST_STEPS = 20
NO_MEMORY = "Out of memory."
# Of torch's CPU allocator, of the C++ library and of oneDNN, as they stand in a RuntimeError.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory",
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_SMALL, _USUAL = 2**16, 2**25  # the second is where glibc's own threshold ends up under torch


def attempt(spec: RunSpec, device_name: str, samples: int, limit_bytes: int) -> BatchTrial:
    """Two steps at least: an optimizer makes its state in the first. Raises BadInput for what is
    wrong with the workload itself."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    samples = samples or _own_samples(spec, device)
    if device.type == "cuda":
        limit_memory(spec.memory_limit_mib, "cuda")
    elif limit_bytes:
        _limit(limit_bytes)
    try:
        return _tried(spec, device, samples)
    except Exception as error:
        if _is_memory(error) or _is_memory(error.__cause__):
            return _failed(spec, samples)
        raise


def _own_samples(spec: RunSpec, device: torch.device) -> int:
    """As many as the workload gives; read before any limit holds, and let go again."""
    return batch_size(batch_of(prepare(spec, device), spec), spec.workload)


def _is_memory(error: BaseException | None) -> bool:
    """The CPU's allocator raises RuntimeError; libraries below it have words of their own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in _NO_MEMORY)


def _tried(spec: RunSpec, device: torch.device, samples: int) -> BatchTrial:
    training = prepare(spec, device)
    batch = batch_of(training, spec, samples)
    training_step(training, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training.optimizer.zero_grad(set_to_none=True)
    with LiveBytes(training.model, training.optimizer, batch) as live:
        training_step(training, batch)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if device.type == "cpu":  # it fits: mapping every tensor anew costs time that training has not
        _unlimited()
        _allocate_with(_USUAL)
        training_step(training, batch)
    seconds: list[float] = []
    ends = time.monotonic() + TIMED_S
    while not seconds or (time.monotonic() < ends and len(seconds) < MOST_STEPS):
        seconds.append(timed_step(training, batch).step)
    step = summary(seconds)
    return BatchTrial(spec.precision, samples, True, live.peak, peak, step, "", time.time())


def _failed(spec: RunSpec, samples: int, why: str = NO_MEMORY) -> BatchTrial:
    return BatchTrial(spec.precision, samples, False, None, None, None, why, time.time())


def _limit(limit_bytes: int) -> None:
    """Above what the process holds once its threads run and matmuls were made. Linux counts
    private memory (VmData) against it, so freed tensors must not stay in malloc's heap: without a
    fixed threshold 8,192 samples failed where 16,384 fitted (measured, an MLP under 256 MiB)."""
    _allocate_with(_SMALL, arenas=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = torch.ones(256, 256, dtype=dtype, requires_grad=True)
        torch.relu(weights @ weights).sum().backward()  # type: ignore[no-untyped-call]  # torch
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) * 1024 for line in status.splitlines() if "VmData" in line)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (held + limit_bytes, hard))


def _allocate_with(mmap_threshold: int, arenas: int = 0) -> None:
    """glibc's malloc maps and unmaps what is larger; 0 arenas are its default."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * mmap_threshold)
        libc.mallopt(_M_ARENA_MAX, arenas)


def _unlimited() -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def in_child(
    answer: Connection, spec: RunSpec, device_name: str, samples: int, limit_bytes: int
) -> None:
    """Body of the child process: one JSON object into ``answer``."""
    die_with_parent(wanted=True)  # with the server process, which ends with the search
    content: dict[str, object]
    try:
        content = {"try": dataclasses.asdict(attempt(spec, device_name, samples, limit_bytes))}
    except AmpscopeError as error:
        content = {"wrong": str(error)}
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        what = f"With {samples:,} samples" if samples else "With the workload's own batch"
        content = {"wrong": f"{what} a step raised {text}"}
    _unlimited()  # the answer needs a little memory as well
    answer.send_bytes(json.dumps(content).encode())


def tell_free(answer: Connection, device_name: str) -> None:
    """Body of the child that asks a GPU for its free memory, its own context taken off."""
    free = torch.cuda.mem_get_info(torch.device(device_name))[0]
    answer.send_bytes(json.dumps(free).encode())
