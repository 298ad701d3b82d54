"""A process that has imported torch once and forks a child for every run of a script.

``python -m ampscope.runner.fork_server --store FILE --script SCRIPT`` speaks the lines of
``ampscope.runner.run_server``. Importing torch takes 1.5 to 3 s; a diagnosis makes 3 to 12 runs.
Nothing that starts threads runs before a fork, and torch starts its own at the first parallel op.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import click

from ampscope import extensions
from ampscope.runner.run_server import (
    adopt_orphans,
    answer,
    die_with_parent,
    end_with_parent,
    serve,
)


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--script", required=True)
def main(store: Path, script: str) -> None:
    """Serve runs of SCRIPT, into STORE, until standard input ends."""
    end_with_parent()  # while it loads; afterwards the end of standard input ends it and its runs
    import torch  # the import that every child shares

    import ampscope.runner.script  # noqa: F401  # the children's other imports
    from ampscope.runner.probe import preload
    from ampscope.runner.script_text import read_once

    adopt_orphans()
    torch.manual_seed(0)
    preload(torch.device("cpu"))
    if simulated := extensions.simulated_device():
        extensions.load(simulated)  # before a script's surroundings replace anything of torch's
    read_once(script)
    die_with_parent(wanted=False)
    gc.collect()
    gc.freeze()  # what is loaded stays: no run has to look through it, nor copy its pages for that
    answer("ready", 0)
    serve(functools.partial(_fork, store))


def _fork(store: Path, run_id: str, out: Path, err: Path, view: str) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        from ampscope.capture.exponent_count import adopt_fork
        from ampscope.privacy import taken
        from ampscope.runner.script import run_child, settle
        from ampscope.store.reader import Reader

        adopt_fork()
        settle(out, err, server)
        with Reader(store) as reader:
            spec = taken(run_id, reader.run(run_id).spec)
        status = run_child(store, run_id, spec, Path(view) if view else None)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
