"""Asks a child process where the tensors of a torch file lie.

The child (ampscope.ext.checkpoints.child) opens the file by ``torch.load(weights_only=True)``
alone, which runs no code of the file.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from ampscope.errors import BadInput

MAY_BE_WHOLE = "The file may be whole: save its weights alone, as safetensors."


class TorchFiles:
    """Says of torch files where their tensors lie: one child process, started at the first of them,
    imports torch for all. Use as a context manager."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def __enter__(self) -> TorchFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def ask(self, path: Path, scratch: Path) -> dict[str, Any]:
        """What the child says of a file. Raises BadInput where it ended instead."""
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps([str(path), str(scratch)]) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        try:
            said: dict[str, Any] = json.loads(answer)
        except ValueError:
            last = (self._end().strip().splitlines() or ["no reason given"])[-1]
            limits = {
                -signal.SIGXCPU: "opening it took more processor time than is allowed for its size",
                -signal.SIGKILL: "the process that opens it was killed, as where memory runs out",
            }
            if child.returncode in limits:
                text = f"{path} is not looked at: {limits[child.returncode]}. {MAY_BE_WHOLE}"
                raise BadInput(text) from None
            raise BadInput(
                f"{path} could not be read: the process that loads it ended early ({last[:300]})."
            ) from None
        return said

    def _start(self) -> subprocess.Popen[str]:
        # -P: no module of the folder in which the user stands is imported.
        command = [sys.executable, "-P", "-m", "ampscope.ext.checkpoints.child"]
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 # closed at the end
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        return self._child

    def _end(self) -> str:
        """End the child; returns what it wrote to standard error."""
        if self._child is None or self._errors is None:
            return ""
        with self._child as child, contextlib.suppress(BrokenPipeError):
            child.kill()
        self._errors.seek(0)
        with self._errors as errors:
            said = errors.read()
        self._child = self._errors = None
        return said
