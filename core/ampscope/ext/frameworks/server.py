"""Starts a process for every run of a script that trains with Keras or Paddle.

``python -m ampscope.ext.frameworks.server --store FILE --python EXECUTABLE`` speaks the lines of
``ampscope.runner.run_server``, as the fork server does. It starts processes where that one forks:
TensorFlow and Paddle start threads at their import, and a fork of such a process hangs.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

from ampscope.pythons import with_package
from ampscope.runner.run_server import adopt_orphans, serve


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--python", required=True)
    found = parser.parse_args()
    adopt_orphans()
    serve(functools.partial(_spawn, found.python, found.store))


def _spawn(python: str, store: str, run_id: str, out: Path, err: Path, view: str) -> int:
    command = [python, "-m", "ampscope.ext.frameworks.script", "--store", store, "--run", run_id]
    if view:
        command += ["--view", view]
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawnp(
        python,
        command,
        with_package(dict(os.environ)),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(out), appending, 0o644),
            (os.POSIX_SPAWN_OPEN, 2, str(err), appending, 0o644),
        ],
        setsid=True,
    )


if __name__ == "__main__":
    main()
