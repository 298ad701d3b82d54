"""Tries of a batch search, each in a child process that may die of it.

A server process imports torch once and forks for every try (multiprocessing's forkserver); it runs
nothing that starts threads, so a fork of it is sound.
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
from ampscope.measure.batch_try import NO_MEMORY, in_child, tell_free
from ampscope.records import BatchTry, RunSpec

_UNDER_A_LIMIT = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
GRACE_S = 5.0  # for a child that has answered to end


class TookTooLong(BadInput):
    """A try did not end in its time."""


class Tries:
    """Makes tries on one device; ``limit_bytes`` bounds a CPU's, 0 for none."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device, self._limit = device, limit_bytes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ampscope.measure.batch_try"])

    def attempt(self, spec: RunSpec, samples: int, time_limit_s: float) -> BatchTry:
        """With ``samples`` a step, 0 for as many as the workload gives. Raises BadInput for what is
        wrong with the workload at any size, and where a try takes longer than it may."""
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
                    f"A try with {samples:,} samples took more than {time_limit_s:.0f} s. Raise "
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

    def _died(self, spec: RunSpec, samples: int, status: int | None) -> BatchTry:
        """The process ended without a word. The kernel kills what takes too much memory; under a
        limit a library below torch may also take a failed allocation for a pointer. Raises
        BadInput for any other end: a crash is no answer."""
        number = -(status or 0)
        names = {s.value: s.name for s in signal.Signals}
        how = f"by {names[number]}" if number in names else f"with status {status}"
        if number not in (_UNDER_A_LIMIT if self._limit else (signal.SIGKILL,)):
            raise BadInput(f"A try with {samples:,} samples ended {how}, without a word.")
        why = f"{NO_MEMORY} The process ended {how}."
        return BatchTry(spec.precision, samples, False, None, None, None, why, time.time())

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


def _read(answer: bytes) -> BatchTry:
    from ampscope.store.result_codec import decode

    content = json.loads(answer)
    if "wrong" in content:
        raise BadInput(content["wrong"])
    found = decode("BatchTry", json.dumps(content["try"]))
    assert isinstance(found, BatchTry)
    return found
