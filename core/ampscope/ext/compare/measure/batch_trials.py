"""Trials of a batch search, each in a child process that may run out of memory.

A server process imports torch once and forks for every trial (multiprocessing's forkserver); it
runs nothing that starts threads, so a fork of it is sound. What a child does is in
:mod:`.batch_child`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from types import ModuleType

import torch

from ampscope.errors import BadInput
from ampscope.ext.compare.measure.batch_child import NO_MEMORY, in_child, tell_free
from ampscope.records import BatchTrial, RunSpec
from ampscope.store.codec import decode_result

_UNDER_A_LIMIT = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
GRACE_S = 5.0  # for a child that has answered to end


class TookTooLong(BadInput):
    """A trial did not end in its time."""


class Trials:
    """Runs trials on one device; ``limit_bytes`` bounds a CPU's, 0 for none."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device, self._limit = device, limit_bytes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ampscope.ext.compare.measure.batch_child"])

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
    content = json.loads(answer)
    if "wrong" in content:
        raise BadInput(content["wrong"])
    found = decode_result("BatchTrial", json.dumps(content["try"]))
    assert isinstance(found, BatchTrial)
    return found
